"""Read plans back out of a trace, and say how two differ: plain Python, the format's specification.

Slow beside the encoder, and needed only where somebody wants to see a plan.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, Count, Flag
from cupaged.trace.plan_state import NUM_COLUMNS, NUM_TOTALS, Column, PlanState


class Plan(NamedTuple):
    """What a batch held but for its token ids; int32 unless noted, shapes as in BatchArrays."""

    counts: NDArray[np.int32]  # [len(Count)]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int32]
    query_start: NDArray[np.int32]
    rows: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    flags: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.int32]
    group_index: NDArray[np.int32]
    output_position: NDArray[np.int32]
    num_logprobs: NDArray[np.int32]
    num_prompt_logprobs: NDArray[np.int32]
    logit_index: NDArray[np.int32]
    logit_seq: NDArray[np.int32]
    logit_samples: NDArray[np.bool_]  # [num_logits], logit_target is -1
    block_tables: NDArray[np.int32]
    copy: NDArray[np.int32]
    banned_start: NDArray[np.int32]
    history_start: NDArray[np.int32]
    swap_out: NDArray[np.int32]
    swap_in: NDArray[np.int32]


_COLUMNS = {
    "seq_lens": Column.SEQ_LEN,
    **{
        name: Column[name.upper()]
        for name in (
            *("flags", "temperature", "top_p", "min_p", "top_k", "group_index", "output_position"),
            *("num_logprobs", "num_prompt_logprobs"),
        )
    },
}
_STARTS = {
    "query_start": Column.NUM_NEW,
    "banned_start": Column.NUM_BANNED,
    "history_start": Column.NUM_HISTORY,
}


def plan_of(batch: Batch) -> Plan:
    """Return a copy of a batch's plan."""
    values = {name: getattr(batch, name) for name in Plan._fields if name not in ("counts", "logit_samples")}
    values["counts"] = batch.arrays.counts[: len(Count)]
    values["logit_samples"] = batch.logit_target < 0
    return Plan(**{name: np.array(value) for name, value in values.items()})


def describe_difference(recorded: Plan, replayed: Plan) -> str:
    """Say in one line where two plans first differ; "" if they are the same, bit for bit."""
    for name in Plan._fields:
        old, new = getattr(recorded, name), getattr(replayed, name)
        if old.shape != new.shape:
            return f"{name} has shape {old.shape} in the trace and {new.shape} now"
        if old.tobytes() != new.tobytes():
            place = tuple(np.argwhere(old.view(np.int32 if old.dtype == np.float32 else old.dtype) != new)[0])
            where = f"{Count(int(place[0])).name}" if name == "counts" else ", ".join(map(str, place))
            return f"{name}[{where}] is {old[place]} in the trace and {new[place]} now"
    return ""


