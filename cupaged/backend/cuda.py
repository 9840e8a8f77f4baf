"""CudaBackend: arrays on a GPU, the kernels' *_cuda launches, matrix products by cublasLt.

Activations, weights and KV cache are bfloat16 or float16. All memory is taken at load (cuda_memory.py); a
step only puts work on the device's stream.
"""

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array, KVCacheView, Limits, LogprobArrays, MemoryUse, Part
from cupaged.backend.cuda_memory import CudaMemory
from cupaged.backend.decode_launches import DecodeLaunches
from cupaged.backend.device import Device
from cupaged.backend.gemm import Gemm, Weight
from cupaged.backend.graphs import DecodeGraphs, graph_shapes
from cupaged.backend.host_memory import available_memory
from cupaged.backend.rehearsal import Rehearsal, outline
from cupaged.batch import Batch, padding_batch
from cupaged.config import EngineConfig
from cupaged.kernels import launch
from cupaged.kernels.adjust_logits import adjust_logits_cuda
from cupaged.kernels.gated_mul import silu_mul_cuda
from cupaged.kernels.logprobs import logprobs_cuda
from cupaged.kernels.nvrtc import CudaUnavailable
from cupaged.kernels.paged_attention import paged_attention_cuda
from cupaged.kernels.paged_decode import blocks_at_once
from cupaged.kernels.rms_norm import add_rms_norm_cuda, rms_norm_cuda
from cupaged.kernels.rope_kv_write import rope_kv_write_cuda
from cupaged.kernels.rows import (
    copy_blocks_cuda,
    gather_rows_cuda,
    load_last_tokens_cuda,
    store_last_tokens_cuda,
)
from cupaged.kernels.sample import sample_cuda

logger = logging.getLogger("cupaged")

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# What the driver takes for itself, in bytes, beside its context, which is there before free memory is asked:
# estimates, no GPU has been asked yet. warm_up and gpu_check hold them to what it takes.
MODULES_RESERVE = 256 << 20  # code of our kernels and of cublasLt's, memory rounded up to pages of 2 MiB
GRAPH_RESERVE = 2 << 20  # each recorded step, of some 300 launches


