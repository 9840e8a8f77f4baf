"""The seam between the models and the machine: Backend, Communicator, KVCacheView.

Models know nothing else of where they run. Operations return arrays out of the backend's arena: one
allocation made at start. `begin_forward` rewinds it; `begin_layer` frees what was made in the layer
before the last one, so a layer's result outlives the next layer and nothing more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch
from cupaged.config import ModelConfig

Array = Any  # the backend's array: NumPy or CuPy
Handle = Any  # the backend's own form of a weight matrix
Part = Mapping[str, NDArray[Any]]  # tensor suffix ("weight", later "scales", ...) -> memory-mapped array


class KVCacheView(NamedTuple):
    """The KV cache as one layer sees it."""

    pool: Array  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int


class KVCache(Protocol):
    """The KV cache as a model gets it."""

    def layer(self, layer: int) -> KVCacheView: ...


class LogprobArrays(NamedTuple):
    """Log-probabilities of n logits rows; column 0 is the token itself, then the top ones."""

    token_ids: Array  # int32[n, 1 + num_top]
    logprobs: Array  # float32[n, 1 + num_top]
    ranks: Array  # int32[n], of column 0


class Communicator(Protocol):
    """What ranks say to each other; with one rank every call returns its argument."""

    rank: int
    size: int

    def all_reduce(self, x: Array) -> Array: ...

    def all_gather(self, x: Array) -> Array:
        """Return the ranks' x side by side along the last axis."""

    def broadcast(self, x: Array) -> Array: ...

    def barrier(self) -> None: ...


class Backend(Protocol):
    """Arithmetic on one device. n = rows of x, in and out = a matrix's columns and rows."""

    name: str
    dtype: np.dtype[Any]  # of activations
    kv_dtype: np.dtype[Any]

    # Memory and transfers.
    def available_memory(self) -> int: ...

    def create_pool(self, num_blocks: int, block_size: int, config: ModelConfig) -> Array: ...

    def copy_blocks(self, source: Array, target: Array, pairs: Array) -> None: ...

    def from_host(self, array: NDArray[Any]) -> Array: ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Return a copy that the caller owns."""

    def upload(self, batch: Batch) -> Batch: ...

    # The arena.
    def measure(self, run: Callable[[], Any]) -> int:
        """Return the arena bytes that `run` needs; arrays have shapes but no memory, kernels do not run."""

    def create_arena(self, num_bytes: int) -> None: ...

    def begin_forward(self) -> None: ...

    def begin_layer(self) -> None: ...

    def rewind_layer(self) -> None:
        """Free what was made since the last begin_layer; what the layer before made stays."""

    # Weights.
    def prepare_linear(
        self, parts: Sequence[Part], bias: Sequence[NDArray[Any]] | None = None, scheme: str | None = None
    ) -> Handle: ...

    def prepare_vector(self, weight: NDArray[Any]) -> Array: ...

    # Operations, named after the kernels.
    def linear(self, x: Array, weight: Handle) -> Array:
        """Return x @ weight.T + bias, [n, out]; a row's bits depend neither on n nor on other rows."""

    def embedding(self, ids: Array, weight: Handle) -> Array: ...

    def rms_norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        """Return norm(x), or, with a residual, residual += x and norm(residual). x [n, hidden]."""

    def rope_kv_write(
        self,
        q: Array,  # [num_tokens, num_heads, head_dim], rotated in place
        k: Array,  # [num_tokens, num_kv_heads, head_dim], undefined afterwards
        v: Array,
        kv: KVCacheView,
        batch: Batch,
        cos_sin: Array,  # float32[max_positions, rotary_dim], cos then sin
        q_norm: Array | None = None,  # [head_dim], RMS norm of each head before the rotation
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None: ...

    def paged_attention(
        self,
        q: Array,  # [num_tokens, num_heads, head_dim]
        kv: KVCacheView,
        batch: Batch,
        scale: float,
        sliding_window: int = 0,  # tokens, the query's own included; 0 = all
        softcap: float = 0.0,  # s -> softcap * tanh(s / softcap); 0 = off
        sinks: Array | None = None,  # float32[num_heads], a logit that only takes weight away
    ) -> Array:
        """Return [num_tokens, num_heads * head_dim]: each query over the cached keys up to its own."""

    def silu_mul(self, gate_up: Array) -> Array:
        """Return silu(gate) * up, [n, size], of gate_up [n, 2 * size]."""

    def gather_rows(self, x: Array, index: Array) -> Array: ...

    # Sampling: rows of logits float32[n, vocab_size] are logit_index[first : first + n] of the batch.
    def load_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Do row_copy on last_token int32[max_num_seqs], then fill the inputs INPUT_FROM_LAST_TOKEN flags."""

    def sample(self, logits: Array, batch: Batch, first: int, token_ids: Array) -> None:
        """Set token_ids[logit_seq], int32[num_seqs], for the rows that sample; logits stay as they are."""

    def logprobs(
        self, logits: Array, batch: Batch, first: int, token_ids: Array, num_top: int
    ) -> LogprobArrays:
        """Return the log-probabilities of each row's target, or of its sampled token, and the top num_top."""

    def store_last_tokens(self, batch: Batch, token_ids: Array, last_token: Array) -> None:
        """Set last_token[row] for the sequences that sampled."""


def create_backend(device: str, dtype: str, num_threads: int | None = None) -> Backend:
    """Return the backend of "cpu" or "cuda" for a concrete dtype; ValueError if there is none."""
    if device in ("auto", "cpu"):
        from cupaged.backend.cpu import CpuBackend

        return CpuBackend(dtype, num_threads=num_threads)
    raise ValueError(f"device={device!r} is not supported yet; use device='cpu'")
