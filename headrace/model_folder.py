"""The Hugging Face folder of the run's policy: made from `model.create`, or checked where `model.path` names one.

In: the run's config. Out: the path of a folder whose config.json, tokenizer.json and tokenizer_config.json fit each
other. Every service calls `ensure` at its start, in any order and at once: what it writes is a function of the config
alone, each file appears whole, and no weights are among them (the trainer draws those from run.seed). Only JSON is
read and written here, so no service needs a tokenizer library for it.

A created vocabulary is seven special tokens and then `model.create.words`. With `characters` each word of one character
is a symbol and each longer one a piece that is taken whole wherever it occurs, as a trained tokenizer would take a
frequent string. That keeps the actions of a small model short without a grammar of its own: the calculator's tool call
is Hermes JSON, of which `{"name": "calculate", "arguments": {"expression": "` is one piece.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from headrace.config import Config, ConfigError, Create

# The decoders that services/trainer/model and the engine both know, with the model_type that transformers expects.
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
SPECIAL_TOKENS = (PAD, END, UNKNOWN, "<system>", "<user>", "<assistant>", "<tool>")

# Each message opens with its role's token; only assistant messages close, with the token that ends an action. `_`
# stands for the separator: a space between words, nothing between characters. The tools' schemas are left out: a model
# made from nothing could not read them.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<' + message.role + '>_' }}{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{ '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}"""
    "{{ (call.function.arguments | tojson) + '}</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '_' }}{%- if message.role == 'assistant' -%}{{ '<end>_' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>_' }}{%- endif -%}"
)


def ensure(config: Config) -> Path:
    """The policy's folder, made if `model.create` says so, and checked.

    Raises:
        ConfigError: the folder cannot be made, was made from another config, or cannot be a model's.
    """
    folder = config.model_path
    if config.model.create is None:
        check(folder)
        if not any(folder.glob("*.safetensors")):
            _refuse(folder, "holds no *.safetensors; put the weights there or use model.create to start from nothing")
        return folder
    for name, content in files(config.model.create).items():
        _write(folder / name, content)
    check(folder)
    return folder


def files(create: Create) -> dict[str, str]:
    """Contents of a created folder's files, by name; config.json is the last."""
    vocabulary = _vocabulary(create)
    return {
        "tokenizer.json": _json(_tokenizer(create, vocabulary)),
        "tokenizer_config.json": _json(_tokenizer_config(create)),
        "config.json": _json(_model_config(create, vocabulary)),
    }


def check(folder: Path) -> None:
    """Raises ConfigError, naming the file and the remedy, unless the folder can be a chat model's."""
    if not folder.is_dir():
        _refuse(folder, "is no folder; set model.path to one that holds a Hugging Face model")
    model = _read(folder / "config.json")
    architectures = model.get("architectures")
    known = isinstance(architectures, list) and any(name in MODEL_TYPES for name in architectures)
    if not known:
        _refuse(folder / "config.json", f"architectures is {architectures!r}; use one of {sorted(MODEL_TYPES)}")
    size = model.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        _refuse(folder / "config.json", f"vocab_size is {size!r}; give the number of rows of the embedding")
    ids = _token_ids(folder / "tokenizer.json")
    highest = max(ids.values())
    if highest >= size:
        _refuse(
            folder,
            f"tokenizer.json knows ids up to {highest}, config.json vocab_size {size}; both must be one model's",
        )
    settings = _read(folder / "tokenizer_config.json")
    if not settings.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        _refuse(folder, "has no chat template; use an instruction-tuned model or add chat_template.jinja")
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos not in ids:
        _refuse(folder, f"eos_token in tokenizer_config.json is {eos!r}; name a token of tokenizer.json")


def _vocabulary(create: Create) -> dict[str, int]:
    tokens = [*SPECIAL_TOKENS, *create.words]
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if repeated:
        raise ConfigError("model.create.words", [f"{repeated} occur twice or are special tokens; remove them"])
    for word in create.words:
        if not word or (not create.characters and word.split() != [word]):
            raise ConfigError(
                "model.create.words", [f"{word!r} is empty or holds white space, at which text is split; remove it"]
            )
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer(create: Create, vocabulary: dict[str, int]) -> dict[str, Any]:
    pieces = [word for word in create.words if len(word) > 1] if create.characters else []
    added = [
        {
            "id": vocabulary[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *pieces)
    ]
    each_character = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": each_character if create.characters else {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "Fuse"} if create.characters else None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }


def _tokenizer_config(create: Create) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": create.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE.replace("_'", "'" if create.characters else " '"),
    }


def _model_config(create: Create, vocabulary: dict[str, int]) -> dict[str, Any]:
    shape = create.model_dump(exclude={"architecture", "words", "characters"})
    return {
        "architectures": [create.architecture],
        "model_type": MODEL_TYPES[create.architecture],
        **shape,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "vocab_size": len(vocabulary),
        "bos_token_id": None,
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[PAD],
    }


def _write(path: Path, content: str) -> None:
    """Lets the file appear whole; another process that writes it too writes the same."""
    try:
        if path.exists():
            if path.read_text(encoding="utf-8") != content:
                _refuse(path, "was made from another model.create; set another run.id or remove the folder")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except (OSError, UnicodeDecodeError) as error:
        _refuse(path, f"cannot be written or read ({error}); set run.directory to a folder that can")


def _token_ids(path: Path) -> dict[str, int]:
    """Every token of a tokenizer.json and its id."""
    tokenizer = _read(path)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):
            ids = {entry[0]: number for number, entry in enumerate(vocabulary)}
        else:
            ids = {str(token): int(number) for token, number in vocabulary.items()}
        ids |= {entry["content"]: int(entry["id"]) for entry in added}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        ids = {}
    if not ids:
        _refuse(path, "holds no vocabulary; take tokenizer.json from the model that the weights belong to")
    return ids


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror}); complete the model's folder")
    except ValueError:
        _refuse(path, "is not JSON; copy it again from the model")
    if not isinstance(value, dict):
        _refuse(path, "is not a JSON object; copy it again from the model")
    return value


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigError(str(path), [reason])
