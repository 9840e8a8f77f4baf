"""CpuBackend: weights in, results out of the arena, and nothing allocated on the way."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import KVCacheView, Limits, MemoryUse, create_backend
from cupaged.backend.cpu import MOST_KV_CACHE, CpuBackend
from cupaged.batch import Batch, Bucket, Count, buffer_size, view
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.kv_cache import pool_shape

CONFIG = ModelConfig(
    model_type="test",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
LIMITS = Limits(num_tokens=1024, num_seqs=4, seq_len=1024, block_size=16, num_slots=120 * 16)


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def create(dtype: str = "float32", arena: int = 1 << 20) -> CpuBackend:
    backend = CpuBackend(dtype)
    allocate(backend, arena)
    return backend


def allocate(backend: CpuBackend, arena: int) -> None:
    backend.allocate(LIMITS, MemoryUse(weights=0, workspace=0, activations=arena, reserve=0))


def create_batch(chunks: list[int]) -> Batch:
    """Return a step in which sequence i prefills chunks[i] tokens into its own blocks of 16."""
    total, num_seqs, width = sum(chunks), len(chunks), -(-max(chunks) // 16)
    bucket = Bucket(total, num_seqs, width)
    buffer = np.zeros(buffer_size(bucket, 0), np.int32)
    arrays = view(buffer, bucket)
    counts = arrays.counts
    counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_LOGITS, Count.TABLE_WIDTH]] = [
        total,
        num_seqs,
        num_seqs,
        width,
    ]
    counts[Count.NUM_DECODES] = chunks.count(1)
    arrays.query_start[:] = np.cumsum([0, *chunks])
    arrays.seq_lens[:] = chunks
    arrays.block_tables[:] = np.arange(num_seqs * width).reshape(num_seqs, width)
    arrays.positions[:] = np.concatenate([np.arange(n) for n in chunks])
    arrays.input_ids[:] = np.arange(total) % CONFIG.vocab_size
    arrays.slot_mapping[:] = np.concatenate([seq * width * 16 + np.arange(n) for seq, n in enumerate(chunks)])
    arrays.logit_index[:num_seqs] = arrays.query_start[1:] - 1
    arrays.logit_seq[:num_seqs] = arrays.rows[:] = np.arange(num_seqs)
    arrays.logit_target[:num_seqs] = -1
    arrays.flags[:] = 1
    arrays.temperature[:], arrays.top_p[:] = 1, 0.9
    return Batch(buffer, bucket, np.zeros(num_seqs, np.int64))


class TinyLayer:
    """One pass through every operation, as a model makes it."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        hidden, heads = CONFIG.hidden_size, CONFIG.num_heads + 2 * CONFIG.num_kv_heads
        parts = [random(CONFIG.num_heads * 8, hidden), random(16, hidden), random(16, hidden)]
        self.embed = backend.prepare_linear([{"weight": random(CONFIG.vocab_size, hidden)}])
        self.qkv = backend.prepare_linear([{"weight": part} for part in parts], [p[:, 0] for p in parts])
        self.o = backend.prepare_linear([{"weight": random(hidden, CONFIG.num_heads * 8)}])
        self.gate_up = backend.prepare_linear([{"weight": random(80, hidden)}] * 2)
        self.down = backend.prepare_linear([{"weight": random(hidden, 80)}])
        self.norm = backend.prepare_vector(random(hidden))
        self.cos_sin = backend.from_host(random(1024, 8))
        self.pool = backend.create_pool(pool_shape(CONFIG, 120, 16))
        self.last_token = np.zeros(4, np.int32)
        self.heads = heads

    def run(self, batch: Batch) -> Any:
        backend, n = self.backend, batch.num_tokens
        backend.begin_forward()
        backend.load_last_tokens(batch, self.last_token)
        hidden = residual = backend.embedding(batch.input_ids, self.embed)
        for layer in range(CONFIG.num_layers):
            backend.begin_layer()
            normed = backend.rms_norm(hidden, self.norm, 1e-5, residual if layer else None)
            qkv = backend.linear(normed, self.qkv).reshape(n, self.heads, 8)
            q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
            kv = KVCacheView(self.pool, layer)
            backend.rope_kv_write(q, k, v, kv, batch, self.cos_sin)
            attended = backend.linear(backend.paged_attention(q, kv, batch, 0.3), self.o)
            normed = backend.rms_norm(attended, self.norm, 1e-5, residual)
            hidden = backend.linear(backend.silu_mul(backend.linear(normed, self.gate_up)), self.down)
        hidden = backend.rms_norm(hidden, self.norm, 1e-5, residual)
        backend.begin_layer()
        logits = backend.logits(backend.gather_rows(hidden, batch.logit_index), self.embed)
        backend.sample(logits, batch, 0)
        logprobs = backend.logprobs(logits, batch, 0, 3)
        backend.store_last_tokens(batch, self.last_token)
        return backend.fetch(logprobs.logprobs)()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_measured_arena_is_exactly_enough_and_nothing_else_is_allocated(dtype: str) -> None:
    backend = CpuBackend(dtype, num_threads=1)  # each thread has scratch of its own
    layer, batch = TinyLayer(backend), create_batch([1, 633, 5])
    use = backend.measure(LIMITS, lambda: layer.run(batch))
    backend.allocate(LIMITS, use)
    layer.run(batch)

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    layer.run(batch)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()

    smallest = batch.num_tokens * CONFIG.hidden_size * 4  # of the activations; kernels' scratch is less
    assert peak < smallest, f"{peak} bytes on the step path"
    allocate(backend, use.activations - 64)
    with pytest.raises(AssertionError, match="arena"):
        layer.run(batch)


