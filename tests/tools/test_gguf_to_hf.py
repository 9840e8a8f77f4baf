import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cupaged.engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_level
from tools.gguf_to_hf import convert, unpermute

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 16, 4, 2, 4, 24
RNG = np.random.default_rng(0)


def permuted(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder q or k rows as llama.cpp's converter does."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    interleaved: NDArray[np.float32] = halves.swapaxes(1, 2).reshape(rows, columns)
    return interleaved


def write_gguf(file: Path, **metadata: Any) -> dict[str, NDArray[np.float32]]:
    """Write a one-layer Llama; return its weights in transformers' names and order."""
    vocabulary = json.loads(byte_level().to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    values = {"pre": "smollm", "architecture": "llama", "template": "{{ messages[0].content }}"} | metadata
    writer = gguf.GGUFWriter(file, values["architecture"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>", "<unk>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(values["template"])
    weights = {
        "model.embed_tokens": ("token_embd", (len(tokens), HIDDEN)),
        "model.norm": ("output_norm", (HIDDEN,)),
        "model.layers.0.input_layernorm": ("blk.0.attn_norm", (HIDDEN,)),
        "model.layers.0.post_attention_layernorm": ("blk.0.ffn_norm", (HIDDEN,)),
        "model.layers.0.self_attn.q_proj": ("blk.0.attn_q", (HEADS * HEAD_DIM, HIDDEN)),
        "model.layers.0.self_attn.k_proj": ("blk.0.attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "model.layers.0.self_attn.v_proj": ("blk.0.attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "model.layers.0.self_attn.o_proj": ("blk.0.attn_output", (HIDDEN, HEADS * HEAD_DIM)),
        "model.layers.0.mlp.gate_proj": ("blk.0.ffn_gate", (MLP, HIDDEN)),
        "model.layers.0.mlp.up_proj": ("blk.0.ffn_up", (MLP, HIDDEN)),
        "model.layers.0.mlp.down_proj": ("blk.0.ffn_down", (HIDDEN, MLP)),
    }
    made = {}
    for name, (gguf_name, shape) in weights.items():
        weight = made[f"{name}.weight"] = RNG.standard_normal(shape, np.float32)
        if gguf_name.endswith("attn_q"):
            weight = permuted(weight, HEADS)
        if gguf_name.endswith("attn_k"):
            weight = permuted(weight, KV_HEADS)
        writer.add_tensor(f"{gguf_name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    weights = write_gguf(tmp_path / "model.gguf")
    directory = tmp_path / "hf"
    directory.mkdir()
    convert(tmp_path / "model.gguf", directory)
    return directory, weights


def test_weights_get_transformers_names_order_and_bfloat16(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    directory, weights = converted

    tensors = load_file(directory / "model.safetensors")

    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(tensors[name], weight.astype(ml_dtypes.bfloat16), err_msg=name)


def test_config_states_the_shape(converted: tuple[Path, dict[str, NDArray[np.float32]]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text(encoding="utf-8"))

    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_tokenizer_splits_digits_and_keeps_the_chat_template(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    tokenizer = Tokenizer.from_directory(converted[0])

    ids = tokenizer.encode("Rome 10007</s>")

    assert [tokenizer.token_text(i) for i in ids[-6:]] == ["1", "0", "0", "0", "7", "</s>"]
    assert (tokenizer.decode(ids), tokenizer.eos_token_id) == ("Rome 10007", 2)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    calls: list[tuple[int, int]] = []

    convert(tmp_path / "model.gguf", tmp_path, progress=lambda done, total: calls.append((done, total)))

    assert calls == [(n, len(weights)) for n in range(1, len(weights) + 1)]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"pre": "llama-bpe"}, "tokenizer \\('gpt2', 'llama-bpe'\\) is not supported"),
    ],
)
def test_file_of_another_kind_is_refused(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", **metadata)

    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "model.gguf", tmp_path)


def test_unpermute_undoes_llama_cpps_order() -> None:
    weight = RNG.standard_normal((24, 5), np.float32)

    np.testing.assert_array_equal(unpermute(permuted(weight, 3), 3), weight)
    assert not np.array_equal(permuted(weight, 3), weight)