class PlanDecoder:
    """Turns records of plans into plans, one after the other."""

    def __init__(self, state: PlanState) -> None:
        """Take the state before the first plan."""
        self._state = state

    def decode(self, numbers: list[int]) -> Plan:
        """Return the plan that `numbers` tell; ValueError if they tell too few or too many."""
        values = iter(numbers)
        try:
            plan = self._decode(values)
        except (StopIteration, IndexError):
            raise ValueError("a plan ends early") from None
        if next(values, None) is not None:
            raise ValueError("a plan goes on behind its end")
        return plan

    def _decode(self, values: Iterator[int]) -> Plan:
        state = self._state
        for k in range(NUM_TOTALS):
            state.counts[k] += next(values)
        counts = state.counts[: len(Count)].astype(np.int32)
        num_seqs, width = int(counts[Count.NUM_SEQS]), int(counts[Count.TABLE_WIDTH])
        rows = self._read_rows(values, num_seqs, int(counts[Count.NUM_DECODES]), width)
        columns = state.columns[rows]
        views: dict[str, NDArray[Any]] = {name: columns[:, column] for name, column in _COLUMNS.items()}
        for name in ("temperature", "top_p", "min_p"):
            views[name] = np.ascontiguousarray(views[name]).view(np.float32)
        for name, column in _STARTS.items():
            views[name] = np.concatenate([[0], np.cumsum(columns[:, column])])
        views["block_tables"] = state.tables[rows, :width] - 1
        seq = np.repeat(np.arange(num_seqs), columns[:, Column.NUM_NEW])
        first = views["seq_lens"] - views["query_start"][1:]
        positions = np.arange(seq.size) + first[seq]
        place, offset = positions // state.block_size, positions % state.block_size
        slots = views["block_tables"][seq, place] * state.block_size + offset
        while (t := next(values)) >= 0:
            (slots if t & 1 else positions)[t // 2] = next(values)
        views |= {"counts": counts, "rows": rows, "positions": positions, "slot_mapping": slots}
        views["seed"] = columns[:, [Column.SEED_LOW, Column.SEED_HIGH]]
        views |= _read_logits(values, views, int(counts[Count.NUM_LOGITS]))
        for name in ("copy", "swap_out", "swap_in"):
            views[name] = _read_pairs(values, int(counts[Count[f"NUM_{name.upper()}"]]))
        kept = (np.float32, np.bool_)
        for name, values_of in views.items():
            views[name] = values_of if values_of.dtype in kept else values_of.astype(np.int32)
        return Plan(**views)

    def _read_rows(
        self, values: Iterator[int], num_seqs: int, num_decodes: int, width: int
    ) -> NDArray[np.int32]:
        """Read which rows the plan has and move their columns and tables on."""
        state = self._state
        rows = np.empty(num_seqs, np.int32)
        previous = state.row_after.size - 1
        as_foretold = next(values)
        for i in range(num_seqs):
            mask = 0
            if as_foretold == 0:
                mask = next(values)
            row = next(values) if mask & 1 << Column.ROW else int(state.row_after[previous])
            last = state.columns[row]
            told = last.astype(np.int64)
            if i < num_decodes:
                told[Column.NUM_NEW] = 1
            told[Column.FLAGS] &= ~int(Flag.RESET)
            told[Column.OUTPUT_POSITION] += bool(last[Column.FLAGS] & Flag.SAMPLES)
            told[Column.NUM_HISTORY] = 0
            for k in range(Column.NUM_NEW, NUM_COLUMNS):
                if k == Column.SEQ_LEN:
                    told[k] += told[Column.NUM_NEW]
                if mask & 1 << k:
                    told[k] += next(values)
            if mask & 1 << Column.TABLE:
                _read_table(values, state.tables[row, :width])
            state.columns[row] = told
            rows[i] = state.row_after[previous] = row
            previous = row
            as_foretold = next(values) if mask else as_foretold - 1
        if as_foretold != 0:
            raise ValueError("a plan's sequences do not add up")
        return rows


def _read_logits(
    values: Iterator[int], views: dict[str, NDArray[Any]], num_logits: int
) -> dict[str, NDArray[Any]]:
    if next(values) == 0:
        seq = np.flatnonzero(views["flags"] & int(Flag.SAMPLES))
        index, samples = views["query_start"][seq + 1] - 1, np.ones(seq.size, np.bool_)
    else:
        listed = np.array([next(values) for _ in range(2 * num_logits)], np.int64).reshape(-1, 2)
        index, seq, samples = listed[:, 0], listed[:, 1] >> 1, (listed[:, 1] & 1).astype(np.bool_)
    return {"logit_index": index, "logit_seq": seq, "logit_samples": samples}


def _read_table(values: Iterator[int], table: NDArray[np.int32]) -> None:
    place = before = 0
    for _ in range(next(values)):
        place += next(values)
        before += next(values)
        table[place] = before
        place += 1


def _read_pairs(values: Iterator[int], count: int) -> NDArray[np.int32]:
    differences = np.array([next(values) for _ in range(2 * count)], np.int64).reshape(-1, 2)
    return np.cumsum(differences, axis=0).astype(np.int32)
