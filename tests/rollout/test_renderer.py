"""services.rollout.renderer: contexts grow by exactly what the template adds, whatever was sampled."""

import concurrent.futures
import json
import threading
import time

import numpy as np
import pytest
import tokenizers
import yaml

from headrace import config as config_file
from headrace import model_folder
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.chat_template import ChatTemplate, RenderError
from services.rollout.renderer import Renderer
from tests.processes import ROOT
from tests.rollout import chat_templates as templates

CHATML = {"qwen": templates.QWEN, "smollm2": templates.SMOLLM2, "llama3": templates.LLAMA3}
EOS = {"llama3": "<|eot|>"}


def message(role: str, content: str, **fields) -> pb.Message:
    return pb.Message(role=role, content=content, **fields)


def user(content: str) -> pb.Message:
    return message("user", content)


@pytest.fixture(params=sorted(CHATML))
def folder(request, tmp_path):
    return templates.folder(tmp_path, CHATML[request.param], eos=EOS.get(request.param, "<|im_end|>"))


@pytest.fixture
def qwen(tmp_path):
    return templates.folder(tmp_path, templates.QWEN)


def tokenizer(folder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def whole(folder, messages) -> list[int]:
    """What rendering and tokenizing the whole conversation gives."""
    text = ChatTemplate.load(folder).render(messages, add_generation_prompt=True)
    return tokenizer(folder).encode(text, add_special_tokens=False).ids


def test_five_turns_equal_the_template_when_sampled_canonically(folder):
    renderer = Renderer.open(folder)
    conversation = [message("system", "be brief"), user("hello world")]
    context = list(renderer.first(conversation))
    action = []
    for turn in range(5):
        if turn:
            observation = user(f"the number {turn} is higher é 🙂\n\n")
            context += list(renderer.follow(action, [observation]))
            conversation.append(observation)
        assert context == whole(folder, conversation)
        answer = message("assistant", f"is it {turn}?")
        action = list(renderer.action(answer))
        context += action
        conversation.append(answer)


def test_sampled_splits_are_kept_as_they_are(qwen):
    renderer = Renderer.open(qwen)
    coder = tokenizer(qwen)
    canonical = list(renderer.action(message("assistant", "hello world")))
    split = [*(coder.token_to_id(token) for token in "helloĠworld"), canonical[-1]]
    assert split != canonical and renderer.decode(split) == renderer.decode(canonical) == "hello world"
    first, follow = renderer.first([user("a")]), renderer.follow(split, [user("b")])
    context = [*first, *split, *follow]
    assert coder.decode(context, skip_special_tokens=False) == ChatTemplate.load(qwen).render(
        [user("a"), message("assistant", "hello world"), user("b")], add_generation_prompt=True
    )
    assert context[len(first) : len(first) + len(split)] == split


def test_the_turn_separator_follows_a_sampled_stop_token(qwen):
    renderer, coder = Renderer.open(qwen), tokenizer(qwen)
    end = coder.token_to_id("<|im_end|>")
    after_stop = renderer.follow([*coder.encode("hello").ids, end], [user("b")])
    assert (
        coder.decode(after_stop, skip_special_tokens=False)
        == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert after_stop.dtype == np.int32


def test_an_action_cut_by_length_is_closed(folder):
    renderer = Renderer.open(folder)
    stop = list(renderer.action(message("assistant", "hello")))
    closed, cut = renderer.follow(stop, [user("b")]), renderer.follow(stop[:-1], [user("b")])
    assert list(cut) == [stop[-1], *closed]
    assert list(renderer.follow([], [user("b")])) == list(cut)


def test_another_stop_token_closes_the_turn_too(tmp_path):
    folder = templates.folder(tmp_path, templates.QWEN, generation_config={"eos_token_id": [1, 2]})
    renderer, coder = Renderer.open(folder), tokenizer(folder)
    assert renderer.stop_token_ids == (1, 2)
    assert coder.id_to_token(2) == "<|endoftext|>"
    assert list(renderer.follow([2], [user("b")])) == list(renderer.follow([1], [user("b")]))


def test_parallel_tool_answers_share_one_turn(qwen):
    renderer, coder = Renderer.open(qwen), tokenizer(qwen)
    calls = [pb.ToolCall(id=str(n), name="add", arguments_json=json.dumps({"n": n})) for n in range(2)]
    answers = [message("tool", f"is {n}", tool_call_id=str(n)) for n in range(2)]
    acting = message("assistant", "", tool_calls=calls)
    action = renderer.action(acting)
    assert renderer.decode(action) == "\n".join(
        f'<tool_call>\n{{"name": "add", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in range(2)
    )
    context = [*renderer.first([user("a")]), *action, *renderer.follow(action, answers)]
    assert context == whole(qwen, [user("a"), acting, *answers])
    assert coder.decode(context).count("<tool_response>") == 2
    assert context.count(coder.token_to_id("<|im_start|>")) == 5


def test_tools_are_in_the_prompt_only(qwen):
    renderer, coder = Renderer.open(qwen), tokenizer(qwen)
    tool = environment_pb.Tool(name="add", description="adds", parameters_json='{"type": "object"}')
    assert '"name": "add"' in coder.decode(renderer.first([user("a")], [tool]))
    assert "add" not in coder.decode(renderer.follow([1], [user("b")]))


def test_a_template_that_strips_reasoning_keeps_what_was_sampled(tmp_path):
    folder = templates.folder(tmp_path, templates.QWEN3)
    renderer, coder = Renderer.open(folder), tokenizer(folder)
    sampled = [*coder.encode("<think>\nhello\n</think>\n\nyou").ids, coder.token_to_id("<|im_end|>")]
    context = [*renderer.first([user("a")]), *sampled, *renderer.follow(sampled, [user("b")])]
    assert coder.decode(context, skip_special_tokens=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhello\n</think>\n\nyou<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(context) > len(whole(folder, [user("a"), message("assistant", coder.decode(sampled)), user("b")]))


def test_a_space_before_the_closing_token_is_not_added_to_what_was_sampled(tmp_path):
    folder = templates.folder(tmp_path, templates.MISTRAL, eos="</s>")
    renderer, coder = Renderer.open(folder), tokenizer(folder)
    end = coder.token_to_id("</s>")
    assert coder.decode(renderer.follow([9, end], [user("b")])) == "[INST] b [/INST]"
    assert renderer.follow([9], [user("b")])[0] == end


def test_tools_that_the_template_moves_are_refused(tmp_path):
    renderer = Renderer.open(templates.folder(tmp_path, templates.MISTRAL, eos="</s>"))
    with pytest.raises(RenderError, match="not append-only"):
        renderer.first([user("a")], [environment_pb.Tool(name="add")])


def test_messages_that_the_template_refuses_are_an_error_of_the_episode(tmp_path):
    renderer = Renderer.open(templates.folder(tmp_path, templates.MISTRAL, eos="</s>"))
    with pytest.raises(RenderError, match=r"\(user, assistant, tool\): Only user and assistant roles"):
        renderer.follow([1], [message("tool", "1")])
    broken = message("assistant", "", tool_calls=[pb.ToolCall(name="add", arguments_json="{")])
    with pytest.raises(RenderError, match="cannot render the messages"):
        renderer.first([user("a"), broken])


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHAT.replace("{{ m.role }}", "{{ loop.index }}"), "depending on the turns before"),
        (
            CHAT.replace("<|im_end|>", "{% if m.role == 'assistant' and loop.last %}<|im_end|>{% endif %}"),
            "only at the end",
        ),
        (CHAT.replace("<|im_end|>", "{% if loop.last %}<|im_end|>{% endif %}"), "adds text of its own"),
        (CHAT.replace("{{ m.content }}", "{{ m.content | upper }}"), "the text of assistant messages as it is"),
        (CHAT.replace("<|im_end|>", "\n"), "no special token"),
        (CHAT.replace("<|im_end|>", " Amen<|im_end|>"), "adds text of its own"),
        ("{% if %}", "no Jinja template"),
        ("{{ raise_exception('not\nnow') }}", "not now"),
    ],
)
def test_templates_that_do_not_append_are_refused_at_start(tmp_path, template, problem):
    with pytest.raises(config_file.ConfigError, match=problem) as caught:
        Renderer.open(templates.folder(tmp_path, template))
    assert len(caught.value.errors) == 1 and "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_refused_at_start(qwen):
    (qwen / "tokenizer.json").write_text("{}")
    with pytest.raises(config_file.ConfigError, match="the tokenizer cannot be read"):
        Renderer.open(qwen)


