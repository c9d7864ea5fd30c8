"""The conversion from GGUF, on a file of a few tensors."""

import json

import gguf
import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

from tools import convert_smollm2


def permute(weight_OI: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to Hugging Face's rows: row i + p·H/2 of a head becomes row 2i + p."""
    outputs, inputs = weight_OI.shape
    return weight_OI.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def write_file(path, q_proj: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(8)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_tensor("blk.0.attn_q.weight", permute(q_proj, 2))
    writer.add_tensor("blk.0.ffn_norm.weight", np.ones(8, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_folder_holds_what_the_file_held(tmp_path):
    q_proj = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_file(tmp_path / "model.gguf", q_proj)
    folder = tmp_path / "model"
    convert_smollm2.convert(tmp_path / "model.gguf", folder)

    with safe_open(folder / "model.safetensors", "np") as tensors:
        assert set(tensors.keys()) == {
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.embed_tokens.weight",
        }
        np.testing.assert_array_equal(
            tensors.get_tensor("model.layers.0.self_attn.q_proj.weight").astype(np.float32), q_proj
        )

    config = json.loads((folder / "config.json").read_text())
    assert (config["head_dim"], config["rope_theta"], config["rms_norm_eps"]) == (4, 100_000.0, 1e-5)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").ids == [1, 7, 3, 4, 2]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|im_end|>", "{{ messages[0].content }}")