def test_building_a_model_is_measured_without_its_memory() -> None:
    backend = CpuBackend("float32", num_threads=1)
    weight = np.broadcast_to(np.float32(0), (3 << 19, 1 << 14))  # 96 GB, of which nothing is there

    def build() -> None:
        backend.prepare_linear([{"weight": weight}] * 2, [weight[:, 0]] * 2)
        backend.prepare_vector(random(5))
        backend.from_host(random(3, 2))
        backend.create_pool(pool_shape(CONFIG, 1 << 20, 16))

    use = backend.measure(LIMITS, build)

    num_rows = 3 << 20
    assert (
        use.weights == 4 * (num_rows * (1 << 14) + num_rows + 5 + 6) + 2 * 64
    )  # to begin the weights and the pool on a cache line


@pytest.mark.parametrize("num_blocks", [3, 4096])
def test_a_pool_is_zeros_that_begin_on_a_cache_line(num_blocks: int) -> None:
    shape = pool_shape(CONFIG, num_blocks, 16)

    pool = CpuBackend("bfloat16", num_threads=1).create_pool(shape)

    assert pool.shape == shape
    assert pool.ctypes.data % 64 == 0
    assert not pool.any()


@pytest.mark.parametrize(("free", "share"), [(0, 0), (100, 50), (1 << 40, MOST_KV_CACHE)])
def test_kv_cache_leaves_half_of_the_host_to_others(free: int, share: int) -> None:
    assert create().kv_cache_share(free) == share


@pytest.mark.parametrize(
    ("options", "checkpoint_dtype", "kv_dtype"),
    [
        ({}, "bfloat16", ml_dtypes.bfloat16),
        ({}, "float16", np.float32),
        ({"dtype": "bfloat16"}, "float32", ml_dtypes.bfloat16),
        ({"dtype": "float32"}, "bfloat16", np.float32),
    ],
)
def test_dtype_is_the_users_or_the_checkpoints(
    options: dict[str, Any], checkpoint_dtype: str, kv_dtype: Any
) -> None:
    config = EngineConfig.create("model", device="cpu", **options)

    backend = create_backend(config, checkpoint_dtype)

    assert (backend.name, backend.dtype) == ("cpu", np.dtype(np.float32))
    assert backend.kv_dtype == np.dtype(kv_dtype)


def test_measuring_computes_nothing() -> None:
    backend = CpuBackend("float32")
    layer, batch = TinyLayer(backend), create_batch([1, 33, 5])
    layer.pool[:] = 7
    batch.sampled_ids[:] = -1

    backend.measure(LIMITS, lambda: layer.run(batch))

    assert (layer.pool == 7).all()
    assert (batch.sampled_ids == -1).all()


def test_number_of_threads_changes_no_bit() -> None:
    results = []
    for num_threads in (1, 2):
        backend = CpuBackend("float32", num_threads)
        allocate(backend, 1 << 24)
        results.append(TinyLayer(backend).run(create_batch([1, 200, 33])))

    assert np.array_equal(*results)


