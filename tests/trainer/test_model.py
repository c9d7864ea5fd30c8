"""The decoder against its twin in NumPy, and Hugging Face folders there and back."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from headrace.config import ConfigError
from services.trainer import sharding
from services.trainer.logprob import token_logprobs
from services.trainer.model import config as model_config
from services.trainer.model import decoder, huggingface
from services.trainer.model.config import DecoderConfig
from tests import numpy_decoder
from tests.numpy_decoder import LLAMA, QWEN2, QWEN3, SMOLLM2

SHAPES = pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA, SMOLLM2], ids=["qwen3", "qwen2", "llama", "smollm2"])


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return sharding.create_mesh()


def random_tensors(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter off its initial value, norms and biases too."""
    rng = np.random.default_rng(seed)
    return {
        name: ((len(shape) == 1 and "bias" not in name) + config.initializer_range * rng.normal(size=shape)).astype(
            "f4"
        )
        for name, shape in decoder.shapes(config).items()
    }


def write_folder(folder: Path, config: DecoderConfig, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config.to_json(config)))
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


def logprobs(config, parameters, tokens, positions, segments, *, temperature=1.0, chunk_tokens=1024, **options):
    @jax.jit
    def score(parameters):
        model = decoder.bind(config, parameters)
        hidden = model(jnp.array(tokens), jnp.array(positions), jnp.array(segments), **options)
        return token_logprobs(
            hidden, model.head_VD, jnp.array(tokens), temperature=temperature, chunk_tokens=chunk_tokens
        )

    return jax.device_get(score(parameters))


@SHAPES
def test_agrees_with_numpy_on_packed_rows(config: DecoderConfig, mesh: Mesh):
    tensors = random_tensors(config)
    rng = np.random.default_rng(1)
    first, second, third = (rng.integers(0, config.vocab_size, length) for length in (7, 5, 12))
    tokens = np.array([[*first, *second], third])
    positions = np.array([[*range(7), *range(5)], range(12)])
    segments = np.array([[1] * 7 + [2] * 5, [1] * 12])
    parameters = huggingface.from_huggingface(tensors, config, mesh)
    ours, _ = logprobs(config, parameters, tokens, positions, segments, temperature=0.7)
    for row, start, sequence in [(0, 0, first), (0, 7, second), (1, 0, third)]:
        expected = numpy_decoder.token_logprobs(config, tensors, sequence, temperature=0.7)
        np.testing.assert_allclose(ours[row, start + 1 : start + len(sequence)], expected[1:], atol=1e-4)
    assert not ours[:, 0].any()


def test_numpy_twin_by_hand():
    # No layers: the word's embedding, normalised, times the head. RMS of (3, 4) is sqrt(12.5).
    config = replace(LLAMA, num_hidden_layers=0, hidden_size=2, vocab_size=2, rms_norm_eps=0.0)
    tensors = {
        "model.embed_tokens.weight": np.array([[3.0, 4.0], [0.0, 0.0]]),
        "model.norm.weight": np.array([1.0, 2.0]),
        "lm_head.weight": np.array([[1.0, 0.0], [0.0, 1.0]]),
    }
    logits = numpy_decoder.logits(config, tensors, np.array([0]))
    np.testing.assert_allclose(logits, [[3 / np.sqrt(12.5), 8 / np.sqrt(12.5)]])


