"""The team: every piece once, whoever is there; it sleeps when nothing runs, and a fork has its own."""

import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numba.core import types
from numpy.typing import NDArray

from cupaged import team, threads
from cupaged.atomics import store, words, yield_core
from cupaged.jit import njit, njit_inner, specialize
from cupaged.kernels.parallel import parallel_for
from cupaged.recording import MOST_AHEAD, Recording
from cupaged.team import claim_ahead, nth_piece, num_team_threads
from cupaged.threads import ParallelRunner, available_cpus

ROOT = Path(__file__).parent.parent


@njit_inner
def count_range(counts: Any, work: int, bounds: Any) -> None:
    for i in range(*bounds):
        for j in range(work):
            counts[i] += 1 if j == 0 else counts[i] % 1


@njit
def count(counts: Any, work: int, pieces: int) -> None:
    parallel_for(count_range, counts.shape[0], pieces, (counts, work))


COUNT_SIGNATURE = "void(i8[::1],i8,i8)"


@njit
def claim(places: Any, num_bytes: int) -> None:
    for i in range(places.shape[0]):
        places[i] = claim_ahead(num_bytes)


CLAIM_SIGNATURE = "void(i8[::1],i8)"


this_thread: Any = types.ExternalFunction("pthread_self", types.int64())


def counts(n: int = 256) -> NDArray[np.int64]:
    return np.zeros(n, np.int64)


def fail() -> None:
    raise ValueError("kernel")


def run_python(*code: str) -> list[str]:
    """Run the code in a fresh process and return the words it prints."""
    script = "\n".join(map(textwrap.dedent, code))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
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


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_each_piece_of_a_recording_is_done_once_each_time(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 4)
    specialize(count, COUNT_SIGNATURE)
    done, runner, others = counts(), ParallelRunner(num_threads), counts(7)
    calls = [(count, (done, 1, pieces)) for pieces in (1, 2, 7, 256)] + [(count, (others, 3, 5))]
    recording = Recording(calls, [done, None, others, done, None])

    for _ in range(100):
        runner.play(recording)
    runner.wait()

    assert (done == 400).all()
    assert (others == 100).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("pieces", [1, 2, 4, 7, 40])
def test_threads_that_take_turns_get_pieces_that_follow_each_other(pieces: int, threads: int) -> None:
    order = [nth_piece(n, pieces, threads) for n in range(pieces)]

    assert sorted(order) == list(range(pieces))
    shares = [order[thread::threads] for thread in range(min(threads, pieces))]
    assert all(share == list(range(share[0], share[0] + len(share))) for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


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
            yield_core()
            tries += 1
        for _ in range(100 if i == slow else 0):
            yield_core()
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


@njit_inner
def note_range(owners: Any, bounds: Any) -> None:
    for i in range(*bounds):
        owners[i] = this_thread()
        for _ in range(5):
            yield_core()


@njit
def note(owners: Any) -> None:
    parallel_for(note_range, owners.shape[0], owners.shape[0], (owners,))


@pytest.mark.skipif(sys.platform == "win32", reason="threads are not told by pthread_self there")
def test_no_more_threads_share_a_kernel_than_its_runner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 4)
    many, few, owners = ParallelRunner(4), ParallelRunner(2), counts(8)
    found: set[int] = set()

    for _ in range(20):
        many.run([(note, (owners,))])  # so all are awake
        few.run([(note, (owners,))])
        found.update(owners.tolist())

    assert threading.get_ident() in found
    assert len(found) <= 2


@njit
def tell(player: Any) -> None:
    player[0] = this_thread()