def test_sampled_tokens_and_logprobs_come_out_of_a_whole_pass() -> None:
    layer, batch = TinyLayer(create()), create_batch([1, 33, 5])
    batch.sampled_ids[:] = -1

    logprobs = layer.run(batch)

    assert np.isfinite(logprobs).all()
    assert (batch.sampled_ids >= 0).all()
    assert layer.last_token[:3].tolist() == batch.sampled_ids.tolist()


@pytest.mark.parametrize(
    ("changed", "wanted", "times"),
    [
        ({}, None, 0),
        ({Count.NUM_LOGITS: 2}, None, 2),
        ({Count.NUM_BANNED: 1}, None, 2),
        ({}, "num_logprobs", 2),
        ({}, "num_prompt_logprobs", 2),
    ],
)
def test_sampling_is_replayed_where_each_sequence_samples_any_token_and_no_more(
    changed: dict[Count, int], wanted: str | None, times: int
) -> None:
    backend, hidden, tokens = create(), random(3, 48), np.zeros(3, np.int32)
    like = create_batch([1, 1, 1])
    buffer = np.concatenate([like.buffer, np.zeros(4, np.int32)])  # with a tail
    arrays = view(buffer, like.bucket)
    arrays.num_logprobs[:] = arrays.num_prompt_logprobs[:] = -1
    sampled = []

    def step() -> None:
        batch = Batch(buffer, like.bucket, like.serials)

        def sample() -> None:
            backend.store_last_tokens(batch, tokens)
            sampled.append(batch)

        backend.begin_forward()
        backend.run_sampling(batch, hidden, sample)

    step()
    for count, value in changed.items():
        arrays.counts[count] = value
    if wanted:
        getattr(arrays, wanted)[2] = 0
    sampled.clear()
    step()
    step()

    assert len(sampled) == times
    assert backend.is_async(Batch(buffer, like.bucket, like.serials)) == (times == 0)


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_parts_of_any_float_type_are_stacked_along_the_output(kind: Any) -> None:
    backend = create()
    parts = [random(n, 40).astype(kind) for n in (50, 7, 33)]
    biases = [random(n).astype(kind) for n in (50, 7, 33)]
    x = random(5, 40)

    out = backend.linear(x, backend.prepare_linear([{"weight": part} for part in parts], biases))

    expected = x @ np.concatenate(parts).astype(np.float32).T + np.concatenate(biases).astype(np.float32)
    assert np.abs(out - expected).max() < 1e-4


def test_tied_embedding_reads_the_linear_weight() -> None:
    backend, weight = create(), random(97, 33)
    handle = backend.prepare_linear([{"weight": weight}])

    assert np.array_equal(backend.embedding(np.array([96, 0, 31], np.int32), handle), weight[[96, 0, 31]])


def test_copy_blocks_moves_whole_blocks_of_a_bfloat16_pool() -> None:
    backend = create("bfloat16")
    pool = backend.create_pool(pool_shape(CONFIG, 3, 16))
    pool[:] = np.arange(3).reshape(3, 1, 1, 1, 1, 1).astype(pool.dtype)

    backend.copy_blocks(pool, np.array([[2, 0]], np.int32))

    assert pool.shape == (3, 2, 2, 2, 16, 8)
    assert pool.reshape(3, -1).astype(np.float32).mean(1).tolist() == [2, 1, 2]


@pytest.mark.parametrize("name", ["create_pool", "create_host_pool"])
def test_new_pool_holds_zeros_whatever_its_memory_held_before(name: str) -> None:
    create_pool, shape = getattr(create("bfloat16"), name), pool_shape(CONFIG, 3, 16)
    for _ in range(2):
        pool = create_pool(shape)

        assert not pool.any()
        pool[:] = 1
        del pool  # for the next one to be made of


def test_result_on_the_host_outlives_the_forward() -> None:
    backend = create()
    handle = backend.prepare_linear([{"weight": np.eye(4, dtype=np.float32)}])
    kept = backend.fetch(backend.linear(np.ones((1, 4), np.float32), handle))

    backend.begin_forward()
    backend.linear(np.zeros((1, 4), np.float32), handle)

    assert kept().tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CpuBackend("int8"), "dtype='int8'.*bfloat16"),
    ],
)
def test_unsupported_choices_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < create().available_memory() < 1 << 50