@pytest.mark.parametrize("chunk_tokens", [1, 6, 10])
def test_chunks_of_the_vocabulary_change_nothing(chunk_tokens: int, mesh: Mesh):
    tensors = random_tensors(QWEN3)
    tokens = np.random.default_rng(2).integers(0, QWEN3.vocab_size, (2, 11))
    layout = (tokens, np.tile(np.arange(11), (2, 1)), np.ones((2, 11), int))
    parameters = huggingface.from_huggingface(tensors, QWEN3, mesh)
    whole = logprobs(QWEN3, parameters, *layout)
    chunked = logprobs(QWEN3, parameters, *layout, chunk_tokens=chunk_tokens)
    for expected, found in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_chunks_of_the_vocabulary_give_the_same_gradient():
    rng = np.random.default_rng(3)
    hidden, head = jnp.array(rng.normal(size=(2, 7, 4))), jnp.array(rng.normal(size=(5, 4)))
    tokens = jnp.array(rng.integers(0, 5, (2, 7)))

    def total(hidden, head, chunk_tokens):
        scores, entropies = token_logprobs(hidden, head, tokens, temperature=0.9, chunk_tokens=chunk_tokens)
        return (scores + 0.3 * entropies).sum()

    whole = jax.grad(total, argnums=(0, 1))(hidden, head, 100)
    for expected, found in zip(whole, jax.grad(total, argnums=(0, 1))(hidden, head, 4), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_logits_of_a_large_vocabulary_never_exist_at_once():
    rows, length, words = 4, 256, 4096

    def total(hidden, head):
        scores, _ = token_logprobs(hidden, head, jnp.zeros((rows, length), int), temperature=1.0, chunk_tokens=64)
        return scores.sum()

    inputs = jnp.ones((rows, length, 8)), jnp.ones((words, 8))
    memory = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * length * words * 4 / 2


def test_entropy_is_that_of_the_distribution_before_the_token():
    # One token of two words at logits (0, log 3): probabilities 1/4 and 3/4.
    hidden, head = jnp.array([[[1.0], [0.0]]]), jnp.array([[0.0], [float(np.log(3))]])
    scores, entropies = token_logprobs(hidden, head, jnp.array([[0, 1]]), temperature=1.0, chunk_tokens=8)
    np.testing.assert_allclose(scores, [[0, np.log(0.75)]], rtol=1e-6)
    np.testing.assert_allclose(entropies, [[0, -0.25 * np.log(0.25) - 0.75 * np.log(0.75)]], rtol=1e-6)


def test_bfloat16_is_close_and_float32_comes_out(mesh: Mesh):
    parameters = huggingface.from_huggingface(random_tensors(QWEN3), QWEN3, mesh)
    layout = (np.arange(10)[None], np.arange(10)[None], np.ones((1, 10), int))
    wide, _ = logprobs(QWEN3, parameters, *layout)
    narrow, _ = logprobs(QWEN3, parameters, *layout, dtype=jnp.bfloat16)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, wide, atol=0.3)
    assert not np.array_equal(narrow, wide)


@SHAPES
def test_names_and_layouts_are_those_of_hugging_face(config: DecoderConfig):
    shapes = decoder.shapes(config)
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    expected = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if config is QWEN3:
            layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
        if config is QWEN2:
            layer |= {f"self_attn.{name}_proj.bias": (queries if name == "q" else keys,) for name in "qkv"}
        expected |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    assert shapes == expected


@SHAPES
def test_a_saved_folder_loads_to_the_same_values(config: DecoderConfig, mesh: Mesh, tmp_path: Path):
    tensors = random_tensors(config)
    source = write_folder(tmp_path / "source", config, tensors)
    parameters = huggingface.load_parameters(source, model_config.read(source), mesh)
    huggingface.save_folder(tmp_path / "saved", parameters, source=source)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(saved[name], tensor)
    assert model_config.read(tmp_path / "saved") == config
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == '{"a": "tokenizer"}'


def test_bfloat16_weights_are_read_and_written(mesh: Mesh, tmp_path: Path):
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_tensors(LLAMA).items()}
    source = write_folder(tmp_path / "source", LLAMA, tensors)
    parameters = huggingface.load_parameters(source, LLAMA, mesh)
    assert {parameter.dtype for parameter in parameters.values()} == {jnp.float32.dtype}
    huggingface.save_folder(tmp_path / "saved", parameters, source=source, dtype="bfloat16")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, tensor in huggingface.load_parameters(tmp_path / "saved", LLAMA, mesh).items():
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32))


