"""The threads that share a kernel's work: a team of our own, because a step is hundreds of short kernels.

A pool that sleeps between them (TBB, OpenMP with passive waits) wakes in 10 microseconds, as long as a
small model's layer takes, so one core does nearly all; one that spins for ever (OpenMP with active waits)
starves its neighbours. These threads spin while an engine runs, yield soon, and sleep when it is idle.
Work is handed out piece by piece, so whoever is late, or kept from its core, holds up nobody but with the
piece that it has. Who finds none left fetches the weights that a recording will want next.

A leader, the thread that runs a kernel, opens a job and takes pieces like the others. Recordings wait in a
queue, of which any thread of the team that is free makes the calls, as a GPU would: Python's thread goes on
meanwhile, and is one of the team when it waits. The team's state is words that all share.
"""

import atexit
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import numba as _numba
from numba.extending import overload

from cupaged.atomics import (
    PAIR,
    add,
    claim,
    do_piece,
    enter,
    fetch,
    load,
    pause,
    read,
    store,
    words,
    yield_core,
)
from cupaged.jit import njit, specialize
from cupaged.recording import AHEAD, AHEAD_END, ARGUMENTS, ENTRY, ROW_BYTES, Call, Recording

numba: Any = _numba  # untyped

# Places of words.
LEADING = 0  # 1 while somebody leads: there is one job at a time
NEXT = PAIR  # how many pieces have been taken
INSIDE = 2 * PAIR  # threads that look at the job
JOB = 3 * PAIR  # odd while it is open; the next four belong to it
TASK, DATA, PIECES, THREADS = JOB + 1, JOB + 2, JOB + 3, JOB + 4
LIMIT = JOB + 5  # of threads that may take part in the next one
FETCH, FETCH_END = 4 * PAIR, 4 * PAIR + 1  # addresses: what nobody has fetched yet
QUEUED = 5 * PAIR  # how many recordings have been queued, ever
PLAYED = 6 * PAIR  # how many of them are done
PLAYING = 7 * PAIR  # 1 while somebody plays them
FAILED, FAILED_CALL = 8 * PAIR, 8 * PAIR + 1  # the first recording that failed, counted from 1, and its call
QUEUE = 9 * PAIR  # [QUEUE_LENGTH, 3]: a recording's table, its calls, the most threads that make them
QUEUE_LENGTH = 8
words[LIMIT] = 1

LINE = 64  # bytes that one instruction fetches
FETCHED = 32 * LINE  # between two looks for work
ALL = 2**63 - 1
SPINS = 2000  # pauses, some 50 microseconds, before a thread that waits yields its core
PATIENCE = 4000  # pauses and yields, some milliseconds at least, before one that has no work goes to sleep


def num_team_threads() -> int:
    """Return the threads that the job which this thread would lead may have, itself included."""
    return int(words[LIMIT])


@overload(num_team_threads)
def _num_team_threads() -> Any:
    return lambda: load(LIMIT)


def claim_ahead(num_bytes: int) -> int:  # noqa: ARG001
    """Return where so many bytes begin that a recording reads next, for the caller to fetch; 0 if none."""
    return 0


@overload(claim_ahead, strict=False)
def _claim_ahead(num_bytes: int) -> Any:  # noqa: ARG001
    return lambda num_bytes: add(FETCH, num_bytes) if load(FETCH) < load(FETCH_END) else 0


