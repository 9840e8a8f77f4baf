"""The team: every piece once, whoever is there; it sleeps when nothing runs, and a fork has its own."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged import threads
from cupaged.jit import njit, njit_inner
from cupaged.kernels.parallel import parallel_for
from cupaged.threads import ParallelRunner, available_cpus, num_team_threads


@njit_inner
def count_range(counts: Any, work: int, bounds: Any) -> None:
    for i in range(*bounds):
        for j in range(work):
            counts[i] += 1 if j == 0 else counts[i] % 1


@njit
def count(counts: Any, work: int, pieces: int) -> None:
    parallel_for(count_range, counts.shape[0], pieces, (counts, work))


def counts(n: int = 256) -> NDArray[np.int64]:
    return np.zeros(n, np.int64)


def fail() -> None:
    raise ValueError("kernel")


def run_python(*code: str) -> list[str]:
    """Run the code in a fresh process and return the words it prints."""
    script = "\n".join(map(textwrap.dedent, code))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 2, 7, 256])
def test_each_piece_is_done_once(num_threads: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 4)
    done, runner = counts(), ParallelRunner(num_threads)

    for _ in range(20):
        runner.run([(count, (done, 1, pieces))] * 25)

    assert (done == 500).all()


def test_a_kernel_runs_without_the_team() -> None:
    done = counts()

    count(done, 1, 16)

    assert (done == 1).all()


def test_engines_of_two_threads_take_turns_and_lose_nothing() -> None:
    done = [counts(), counts()]
    running, most = [0], [0]

    def kernel(mine: NDArray[np.int64]) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        count(mine, 20, 16)
        running[0] -= 1

    def engine(mine: NDArray[np.int64]) -> None:
        runner = ParallelRunner()
        for _ in range(200):
            runner.run([(kernel, (mine,))])

    engines = [threading.Thread(target=engine, args=(mine,)) for mine in done]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()

    assert most == [1]
    assert all((mine == 200).all() for mine in done)


def test_who_finds_the_team_at_work_does_its_pieces_alone() -> None:
    done, others = counts(), counts()
    stop = threading.Event()

    def beside() -> None:  # without the runner, which would wait for its turn
        while not stop.is_set():
            count(others, 5, 16)

    thread = threading.Thread(target=beside)
    thread.start()
    ParallelRunner().run([(count, (done, 5, 16))] * 2000)
    stop.set()
    thread.join()

    assert (done == 2000).all()
    assert len(set(others)) == 1


@njit_inner
def meet_range(begun: Any, slow: int, done: Any, bounds: Any) -> None:
    for i in range(*bounds):
        begun[i] = 1
        tries = 0
        while begun[1 - i] == 0 and tries < 200:  # until another thread has the other piece, if any comes
            threads._yield()
            tries += 1
        for _ in range(100 if i == slow else 0):
            threads._yield()
        done[i] = 1


@njit
def meet(begun: Any, slow: int, done: Any) -> None:
    parallel_for(meet_range, 2, 2, (begun, slow, done))


@pytest.mark.parametrize("slow", [0, 1])  # one of which the leader does not have
def test_a_kernel_ends_when_the_last_thread_has_done_its_piece(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    runner = ParallelRunner(2)

    for _ in range(10):
        done = counts(2)
        runner.run([(meet, (counts(2), slow, done))])
        assert done.all()


def test_threads_sleep_when_nothing_has_run_for_a_while() -> None:
    code = """
    import os, time
    import numpy as np
    from cupaged.kernels.gated_mul import silu_mul_cpu
    from cupaged.threads import ParallelRunner
    x, out = np.ones((512, 512), np.float32), np.zeros((512, 256), np.float32)
    ParallelRunner(2).run([(silu_mul_cpu, (x, out))] * 50)
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(0.5)
    print(int((time.process_time() - before) < 0.25))
    """

    assert run_python(code) == ["1"]


def test_limit_of_the_team_is_as_before_afterwards() -> None:
    seen = []
    runner = ParallelRunner(2)
    before = num_team_threads()

    runner.run([(lambda: seen.append(num_team_threads()), ())])
    with pytest.raises(ValueError, match="kernel"):
        runner.run([(fail, ())])

    assert seen == [runner.num_threads]
    assert num_team_threads() == before


def test_more_threads_than_there_are_become_as_many_as_there_are() -> None:
    assert ParallelRunner(10_000).num_threads == ParallelRunner().num_threads == available_cpus()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    code = """
    import os, warnings
    import numpy as np
    from cupaged.kernels.gated_mul import silu_mul_cpu
    from cupaged.threads import ParallelRunner
    warnings.simplefilter("ignore")  # that a process with threads forks
    x, out = np.ones((512, 512), np.float32), np.zeros((512, 256), np.float32)
    runner = ParallelRunner(2)
    runner.run([(silu_mul_cpu, (x, out))] * 50)
    child = os.fork()
    out[:] = 0
    runner.run([(silu_mul_cpu, (x, out))] * 50)
    assert out.all()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """

    assert run_python(code) == ["0"]


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_a_containers_quota_of_cpus_is_kept(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    assert available_cpus(tmp_path / "cpu.max") == expected
