import pytest

from cupaged import threads
from cupaged.kernels.chunks import PIECES, chunk_range, num_chunks
from cupaged.threads import ParallelRunner


@pytest.mark.parametrize(("work", "expected"), [(0, 1), (99, 1), (199, 1), (200, 2), (350, 3)])
def test_small_work_is_cut_into_grains(work: int, expected: int) -> None:
    assert num_chunks(work, 100) == expected


@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_work_is_cut_into_pieces_a_thread(num_threads: int) -> None:
    seen = []
    runner = ParallelRunner(num_threads)

    runner.run([(lambda: seen.append(num_chunks(10**9, 100)), ())])

    assert seen == [PIECES * runner.num_threads]


@pytest.mark.parametrize(("work", "expected"), [(199, 1), (299, 2), (399, 2), (850, 8), (10**9, 2 * PIECES)])
def test_each_of_two_threads_gets_as_many_pieces(
    work: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    seen = []

    ParallelRunner(2).run([(lambda: seen.append(num_chunks(work, 100)), ())])

    assert seen == [expected]


@pytest.mark.parametrize(("n", "pieces"), [(1, 3), (7, 3), (64, 16), (0, 2)])
def test_chunks_cover_each_item_once(n: int, pieces: int) -> None:
    ranges = [chunk_range(n, chunk, pieces) for chunk in range(pieces)]

    assert [i for first, last in ranges for i in range(first, last)] == list(range(n))
    assert max(last - first for first, last in ranges) <= -(-n // pieces)
