"""A backend that has loaded a few operations, and runs steps of them: no model, no worker."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, KVCacheView, Limits, MemoryUse
from cupaged.batch import Batch
from cupaged.config import ModelConfig
from cupaged.worker.kv_cache import pool_shape
from tests.backend.cuda_steps import LIMITS, VOCAB_SIZE, create_batch, random

CONFIG = ModelConfig(
    model_type="test",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=64,
)
NUM_BLOCKS = 16
CHUNKS = [
    create_batch([4, 10, 8, 9, 2], [4, 10, 8, 9, 2]),
    create_batch([5, 33, 30, 17, 20], [1, 23, 22, 8, 18]),
    create_batch([6, 34, 31, 18, 21], [1] * 5),
]

Build = Callable[[Backend], tuple[Any, ...]]
Operate = Callable[..., Sequence[Array]]
Step = Callable[[Batch], list[NDArray[Any]]]


class Loaded(NamedTuple):
    """A backend that has loaded something, and runs steps with it."""

    use: MemoryUse  # as planned
    step: Step


def load(
    backend: Backend, batches: Sequence[Batch], build: Build, operate: Operate, *, limits: Limits = LIMITS
) -> Loaded:
    """Plan for steps of `batches`, load what `build` does, and return what runs `operate` in a step."""

    def begin(batch: Batch, built: tuple[Any, ...]) -> list[Callable[[], NDArray[Any]]]:
        backend.begin_forward()
        uploaded = backend.upload(batch)
        arrays = backend.run_forward(uploaded, lambda: operate(backend, uploaded, *built))
        return [backend.fetch(array) for array in arrays]

    def rehearse() -> None:
        built = build(backend)
        for batch in batches:
            begin(batch, built)

    use = backend.measure(limits, rehearse)
    backend.allocate(limits, use)
    built = build(backend)

    def step(batch: Batch) -> list[NDArray[Any]]:
        return [fetch() for fetch in begin(batch, built)]

    backend.warm_up(step)
    return Loaded(use, step)


def matrix(backend: Backend, *shape: int) -> Any:
    return backend.prepare_linear([{"weight": random(*shape)}])


class Attention(NamedTuple):
    """Writes keys and values to one layer of a cache and attends to it."""

    sliding_window: int = 0
    softcap: float = 0.0
    with_sinks: bool = False

    def build(self, backend: Backend) -> tuple[Any, ...]:
        rows = matrix(backend, VOCAB_SIZE, 4 * 64)
        norms = (backend.prepare_vector(random(64)), backend.prepare_vector(abs(random(64))))
        sinks = backend.from_host(random(2)) if self.with_sinks else None
        pool = backend.create_pool(pool_shape(CONFIG, NUM_BLOCKS, 16))
        return rows, backend.from_host(random(64, 64)), norms, sinks, KVCacheView(pool, 1)

    def operate(
        self, backend: Backend, batch: Batch, rows: Any, cos_sin: Array, norms: Any, sinks: Any, kv: Any
    ) -> list[Array]:
        if len(batch.copy):
            backend.copy_blocks(kv.pool, batch.copy)
        qkv = backend.embedding(batch.input_ids, rows)
        q, k, v = (
            qkv[:, first:last].reshape(-1, (last - first) // 64, 64)
            for first, last in ((0, 128), (128, 192), (192, 256))
        )
        backend.begin_layer()
        backend.rope_kv_write(q, k, v, kv, batch, cos_sin, norms[0], norms[1], eps=1e-5)
        out = backend.paged_attention(q, kv, batch, 0.125, self.sliding_window, self.softcap, sinks)
        return [backend.gather_rows(out, batch.logit_index)]