def test_weights_in_several_files_are_read_together_and_a_repeated_tied_head_is_left_out(mesh: Mesh, tmp_path: Path):
    tensors = random_tensors(QWEN3)
    names = sorted(tensors)
    folder = write_folder(tmp_path / "model", QWEN3, {name: tensors[name] for name in names[:5]})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    rest = {name: tensors[name] for name in names[5:]} | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    assert huggingface.load_parameters(folder, QWEN3, mesh).keys() == tensors.keys()


def test_folders_that_do_not_fit_are_refused_tensor_by_tensor(mesh: Mesh, tmp_path: Path):
    tensors = random_tensors(QWEN3)
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.embed_tokens.weight"] = np.zeros((2, 2), np.float32)
    folder = write_folder(tmp_path / "model", QWEN3, tensors)
    with pytest.raises(ConfigError) as caught:
        huggingface.load_parameters(folder, QWEN3, mesh)
    assert caught.value.errors == [
        "model.norm.weight is missing",
        "model.extra.weight is unknown to Qwen3ForCausalLM",
        "model.embed_tokens.weight has shape [2, 2], must have [19, 24]",
    ]
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match="cannot be read"):
        huggingface.load_parameters(folder, QWEN3, mesh)


def test_the_wire_format_is_a_copy_in_name_order(mesh: Mesh):
    parameters = huggingface.from_huggingface(random_tensors(QWEN3), QWEN3, mesh)
    arrays = dict(huggingface.to_huggingface(parameters))
    assert list(arrays) == sorted(parameters)
    assert all(array.flags.owndata for array in arrays.values())
    kept = {name: array.copy() for name, array in arrays.items()}
    # Overwrites the parameters' buffers, as an update does.
    jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)(parameters))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])


def test_parameters_do_not_share_memory_with_the_arrays_that_they_were_made_from(mesh: Mesh):
    tensors = random_tensors(QWEN3)
    parameters = huggingface.from_huggingface(tensors, QWEN3, mesh)
    before = np.array(parameters["model.norm.weight"])
    for tensor in tensors.values():
        tensor[:] = 7
    np.testing.assert_array_equal(parameters["model.norm.weight"], before)


def test_initial_parameters_follow_the_seed_and_the_range(mesh: Mesh):
    config = replace(SMOLLM2, initializer_range=0.02)
    first, again, other = (decoder.initial_parameters(config, seed, mesh) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])
    assert float(first[name].std()) == pytest.approx(0.02, rel=0.05)
    assert (first["model.norm.weight"] == 1).all()
    assert not np.array_equal(first[name], first["model.layers.0.self_attn.o_proj.weight"])


def config_file(folder: Path, **changes: object) -> Path:
    values = {**model_config.to_json(QWEN3), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value != "gone"}))
    return folder


@SHAPES
def test_a_config_reads_back_to_itself(config: DecoderConfig, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(model_config.to_json(config)))
    assert model_config.read(tmp_path) == config


def test_a_config_may_leave_out_what_follows(tmp_path: Path):
    folder = config_file(
        tmp_path,
        architectures=["LlamaForCausalLM"],
        num_key_value_heads="gone",
        head_dim="gone",
        rope_theta="gone",
        rope_scaling=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    config = model_config.read(folder)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 6, 500.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["MixtralForCausalLM"], "architectures is ['MixtralForCausalLM'], must name one of Llama"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', which is not supported; only 'silu'"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling asks for 'llama3', which is not"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters asks for 'yarn'"),
        ("attention_bias", True, "attention_bias is True"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types asks for sliding_attention"),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4}, which is not supported"),
        ("vocab_size", "gone", "vocab_size is None, must be a positive number"),
        ("num_key_value_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(tmp_path: Path, key: str, value: object, message: str):
    with pytest.raises(ConfigError) as caught:
        model_config.read(config_file(tmp_path, **{key: value}))
    (error,) = caught.value.errors
    assert error.startswith(message)


def test_a_missing_or_broken_config_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        model_config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
        model_config.read(tmp_path)
