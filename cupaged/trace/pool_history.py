"""PoolHistory: who held which block when, step by step, from a replay; what the page of `view` draws.

A frame is what a step's plan leaves, where a run is long that of the last of several steps. Device blocks
come first, the host's behind them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch
from cupaged.scheduler.allocator import Blocks
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.prefix_cache import NO_ENTRY
from cupaged.scheduler.scheduler import Scheduler
from cupaged.trace.records import Kind
from cupaged.trace.replay import Event, replay
from cupaged.trace.workload import Segment

MAX_FRAMES = 2000
FREE, CACHED, USED = 0, 1, 2  # what a block is; cached: nobody holds it, but it may be found
HIT, COPIED, SWAPPED_IN, SWAPPED_OUT, EVICTED = range(5)  # what happened to a block

_OWNER_SHIFT, _STATE_SHIFT, _MAX_REFERENCES = 12, 10, 1023
_EVENT_SHIFT = 28
SERIES = (
    "time",  # seconds
    "tokens",  # that the step computes
    "decodes",
    "running",  # sequences
    "waiting",  # groups
    "used",  # blocks
    "cached",
    "stored",  # tokens
    "host_used",  # blocks
    "preemptions",  # so far, like the next two
    "hit_tokens",
    "recomputed_tokens",
)


class PoolHistory(NamedTuple):
    """Frames as differences; F frames, C changes of a block, E events."""

    series: NDArray[np.float32]  # [len(SERIES), F]
    steps: NDArray[np.uint32]  # [F], number of the step whose plan is shown
    change_start: NDArray[np.uint32]  # [F + 1]
    change_block: NDArray[np.uint32]  # [C]
    change_word: NDArray[np.uint32]  # [C], owner's arrival, state, references: see `block_words`
    event_start: NDArray[np.uint32]  # [F + 1]
    events: NDArray[np.uint32]  # [E], what << 28 | block


def block_words(
    owner: NDArray[np.int64], state: NDArray[np.int64], references: NDArray[np.int32]
) -> NDArray[np.uint32]:
    """Return one number a block, all of them [num_blocks]; a free one's is 0."""
    counted = np.minimum(references, _MAX_REFERENCES)
    words = owner << _OWNER_SHIFT | state << _STATE_SHIFT | counted
    return np.where(state == FREE, 0, words).astype(np.uint32)


class _Pool:
    """One pool's blocks as they were at the last step."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.references = blocks.at.ref_count[:-1]  # [num_blocks], a view, and so the others
        self.owner = np.zeros(self.references.size, np.int64)  # arrival of who held it last
        self.state = np.zeros(self.references.size, np.int64)
        self._index = np.arange(blocks.block_tables.shape[1])

    def is_entry(self) -> NDArray[np.bool_]:
        """Return which blocks may be found by their content."""
        if not self.blocks.cache.at.size:
            return np.zeros(self.references.size, np.bool_)
        return np.array(self.blocks.cache.at.serial != NO_ENTRY)

    def look(self, arrivals: NDArray[np.int64]) -> None:
        """Take over what the blocks are now; `arrivals` are those of the rows' groups."""
        blocks = self.blocks
        rows = np.flatnonzero(blocks.held.num_blocks)
        first, end = blocks.held.first_block[rows, None], blocks.held.num_blocks[rows, None]
        held = (self._index >= first) & (self._index < end)
        places = np.nonzero(held)
        self.owner[blocks.block_tables[rows[places[0]], places[1]]] = arrivals[rows[places[0]]]
        unused = np.where(self.is_entry(), CACHED, FREE)
        self.state[:] = np.where(self.references > 0, USED, unused)

    def words(self) -> NDArray[np.uint32]:
        """Return each block's number."""
        return block_words(self.owner, self.state, self.references)


