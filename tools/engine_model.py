"""What gpu_check measures the engine on: a llama of a real one's shape, random weights, and workloads.

Only config.json and a tokenizer are written: the weights come from load_format="dummy".
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.worker.sampler import LOGITS_CHUNK
from tools.kernel_cases.paged import Heads
from tools.make_tiny_model import LLAMA, SPECIAL_TOKENS, write_tiny_tokenizer
from tools.steps import LLAMA_8B, STEPS, Gemm, Shape, Step

# Of Llama 3.1; it changes the angles of the rotation, not the work.
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FIRST_TOKEN = len(SPECIAL_TOKENS)  # prompts have no special ones
BLOCK_TOKENS = 16  # of a KV block, by default


class Workload(NamedTuple):
    """So many prompts of equal length, put in together, and so many tokens generated for each."""

    num_seqs: int
    prompt_length: int  # tokens
    output_length: int  # tokens

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.prompt_length}+{self.output_length}"


class Bench(NamedTuple):
    """A shape and what is measured on it."""

    shape: Shape
    steps: list[Step]
    workloads: list[Workload]  # which transformers does too
    gemm_rows: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_timed_steps: int  # of decodes, with graphs and without
    num_prefills: int
    fork: Workload  # all its prompts in one step, none ends with a block
    num_forks: int  # sequences of each of its requests
    swap_space: float | None = None  # GiB; None = the engine's default

    @property
    def products(self) -> list[Gemm]:
        """Return the matrix products of a layer, and of logits where so many rows are made at once."""
        found = []
        for rows in self.gemm_rows:
            heads = [self.shape.head(rows)] if rows <= LOGITS_CHUNK else []
            found += [*self.shape.gemms(rows), *heads]
        return found


REAL = Bench(
    shape=LLAMA_8B,
    steps=STEPS,
    workloads=[Workload(1, 1024, 32), Workload(16, 1024, 32)],
    gemm_rows=(1, 16, 64, 256, 2048, 8192),
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192 + 16,  # the longest prompt, and what it generates
    num_timed_steps=24,
    num_prefills=5,
    fork=Workload(64, 120, 12),
    num_forks=4,
)
# For a dry run: as little as shows that every line runs.
TINY_SHAPE = Shape(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    heads=Heads("bf16", 4, 2, 64),
    vocab_size=288,
)
TINY = Bench(
    shape=TINY_SHAPE,
    steps=[Step(TINY_SHAPE, 1, 40), Step(TINY_SHAPE, 3, 40), Step(TINY_SHAPE, 1, 64, 64)],
    workloads=[Workload(2, 17, 3)],
    gemm_rows=(1, 16),
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=80,
    num_timed_steps=3,
    num_prefills=2,
    fork=Workload(1, 24, 12),
    num_forks=3,
    swap_space=8 * BLOCK_TOKENS * TINY_SHAPE.kv_bytes / 2**30,
)


def hf_config(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a llama of this shape."""
    _, num_heads, num_kv_heads, head_dim = shape.heads
    return LLAMA | {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": ROPE_SCALING,
        "torch_dtype": "bfloat16",
    }


def write_model(directory: Path, shape: Shape, **changes: Any) -> Path:
    """Write a model without weights into `directory` and return it; changes are made to its config.json."""
    text = json.dumps(hf_config(shape) | changes, indent=2)
    (directory / "config.json").write_text(text, encoding="utf-8")
    write_tiny_tokenizer(directory)
    return directory