def test_truncation_in_the_tokenizer_file_cuts_nothing(qwen):
    coder = tokenizer(qwen)
    coder.enable_truncation(4)
    coder.enable_padding(length=999)
    before = Renderer.open(qwen).first([user("hello world")])
    coder.save(str(qwen / "tokenizer.json"))
    assert list(Renderer.open(qwen).first([user("hello world")])) == list(before)


def test_the_sandbox_holds(tmp_path):
    source = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(RenderError):
        ChatTemplate(source, {}).render([user("a")], add_generation_prompt=True)


def test_ids_of_no_token_are_left_out_of_text(qwen):
    renderer = Renderer.open(qwen)
    action = list(renderer.action(message("assistant", "hello")))
    assert renderer.decode([action[0], 10**6, *action[1:]]) == "hello"
    assert renderer.decode([]) == ""


def created(tmp_path, **create) -> Renderer:
    tree = yaml.safe_load((ROOT / "configs/guess_number.yaml").read_text())
    tree["run"] = {"id": "test", "directory": str(tmp_path)}
    tree["model"]["create"].update(create)
    return Renderer.open(model_folder.ensure(config_file.parse(tree)))


def test_the_created_words_model(tmp_path):
    renderer = created(tmp_path)
    prompt = renderer.first([user("guess a number")])
    assert len(prompt) == 5
    action = renderer.action(message("assistant", "4"))
    assert (len(action), renderer.decode(action), action[-1]) == (2, "4", renderer.stop_token_ids[0])
    assert len(renderer.follow(action, [user("higher")])) == 3
    assert len(renderer.follow(action[:1], [user("higher")])) == 4


def test_the_created_character_model_calls_tools_in_few_tokens(tmp_path):
    head, tail = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
    renderer = created(tmp_path, characters=True, words=[*"0123456789+-*()", head, tail])
    call = pb.ToolCall(id="call_0", name="calculate", arguments_json='{"expression": "53+6"}')
    action = renderer.action(message("assistant", "", tool_calls=[call]))
    assert len(action) == 7 and renderer.decode(action) == f"{head}53+6{tail}"
    assert len(renderer.first([user("(53+6)-79")])) == 11
    assert len(renderer.follow(action, [message("tool", "59", tool_call_id="call_0")])) == 4


def test_64_sessions_at_once(qwen):
    renderer = Renderer.open(qwen)
    expected = [renderer.follow([1], [user(f"hello {n}" * 50)]).tolist() for n in range(64)]

    def session(number: int) -> bool:
        text = user(f"hello {number}" * 50)
        return all(renderer.follow([1], [text]).tolist() == expected[number] for _ in range(20))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert all(pool.map(session, range(64)))


def test_long_text_in_a_thread_lets_others_run(qwen):
    renderer = Renderer.open(qwen)
    text = user("hello world, how are you? " * 40_000)
    thread = threading.Thread(target=lambda: renderer.follow([1], [text]))
    longest, last = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < 0.2
