"""Staging: what is copied while the host goes on arrives as it was, and no piece is used too early."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.staging import Fetches, Uploads, fetched_bytes
from tests.cuda_on_cpu.gpu import DeviceArray, EmulatedGpu


@pytest.fixture
def gpu() -> EmulatedGpu:
    return EmulatedGpu()


def send(gpu: EmulatedGpu, source: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return what arrives of `source` sent as `dtype` through pieces of 64 bytes."""
    target = empty(gpu, source.shape, dtype)
    uploads = Uploads(gpu, 64, num_pieces=2)
    uploads.copy_rows(target, source)
    uploads.finish()
    return gpu.read(target)


def empty(gpu: EmulatedGpu, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    return gpu.array(np.zeros(shape, dtype))


class TestUploads:
    def test_source_may_change_at_once(self, gpu: EmulatedGpu) -> None:
        uploads = Uploads(gpu, 64, num_pieces=2)
        source = np.arange(16, dtype=np.int32)
        targets = [empty(gpu, (16,), np.int32) for _ in range(5)]

        for target in targets:
            uploads.copy(target, source)
            source += 100

        assert [gpu.read(target)[3] for target in targets] == [3, 103, 203, 303, 403]

    @pytest.mark.parametrize("to", [ml_dtypes.bfloat16, np.float16, np.float32])
    @pytest.mark.parametrize("of", [ml_dtypes.bfloat16, np.float16, np.float32])
    def test_types_are_converted_to_the_nearest(self, gpu: EmulatedGpu, of: Any, to: Any) -> None:
        source = np.random.default_rng(0).standard_normal((3, 5), np.float32).astype(of)

        sent = send(gpu, source, to)

        assert np.array_equal(sent, source.astype(np.float32).astype(to))

    @pytest.mark.parametrize("shape", [(1, 7), (97, 7), (64,), (97,), (0, 7)])
    def test_any_number_of_rows_arrives(self, gpu: EmulatedGpu, shape: tuple[int, ...]) -> None:
        source = np.random.default_rng(0).standard_normal(shape, np.float32)

        assert np.array_equal(send(gpu, source, np.float16), source.astype(np.float16))

    def test_rows_of_overlapping_and_of_cut_arrays_arrive(self, gpu: EmulatedGpu) -> None:
        noise = np.arange(40, dtype=np.float32)
        views = [np.lib.stride_tricks.as_strided(noise, (6, 8), (12, 4)), noise.reshape(5, 8)[:, 2:6]]

        for view in views:
            assert np.array_equal(send(gpu, view, np.float32), view)

    def test_row_that_no_piece_holds_is_refused(self, gpu: EmulatedGpu) -> None:
        with pytest.raises(AssertionError, match="68 bytes, in pieces of 64"):
            send(gpu, np.zeros((2, 17)), np.float32)

    def test_finished_copies_need_their_memory_no_more(self, gpu: EmulatedGpu) -> None:
        target = empty(gpu, (16,), np.int32)
        uploads = Uploads(gpu, 64, num_pieces=2)
        uploads.copy(target, np.arange(16))

        uploads.finish()
        del uploads

        assert np.array_equal(gpu.read(target), np.arange(16))


class TestFetches:
    def run(self, gpu: EmulatedGpu, num_steps: int) -> list[Callable[[], NDArray[Any]]]:
        """Return the fetches of steps that each write one array anew and fetch it and half of it."""
        array = empty(gpu, (8,), np.int32)
        uploads = Uploads(gpu, 32, num_pieces=2)
        fetches = Fetches(gpu, 2 * fetched_bytes(array), num_steps=3)
        taken = []
        for step in range(num_steps):
            fetches.begin_step()
            uploads.copy(array, np.full(8, step))
            taken += [fetches.fetch(array), fetches.fetch(array[:4])]
        uploads.finish()
        return taken

    def test_steps_under_way_are_kept_apart(self, gpu: EmulatedGpu) -> None:
        taken = self.run(gpu, 3)

        assert [fetch().tolist() for fetch in taken] == [[n] * k for n in range(3) for k in (8, 4)]

    def test_results_are_the_callers(self, gpu: EmulatedGpu) -> None:
        fetch = self.run(gpu, 1)[0]

        first = fetch()
        first += 1

        assert fetch().tolist() == [0] * 8

    def test_memory_is_used_anew(self, gpu: EmulatedGpu) -> None:
        taken = self.run(gpu, 7)

        assert len(gpu.pinned) == 5
        assert [fetch()[0] for fetch in taken[-6:]] == [4, 4, 5, 5, 6, 6]

    def test_late_fetch_is_refused(self, gpu: EmulatedGpu) -> None:
        taken = self.run(gpu, 4)

        with pytest.raises(AssertionError, match="3 steps began since"):
            taken[0]()

    def test_more_than_was_planned_is_refused(self, gpu: EmulatedGpu) -> None:
        fetches = Fetches(gpu, 64, num_steps=2)
        array = empty(gpu, (4,), np.int32)
        fetches.fetch(array)

        with pytest.raises(AssertionError, match="fetches 128 bytes, planned were 64"):
            fetches.fetch(array)
