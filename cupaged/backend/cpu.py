"""CpuBackend: NumPy arrays, the kernels' CPU twins, Numba's threads.

In bfloat16 weights and KV cache are bfloat16, and so is what goes into a linear layer if the CPU multiplies
such numbers; all else is float32. In float32, and in float16, which is computed as that, a bfloat16
checkpoint's weights stay as they are, for they lose nothing, and all else is float32.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.backend.arena import Arena, HostMemory, no_memory
from cupaged.backend.base import Array, KVCacheView, Limits, LogprobArrays, MemoryUse, Part
from cupaged.backend.cpu_kernels import step_kernels
from cupaged.backend.host_memory import available_memory
from cupaged.backend.matrices import CODES, Kernel, Matrix, choose_form
from cupaged.backend.replay import Replay
from cupaged.batch import Batch
from cupaged.compile_ahead import compile_all
from cupaged.config import QuantizationName
from cupaged.kernels import (
    adjust_logits,
    gated_mul,
    logprobs,
    paged_attention,
    rms_norm,
    rope_kv_write,
    rows,
    sample,
)
from cupaged.kernels.intrinsics import HAS_BF16
from cupaged.recording import prepare
from cupaged.threads import ParallelRunner

_KV_DTYPES = {"float32": np.float32, "float16": np.float32, "bfloat16": ml_dtypes.bfloat16}
MOST_KV_CACHE = 4 << 30  # bytes that the KV cache takes unasked: others live on a host too
_NONE = np.empty(0, np.float32)
_NO_IDS = np.empty(0, np.int32)
_NO_COUNTS = np.empty((0, 0), np.int32)
ADJUSTED_ROWS = 16  # of logits, adjusted and sampled from at a time: they stay in cache


class CpuBackend:
    """Arithmetic on the host's CPU; see base.Backend."""

    name = "cpu"

    def __init__(
        self, dtype: str, num_threads: int | None = None, quantization: QuantizationName | None = None
    ) -> None:
        if dtype not in _KV_DTYPES:
            raise ValueError(f"dtype={dtype!r} is not supported on the CPU; use one of {sorted(_KV_DTYPES)}")
        self.dtype = np.dtype(np.float32)
        self.kv_dtype = np.dtype(_KV_DTYPES[dtype])
        self._weight_dtype = self.kv_dtype
        self._quantization = quantization
        # Of what goes into a linear layer: what rms_norm, paged_attention, silu_mul and gather_rows return.
        # What will have 8 bits there is not rounded to bfloat16 first.
        is_float32 = not HAS_BF16 or quantization == "int8_w8a8"
        self._input_dtype = np.dtype(np.float32) if is_float32 else self._weight_dtype
        kv, inputs = CODES[self.kv_dtype], CODES[self._input_dtype]
        self._kernels = dict.fromkeys(step_kernels(inputs, kv))  # to compile; those of matrices follow
        self._arena = Arena(HostMemory())
        self._runner = ParallelRunner(num_threads)
        self.max_in_flight = min(2, self._runner.num_threads)  # another thread computes while Python plans
        self._replay = Replay(self._runner, self._arena)
        self._kept_bytes = 0  # of what lives as long as the model, counted while measuring
        self._weight_bytes = 0  # of matrices, counted while measuring, then as they are packed
        self._weights = np.empty(0, np.uint8)

    def available_memory(self) -> int:
        """Return the bytes that machine and container can still give."""
        return available_memory()

    def host_memory(self) -> int | None:
        """Return None: there is no other memory."""
        return None

    def kv_cache_share(self, free: int) -> int:
        """Return half of what is free, at most MOST_KV_CACHE."""
        return min(free // 2, MOST_KV_CACHE)

    def measure(self, limits: Limits, rehearse: Callable[[], Any]) -> MemoryUse:  # noqa: ARG002
        """Return the bytes of weights and arena, without memory and without arithmetic."""
        self._kept_bytes = self._weight_bytes = 0
        arena = self._arena.measure(rehearse) + HostMemory.alignment  # which it takes to begin at a multiple
        weights = self._kept_bytes + self._weight_bytes + HostMemory.alignment
        return MemoryUse(weights, 0, arena, 0)

    def allocate(self, limits: Limits, use: MemoryUse) -> None:  # noqa: ARG002
        """Allocate what operations return their results in, and what matrices are packed in.

        All matrices in one piece, or the many that are small would not get huge pages.
        """
        compile_all("Compiling kernels", list(self._kernels))
        prepare(self._kernels)
        self._arena.create(use.activations - HostMemory.alignment)
        self._weights, self._weight_bytes = HostMemory().allocate(self._weight_bytes), 0

    def create_pool(self, shape: tuple[int, ...]) -> Array:
        """Return a KV cache pool of zeros: a block read before it was written shows alike in every run."""
        self._kept_bytes += HostMemory.alignment
        if self._arena.measuring:
            return no_memory(shape, self.kv_dtype)
        memory = HostMemory()
        return memory.view(memory.zeros(prod(shape) * self.kv_dtype.itemsize), 0, shape, self.kv_dtype)

    def create_host_pool(self, shape: tuple[int, ...]) -> Array:
        """Return a second pool, of the same memory."""
        return self.create_pool(shape)

    def warm_up(self, step: Callable[[Batch], Any]) -> None:
        """Do nothing: kernels are compiled by now, by allocate."""

    def copy_blocks(self, pool: Array, pairs: Array) -> None:
        """Copy whole blocks."""
        self._copy_blocks(pool, pool, pairs)

    def swap_out(self, pool: Array, host_pool: Array, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks to the second pool."""
        self._copy_blocks(pool, host_pool, pairs)

    def swap_in(self, host_pool: Array, pool: Array, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks back."""
        self._copy_blocks(host_pool, pool, pairs)

    def _copy_blocks(self, source: Array, target: Array, pairs: Array) -> None:
        self._runner.run([(rows.copy_blocks_cpu, (_bytes(source), _bytes(target), pairs))])

    def from_host(self, array: NDArray[Any]) -> Array:
        """Return the array itself: host and device are one."""
        self._kept_bytes += array.nbytes
        return array

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Return a call that gives a copy: made now, or when it is called if the array is not complete.

        Such a step is a plain decode, of which only what lies in its batch is fetched.
        """
        position = self._runner.position
        if self._runner.is_done(position):
            copy = np.array(array)
            return lambda: copy

        def result() -> NDArray[Any]:
            self._runner.wait(position)
            return np.array(array)

        return result

    def synchronize(self) -> None:
        """Wait for all recordings that are being played."""
        self._runner.wait()

    def begin_forward(self) -> None:
        """Free all results."""
        self._arena.begin_forward()

    def upload(self, batch: Batch) -> Batch:
        """Return the batch itself."""
        return batch

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), or make the same calls of kernels that it made for such a batch before."""
        return forward() if self._arena.measuring else self._replay.run_part("forward", batch, forward)

    def run_sampling(self, batch: Batch, hidden: Array, sample: Callable[[], Any]) -> Any:
        """Return sample(), or make the same calls of kernels."""
        if self._arena.measuring or not batch.is_plain_decode:
            return sample()
        return self._replay.run_part("sampling", batch, sample, hidden)

    def is_async(self, batch: Batch) -> bool:
        """Return whether both parts of such a step are replayed, once they have been recorded."""
        return batch.is_plain_decode

    def begin_layer(self) -> None:
        """Free the results of the layer before the last one."""
        self._arena.begin_layer()

    def rewind_layer(self) -> None:
        """Free the results since the last begin_layer."""
        self._arena.rewind_layer()

    def prepare_linear(self, parts: Sequence[Part], bias: Sequence[NDArray[Any]] | None = None) -> Matrix:
        """Pack the parts' weights, stacked along the output."""
        weights = [part["weight"] for part in parts]
        shape = sum(map(len, weights)), weights[0].shape[1]
        form = choose_form(weights, self._weight_dtype, self._input_dtype, self._quantization)
        packed = form.name([self._keep(*array) for array in form.arrays(*shape)], *shape)
        self._need_kernels(form.kernels(weights))
        if not self._arena.measuring:
            self._runner.run([(form.pack, (weights, bias, packed))])
        return Matrix(form, packed, *shape)

    def _need_kernels(self, kernels: Sequence[Kernel]) -> None:
        """Have the kernels compiled, as allocate does; now if they come unmeasured."""
        new = [kernel for kernel in kernels if kernel not in self._kernels]
        self._kernels.update(dict.fromkeys(new))
        if new and not self._arena.measuring:
            compile_all("Compiling kernels", new)

    def _keep(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array for a part of a matrix, out of the memory for all of them if they were measured."""
        first, kind = self._weight_bytes, np.dtype(dtype)
        self._weight_bytes += -(-prod(shape) * kind.itemsize // HostMemory.alignment) * HostMemory.alignment
        if self._arena.measuring:
            return no_memory(shape, kind)
        if self._weight_bytes > len(self._weights):
            return np.empty(shape, kind)
        return HostMemory().view(self._weights, first, shape, kind)

    def prepare_vector(self, weight: NDArray[Any]) -> Array:
        """Return a float32 copy."""
        return self.from_host(np.array(weight, np.float32))

    def linear(self, x: Array, weight: Matrix) -> Array:
        """Return x @ weight.T + bias."""
        out = self._arena.take((x.shape[0], weight.out_features), np.float32)
        self._run(*weight.form.multiply(x, weight.packed, out, self._arena.take), reads=weight.packed.panels)
        return out

    def logits(self, x: Array, weight: Matrix) -> Array:
        """Return linear(x, weight)."""
        return self.linear(x, weight)

    def embedding(self, ids: Array, weight: Matrix) -> Array:
        """Return the rows `ids` of the weight."""
        out = self._arena.take((ids.shape[0], weight.in_features), np.float32)
        self._run(*weight.form.embed(ids, weight.packed, out))
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        """Return norm(x), or do residual += x and return norm(residual)."""
        out = self._arena.take(x.shape, self._input_dtype)
        if residual is None:
            self._run(rms_norm.rms_norm_cpu, x, weight, eps, out, 0.0)
        else:
            self._run(rms_norm.add_rms_norm_cpu, x, weight, eps, residual, out, 0.0)
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
        norms = (_NONE if q_norm is None else q_norm, _NONE if k_norm is None else k_norm)
        place = (kv.pool, kv.layer, batch.positions, batch.slot_mapping)
        self._run(rope_kv_write.rope_kv_write_cpu, q, k, v, *place, cos_sin, *norms, eps, 0.0, False)

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
        out = self._arena.take(q.shape, self._input_dtype)
        tables = batch.arrays.block_tables[: batch.num_seqs]  # as wide as the bucket's, for the replay
        sequences = (tables, batch.query_start, batch.seq_lens)
        mask = (scale, sliding_window, softcap, _NONE if sinks is None else sinks)
        args = (q, kv.pool, kv.layer, *sequences, *mask, out)
        self._run(paged_attention.paged_attention_cpu, *args)
        return out.reshape(q.shape[0], -1)

    def silu_mul(self, gate_up: Array) -> Array:
        """Return silu(gate) * up."""
        out = self._arena.take((gate_up.shape[0], gate_up.shape[1] // 2), self._input_dtype)
        self._run(gated_mul.silu_mul_cpu, gate_up, out)
        return out

    def gather_rows(self, x: Array, index: Array) -> Array:
        """Return x[index]."""
        out = self._arena.take((index.shape[0], x.shape[1]), x.dtype)
        self._run(rows.gather_rows_cpu, x, index, out)
        return out

    def load_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Fill the inputs that ask for the last token of their row."""
        sequences = (batch.rows, batch.flags, batch.query_start)
        self._run(rows.load_last_tokens_cpu, *sequences, last_token, batch.input_ids)

    def sample(self, logits: Array, batch: Batch, first: int) -> None:
        """Set sampled_ids of the sequences that sample in these rows."""
        if not (batch.banned.size or self._arena.measuring):
            self._sample(logits, batch, first)
            return
        none = (batch.rows, _NO_COUNTS, _NONE, _NONE, _NONE, _NO_IDS, _NO_IDS, _NONE)
        room = self._arena.take((min(ADJUSTED_ROWS, logits.shape[0]), logits.shape[1]), np.float32)
        for start in range(0, logits.shape[0], ADJUSTED_ROWS):
            part = logits[start : start + ADJUSTED_ROWS]
            where = slice(first + start, first + start + part.shape[0])
            which = (batch.logit_seq[where], batch.logit_target[where])
            bans = (batch.banned_start, batch.banned)
            adjusted = room[: part.shape[0]]
            self._run(adjust_logits.adjust_logits_cpu, part, *which, *none, *bans, adjusted)
            self._sample(adjusted, batch, first + start)

    def _sample(self, logits: Array, batch: Batch, first: int) -> None:
        where = slice(first, first + logits.shape[0])
        which = (batch.logit_seq[where], batch.logit_target[where])
        filters = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        random = (batch.seed, batch.group_index, batch.output_position)
        self._run(sample.sample_cpu, logits, *which, *filters, *random, batch.sampled_ids)

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
        self._run(logprobs.logprobs_cpu, logits, *which, *by_seq, *out)
        return out

    def store_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Set last_token[row] for the sequences that sampled."""
        self._run(rows.store_last_tokens_cpu, batch.rows, batch.flags, batch.sampled_ids, last_token)

    def _run(self, kernel: Callable[..., None], *args: Any, reads: Array | None = None) -> None:
        """Run a kernel on this backend's threads; not while only sizes are counted. reads: its weights."""
        if not self._arena.measuring:
            self._replay.run((kernel, tuple(map(_bits, args))), reads)


def _bits(array: Any) -> Any:
    """Return the array as kernels take it: bfloat16 as uint16, of which Numba knows."""
    is_half = isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16
    return array.view(np.uint16) if is_half else array


def _bytes(pool: Array) -> Array:
    """Return the pool as [num_blocks, bytes of a block]."""
    return pool.reshape(len(pool), -1).view(np.uint8)
