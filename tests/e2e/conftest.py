"""For all tests of whole engines: an emulated GPU takes the time of its threads, most of them idle here."""

from collections.abc import Iterator

import pytest

from cupaged.kernels import logprobs, sample


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Let a row of some 300 logits have 64 threads; tests/kernels and gpu_check also have 1024."""
    with pytest.MonkeyPatch.context() as patch:
        for kernels in (sample, logprobs):
            patch.setattr(kernels, "THREADS", 64)
        yield