class _Historian:
    """Follows a replay and keeps frames."""

    def __init__(self, segment: Segment, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._device = _Pool(scheduler.block_manager.blocks)
        self._host = _Pool(scheduler.block_manager.host_blocks)
        self._arrivals = np.zeros(segment.config.max_num_seqs, np.int64)  # [num_rows]
        self._was_cached = np.zeros(segment.config.num_blocks, np.bool_)  # before the plan
        self._admitted: set[int] = set()
        self._words = np.zeros(segment.config.num_blocks + segment.config.num_host_blocks, np.uint32)
        self._events: list[NDArray[np.uint32]] = []  # since the last frame
        self.series: list[tuple[float, ...]] = []
        self.steps: list[int] = []
        self.changes: list[tuple[NDArray[np.uint32], NDArray[np.uint32]]] = []
        self.events: list[NDArray[np.uint32]] = []

    def follow(self, event: Event, step: int, *, keeps: bool) -> None:
        """Look at the pools after a plan; `keeps`: as a frame."""
        batch = event.batch
        assert batch is not None, "only plans are followed"
        groups = {seq.group: None for seq in event.sequences}
        for group in groups:
            for seq in group.unfinished:
                self._arrivals[seq.row] = group.arrival
        self._device.look(self._arrivals)
        self._host.look(self._arrivals)
        self._note_events(batch, event)
        if keeps:
            self._keep(batch, event.time, step)

    def look_back(self) -> None:
        """Note which blocks are cached and held by nobody, for the next plan to evict."""
        self._was_cached = self._device.is_entry() & (self._device.references == 0)

    def _note_events(self, batch: Batch, event: Event) -> None:
        num_blocks = self._device.owner.size
        self._note(COPIED, batch.copy[:, 1])
        self._note(SWAPPED_IN, batch.swap_in[:, 1])
        self._note(SWAPPED_OUT, batch.swap_out[:, 0])
        self._note(SWAPPED_OUT, batch.swap_out[:, 1] + num_blocks)
        self._note(EVICTED, np.flatnonzero(self._was_cached & ~self._device.is_entry()))
        block_size = self._device.blocks.block_size
        for i, seq in enumerate(event.sequences):
            if seq.group.arrival not in self._admitted:
                self._admitted.add(seq.group.arrival)
                hits = batch.block_tables[i, : -(-seq.group.num_cached_tokens // block_size)]
                self._note(HIT, hits[hits >= 0])

    def _note(self, what: int, blocks: NDArray[np.int32] | NDArray[np.intp]) -> None:
        if blocks.size:
            self._events.append((blocks | what << _EVENT_SHIFT).astype(np.uint32))

    def _keep(self, batch: Batch, time: float, step: int) -> None:
        words = np.concatenate([self._device.words(), self._host.words()])
        changed = np.flatnonzero(words != self._words)
        self.changes.append((changed.astype(np.uint32), words[changed]))
        self._words = words
        nothing = [np.empty(0, np.uint32)]
        self.events.append(np.concatenate(self._events or nothing))
        self._events = []
        self.steps.append(step)
        scheduler, counters = self._scheduler, self._scheduler.counters
        self.series.append(
            (
                time,
                batch.num_tokens,
                batch.num_decodes,
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.num_used_blocks,
                int(np.count_nonzero(self._device.state == CACHED)),
                scheduler.num_stored_tokens,
                int(np.count_nonzero(self._host.state == USED)),
                int(counters[Counter.PREEMPTIONS]),
                int(counters[Counter.PREFIX_HIT_TOKENS]),
                int(counters[Counter.RECOMPUTED_TOKENS]),
            )
        )


def read_history(segment: Segment, max_frames: int = MAX_FRAMES) -> PoolHistory:
    """Replay a segment and return the history of its pools; PlansDifferError as from `replay`."""
    num_steps = sum(record.kind == Kind.PLAN for record in segment.records)
    every = max(1, -(-num_steps // max_frames))
    historian: _Historian | None = None
    step = 0
    for event in replay(segment):
        if historian is None:
            historian = _Historian(segment, event.scheduler)
        if event.kind == Kind.PLAN:
            historian.follow(event, step, keeps=(step + 1) % every == 0 or step + 1 == num_steps)
            step += 1
        historian.look_back()
    if historian is None or not historian.steps:
        raise ValueError("the trace has no step to show")
    blocks, words = (np.concatenate(part) for part in zip(*historian.changes, strict=True))
    return PoolHistory(
        series=np.array(historian.series, np.float32).T.copy(),
        steps=np.array(historian.steps, np.uint32),
        change_start=_starts([part[0] for part in historian.changes]),
        change_block=blocks,
        change_word=words,
        event_start=_starts(historian.events),
        events=np.concatenate(historian.events),
    )


def _starts(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return where each part begins once they stand one behind the other, and where the last one ends."""
    return np.cumsum([0, *map(len, parts)]).astype(np.uint32)
