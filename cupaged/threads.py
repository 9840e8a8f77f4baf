"""The threads that share a kernel's work: a team of our own, because a step is hundreds of short kernels.

A pool that sleeps between them (TBB, OpenMP with passive waits) wakes in 10 microseconds, as long as a
small model's layer takes, so one core does nearly all; one that spins for ever (OpenMP with active waits)
starves its neighbours. These threads spin while an engine runs, yield soon, and sleep when it is idle.
Work is handed out piece by piece, so whoever is late, or kept from its core, holds up nobody but with the
piece that it has. Who finds none left fetches the weights that a recording will want next.

A leader, the thread that runs a kernel, opens a job and takes pieces like the others. The team's state is
words in memory that compiled code finds by the name of a symbol, so it may lie in the on-disk cache.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba as _numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic, overload

from cupaged.jit import njit, specialize
from cupaged.recording import AHEAD, AHEAD_END, ARGUMENTS, ENTRY, ENTRY_TYPE, Call, Recording

# ruff: noqa: ARG001  (Numba knows an operation's arguments by the parameters of the function that types it)

numba: Any = _numba  # untyped
cgutils: Any = _cgutils

# Places of words. Those that different threads write lie in cache lines of their own, two of them, for
# processors fetch lines in pairs.
LEADING = 0  # 1 while somebody leads: there is one job at a time
NEXT = 16  # the piece that nobody has taken yet
INSIDE = 32  # threads that look at the job
JOB = 48  # odd while it is open; the next four belong to it
TASK, DATA, PIECES, LIMIT = 49, 50, 51, 52
FETCH, FETCH_END = 64, 65  # addresses: what nobody has fetched yet
NUM_WORDS = 80
SYMBOL = "cupaged_team"

LINE = 64  # bytes that one instruction fetches
FETCHED = 32 * LINE  # between two looks for work
SPINS = 2000  # pauses, some 50 microseconds, before a thread that waits yields its core
PATIENCE = 4000  # pauses and yields, some milliseconds at least, before one that has no work goes to sleep

_INT = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_TASK = ir.FunctionType(ir.VoidType(), [_POINTER, _INT])
_memory = np.zeros(NUM_WORDS + 16, np.int64)
_words = _memory[-_memory.ctypes.data % 128 // 8 :][:NUM_WORDS]
_words[LIMIT] = 1
llvmlite.binding.add_symbol(SYMBOL, _words.ctypes.data)


def _word(builder: Any, place: Any) -> Any:
    """Return the address of a word."""
    module, kind = builder.module, ir.ArrayType(_INT, NUM_WORDS)
    found = module.globals.get(SYMBOL)
    team = ir.GlobalVariable(module, kind, SYMBOL) if found is None else found
    return builder.gep(team, [_INT(0), place])


def _type_load(_context: Any, place: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


def _type_store(_context: Any, place: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _type_add(_context: Any, place: Any, value: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _type_claim(_context: Any, place: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0]), _INT(0), _INT(1), "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64), emit


def _type_pause(_context: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        nothing = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        if llvmlite.binding.get_default_triple().startswith("x86"):
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, name), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _type_do_piece(_context: Any, task: Any, data: Any, piece: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], _TASK.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], _POINTER), args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _type_enter(_context: Any, entry: Any, arguments: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ENTRY_TYPE.as_pointer())
        return builder.call(function, [builder.inttoptr(args[1], _INT.as_pointer())])

    return types.int32(types.int64, types.int64), emit


def _type_fetch(_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into all but the first of the caches, data; any address will do.
        builder.call(function, [builder.inttoptr(args[0], _POINTER), number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


_load: Any = intrinsic(_type_load)
_store: Any = intrinsic(_type_store)
_add: Any = intrinsic(_type_add)  # returns what was there
_claim: Any = intrinsic(_type_claim)  # sets a word that is 0 to 1; returns whether it was 0
_pause: Any = intrinsic(_type_pause)
_do_piece: Any = intrinsic(_type_do_piece)
_enter: Any = intrinsic(_type_enter)  # returns 0 unless the kernel failed
_fetch: Any = intrinsic(_type_fetch)
_yield: Any = types.ExternalFunction(
    "SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32()
)


def num_team_threads() -> int:
    """Return the threads that the job which this thread would lead may have, itself included."""
    return int(_words[LIMIT])


@overload(num_team_threads)
def _num_team_threads() -> Any:
    return lambda: _load(LIMIT)


def claim_ahead(num_bytes: int) -> int:
    """Return where so many bytes begin that a recording reads next, for the caller to fetch; 0 if none."""
    return 0


@overload(claim_ahead, strict=False)
def _claim_ahead(num_bytes: int) -> Any:
    return lambda num_bytes: _add(FETCH, num_bytes) if _load(FETCH) < _load(FETCH_END) else 0


@njit
def _take_pieces(task: int, data: int, pieces: int) -> None:
    piece = _add(NEXT, 1)
    while piece < pieces:
        _do_piece(task, data, piece)
        piece = _add(NEXT, 1)


@njit
def lead(task: int, data: int, pieces: int) -> None:
    """Call task(data, piece) for all pieces, with the team; alone if it is at work for another thread."""
    if pieces == 1 or _load(LIMIT) == 1 or not _claim(LEADING):
        for piece in range(pieces):
            _do_piece(task, data, piece)
        return
    _store(TASK, task)
    _store(DATA, data)
    _store(PIECES, pieces)
    _store(NEXT, 0)
    _add(JOB, 1)
    _take_pieces(task, data, pieces)
    _add(JOB, 1)
    # Whoever has come inside before it was closed may still be at a piece; nobody else comes in.
    waited = 0
    while _load(INSIDE) > 0:
        _pause()
        waited += 1
        if waited > SPINS:
            _yield()
    _store(LEADING, 0)


@njit
def _follow(number: int) -> None:
    """Take pieces of the jobs that leaders open; return when there has been none for a while."""
    idle = done = 0
    while idle < PATIENCE:
        job = _load(JOB)
        if job % 2 == 1 and job != done and number < _load(LIMIT):
            _add(INSIDE, 1)
            if _load(JOB) == job:  # still open, and so it stays what it is until this thread is out
                _take_pieces(_load(TASK), _load(DATA), _load(PIECES))
                done, idle = job, 0
            _add(INSIDE, -1)
            continue
        if _load(FETCH) < _load(FETCH_END):
            first = _add(FETCH, FETCHED)
            for place in range(first, first + FETCHED, LINE):
                _fetch(place)
            continue
        _pause()
        idle += 1
        if idle > SPINS:
            _yield()


@njit
def play_table(table: Any) -> int:
    """Make the calls of a recording's table; return the index of one that failed, or -1."""
    for i in range(table.shape[0]):
        if table[i, AHEAD_END] > 0:
            _store(FETCH_END, 0)
            _store(FETCH, table[i, AHEAD])
            _store(FETCH_END, table[i, AHEAD_END])
        if _enter(table[i, ENTRY], table[i, ARGUMENTS]) != 0:
            return i
    return -1