@njit
def nth_piece(n: int, pieces: int, threads: int) -> int:
    """Return which piece is handed out as the n-th one.

    While threads take turns each gets pieces that follow each other, and its part of memory streams.
    """
    thread, turn = n % threads, n // threads
    return thread * (pieces // threads) + min(thread, pieces % threads) + turn


@njit
def _take_pieces(task: int, data: int, pieces: int, threads: int) -> None:
    n = add(NEXT, 1)
    while n < pieces:
        do_piece(task, data, nth_piece(n, pieces, threads))
        n = add(NEXT, 1)


@njit
def lead(task: int, data: int, pieces: int) -> None:
    """Call task(data, piece) for all pieces, with the team; alone if it is at work for another thread."""
    threads = load(LIMIT)
    if pieces == 1 or threads == 1 or not claim(LEADING):
        for piece in range(pieces):
            do_piece(task, data, piece)
        return
    store(TASK, task)
    store(DATA, data)
    store(PIECES, pieces)
    store(THREADS, threads)
    store(NEXT, 0)
    add(JOB, 1)
    _take_pieces(task, data, pieces, threads)
    add(JOB, 1)
    # Whoever has come inside before it was closed may still be at a piece; nobody else comes in.
    waited = 0
    while load(INSIDE) > 0:
        pause()
        waited += 1
        if waited > SPINS:
            yield_core()
    store(LEADING, 0)


@njit
def play_table(table: int, num_calls: int) -> int:
    """Make the calls of a recording's table; return the index of one that failed, or -1."""
    for i in range(num_calls):
        row = table + i * ROW_BYTES
        ahead_end = read(row + 8 * AHEAD_END)
        if ahead_end > 0:
            store(FETCH_END, 0)
            store(FETCH, read(row + 8 * AHEAD))
            store(FETCH_END, ahead_end)
        if enter(read(row + 8 * ENTRY), read(row + 8 * ARGUMENTS)) != 0:
            return i
    return -1


@njit
def _queue_up(table: int, num_calls: int, num_threads: int) -> None:
    """Queue a recording; there must be room."""
    place = QUEUE + 3 * (load(QUEUED) % QUEUE_LENGTH)
    store(place, table)
    store(place + 1, num_calls)
    store(place + 2, num_threads)
    add(QUEUED, 1)


@njit
def _may_play(number: int) -> bool:
    """Return whether a recording is to be played next, by so many threads that this one is among them."""
    played = load(PLAYED)
    if played == load(QUEUED):  # looked at first: what its place holds is another's then
        return False
    is_ours: bool = number < load(QUEUE + 3 * (played % QUEUE_LENGTH) + 2)
    return is_ours


@njit
def _play_queue(number: int, until: int) -> None:
    """Play what is queued, at most the first `until`, unless another thread does.

    What follows on a failure counts as played, until somebody has taken note of it.
    """
    if not claim(PLAYING):
        return
    played = load(PLAYED)
    while played < until and _may_play(number):
        place = QUEUE + 3 * (played % QUEUE_LENGTH)
        store(LIMIT, load(place + 2))
        if load(FAILED) == 0:
            failed = play_table(load(place), load(place + 1))
            if failed >= 0:
                store(FAILED_CALL, failed)
                store(FAILED, played + 1)
        played += 1
        store(LIMIT, 1)  # before others are told
        store(PLAYED, played)
    store(PLAYING, 0)


@njit
def _follow(number: int, until: int) -> None:
    """Play what is queued and take pieces of the jobs that leaders open.

    Return when so many recordings have been played, or, with 0, when there has been nothing for a while.
    """
    idle = done = 0
    while load(PLAYED) < until if until > 0 else idle < PATIENCE:
        job = load(JOB)
        if job % 2 == 1 and job != done and number < load(LIMIT):
            add(INSIDE, 1)
            if load(JOB) == job:  # still open, and so it stays what it is until this thread is out
                _take_pieces(load(TASK), load(DATA), load(PIECES), load(THREADS))
                done, idle = job, 0
            add(INSIDE, -1)
            continue
        if load(PLAYING) == 0 and _may_play(number):
            _play_queue(number, until if until > 0 else ALL)
            idle = 0
            continue
        if load(FETCH) < load(FETCH_END):
            first = add(FETCH, FETCHED)
            for place in range(first, first + FETCHED, LINE):
                fetch(place)
            continue
        pause()
        idle += 1
        if idle > SPINS:
            yield_core()


_lock = threading.RLock()  # one engine's kernels at a time
_queued: dict[int, tuple["ParallelRunner", Recording]] = {}  # whose arrays must live; guarded by _lock
_sleep = threading.Lock()  # an interrupt can come neither before it is held nor before it is free again
_wake = threading.Condition(_sleep)  # whose own enter and exit are Python's: not for the leader's thread
_running = False  # whether an engine runs kernels
_num_asleep = 0  # followers that wait for work, or are about to; guarded by _sleep
_num_followers = 0  # guarded by _lock


def _work(number: int) -> None:
    """Follow while there may be work, and sleep while there is none."""
    global _num_asleep
    while True:
        with _sleep:
            _num_asleep += 1  # before the look: who brings work later sees it
            while not (_running or words[PLAYED] < words[QUEUED]):
                _wake.wait()
            _num_asleep -= 1
        _follow(number, 0)
        _let_go()


def _let_go() -> None:
    """Free what has been played, or an engine that is gone, with steps in flight, would keep its memory.

    Whoever has the lock does so itself, and may want this thread's help with a kernel.
    """
    if _queued and _lock.acquire(blocking=False):
        try:
            if words[PLAYED] == words[QUEUED] and not words[FAILED]:
                _queued.clear()
        finally:
            _lock.release()


def _wake_up() -> None:
    if _num_asleep:
        with _sleep:
            _wake.notify_all()


def _hire(num_threads: int) -> None:
    """Start threads until there are so many, the leader included."""
    global _num_followers
    while _num_followers + 1 < num_threads:
        _num_followers += 1
        threading.Thread(target=_work, args=(_num_followers,), daemon=True, name="cupaged-team").start()


def _drain() -> None:
    """Have all that is queued played; tell the runner whose recording failed, if one did."""
    if words[PLAYED] < words[QUEUED]:
        _follow(0, int(words[QUEUED]))
    if words[FAILED]:
        runner, recording = _queued[int(words[FAILED])]
        runner.failed = recording, int(words[FAILED_CALL])
        words[FAILED] = 0
    _queued.clear()


def _stop() -> None:
    """Have all that is queued played, and nothing begun from here on by other threads."""
    _lock.acquire()
    _drain()


atexit.register(_stop)  # followers do not stop for an interpreter that goes, and its arrays with it


def _forget_the_team() -> None:
    """Begin anew in a forked process, which has none of the threads, and nothing queued."""
    global _num_followers, _num_asleep, _running, _lock, _sleep, _wake
    _num_followers, _num_asleep, _running = 0, 0, False
    _lock, _sleep = threading.RLock(), threading.Lock()
    _wake = threading.Condition(_sleep)
    num_queued = words[QUEUED]  # of which engines know the numbers of theirs
    words[:] = 0
    words[LIMIT] = 1
    words[QUEUED] = words[PLAYED] = num_queued


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_stop, after_in_parent=lambda: _lock.release(), after_in_child=_forget_the_team
    )


