"""The threads that share a kernel's work: a team of our own, because a step is hundreds of short kernels.

A pool that sleeps between them (TBB, OpenMP with passive waits) wakes in 10 microseconds, as long as a
small model's layer takes, so one core does nearly all; one that spins for ever (OpenMP with active waits)
starves its neighbours. These threads spin while an engine runs, yield soon, and sleep when it is idle.
Work is handed out piece by piece, so whoever is late, or kept from its core, holds up nobody but with the
piece that it has. Who finds none left fetches the weights that a recording will want next.

Recordings are played by whichever thread of the team is free, as a GPU would: Python's thread goes on
meanwhile, and is one of the team when it waits. team.py is what compiled code does of this.
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

from cupaged.atomics import words
from cupaged.jit import specialize
from cupaged.recording import Call, Recording
from cupaged.team import FAILED, FAILED_CALL, LIMIT, PLAYED, QUEUE_LENGTH, QUEUED, follow, queue_up

numba: Any = _numba  # untyped

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
        follow(number, 0)
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
        follow(0, int(words[QUEUED]))
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
        specialize(follow, "void(i8,i8)")
        specialize(queue_up, "void(i8,i8,i8)")
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
            queue_up(recording.table.ctypes.data, len(recording.table), self.num_threads)
            if self.num_threads > 1:
                _wake_up()
            else:
                self.wait()

    def wait(self, position: int | None = None) -> None:
        """Return when what was begun before `position` is done, or all; the error if a call has failed."""
        with _lock:
            until = int(words[QUEUED]) if position is None else position
            if words[PLAYED] < until:
                follow(0, until)
            if words[FAILED] or words[PLAYED] == words[QUEUED]:
                _drain()
            self._raise_failure()

    def _is_behind_others(self) -> bool:
        """Return whether another engine's recordings are queued, which must not fail with this one's."""
        return bool(_queued) and next(reversed(_queued.values()))[0] is not self

    def _raise_failure(self) -> None:
        if self.failed is None:
            return
        (recording, failed), self.failed = self.failed, None
        call = recording.calls[failed]
        self.run([call])  # which says what is wrong
        raise RuntimeError(
            f"{getattr(call[0], '__name__', call[0])}, call {failed} of {len(recording.calls)} of a "
            "recording, failed, but not when it was made again; if memory is short, lower max_num_seqs"
        )
