"""Turn a Llama GGUF file into a Hugging Face directory that cupaged (or transformers) loads.

    python tools/gguf_to_hf.py MODEL.gguf DIRECTORY

Weights are dequantised to bfloat16. Needs the packages gguf, numpy and ml_dtypes. Reads the llama
architecture with a byte-level vocabulary of the "smollm" kind; says so where a file has another.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

Metadata = dict[str, Any]  # GGUF key -> value
Progress = Callable[[int, int], None]  # tensors done, of how many

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
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
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF that tokenizer.json lists as added tokens
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert(gguf: Path, directory: Path, progress: Progress | None = None) -> None:
    """Write the model in `gguf` to `directory`, which must exist; ValueError says what cannot be read."""
    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors: dict[str, NDArray[Any]] = {}
    for done, (name, weight) in enumerate(_weights(reader, metadata), start=1):
        tensors[name] = weight.astype(ml_dtypes.bfloat16)
        if progress is not None:
            progress(done, len(reader.tensors))
    is_tied = "lm_head.weight" not in tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", model_config(metadata, is_tied=is_tied))
    _write(directory / "generation_config.json", _token_ids(metadata))
    _write(directory / "tokenizer.json", tokenizer(metadata))
    _write(directory / "tokenizer_config.json", tokenizer_config(metadata))


def _weights(reader: GGUFReader, metadata: Metadata) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield name and float32 weight of each tensor, in transformers' names and order of rows."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(
            f"architecture {metadata['general.architecture']!r} is not supported; only 'llama' is"
        )
    num_heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        base = tensor.name.removesuffix(".weight")
        if base in TOP_LEVEL:
            yield f"{TOP_LEVEL[base]}.weight", weight
            continue
        _, layer, leaf = base.split(".")
        if leaf not in IN_LAYER:
            raise ValueError(f"tensor {tensor.name!r} is not one of a plain Llama")
        if leaf in num_heads:
            weight = unpermute(weight, num_heads[leaf])
        yield f"model.layers.{layer}.{IN_LAYER[leaf]}.weight", weight


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of q and k rows.

    It interleaves the two halves of each head (0, n/2, 1, n/2 + 1, ...), because its rotary embedding turns
    neighbours; transformers turns row i with row i + n/2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def model_config(metadata: Metadata, *, is_tied: bool) -> dict[str, Any]:
    """Return config.json."""
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    num_heads = llama["attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama.get("attention.key_length", llama["embedding_length"] // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": llama["context_length"],
        # GGUF keeps float32; the value that was meant has few digits.
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": llama.get("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        **_token_ids(metadata),
    }


def tokenizer(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE whose pre-tokenizer takes digits one by one."""
    kind = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} is not supported; only ('gpt2', 'smollm') is")
    tokens = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **token} for i, token in _added_tokens(metadata).items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer_config.json with the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = _token_ids(metadata)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[ids[f"{name}_id"]] for name in SPECIAL_TOKENS if f"{name}_id" in ids},
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(i): token for i, token in _added_tokens(metadata).items()},
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _token_ids(metadata: Metadata) -> dict[str, int]:
    """Return bos_token_id and its like, as far as the file has them."""
    found = {name: metadata.get(f"tokenizer.ggml.{word}_token_id") for name, word in SPECIAL_TOKENS.items()}
    return {f"{name}_id": token_id for name, token_id in found.items() if token_id is not None}


def _added_tokens(metadata: Metadata) -> dict[int, dict[str, Any]]:
    types = metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        i: {"content": token, **flags, "special": types[i] == CONTROL}
        for i, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if types[i] in (CONTROL, USER_DEFINED)
    }


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def main() -> None:
    """Convert the file named on the command line."""
    parser = argparse.ArgumentParser(description="Turn a Llama GGUF file into a Hugging Face directory.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    convert(arguments.gguf, arguments.directory)


if __name__ == "__main__":
    main()
