"""LateBackend: a CPU that works like a GPU. What is begun waits in line until somebody waits for it."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array
from cupaged.backend.cpu import CpuBackend
from cupaged.batch import Batch


class LateBackend(CpuBackend):
    """Two steps in flight; a loop that needs a token too soon or reuses a buffer too early goes wrong."""

    def __init__(self, dtype: str, num_threads: int | None = None) -> None:
        super().__init__(dtype, num_threads)
        self.max_in_flight = 2
        self.begun: deque[Callable[[], None]] = deque()

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Return a call that does all that comes before the copy, unless it is done."""
        copies: list[NDArray[Any]] = []
        self._begin(lambda: copies.append(np.array(array)))

        def wait() -> NDArray[Any]:
            while not copies:
                self.begun.popleft()()
            return copies[0]

        return wait

    def synchronize(self) -> None:
        """Do all that has begun."""
        while self.begun:
            self.begun.popleft()()

    def upload(self, batch: Batch) -> Batch:
        """Return a copy, as on a device."""
        return Batch(batch.words.copy(), batch.bucket, batch.serials)

    def copy_blocks(self, pool: Array, pairs: Array) -> None:
        """Begin to copy whole blocks."""
        self._begin(partial(super().copy_blocks, pool, pairs))

    def swap_out(self, pool: Array, host_pool: Array, pairs: NDArray[np.int32]) -> None:
        """Begin to copy whole blocks to the second pool."""
        self._begin(partial(super().swap_out, pool, host_pool, pairs))

    def swap_in(self, host_pool: Array, pool: Array, pairs: NDArray[np.int32]) -> None:
        """Begin to copy them back."""
        self._begin(partial(super().swap_in, host_pool, pool, pairs))

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:  # noqa: ARG002
        """Return forward(), which has begun; a replay would need that it has run."""
        return forward()

    def run_sampling(self, batch: Batch, hidden: Array, sample: Callable[[], Any]) -> Any:  # noqa: ARG002
        """Return sample(), likewise."""
        return sample()

    def is_async(self, batch: Batch) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def _run(self, kernel: Callable[..., None], *args: Any, reads: Array | None = None) -> None:
        self._begin(partial(super()._run, kernel, *args, reads=reads))

    def _begin(self, work: Callable[[], None]) -> None:
        if not self._arena.measuring:
            self.begun.append(work)
