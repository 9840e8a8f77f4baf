"""Rows: what the scheduler knows of every live sequence, as arrays allocated once.

A live sequence is a row. Large arrays start as untouched zero pages, so a row costs memory only as
far as it is filled.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.scheduler.prefix_cache import ROOT, root_hash
from cupaged.sequence import Sequence

NO_SERIAL = -1
NEVER = 2**31 - 1  # in num_registered: the row's blocks are not to be found by their content
_WORD = 0xFFFFFFFF


class Rows(NamedTuple):
    """What every step reads and writes, by row; int32[num_rows] unless noted.

    [0, num_computed_tokens)                    in the KV cache once the submitted steps are done
    [num_computed_tokens, num_tokens)           known, to be computed
    [num_tokens, num_tokens + num_in_flight)    being sampled: on the device, not known here yet

    The rows of a group have the same serial and stand side by side in `running`.
    """

    tokens: NDArray[np.int32]  # [num_rows, max_model_len], prompt and output
    num_tokens: NDArray[np.int32]  # 0 for a beam that does not take part yet
    num_prompt_tokens: NDArray[np.int32]
    num_in_flight: NDArray[np.int32]  # 0 or 1 when a step is planned, up to the steps in flight after it
    num_computed_tokens: NDArray[np.int32]
    num_stored_tokens: NDArray[np.int32]  # those below are in shared blocks: perhaps computed, never written
    num_lost_tokens: NDArray[np.int32]  # computed before the group was preempted, until it has resumed
    num_new: NDArray[np.int32]  # tokens that the step being planned computes
    max_total_tokens: NDArray[np.int32]
    priority: NDArray[np.int64]
    arrival: NDArray[np.int64]
    serial: NDArray[np.int64]  # ascending by admission, never used twice; NO_SERIAL = the row is free
    last_scheduled: NDArray[np.int64]  # number of the row's last step
    reset: NDArray[np.bool_]  # no step yet since it was admitted or resumed
    is_pending: NDArray[np.bool_]  # to fork once the first of its group has computed the prompt
    is_beam: NDArray[np.bool_]  # waits for its token to be chosen
    prompt_logprobs_end: NDArray[np.int32]  # positions below have had their prompt log-probabilities
    salt: NDArray[np.int64]  # whose cached prefixes it shares
    num_registered: NDArray[np.int32]  # blocks that the prefix cache has been told of, or NEVER
    chain_hash: NDArray[np.uint64]  # of the last of them
    chain_serial: NDArray[np.int64]
    stop_token_ids: NDArray[np.int32]  # [num_rows, n], ended by -1; n grows
    running: NDArray[np.int32]  # running[:num_running] are the rows that run, by priority, then arrival
    num_running: NDArray[np.int32]  # [1]


class SamplingRows(NamedTuple):
    """What is fixed when a sequence enters and only packed, by row; int32[num_rows] unless noted."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.int32]  # [num_rows, 2], low and high word
    group_index: NDArray[np.int32]
    num_logprobs: NDArray[np.int32]  # -1 = none
    num_prompt_logprobs: NDArray[np.int32]  # -1 = none
    min_tokens: NDArray[np.int32]  # of output, before which the banned ids are banned
    banned_token_ids: NDArray[np.int32]  # [num_rows, n], ended by -1; n grows
    scales_logprobs: NDArray[np.bool_]  # its log-probabilities are those after temperature
    wants_history: NDArray[np.bool_]  # its sampling needs the ids of all its tokens on the device


_ROW_TYPES: dict[str, Any] = {
    **dict.fromkeys(("priority", "arrival", "serial", "last_scheduled", "salt", "chain_serial"), np.int64),
    **dict.fromkeys(("reset", "is_pending", "is_beam"), np.bool_),
    "chain_hash": np.uint64,
}


def create_rows(num_rows: int, max_model_len: int) -> Rows:
    """Return `num_rows` free rows."""
    shapes = {"tokens": (num_rows, max_model_len), "stop_token_ids": (num_rows, 1), "num_running": (1,)}
    names = Rows._fields
    rows = Rows(**{n: np.zeros(shapes.get(n, num_rows), _ROW_TYPES.get(n, np.int32)) for n in names})
    rows.serial.fill(NO_SERIAL)
    return rows


