"""Messages to token ids, append-only: what the policy sampled stays as it was sampled, and only new text is tokenized.

In: chat messages as environments send them. Out: the ids to append to the context. Nothing here blocks on I/O after
`open`, nothing is mutated, and any number of threads may call at once. All functions are synchronous; tokenizing runs
outside Python's global lock, so a caller on an event loop gives long messages (some 100 kB and more) to a thread.

An episode's context is  first | action | follow | action | follow | ...  `first` renders the whole prompt. `follow` is
what the chat template writes between the text of an assistant message and the assistant's next turn: the token that
closes the turn (unless it was sampled), any separator such as the newline after <|im_end|>, the new messages, and the
assistant's header. It is found as a difference: a dummy conversation whose assistant message is a mark is rendered with
the new messages, and everything after the mark is taken. History itself is never rendered again, so a template that
rewrites old turns (Qwen3 drops their reasoning) changes nothing here. `open` proves on dummy conversations that what
follows the mark depends neither on the history before it nor on where tokenization starts, and refuses the template
otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from headrace.config import ConfigError
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.chat_template import ChatTemplate, RenderError

_MARK = "AssistantTextStandsHere"
_USER = pb.Message(role="user", content="a")


class Renderer:
    """The tokenizer and chat template of one model.

    `stop_token_ids`, ascending, are the ids that end an action: the model's eos ids and what closes an assistant turn.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate, eos_token_ids: set[int]):
        """Raises RenderError when the template is not append-only."""
        # Settings of the file would cut or fill up what is encoded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._closing = self._closing_token(eos_token_ids | special)
        self.stop_token_ids = tuple(sorted(eos_token_ids | {self._closing}))
        self._check()
        self._check_tools_once = functools.lru_cache(maxsize=256)(self._check_tools)

    @classmethod
    def open(cls, folder: Path) -> Renderer:
        """The renderer of a Hugging Face folder.

        Raises:
            ConfigError: a file is missing or broken, or the template is not append-only.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            eos_token_ids = _eos_token_ids(folder, tokenizer)
        except Exception as error:  # tokenizers raises nothing narrower
            line = " ".join(str(error).split())
            raise ConfigError(str(folder), [f"the tokenizer cannot be read ({line}); complete the folder"]) from error
        try:
            return cls(tokenizer, ChatTemplate.load(folder), eos_token_ids)
        except RenderError as error:
            remedy = "use a template that only appends, in chat_template.jinja"
            raise ConfigError(str(folder), [f"the chat template {error}; {remedy}"]) from error

    def first(self, messages: Sequence[pb.Message], tools: Sequence[environment_pb.Tool] = ()) -> np.ndarray:
        """int32[O]: the prompt, ending in the assistant's header.

        Raises RenderError: the template refuses the messages, or would write the tools again with later messages.
        """
        _refuse_images(messages)
        if tools:
            self._check_tools_once(tuple(tool.SerializeToString(deterministic=True) for tool in tools))
        return _array(self._encode(self._template.render(messages, tools=tools, add_generation_prompt=True)))

    def follow(self, last_action_ids: np.ndarray | Sequence[int], messages: Sequence[pb.Message]) -> np.ndarray:
        """int32[O]: what comes between the last action and the next one, which answers `messages`.

        Args:
            last_action_ids: int[A], as sampled. If the last is no stop token (the action reached its length limit or
                was aborted), the ids begin with the token that closes the turn.

        Raises:
            RenderError: the template refuses the messages.
        """
        _refuse_images(messages)
        ids = self._encode(self._after_mark(messages))
        closing = self._closing_index(ids)
        closed = len(last_action_ids) > 0 and int(last_action_ids[-1]) in self.stop_token_ids
        return _array(ids[closing + 1 :] if closed else ids[closing:])

    def action(self, message: pb.Message) -> np.ndarray:
        """int32[A]: an assistant message as the policy would have sampled it, the closing token included.

        For demonstrations. Raises RenderError.
        """
        prompt = self._template.render([_USER], add_generation_prompt=True)
        text = self._template.render([_USER, message], add_generation_prompt=False)
        if not text.startswith(prompt):
            raise RenderError("writes assistant messages otherwise than after its own generation prompt")
        ids = self._encode(text[len(prompt) :])
        return _array(ids[: self._closing_index(ids) + 1])

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of an action, without the stop token at its end. Ids that are no token's are left out."""
        numbers = [int(number) for number in ids]
        if numbers and numbers[-1] in self.stop_token_ids:
            numbers.pop()
        return self._tokenizer.decode(numbers, skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        # A batch of one: unlike `encode` it lets other threads run.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _after_mark(
        self,
        messages: Sequence[pb.Message],
        history: Sequence[pb.Message] = (_USER,),
        tools: Sequence[environment_pb.Tool] = (),
    ) -> str:
        conversation = [*history, pb.Message(role="assistant", content=_MARK), *messages]
        text = self._template.render(conversation, tools=tools, add_generation_prompt=bool(messages))
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise RenderError("does not write the text of assistant messages as it is")
        return after

    def _closing_token(self, candidates: set[int]) -> int:
        for number in self._encode(self._after_mark([])):
            if number in candidates:
                return number
        raise RenderError("closes an assistant message with no special token")

    def _closing_index(self, ids: list[int]) -> int:
        if self._closing not in ids:
            raise RenderError("closes an assistant message only at the end of a conversation")
        return ids.index(self._closing)

    def _check(self) -> None:
        user, assistant = pb.Message(role="user", content="b c"), pb.Message(role="assistant", content="d")
        after = self._after_mark([user])
        if after != self._after_mark([user], [_USER, assistant, pb.Message(role="user", content="e f")]):
            raise RenderError("writes new messages differently depending on the turns before them")
        ids = self._encode(after)
        tail = ids[self._closing_index(ids) :]
        if self._tokenizer.decode(ids[: -len(tail)]).strip():
            raise RenderError("adds text of its own to an assistant message")
        conversation = [_USER, pb.Message(role="assistant", content=_MARK), user]
        if self._encode(self._template.render(conversation, add_generation_prompt=True))[-len(tail) :] != tail:
            raise RenderError("has a text after an assistant message that is tokenized differently by itself")

    def _check_tools(self, serialized: tuple[bytes, ...]) -> None:
        tools = [environment_pb.Tool.FromString(data) for data in serialized]
        if self._after_mark([_USER], tools=tools) != self._after_mark([_USER]):
            raise RenderError("writes the tools again with later messages, so an episode with tools is not append-only")


def _refuse_images(messages: Sequence[pb.Message]) -> None:
    if any(message.images for message in messages):
        raise RenderError(
            "has no place for images, for the model reads text only; set the environment's options so that it"
            " describes what it shows, or leave it out of the run"
        )


def _eos_token_ids(folder: Path, tokenizer: tokenizers.Tokenizer) -> set[int]:
    """Every id that the folder's files name as an end of generation."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        found |= set(value) if isinstance(value, list) else ({value} if value is not None else set())
    token = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    number = tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token or "")
    return found | ({number} if number is not None else set())


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)
