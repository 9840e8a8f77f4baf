"""The seam between the models and the machine: Backend, Communicator, KVCacheView.

Models know nothing else of where they run. Operations return arrays out of the backend's arena: one
allocation made at start. `begin_forward` rewinds it; `begin_layer` frees what was made in the layer
before the last one, so a layer's result outlives the next layer and nothing more.

A worker rehearses first: inside `measure` arrays have shapes but no memory and kernels do not run, so the
lines that will take memory say how much. Then `allocate`, and the same lines again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch
from cupaged.config import EngineConfig

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


class Limits(NamedTuple):
    """The largest step and KV cache that a backend makes room for."""

    num_tokens: int  # of a step
    num_seqs: int
    seq_len: int  # tokens of the longest sequence
    block_size: int
    num_slots: int  # tokens that the KV cache holds at most
    num_host_blocks: int = 0  # of the swap pool
    sliding_window: int = 0  # tokens that any layer looks back at most, its own included; 0 = all


class MemoryUse(NamedTuple):
    """Bytes that a model takes on the device beside its KV cache.

    The host's page-locked memory, which all passes through on its way, is not counted.
    """

    weights: int  # and tables and whatever else is made once
    workspace: int  # of the backend itself: batches under way, matrix products
    activations: int  # the arena
    reserve: int  # what the driver may take for itself: modules, graphs; an estimate, all else is exact


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

    max_in_flight: int  # steps that may be begun before the first one's results are waited for

    # Memory and transfers.
    def available_memory(self) -> int:
        """Return the bytes that this process can still take."""

    def host_memory(self) -> int | None:
        """Return the bytes that the host can still give; None if that is what available_memory says."""

    def kv_cache_share(self, free: int) -> int:
        """Return how many of `free` bytes, beside all else, the KV cache takes if the user does not say."""

    def measure(self, limits: Limits, rehearse: Callable[[], Any]) -> MemoryUse:
        """Return what `rehearse` needs: it builds the model and runs the largest steps."""

    def allocate(self, limits: Limits, use: MemoryUse) -> None:
        """Take the measured memory, all but the two pools of blocks; ValueError if it is not there."""

    def create_pool(self, shape: tuple[int, ...]) -> Array:
        """Return a KV cache pool of kv_dtype, as KVCacheView has it; its contents are undefined."""

    def create_host_pool(self, shape: tuple[int, ...]) -> Array:
        """Return the like of create_pool in the host's memory, for blocks that are swapped out."""

    def warm_up(self, step: Callable[[Batch], Any]) -> None:
        """Prepare what a first request would else wait for; `step` runs a batch to its end."""

    # Whole blocks; pairs int32[n, 2] are (from, to), on the device for a copy and on the host for a swap.
    def copy_blocks(self, pool: Array, pairs: Array) -> None: ...

    def swap_out(self, pool: Array, host_pool: Array, pairs: NDArray[np.int32]) -> None: ...

    def swap_in(self, host_pool: Array, pool: Array, pairs: NDArray[np.int32]) -> None: ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Return a copy on the device that stays; or the array itself where that is the host."""

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Start copying to the host; the call waits for it and returns what the caller owns.

        It must be called before max_in_flight more steps begin. The array is the arena's or the batch's.
        """

    def synchronize(self) -> None:
        """Wait until all that has begun is done."""

    # A step: begin_forward, upload, then operations.
    def begin_forward(self) -> None: ...

    def upload(self, batch: Batch) -> Batch:
        """Return the batch on the device. It may count more tokens, logits or decodes: padding behind."""

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), which depends on the uploaded batch alone; or replay it, recorded earlier."""

    def run_sampling(self, batch: Batch, hidden: Array, sample: Callable[[], Any]) -> Any:
        """Return sample(), which depends on the batch and what run_forward returned alone; or replay it."""

    def is_async(self, batch: Batch) -> bool:
        """Return whether the operations of such a step only begin when they are called."""

    def begin_layer(self) -> None: ...

    def rewind_layer(self) -> None:
        """Free what was made since the last begin_layer; what the layer before made stays."""

    # Weights, in the form that the backend was created to keep them in: quantised ones as others.
    def prepare_linear(self, parts: Sequence[Part], bias: Sequence[NDArray[Any]] | None = None) -> Handle:
        """Return the parts stacked along the output, [out, in], for linear, logits and embedding."""

    def prepare_vector(self, weight: NDArray[Any]) -> Array: ...

    # Operations, named after the kernels.
    def linear(self, x: Array, weight: Handle) -> Array:
        """Return x @ weight.T + bias, [n, out]; on the CPU a row's bits depend on that row alone."""

    def logits(self, x: Array, weight: Handle) -> Array:
        """Return linear(x, weight) as float32[n, out]."""

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
        """Fill the inputs that INPUT_FROM_LAST_TOKEN flags from last_token int32[max_num_seqs], by row."""

    def sample(self, logits: Array, batch: Batch, first: int) -> None:
        """Set the batch's sampled_ids[logit_seq] for the rows that sample; logits stay as they are."""

    def logprobs(self, logits: Array, batch: Batch, first: int, num_top: int) -> LogprobArrays:
        """Return the log-probabilities of each row's target, or of its sampled token, and the top num_top.

        Of the raw logits, or of logits / temperature where a sequence flagged SCALED_LOGPROBS samples.
        """

    def store_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Set last_token[row] for the sequences that sampled."""


def create_backend(config: EngineConfig, checkpoint_dtype: str) -> Backend:
    """Return the backend that the user wants, or for "auto" CUDA's if there is a GPU; ValueError if none."""
    if config.device != "cpu":
        from cupaged.backend.cuda import create_cuda_backend

        backend = create_cuda_backend(config, checkpoint_dtype)
        if backend is not None:
            return backend
    from cupaged.backend.cpu import CpuBackend

    dtype = checkpoint_dtype if config.dtype == "auto" else config.dtype
    return CpuBackend(dtype, num_threads=config.num_threads, quantization=config.quantization)