@pytest.mark.skipif(sys.platform == "win32", reason="threads are not told by pthread_self there")
def test_a_recording_is_played_by_a_thread_of_its_runners_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 4)
    specialize(tell, "void(i8[::1])")
    many, few, found = ParallelRunner(4), ParallelRunner(2), set()

    for _ in range(20):
        many.run([(note, (counts(8),))])  # so all are awake
        player = counts(1)
        few.play(recording((tell, (player,))))
        end = time.monotonic() + 60
        while player[0] == 0 and time.monotonic() < end:
            time.sleep(0)
        found.add(player[0])

    assert len(found) == 1  # all but this thread
    assert not found & {0, threading.get_ident()}


@njit_inner
def disturb_range(done: Any, bounds: Any) -> None:
    for i in range(*bounds):
        done[i] += 1
        store(team.LIMIT, 3)
        yield_core()


@njit
def disturb(done: Any) -> None:
    parallel_for(disturb_range, done.shape[0], done.shape[0], (done,))


def test_a_job_keeps_its_number_of_threads_while_others_change_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    done, runner = counts(65), ParallelRunner(2)

    for _ in range(20):
        runner.run([(disturb, (done,))])

    assert (done == 20).all()


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


def test_what_is_fetched_ahead_is_claimed_piece_by_piece_until_the_end() -> None:
    code = """
    import numpy as np
    from cupaged.jit import specialize
    from cupaged.recording import MOST_AHEAD, Recording
    from cupaged.threads import ParallelRunner
    from tests.test_threads import CLAIM_SIGNATURE, claim, counts
    specialize(claim, CLAIM_SIGNATURE)
    a, b, c = (np.zeros(8) for _ in range(3))
    places = [counts(3) for _ in range(4)]
    sizes = (64, 128, 1 << 23, 1 << 23)
    recording = Recording(list(zip([claim] * 4, zip(places, sizes))), [a, b, None, c])
    runner = ParallelRunner(1)
    runner.play(recording)
    runner.wait()
    for array, found in zip((b, c, c, c), places):
        print(*(place - array.ctypes.data if place else "none" for place in found))
    """

    assert run_python(code) == [
        *("0", "64", "128"),  # of b, while a is read
        *("0", "128", "256"),  # of c, while b is read
        *("384", str(384 + MOST_AHEAD // 2), "none"),
        *("none", "none", "none"),
    ]


@njit
def hold(released: Any, begun: Any) -> None:
    begun[0] = 1
    tries = 0
    while released[0] == 0 and tries < 10**6:  # some seconds
        yield_core()
        tries += 1
    begun[0] = 2 if released[0] else 3


@njit
def append(numbers: Any, count: Any, number: int) -> None:
    numbers[count[0]] = number
    count[0] += 1


@njit
def refuse(number: Any) -> None:
    if number[0] > 1:
        raise ValueError("number is above 1")
    number[0] += 1


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> ParallelRunner:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    for kernel in (hold, claim):
        specialize(kernel, CLAIM_SIGNATURE if kernel is claim else "void(i8[::1],i8[::1])")
    specialize(append, "void(i8[::1],i8[::1],i8)")
    specialize(refuse, "void(i8[::1])")
    return ParallelRunner(2)


def recording(*calls: Any) -> Recording:
    return Recording(calls, [None] * len(calls))


def held() -> tuple[Recording, NDArray[np.int64], NDArray[np.int64]]:
    """Return a recording that ends when the second one's first number is set; the last says how it ended."""
    released, begun = counts(1), counts(1)
    return recording((hold, (released, begun))), released, begun


def test_python_goes_on_while_a_recording_is_played(two_threads: ParallelRunner) -> None:
    played, released, begun = held()

    two_threads.play(played)
    position = two_threads.position
    assert not two_threads.is_done(position)
    released[0] = 1
    two_threads.wait(position)

    assert begun[0] == 2
    assert two_threads.is_done(position)


def test_what_is_waited_for_does_not_wait_for_what_was_begun_later(two_threads: ParallelRunner) -> None:
    numbers, count = counts(1), counts(1)
    later, released, begun = held()
    for _ in range(20):
        count[0] = begun[0] = released[0] = 0
        two_threads.play(recording((append, (numbers, count, 7))))
        position = two_threads.position
        two_threads.play(later)

        two_threads.wait(position)

        assert count[0] == 1
        assert begun[0] < 2
        released[0] = 1
        two_threads.wait()
        assert begun[0] == 2


def test_recordings_are_played_in_their_order_however_many_there_are(two_threads: ParallelRunner) -> None:
    numbers, count = counts(300), counts(1)

    for i in range(len(numbers)):
        two_threads.play(recording((append, (numbers, count, i))))  # which nobody else keeps
    two_threads.wait()

    assert numbers.tolist() == [*range(300)]


def test_kernels_run_after_what_is_played(two_threads: ParallelRunner) -> None:
    played, released, begun = held()
    seen: list[int] = []
    two_threads.play(played)

    threading.Timer(0.05, lambda: released.fill(1)).start()
    two_threads.run([(lambda: seen.append(begun[0]), ())])

    assert seen == [2]


@pytest.mark.usefixtures("two_threads")
def test_one_thread_has_played_when_play_returns() -> None:
    count, numbers = counts(1), counts(9)
    lone = ParallelRunner(1)

    for i in range(9):
        lone.play(recording((append, (numbers, count, i))))
        assert count[0] == i + 1


def test_arrays_of_a_recording_live_until_it_has_been_played(two_threads: ParallelRunner) -> None:
    first, released, _ = held()
    numbers = counts(1)
    second, kept = recording((append, (numbers, counts(1), 7))), weakref.ref(numbers)
    two_threads.play(first)
    two_threads.play(second)

    del second, numbers
    assert kept() is not None
    released[0] = 1
    two_threads.wait()

    assert kept() is None


@pytest.mark.parametrize("behind", [0, 1, team.QUEUE_LENGTH - 2, team.QUEUE_LENGTH + 5])
def test_a_failure_is_told_to_its_runner_once_and_nothing_behind_it_is_played(
    two_threads: ParallelRunner, behind: int
) -> None:
    other, number, numbers, count = ParallelRunner(2), counts(1) + 2, counts(40), counts(1)
    first, released, _ = held()
    two_threads.play(first)
    two_threads.play(recording((append, (numbers, count, 1)), (refuse, (number,))))
    released[0] = behind > team.QUEUE_LENGTH

    def fail() -> None:
        for _ in range(behind):
            two_threads.play(recording((append, (numbers, count, 2))))
            while released[0] and words[team.PLAYED] < words[team.QUEUED]:
                time.sleep(0)
        released[0] = 1
        other.play(recording((append, (numbers[20:], counts(1), 3))))
        other.wait()
        assert not two_threads.is_done(1)
        two_threads.wait()

    with pytest.raises(ValueError, match="number is above 1"):
        fail()
    two_threads.play(recording((append, (numbers, count, 4))))
    two_threads.wait()

    assert numbers[: count[0]].tolist() == [1, 4]
    assert numbers[20] == (3 if behind < team.QUEUE_LENGTH else 0)
    other.wait()


@pytest.mark.parametrize("way", ["play", "run", "wait for all", "wait for it"])
def test_a_failure_is_told_by_whatever_comes_next(two_threads: ParallelRunner, way: str) -> None:
    done = counts(1)
    first, released, _ = held()
    two_threads.play(first)
    two_threads.play(recording((refuse, (counts(1) + 2,))))
    position = two_threads.position
    two_threads.play(recording((refuse, (done,))))
    released[0] = 1
    while words[team.PLAYED] < words[team.QUEUED]:
        time.sleep(0)
    calls: dict[str, Callable[[], None]] = {
        "play": lambda: two_threads.play(recording((refuse, (done,)))),
        "run": lambda: two_threads.run([(refuse, (done,))]),
        "wait for all": two_threads.wait,
        "wait for it": lambda: two_threads.wait(position),
    }

    with pytest.raises(ValueError, match="number is above 1"):
        calls[way]()
    assert done[0] == 0
    two_threads.run([(refuse, (done,))])

    assert done[0] == 1


def test_a_recording_is_played_by_as_many_threads_as_its_runner_has(two_threads: ParallelRunner) -> None:
    specialize(note, "void(i8[::1])")
    lone, owners = ParallelRunner(1), counts(8)
    before = num_team_threads()

    for _ in range(20):
        two_threads.run([(note, (owners,))])  # so all are awake
        lone.play(recording((note, (owners,))))
        lone.wait()

        assert len(set(owners.tolist())) == 1
    assert num_team_threads() == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_one_engine_has_begun_is_done_whatever_another_one_has(
    two_threads: ParallelRunner, fails: bool
) -> None:
    other, numbers = ParallelRunner(2), counts(1)
    two_threads.play(recording((append, (numbers, counts(1), 7))))
    two_threads.wait()
    others, released, _ = held()
    other.play(recording((refuse, (counts(1) + 2,))) if fails else others)
    while fails and not words[team.FAILED]:
        time.sleep(0)

    assert two_threads.is_done(two_threads.position)
    assert not other.is_done(other.position)
    released[0] = 1
    with pytest.raises(ValueError, match="number is above 1") if fails else nullcontext():
        other.wait()


def test_who_has_played_leaves_the_team_to_nobody(two_threads: ParallelRunner) -> None:
    words[team.LIMIT] = 2  # as a thread that is about to play may find it while kernels run

    two_threads.play(recording((append, (counts(1), counts(1), 7))))
    two_threads.wait()

    assert num_team_threads() == 1


def test_what_nobody_waits_for_keeps_no_memory(two_threads: ParallelRunner) -> None:
    numbers = counts(1)
    kept = weakref.ref(numbers)
    two_threads.play(recording((append, (numbers, counts(1), 7))))

    del numbers
    end = time.monotonic() + 60
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.001)

    assert kept() is None


def test_nothing_is_begun_once_the_process_ends() -> None:
    code = """
    import atexit, threading, time
    def look():  # after the team, which registers later
        before = words[team.QUEUED]
        time.sleep(0.1)
        print(*{before, words[team.QUEUED], words[team.PLAYED]} - {0})
    atexit.register(look)
    from cupaged import team, threads
    from cupaged.atomics import words
    from cupaged.jit import specialize
    from tests.test_threads import COUNT_SIGNATURE, count, counts, recording
    specialize(count, COUNT_SIGNATURE)
    runner, done = threads.ParallelRunner(2), counts()
    def play():
        while True:
            runner.play(recording((count, (done, 1, 16))))
    threading.Thread(target=play, daemon=True).start()
    while words[team.PLAYED] < 9:
        time.sleep(0.001)
    """

    assert len(run_python(code)) == 1


def test_what_is_being_played_ends_before_the_process(tmp_path: Path) -> None:
    code = f"""
    import numpy as np
    from cupaged.jit import specialize
    from cupaged.threads import ParallelRunner
    from cupaged.recording import Recording
    from tests.test_threads import COUNT_SIGNATURE, count
    specialize(count, COUNT_SIGNATURE)
    done = np.memmap({str(tmp_path / "done")!r}, np.int64, "w+", shape=64).view(np.ndarray)
    ParallelRunner(2).play(Recording([(count, (done, 500_000, 64))], [None]))
    """

    run_python(code)

    assert (np.fromfile(tmp_path / "done", np.int64) == 1).all()


def test_nothing_is_claimed_where_no_recording_is_played() -> None:
    code = """
    from cupaged.jit import specialize
    from cupaged.threads import ParallelRunner
    from tests.test_threads import CLAIM_SIGNATURE, claim, counts
    specialize(claim, CLAIM_SIGNATURE)
    places = counts(2) - 1
    ParallelRunner(1).run([(claim, (places, 64))])
    print(*places)
    """

    assert run_python(code) == ["0", "0"]
    assert claim_ahead(64) == 0  # in Python


def test_threads_fetch_what_is_read_next_and_then_sleep() -> None:
    code = """
    import time
    import numpy as np
    from cupaged import team, threads
    from cupaged.jit import specialize
    from cupaged.recording import MOST_AHEAD, Recording
    from cupaged.atomics import words
    from tests.test_threads import COUNT_SIGNATURE, count, counts
    threads.available_cpus = lambda: 3
    specialize(count, COUNT_SIGNATURE)
    runner, weights = threads.ParallelRunner(3), np.ones(MOST_AHEAD // 4)
    recording = Recording([(count, (counts(), 20000, 16))] * 2, [weights, weights])
    recording.follow(recording)
    for _ in range(100):  # until they have woken up while it was played
        runner.play(recording)
        runner.wait()
        time.sleep(0.05)
        fetched = words[team.FETCH] - weights.ctypes.data
        if fetched >= MOST_AHEAD:
            break
    print(int(MOST_AHEAD <= fetched <= MOST_AHEAD + 2 * team.FETCHED))
    del weights, recording
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(0.5)
    print(int((time.process_time() - before) < 0.25))
    """

    assert run_python(code) == ["1", "1"]


def test_an_interrupt_leaves_no_thread_awake_and_no_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    runner, lock, before = ParallelRunner(2), cast(Any, threads._lock), num_team_threads()
    left = 0

    def interrupt(_frame: Any, event: str, _arg: Any) -> None:  # where Python looks for signals
        nonlocal left
        left -= event == "call"
        if left < 0:
            raise KeyboardInterrupt

    runner.run([(lambda: None, ())])
    for num_calls in range(20):
        left, error = num_calls, None
        end = time.monotonic() + 60
        while threads._num_asleep < threads._num_followers and time.monotonic() < end:
            time.sleep(0.001)  # so that they are woken
        sys.setprofile(interrupt)
        try:
            runner.run([(lambda: None, ())] * 3)
        except KeyboardInterrupt as raised:
            error = raised  # as whoever shows it keeps it, with all its frames
        finally:
            sys.setprofile(None)
        assert not threads._running
        assert num_team_threads() == before
        assert not lock._is_owned()
        assert threads._sleep.acquire(timeout=60)
        threads._sleep.release()
        if error is None:
            break

    assert 4 < num_calls < 19


def test_limit_of_the_team_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    seen: list[int] = []
    runner = ParallelRunner(2)
    before = num_team_threads()

    runner.run([(lambda: seen.append(num_team_threads()), ())])
    with pytest.raises(ValueError, match="kernel"):
        runner.run([(fail, ())])

    assert seen == [2]
    assert num_team_threads() == before == 1  # nobody runs anything


def test_more_threads_than_there_are_become_as_many_as_there_are() -> None:
    assert ParallelRunner(10_000).num_threads == ParallelRunner().num_threads == available_cpus()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    code = """
    import os, warnings
    import numpy as np
    from cupaged.kernels.gated_mul import silu_mul_cpu
    from cupaged.recording import Recording
    from cupaged.threads import ParallelRunner
    warnings.simplefilter("ignore")  # that a process with threads forks
    x, out = np.ones((512, 512), np.float32), np.zeros((512, 256), np.float32)
    runner = ParallelRunner(2)
    runner.run([(silu_mul_cpu, (x, out))] * 50)
    recording = Recording([(silu_mul_cpu, (x, out))] * 50, [x, out] * 25)
    out[:] = 0
    runner.play(recording)  # which may be at work when the process forks
    position = runner.position
    child = os.fork()
    assert runner.is_done(position) and out.all()
    for run in (runner.run, lambda _: runner.play(recording)):
        runner.wait()
        out[:] = 0
        run([(silu_mul_cpu, (x, out))] * 50)
        runner.wait()
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
