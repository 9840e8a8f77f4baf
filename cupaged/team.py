"""The team's compiled half: jobs whose pieces threads take, and recordings that wait to be played.

A leader, the thread that runs a kernel, opens a job and takes pieces like the others. Recordings wait in a
queue, of which any thread of the team that is free makes the calls. All state is words that threads share.
"""

from typing import Any

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
from cupaged.jit import njit
from cupaged.recording import AHEAD, AHEAD_END, ARGUMENTS, ENTRY, ROW_BYTES

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
assert words.size >= QUEUE + 3 * QUEUE_LENGTH
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
def queue_up(table: int, num_calls: int, num_threads: int) -> None:
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
def follow(number: int, until: int) -> None:
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
