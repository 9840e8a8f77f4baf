"""Whole steps of a model: the kernels and matrix products of one, its roofline, and how long it should take.

Least bytes are those that no engine can do without: every weight once, the keys and values that are seen, and
those that are written. Least FLOPs are those of the matrix products and of causal attention, 2 a
multiply-add. A step's roofline is the longer of the two at the machine's rates; its prediction is the sum of
those of its parts (tools/predict.py), with nothing between them but what a launch in a CUDA graph costs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.gpu_specs import GPUS, Gpu
from tools.kernel_cases.case import Case
from tools.kernel_cases.gated_mul import gated_mul
from tools.kernel_cases.paged import Heads, Paging
from tools.kernel_cases.paged_decode import paged_decode
from tools.kernel_cases.paged_prefill import paged_prefill
from tools.kernel_cases.rms_norm import add_rms_norm, rms_norm
from tools.kernel_cases.rope_kv_write import rope_kv_write
from tools.kernel_cases.rows import gather_rows
from tools.kernel_cases.sampling import GREEDY, sample
from tools.predict import HBM_LATENCY, LAUNCH

ITEM = 2  # bytes of a weight, an activation, a key's or a value's number


class Gemm(NamedTuple):
    """y [rows, out_features] = x [rows, in_features] @ weight.T."""

    rows: int
    out_features: int
    in_features: int
    out_bytes: int = ITEM  # of a number of y

    def __str__(self) -> str:
        return f"gemm-{self.rows}x{self.out_features}x{self.in_features}"

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * ITEM

    @property
    def num_bytes(self) -> int:
        """Return what must move, each number once."""
        return self.weight_bytes + self.rows * (self.in_features * ITEM + self.out_features * self.out_bytes)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.out_features * self.in_features


def gemm_seconds(gemm: Gemm, gpu: Gpu) -> float:
    """Return what a matrix product is predicted to take: its roofline at attained rates, and its launch."""
    busy = max(gemm.num_bytes / gpu.copy_bandwidth, gemm.flops / gpu.matmul_flops)
    return LAUNCH + HBM_LATENCY + busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A llama's shape."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: Heads
    vocab_size: int

    def gemms(self, rows: int) -> list[Gemm]:
        """Return the matrix products of a layer: qkv, o, gate and up, down."""
        _, num_heads, num_kv_heads, head_dim = self.heads
        hidden, inner = self.hidden_size, self.intermediate_size
        return [
            Gemm(rows, (num_heads + 2 * num_kv_heads) * head_dim, hidden),
            Gemm(rows, hidden, num_heads * head_dim),
            Gemm(rows, 2 * inner, hidden),
            Gemm(rows, hidden, inner),
        ]

    def head(self, rows: int) -> Gemm:
        """Return the matrix product that makes logits."""
        return Gemm(rows, self.vocab_size, self.hidden_size, out_bytes=4)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights that every step reads; the embedding is not."""
        layer = sum(gemm.weight_bytes for gemm in self.gemms(1))
        return self.num_layers * layer + self.head(1).weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token's keys and values."""
        return self.num_layers * 2 * self.heads.num_kv_heads * self.heads.head_dim * ITEM


LLAMA_8B = Shape(
    name="8b",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=Heads("bf16", 32, 8, 128),
    vocab_size=128_256,
)


class Step(NamedTuple):
    """One step in which each sequence computes so many tokens, the last ones of its length."""

    shape: Shape
    num_seqs: int
    length: int  # tokens of a sequence, the new ones included
    num_new: int = 1

    @property
    def name(self) -> str:
        kind = "decode" if self.num_new == 1 else "prefill"
        return f"{self.shape.name}-{kind}-{self.num_seqs}x{self.length}"

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new

    @property
    def least_bytes(self) -> int:
        kv_tokens = self.num_seqs * (self.length + (self.num_new if self.num_new > 1 else 0))
        return self.shape.weight_bytes + kv_tokens * self.shape.kv_bytes

    @property
    def least_flops(self) -> int:
        attention = self.attention().attention
        assert attention is not None, "a case of attention says which"
        gemms = sum(gemm.flops for gemm in self.shape.gemms(self.num_tokens))
        return self.shape.num_layers * (gemms + attention.flops) + self.shape.head(self.num_seqs).flops

    def roofline(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the seconds that no engine can beat at these rates."""
        return max(self.least_bytes / bytes_per_second, self.least_flops / flops_per_second)

    def attention(self) -> Case:
        """Return the attention of one layer."""
        paging = Paging((self.length,) * self.num_seqs)
        if self.num_new == 1:
            return paged_decode(self.shape.heads, paging)
        return paged_prefill(self.shape.heads, paging, (self.num_new,) * self.num_seqs)

    def parts(self) -> list[tuple[int, Case | Gemm]]:
        """Return all that the step runs, and how often; what takes a microsecond at most is left out."""
        shape, tokens = self.shape, self.num_tokens
        element, hidden = shape.heads.element, shape.hidden_size
        qkv, o, gate_up, down = shape.gemms(tokens)
        layer: list[Case | Gemm] = [
            qkv,
            rope_kv_write(shape.heads, (self.num_new,) * self.num_seqs),
            self.attention(),
            o,
            gate_up,
            gated_mul("silu_mul", element, tokens, shape.intermediate_size),
            down,
        ]
        return [
            (1, gather_rows(element, tokens, hidden, num_given=shape.vocab_size)),
            (1, rms_norm(element, tokens, hidden)),
            *((shape.num_layers, part) for part in layer),
            (2 * shape.num_layers, add_rms_norm(element, tokens, hidden)),
            (1, gather_rows(element, self.num_seqs, hidden, num_given=tokens)),
            (1, shape.head(self.num_seqs)),
            (1, sample(self.num_seqs, shape.vocab_size, (GREEDY,), "greedy")),
        ]


STEPS = [
    *(Step(LLAMA_8B, num_seqs, 1024) for num_seqs in (1, 16, 64, 256)),
    Step(LLAMA_8B, 1, 8192, 8192),
]


def step_row(step: Step, case_seconds: Callable[[Case, Gpu], float]) -> dict[str, Any]:
    """Return a row for kernel_tables.step_table; case_seconds predicts a kernel."""
    row: dict[str, Any] = {
        "case": step.name,
        "bytes": step.least_bytes,
        "flops": step.least_flops,
        "gpus": {},
    }
    parts = step.parts()
    for gpu in GPUS:
        products = sum(count * gemm_seconds(part, gpu) for count, part in parts if isinstance(part, Gemm))
        kernels = sum(count * case_seconds(part, gpu) for count, part in parts if isinstance(part, Case))
        row["gpus"][gpu.name] = {
            "roofline_us": round(1e6 * step.roofline(gpu.copy_bandwidth, gpu.matmul_flops), 1),
            "predicted_us": round(1e6 * (products + kernels), 1),
            "gemm_share": products / (products + kernels),
        }
    return row
