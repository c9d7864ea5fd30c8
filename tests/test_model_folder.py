"""headrace.model_folder: what it makes loads everywhere, and what cannot be a model is refused with a remedy."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import tokenizers
import yaml

from headrace import config as config_file
from headrace import model_folder

ROOT = Path(__file__).resolve().parent.parent
HEAD, TAIL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'


def run(tmp_path: Path, **model) -> config_file.Config:
    tree = yaml.safe_load((ROOT / "configs/guess_number.yaml").read_text())
    tree["run"] = {"id": "test", "directory": str(tmp_path)}
    if "path" in model:
        tree["model"] = model
    else:
        tree["model"]["create"].update(model)
    return config_file.parse(tree)


def ids(folder: Path, text: str) -> list[str]:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens


def test_words_are_split_at_white_space(tmp_path):
    folder = model_folder.ensure(run(tmp_path))
    assert folder == tmp_path / "test" / "model"
    assert ids(folder, "<user> guess a number\n<assistant> 4 <end>") == [
        "<user>",
        *["guess", "a", "number", "<assistant>", "4", "<end>"],
    ]
    assert ids(folder, "guess twelve") == ["guess", "<unk>"]


def test_characters_are_split_one_by_one_and_pieces_are_taken_whole(tmp_path):
    words = [*"0123456789+-*()", HEAD, TAIL]
    folder = model_folder.ensure(run(tmp_path, characters=True, words=words))
    text = f"<user>(53+6)-79<assistant>{HEAD}53+6{TAIL}<end>"
    assert ids(folder, text) == ["<user>", *"(53+6)-79", "<assistant>", HEAD, *"53+6", TAIL, "<end>"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert ids(folder, "a\n") == ["<unk>", "<unk>"]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_transformers_and_the_engine_read_it(tmp_path, architecture):
    transformers = pytest.importorskip("transformers")
    folder = model_folder.ensure(run(tmp_path, architecture=architecture))
    shape = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert shape.architectures == [architecture]
    assert (shape.vocab_size, shape.head_dim) == (len(tokenizer), 16)
    assert (shape.eos_token_id, shape.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "guess"}], add_generation_prompt=True)
    assert tokenizer.convert_ids_to_tokens(text) == ["<user>", "guess", "<assistant>"]


def test_it_is_made_once_and_deterministically(tmp_path):
    folder = model_folder.ensure(run(tmp_path / "a"))
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    model_folder.ensure(run(tmp_path / "a"))
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    other = model_folder.ensure(run(tmp_path / "b"))
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {name: v[0] for name, v in before.items()}
    assert sorted(before) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_folder_of_another_config_is_refused(tmp_path):
    model_folder.ensure(run(tmp_path))
    with pytest.raises(config_file.ConfigError, match=r"another model\.create; set another run\.id"):
        model_folder.ensure(run(tmp_path, hidden_size=128))


def _ensure(config: config_file.Config, start, results) -> None:
    start.wait()
    folder = model_folder.ensure(config)
    results.put(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))


def test_processes_may_make_it_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(6), context.Queue()
    children = [context.Process(target=_ensure, args=(run(tmp_path), start, results)) for _ in range(6)]
    for child in children:
        child.start()
    complete = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert [results.get(timeout=60) for _ in children] == [complete] * 6
    for child in children:
        child.join(60)


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["a", "b", "a"], "occur twice"), (["<end>"], "special"), (["two words"], "white space"), ([""], "empty")],
)
def test_words_that_cannot_be_a_vocabulary_are_refused(tmp_path, words, problem):
    with pytest.raises(config_file.ConfigError, match=problem):
        model_folder.ensure(run(tmp_path, words=words))


@pytest.fixture
def existing(tmp_path) -> Path:
    """A folder as a user would bring it."""
    folder = tmp_path / "brought"
    shutil.copytree(model_folder.ensure(run(tmp_path)), folder)
    (folder / "model.safetensors").touch()
    return folder


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_sound_folder_is_taken(tmp_path, existing):
    assert model_folder.ensure(run(tmp_path, path=str(existing))) == existing
    edit(existing / "tokenizer_config.json", chat_template=None, eos_token={"content": "<end>"})
    (existing / "chat_template.jinja").write_text("{{ messages }}")
    assert model_folder.ensure(run(tmp_path, path=str(existing))) == existing


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (shutil.rmtree, "is no folder; set model.path"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (
            lambda folder: edit(folder / "config.json", architectures=["GPT2LMHeadModel"]),
            "architectures is .*use one of",
        ),
        (lambda folder: edit(folder / "config.json", architectures=None), "architectures is None"),
        (lambda folder: edit(folder / "config.json", vocab_size=0), "vocab_size is 0"),
        (lambda folder: edit(folder / "config.json", vocab_size=20), "ids up to 23, config.json vocab_size 20"),
        (lambda folder: edit(folder / "tokenizer.json", model={}, added_tokens=[]), "holds no vocabulary"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json: is not JSON"),
        (lambda folder: edit(folder / "tokenizer_config.json", chat_template=None), "has no chat template"),
        (lambda folder: edit(folder / "tokenizer_config.json", eos_token="<eos>"), "eos_token .* is '<eos>'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(tmp_path, existing, damage, problem):
    damage(existing)
    with pytest.raises(config_file.ConfigError, match=problem) as caught:
        model_folder.ensure(run(tmp_path, path=str(existing)))
    assert len(caught.value.errors) == 1 and "\n" not in str(caught.value)