def create_sampling_rows(num_rows: int) -> SamplingRows:
    """Return the sampling side of `num_rows` free rows."""
    dtypes: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "min_p"), np.float32)
    dtypes |= dict.fromkeys(("wants_history", "scales_logprobs"), np.bool_)
    shapes = {"seed": (num_rows, 2), "banned_token_ids": (num_rows, 1)}
    names = SamplingRows._fields
    return SamplingRows(**{n: np.zeros(shapes.get(n, num_rows), dtypes.get(n, np.int32)) for n in names})


def _write_ids(table: NDArray[np.int32], row: int, ids: tuple[int, ...]) -> NDArray[np.int32]:
    """Write ids and a closing -1 at `row`; return the table, or a wider copy if they did not fit."""
    if len(ids) >= table.shape[1]:
        wider = np.full((table.shape[0], 2 * len(ids) + 1), -1, np.int32)
        wider[:, : table.shape[1]] = table
        table = wider
    table[row, : len(ids)] = ids
    table[row, len(ids)] = -1
    return table


@njit
def restart_chain(rows: Rows, row: int) -> None:
    """Let the prefix cache be told of the row's blocks from the first one on."""
    rows.num_registered[row] = 0
    rows.chain_hash[row] = root_hash(rows.salt[row])
    rows.chain_serial[row] = ROOT


def load_row(rows: Rows, row: int, seq: Sequence, *, salt: int) -> Rows:
    """Fill a free row with a sequence; return rows, whose table of stop ids may have grown."""
    group = seq.group
    known = seq.token_ids
    rows.tokens[row, : len(known)] = known
    rows.num_tokens[row] = len(known)
    rows.num_prompt_tokens[row] = len(group.prompt_token_ids)
    for column in (rows.num_in_flight, rows.num_computed_tokens, rows.num_stored_tokens, rows.num_new):
        column[row] = 0
    rows.num_lost_tokens[row] = seq.num_lost_tokens
    rows.max_total_tokens[row] = group.max_total_tokens
    rows.priority[row], rows.arrival[row] = group.priority, group.arrival
    rows.is_pending[row] = False
    rows.is_beam[row] = group.is_beam
    rows.prompt_logprobs_end[row] = seq.prompt_logprobs_end
    rows.salt[row] = salt
    restart_chain(rows, row)
    return rows._replace(stop_token_ids=_write_ids(rows.stop_token_ids, row, group.stop_token_ids))


def unload_row(rows: Rows, row: int, seq: Sequence) -> None:
    """Keep in the sequence what its row knew; a token in flight will be sampled anew, and be the same."""
    seq.token_ids = rows.tokens[row, : rows.num_tokens[row]].copy()
    seq.num_lost_tokens = max(int(rows.num_computed_tokens[row]), int(rows.num_lost_tokens[row]))
    seq.prompt_logprobs_end = int(rows.prompt_logprobs_end[row])


def load_sampling_row(sampling: SamplingRows, row: int, seq: Sequence) -> SamplingRows:
    """Fill a row with a sequence's parameters; return sampling, whose table of banned ids may have grown."""
    group, params = seq.group, seq.group.params
    sampling.temperature[row] = params.temperature
    sampling.top_p[row] = params.top_p
    sampling.min_p[row] = params.min_p
    sampling.top_k[row] = params.top_k
    sampling.seed[row] = np.array([group.seed & _WORD, group.seed >> 32 & _WORD], np.uint32).view(np.int32)
    sampling.group_index[row] = seq.index
    wanted = group.num_candidates if group.is_beam else params.logprobs
    sampling.num_logprobs[row] = -1 if wanted is None else wanted
    asks = params.prompt_logprobs if seq.index == 0 else None  # of one prompt, once
    sampling.num_prompt_logprobs[row] = -1 if asks is None else asks
    sampling.min_tokens[row] = params.min_tokens
    sampling.scales_logprobs[row] = group.is_beam
    sampling.wants_history[row] = False
    return sampling._replace(
        banned_token_ids=_write_ids(sampling.banned_token_ids, row, group.banned_token_ids)
    )