def available_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the processors that this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = quota_file.read_text(encoding="ascii").split()
        cpus = min(cpus, ceil(int(quota) / int(period)))
    return max(1, cpus)


class ParallelRunner:
    """Runs parallel kernels on up to `num_threads` threads, one kernel at a time in this process."""

    def __init__(self, num_threads: int | None = None) -> None:
        specialize(_follow, "void(i8,i8)")
        specialize(_queue_up, "void(i8,i8,i8)")
        limit = available_cpus()
        self.num_threads = limit if num_threads is None else min(num_threads, limit)
        self.position = 0  # what to wait for if all that this runner has begun is to be done
        self.failed: tuple[Recording, int] | None = None  # and the call; whoever waits next is told

    def is_done(self, position: int) -> bool:
        """Return whether what this runner began before `position` is done, and nothing of it has failed."""
        is_played = bool(words[PLAYED] >= position)  # looked at first: a failure is told before it
        return is_played and not 0 < words[FAILED] <= position and self.failed is None

    def run(self, calls: Iterable[Call]) -> None:
        """Call the kernels one after the other, after all that was begun."""
        global _running
        with _lock:
            _drain()
            self._raise_failure()
            limit = words[LIMIT]
            # Neither a context manager nor a call at the end, in which an interrupt may come too early: it
            # must not leave threads that never sleep, nor the lock to a traceback that somebody keeps.
            try:
                if self.num_threads > 1 and not numba.config.DISABLE_JIT:
                    _hire(self.num_threads)
                    _running = True
                    _wake_up()
                words[LIMIT] = self.num_threads
                for kernel, args in calls:
                    kernel(*args)
            finally:
                _running = False
                words[LIMIT] = limit

    def play(self, recording: Recording) -> None:
        """Begin to make the calls of a recording, after all that was begun; wait() says when they are made.

        With one thread they are made when this returns: nobody else would begin.
        """
        if recording.table is None:
            self.run(recording.calls)
            return
        with _lock:
            is_full = words[QUEUED] - words[PLAYED] == QUEUE_LENGTH
            if is_full or words[FAILED] or self._is_behind_others():  # in this order: who failed is known
                _drain()
            self._raise_failure()
            _hire(self.num_threads)
            position = int(words[QUEUED]) + 1
            _queued.pop(position - QUEUE_LENGTH, None)
            _queued[position] = self, recording
            self.position = position
            _queue_up(recording.table.ctypes.data, len(recording.table), self.num_threads)
            if self.num_threads > 1:
                _wake_up()
            else:
                self.wait()

    def wait(self, position: int | None = None) -> None:
        """Return when what was begun before `position` is done, or all; the error if a call has failed."""
        with _lock:
            if position is not None and words[PLAYED] < position < words[QUEUED]:
                _follow(0, position)
            if position is None or position == words[QUEUED] or words[FAILED]:
                _drain()
            self._raise_failure()

    def _is_behind_others(self) -> bool:
        """Return whether another engine's recordings are queued, which must not fail with this one's."""
        return bool(_queued) and next(reversed(_queued.values()))[0] is not self

    def _raise_failure(self) -> None:
        if self.failed is None:
            return
        (recording, failed), self.failed = self.failed, None
        self.run(recording.calls[failed : failed + 1])  # which says what is wrong
        raise RuntimeError(f"call {failed} of {len(recording.calls)} of a recording failed")