class CudaBackend:
    """Arithmetic on one GPU; see base.Backend."""

    name = "cuda"
    max_in_flight = 2  # so that the device finds the next step when it is done with one

    def __init__(self, device: Device, dtype: str, *, enforce_eager: bool = False) -> None:
        """Open cublasLt; nothing is allocated yet."""
        self.dtype = self.kv_dtype = DTYPES[dtype]
        self.reserve = 0  # bytes that were planned for the driver; driver_bytes is what it took
        self._device = device
        self._enforce_eager = enforce_eager
        self._memory = CudaMemory(device, self.max_in_flight)
        self._arena = self._memory.arena
        self._gemm = Gemm(device)
        self._graphs = DecodeGraphs(device, self._arena)
        self._rehearsal = Rehearsal()
        self._launcher: launch.Device = device  # the rehearsal, while measuring
        self._recording = False

    @classmethod
    def create(cls, device: Device, config: EngineConfig, checkpoint_dtype: str) -> "CudaBackend":
        """Return the backend that the user wants, on a device."""
        if config.quantization is not None:
            raise ValueError(
                f"quantization={config.quantization!r} is not supported on a GPU yet; leave it out, or use "
                "device='cpu'"
            )
        dtype = choose_dtype(config.dtype, checkpoint_dtype)
        return cls(device, dtype, enforce_eager=config.enforce_eager)

    # Memory and transfers.
    @property
    def allocations(self) -> list[int]:
        """Return the bytes of all device memory that is ours: weights, workspace, arena, KV cache."""
        return self._memory.allocations

    def driver_bytes(self) -> int:
        """Return what the driver took since `allocate`, unless others use the GPU; planned was `reserve`."""
        return self._memory.driver_bytes()

    def available_memory(self) -> int:
        """Return the bytes that are free on the GPU."""
        return self._memory.free()

    def host_memory(self) -> int | None:
        """Return the bytes that machine and container can still give."""
        return available_memory()

    def kv_cache_share(self, free: int) -> int:
        """Return all that is left."""
        return free

    def measure(self, limits: Limits, rehearse: Callable[[], Any]) -> MemoryUse:
        """Return what will be allocated, to the byte, and an estimate of what the driver takes."""
        self._launches = DecodeLaunches(limits)
        self._launcher = self._rehearsal
        try:
            use = self._memory.measure(limits, rehearse)
        finally:
            self._launcher = self._device
        graphs = 0 if self._enforce_eager else len(graph_shapes(limits))
        return use._replace(reserve=MODULES_RESERVE + graphs * GRAPH_RESERVE)

    def allocate(self, limits: Limits, use: MemoryUse) -> None:
        """Load the kernels that the rehearsal asked for and take the memory, all but the pools of blocks."""
        self._limits, self.reserve = limits, use.reserve
        self._launches = DecodeLaunches(limits)
        self._memory.allocate(limits, use)
        self._rehearsal.load(self._device)

    def create_pool(self, shape: tuple[int, ...]) -> Array:
        """Return a KV cache pool; its contents are undefined."""
        pool = self._memory.create_pool(shape, self.kv_dtype)
        if self._memory.measuring:
            self.copy_blocks(pool, outline((0, 2), np.int32))  # a step's, but not of each
        return pool

    def create_host_pool(self, shape: tuple[int, ...]) -> Array:
        """Return a pool in pinned memory of the host."""
        return self._memory.create_host_pool(shape, self.kv_dtype)

    def warm_up(self, step: Callable[[Batch], Any]) -> None:
        """Choose the algorithms of matrix products, run a first step, record steps of decodes."""
        self._memory.finish_weights()
        self._gemm.tune(self._memory.gemm_workspace, self._arena.memory, self._limits.num_tokens)
        step(padding_batch(1, 1, num_decodes=0, num_logits=1, table_width=1))
        if not self._enforce_eager:
            self._recording = True
            for bucket_seqs, width in graph_shapes(self._limits):
                n = min(bucket_seqs, self._limits.num_seqs)  # upload rounds it up again
                step(padding_batch(n, n, num_decodes=n, num_logits=n, table_width=width))
            self._recording = False
        taken = self.driver_bytes()
        if taken > self.reserve:
            logger.warning(
                "the driver takes %d bytes for modules and graphs but %d were planned for it; should memory "
                "run out, lower gpu_memory_utilization or set enforce_eager",
                taken,
                self.reserve,
            )

    def copy_blocks(self, pool: Array, pairs: Array) -> None:
        """Copy whole blocks from pool to pool."""
        copy_blocks_cuda(self._launcher, pool, pool, pairs)

    def swap_out(self, pool: Array, host_pool: Array, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks to the host, each by itself: they lie anywhere, and have some MiB."""
        for block, host_block in pairs.tolist():
            self._device.to_host(host_pool[host_block], pool[block])

    def swap_in(self, host_pool: Array, pool: Array, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks back."""
        for host_block, block in pairs.tolist():
            self._device.to_device(pool[block], host_pool[host_block])

    def from_host(self, array: NDArray[Any]) -> Array:
        """Return a copy that lives as long as the weights."""
        return self._memory.keep([array], array.shape, array.dtype)

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Start copying to pinned memory; the call waits for it and returns what the caller owns."""
        return self._memory.fetch(array)

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        self._device.record().synchronize()

    # A step.
    def begin_forward(self) -> None:
        """Free all results."""
        self._memory.begin_step()

    def upload(self, batch: Batch) -> Batch:
        """Return the batch on the device, its counts rounded up to buckets."""
        uploaded = self._memory.upload(batch)
        self._launches.begin_step(batch, uploaded.num_decodes)
        return uploaded

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), or replay it where all are decodes and a graph has room for their lengths."""
        if self._recording:
            return self._graphs.record(batch, forward)
        hidden = None
        if not self._memory.measuring and self._launches.fits_any(batch):
            hidden = self._graphs.replay(batch)
        return forward() if hidden is None else hidden

    def run_sampling(self, batch: Batch, hidden: Array, sample: Callable[[], Any]) -> Any:  # noqa: ARG002
        """Return sample(): a few launches, which no graph would make cheaper."""
        return sample()

    def is_async(self, batch: Batch) -> bool:  # noqa: ARG002
        """Return True: whatever a step does is begun on the device's stream."""
        return True

    def begin_layer(self) -> None:
        """Free the results of the layer before the last one."""
        self._arena.begin_layer()

    def rewind_layer(self) -> None:
        """Free the results since the last begin_layer."""
        self._arena.rewind_layer()

    # Weights.
    def prepare_linear(self, parts: Sequence[Part], bias: Sequence[NDArray[Any]] | None = None) -> Weight:
        """Load the parts' weights, stacked along the output."""
        weights = [part["weight"] for part in parts]
        shape = (sum(map(len, weights)), weights[0].shape[1])
        matrix = self._memory.keep(weights, shape, self.dtype)
        joined = None if bias is None else self._memory.keep(bias, shape[:1], self.dtype)
        if self._memory.measuring:
            return Weight(matrix, joined)
        return self._gemm.prepare(matrix, joined)

    def prepare_vector(self, weight: NDArray[Any]) -> Array:
        """Load it in the activations' type."""
        return self._memory.keep([weight], weight.shape, self.dtype)

    # Operations.
    def linear(self, x: Array, weight: Weight) -> Array:
        """Return x @ weight.T + bias."""
        return self._multiply(x, weight, self.dtype)

    def logits(self, x: Array, weight: Weight) -> Array:
        """Return linear(x, weight) as float32, not rounded in between."""
        return self._multiply(x, weight, np.float32)

    def _multiply(self, x: Array, weight: Weight, dtype: Any) -> Array:
        out = self._arena.take((x.shape[0], weight.matrix.shape[0]), dtype)
        (self._gemm.note if self._memory.measuring else self._gemm.multiply)(x, weight, out)
        return out

    def embedding(self, ids: Array, weight: Weight) -> Array:
        """Return the rows `ids` of the weight."""
        return self.gather_rows(weight.matrix, ids)

    def rms_norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        """Return norm(x), or do residual += x and return norm(residual)."""
        out = self._arena.take(x.shape, self.dtype)
        if residual is None:
            rms_norm_cuda(self._launcher, x, weight, eps, out)
        else:
            add_rms_norm_cuda(self._launcher, x, weight, eps, residual, out)
        return out

    def rope_kv_write(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: KVCacheView,
        batch: Batch,
        cos_sin: Array,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate q and k, write k and v to their slots."""
        place = (kv.pool, kv.layer, batch.positions, batch.slot_mapping)
        rope_kv_write_cuda(self._launcher, q, k, v, *place, cos_sin, q_norm, k_norm, eps)

    def paged_attention(
        self,
        q: Array,
        kv: KVCacheView,
        batch: Batch,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
    ) -> Array:
        """Return each query's attention over the cached keys up to its own."""
        num_tokens, num_heads, head_dim = q.shape
        out = self._arena.take((num_tokens, num_heads * head_dim), self.dtype)
        workspace = self._arena.take((self._launches.workspace(num_heads, head_dim),), np.float32)
        max_blocks = None
        if self._memory.measuring:
            decodes = self._launches.of_any(batch, longest=True)
        elif self._recording:
            decodes = self._launches.of_any(batch)
            max_blocks = blocks_at_once(self._device.num_sms, head_dim)
        else:
            decodes = self._launches.of_step(sliding_window)
        paged_attention_cuda(
            self._launcher,
            q,
            kv.pool,
            kv.layer,
            batch.block_tables,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            decodes=decodes,
            workspace=workspace,
            max_blocks=max_blocks,
        )
        return out

    def silu_mul(self, gate_up: Array) -> Array:
        """Return silu(gate) * up."""
        out = self._arena.take((gate_up.shape[0], gate_up.shape[1] // 2), self.dtype)
        silu_mul_cuda(self._launcher, gate_up, out)
        return out

    def gather_rows(self, x: Array, index: Array) -> Array:
        """Return x[index]; rows of index -1 are undefined."""
        out = self._arena.take((index.shape[0], x.shape[1]), self.dtype)
        gather_rows_cuda(self._launcher, x, index, out)
        return out

    def load_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Fill the inputs that ask for the last token of their row."""
        sequences = (batch.rows, batch.flags, batch.query_start)
        load_last_tokens_cuda(self._launcher, *sequences, last_token, batch.input_ids)

    def sample(self, logits: Array, batch: Batch, first: int) -> None:
        """Set sampled_ids of the sequences that sample in these rows."""
        where = slice(first, first + logits.shape[0])
        which = (batch.logit_seq[where], batch.logit_target[where])
        if batch.banned.size or self._memory.measuring:
            adjusted = self._arena.take(logits.shape, np.float32)
            none = (None,) * 7  # counts and penalties, bias
            bans = (batch.banned_start, batch.banned)
            adjust_logits_cuda(self._launcher, logits, *which, batch.rows, *none, *bans, adjusted)
            logits = adjusted
        filters = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        random = (batch.seed, batch.group_index, batch.output_position)
        sample_cuda(self._launcher, logits, *which, *filters, *random, batch.sampled_ids)

    def logprobs(self, logits: Array, batch: Batch, first: int, num_top: int) -> LogprobArrays:
        """Return log-probabilities of each row's target, or of its sampled token, and the top ones."""
        n = logits.shape[0]
        out = LogprobArrays(
            self._arena.take((n, 1 + num_top), np.int32),
            self._arena.take((n, 1 + num_top), np.float32),
            self._arena.take((n,), np.int32),
        )
        where = slice(first, first + n)
        which = (batch.logit_seq[where], batch.logit_target[where])
        by_seq = (batch.sampled_ids, batch.flags, batch.temperature)
        logprobs_cuda(self._launcher, logits, *which, *by_seq, *out)
        return out

    def store_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Set last_token[row] for the sequences that sampled."""
        store_last_tokens_cuda(self._launcher, batch.rows, batch.flags, batch.sampled_ids, last_token)


def create_cuda_backend(config: EngineConfig, checkpoint_dtype: str) -> CudaBackend | None:
    """Return the backend on the GPU; if none can be used None for device="auto", else ValueError."""
    if config.device == "auto" and find_spec("cupy") is None:
        return None
    from cupaged.backend.cupy_device import CudaDevice

    try:
        return CudaBackend.create(CudaDevice(), config, checkpoint_dtype)
    except CudaUnavailable as error:
        if config.device == "auto":
            logger.warning("CuPy is installed, but the model runs on the CPU: %s", error)
            return None
        raise ValueError(f"device={config.device!r} cannot be used: {error}") from error


def choose_dtype(wanted: str, checkpoint_dtype: str) -> str:
    """Return the dtype on a GPU for what the user wants, "auto" = the checkpoint's if kernels have it."""
    if wanted in DTYPES:
        return wanted
    if wanted != "auto":
        raise ValueError(
            f"dtype={wanted!r} is not supported on a GPU; use one of {sorted(DTYPES)}, or device='cpu'"
        )
    if checkpoint_dtype in DTYPES:
        return checkpoint_dtype
    logger.info("the checkpoint is %s, the GPU computes in bfloat16", checkpoint_dtype)
    return "bfloat16"