_lock = threading.RLock()  # one engine's kernels at a time
_wake = threading.Condition()
_running = False  # whether an engine runs kernels
_num_asleep = 0  # followers that wait for that, or are about to; guarded by _wake
_num_followers = 0  # guarded by _lock


def _work(number: int) -> None:
    """Follow while an engine runs, and sleep while none does."""
    global _num_asleep
    while True:
        with _wake:
            _num_asleep += 1  # before the look: who sets _running later sees it
            while not _running:
                _wake.wait()
            _num_asleep -= 1
        _follow(number)


def _set_running(running: bool) -> None:
    global _running
    _running = running
    if running and _num_asleep:
        with _wake:
            _wake.notify_all()


def _hire(num_threads: int) -> None:
    """Start threads until there are so many, the leader included."""
    global _num_followers
    while _num_followers + 1 < num_threads:
        _num_followers += 1
        threading.Thread(target=_work, args=(_num_followers,), daemon=True, name="cupaged-team").start()


def _forget_the_team() -> None:
    """Begin anew in a forked process, which has none of the threads."""
    global _num_followers, _num_asleep, _running, _lock, _wake
    _num_followers, _num_asleep, _running = 0, 0, False
    _lock, _wake = threading.RLock(), threading.Condition()
    _words[:] = 0
    _words[LIMIT] = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_team)


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
        specialize(_follow, "void(i8)")
        specialize(play_table, "i8(i8[:,::1])")
        limit = available_cpus()
        self.num_threads = limit if num_threads is None else min(num_threads, limit)

    def run(self, calls: Iterable[Call]) -> None:
        """Call the kernels one after the other."""
        with self._team():
            for kernel, args in calls:
                kernel(*args)

    def play(self, recording: Recording) -> None:
        """Make the calls of a recording."""
        if recording.table is None:
            self.run(recording.calls)
            return
        with self._team():
            failed = play_table(recording.table)
        if failed >= 0:
            self.run(recording.calls[failed : failed + 1])  # which says what is wrong
            raise RuntimeError(f"call {failed} of {len(recording.calls)} of a recording failed")

    @contextmanager
    def _team(self) -> Iterator[None]:
        """Have the team at this thread's disposal."""
        with _lock:
            limit = _words[LIMIT]
            try:  # from here on: an interrupt must not leave threads that never sleep
                if self.num_threads > 1 and not numba.config.DISABLE_JIT:
                    _hire(self.num_threads)
                    _set_running(True)
                _words[LIMIT] = self.num_threads
                yield
            finally:
                _words[LIMIT] = limit
                _set_running(False)
