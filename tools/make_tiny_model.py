"""Write a tiny random Hugging Face directory: config.json, model.safetensors, optionally a tokenizer.

    python -m tools.make_tiny_model llama /tmp/tiny            one of CASES
    python -m tools.make_tiny_model clear_llama /tmp/tiny      one of CLEAR_CASES
    python -m tools.make_tiny_model chat /tmp/tiny             llama with a byte-level tokenizer

Weights come from a seed through raw Philox words, so they are the same bits on every platform, and are scaled
so that logits have a standard deviation of 1 to 7: small ones would hide errors, large ones invent them.
"""

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, NumPy then knows bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
MISTRAL = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "rope_theta": 1e6,
    "sliding_window": None,
}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "eos_token_id": [2, 3],
}
QWEN3 = QWEN2 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}

# Rope cases have 24 original positions and goldens of 72, so they run far beyond them.
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama_bias": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    # As SmolLM2: head counts that are no powers of two, and nothing a multiple of 16.
    "llama_odd": LLAMA
    | {
        "vocab_size": 101,
        "hidden_size": 90,
        "intermediate_size": 133,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "llama_linear": LLAMA
    | {"max_position_embeddings": 24, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama_dynamic": LLAMA
    | {"max_position_embeddings": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama_llama3": LLAMA
    | {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 24,
        },
    },
    # As transformers 5 writes it.
    "llama_yarn": {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    | {
        "dtype": "float32",
        "max_position_embeddings": 96,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
        },
    },
    "llama_yarn_mscale": LLAMA
    | {
        "rope_theta": 100.0,
        "max_position_embeddings": 96,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    },
    "mistral": MISTRAL,
    "mistral_window": MISTRAL | {"sliding_window": 17, "head_dim": 20},
    "qwen2": QWEN2,
    "qwen2_window": QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "qwen3_window": QWEN3
    | {
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}

# For comparisons of backends: of a dtype and of sizes that CUDA kernels take, and with few near ties between
# the most likely tokens (make_clear_weights), so that a rounding rarely changes a token.
CLEAR = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
CLEAR_CASES: dict[str, dict[str, Any]] = {
    "clear_llama": LLAMA | CLEAR,
    "clear_llama_f16": LLAMA | CLEAR | {"torch_dtype": "float16"},
    "clear_llama_128": LLAMA | CLEAR | {"head_dim": 128, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "clear_mistral": MISTRAL | CLEAR | {"sliding_window": 150},
    "clear_qwen2": QWEN2 | CLEAR,
    "clear_qwen3": QWEN3 | CLEAR,
}

# Rope as published models have it, for a comparison of the tables alone.
ROPES: dict[str, dict[str, Any]] = {
    "smollm2": {"head_dim": 64, "max_position_embeddings": 8192, "rope_theta": 100000.0},
    "llama_3.2": {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5_yarn": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn_attention_factor": {
        "head_dim": 96,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 0.75,
        },
    },
    "vicuna_16k": {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "dynamic": {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.5},
    },
}

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("Ġ", "the"), ("e", "r"), ("o", "u"))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = LLAMA | {"vocab_size": 288, "max_position_embeddings": 512, "eos_token_id": [2, 4]}


def write_tiny_model(directory: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors in float32 into `directory` and return it."""
    return _write(directory, config, make_weights(config, seed))


def write_clear_model(directory: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors in the config's dtype into `directory` and return it."""
    dtype = np.dtype(config["torch_dtype"])
    tensors = {name: tensor.astype(dtype) for name, tensor in make_clear_weights(config, seed).items()}
    return _write(directory, config, tensors)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_tiny_chat_model(directory: Path, *, seed: int = 0) -> Path:
    """Write a llama with a byte-level tokenizer and a chat template into `directory` and return it."""
    write_tiny_model(directory, CHAT, seed=seed)
    write_tiny_tokenizer(directory)
    return directory


def make_weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a checkpoint by name; each depends on the seed and its own name only."""
    biases = {"q_proj", "k_proj", "v_proj"} if config["model_type"] == "qwen2" else set()
    if config.get("attention_bias"):
        biases |= {"q_proj", "k_proj", "v_proj", "o_proj"}
    if config.get("mlp_bias"):
        biases |= {"gate_proj", "up_proj", "down_proj"}
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        linears = {f"{attention}.q_proj": (q, hidden), f"{attention}.k_proj": (kv, hidden)}
        linears |= {f"{attention}.v_proj": (kv, hidden), f"{attention}.o_proj": (hidden, q)}
        linears |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        linears[f"{mlp}.down_proj"] = (hidden, inner)
        for name, shape in linears.items():
            shapes[f"{name}.weight"] = shape
            if name.rsplit(".", 1)[1] in biases:
                shapes[f"{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{attention}.{norm}.weight": (head_dim,) for norm in ("q_norm", "k_norm")}
    shapes["model.norm.weight"] = (hidden,)
    return {name: _random_tensor(name, shape, seed) for name, shape in shapes.items()}


def make_clear_weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return weights whose most likely token is mostly the one after the last, by a wide margin.

    The head has the embedding's rows, each one place further. All other logits are as random as what the
    layers add, and so is, now and then, the answer. Queries and keys are small, so that attention looks at
    many tokens: where it looks at one, it enlarges every error in a score.
    """
    weights = make_weights(config, seed)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    head[:] = np.roll(embedding, 1, axis=0)
    embedding *= np.float32(1.1) / embedding.std()
    for name, tensor in weights.items():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            tensor /= np.float32(1.5)
    return weights


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return uniform values: norms around 1, the rest around 0, as wide as the layer's inputs allow."""
    words = np.random.Philox(key=(seed << 32) + zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    uniform = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)  # [-1, 1)
    if "norm" in name:
        around_one: NDArray[np.float32] = 1 + np.float32(0.3) * uniform.reshape(shape)
        return around_one
    # The spread of a layer's output for inputs of spread 1. Embeddings are small beside what layers add, so
    # that a tied head does not just repeat the last token; q and k are large, so that attention is choosy.
    if name.endswith("bias"):
        spread = 0.5
    elif "embed_tokens" in name or "lm_head" in name:
        spread = 2.5 / np.sqrt(shape[1])
    elif "q_proj" in name or "k_proj" in name:
        spread = 1.5 / np.sqrt(shape[1])
    else:
        spread = 1.2 / np.sqrt(shape[1])
    around_zero: NDArray[np.float32] = np.float32(spread * np.sqrt(3.0)) * uniform.reshape(shape)
    return around_zero


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE with a few merges) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in MERGES)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def main() -> None:
    """Write the model that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES, *CLEAR_CASES, "chat"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.case == "chat":
        write_tiny_chat_model(args.directory, seed=args.seed)
    elif args.case in CLEAR_CASES:
        write_clear_model(args.directory, CLEAR_CASES[args.case], seed=args.seed)
    else:
        write_tiny_model(args.directory, CASES[args.case], seed=args.seed)


if __name__ == "__main__":
    main()
