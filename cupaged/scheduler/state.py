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


ROW = np.dtype(
    [
        ("num_tokens", np.int32),  # known: prompt and output; 0 for a beam that does not take part yet
        ("num_prompt_tokens", np.int32),
        ("num_in_flight", np.int32),  # 0 or 1 when a step is planned, up to the steps in flight after it
        ("num_computed_tokens", np.int32),
        ("num_shared_tokens", np.int32),  # those below are in shared blocks: perhaps computed, never written
        ("num_lost_tokens", np.int32),  # computed before the group was preempted, until it has resumed
        ("num_new", np.int32),  # tokens that the step being planned computes
        ("max_total_tokens", np.int32),
        ("prompt_logprobs_end", np.int32),  # positions below have had their prompt log-probabilities
        ("num_registered", np.int32),  # blocks that the prefix cache has been told of, or NEVER
        ("chain_hash", np.uint64),  # of the last of them
        ("chain_serial", np.int64),
        ("salt", np.int64),  # whose cached prefixes it shares
        ("priority", np.int64),
        ("arrival", np.int64),
        ("serial", np.int64),  # ascending by admission, never used twice; NO_SERIAL = the row is free
        ("last_scheduled", np.int64),  # number of the row's last step
        ("reset", np.bool_),  # no step yet since it was admitted or resumed
        ("is_pending", np.bool_),  # to fork once the first of its group has computed the prompt
        ("is_beam", np.bool_),  # waits for its token to be chosen
    ],
    align=True,
)


class Rows(NamedTuple):
    """What every step reads and writes, by row.

    [0, num_computed_tokens)                    in the KV cache once the submitted steps are done
    [num_computed_tokens, num_tokens)           known, to be computed
    [num_tokens, num_tokens + num_in_flight)    being sampled: on the device, not known here yet

    The rows of a group have the same serial and stand side by side in `running`.
    """

    at: Any  # ROW[num_rows], records: one array where twenty would cost a call, and its compilation, more
    tokens: NDArray[np.int32]  # [num_rows, max_model_len], prompt and output
    stop_token_ids: NDArray[np.int32]  # [num_rows, n], ended by -1; n grows
    running: NDArray[np.int32]  # running[:num_running] are the rows that run, by priority, then arrival
    num_running: NDArray[np.int32]  # [1]


SAMPLING = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("seed_low", np.int32),
        ("seed_high", np.int32),
        ("group_index", np.int32),
        ("num_logprobs", np.int32),  # -1 = none
        ("num_prompt_logprobs", np.int32),  # -1 = none
        ("min_tokens", np.int32),  # of output, before which the banned ids are banned
        ("scales_logprobs", np.bool_),  # its log-probabilities are those after temperature
        ("wants_history", np.bool_),  # its sampling needs the ids of all its tokens on the device
    ],
    align=True,
)


class SamplingRows(NamedTuple):
    """What is fixed when a sequence enters and only packed, by row."""

    at: Any  # SAMPLING[num_rows], records
    banned_token_ids: NDArray[np.int32]  # [num_rows, n], ended by -1; n grows


def create_rows(num_rows: int, max_model_len: int) -> Rows:
    """Return `num_rows` free rows."""
    at = np.zeros(num_rows, ROW).view(np.recarray)
    at.serial.fill(NO_SERIAL)
    return Rows(
        at=at,
        tokens=np.zeros((num_rows, max_model_len), np.int32),
        stop_token_ids=np.zeros((num_rows, 1), np.int32),
        running=np.zeros(num_rows, np.int32),
        num_running=np.zeros(1, np.int32),
    )


def create_sampling_rows(num_rows: int) -> SamplingRows:
    """Return the sampling side of `num_rows` free rows."""
    at = np.zeros(num_rows, SAMPLING).view(np.recarray)
    return SamplingRows(at, np.zeros((num_rows, 1), np.int32))


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
def begin_group(rows: Rows, group: NDArray[np.int32], serial: int) -> None:
    """Give the filled rows of a group their serial; let all but the first wait for it, to fork.

    The prefix cache is to be told of their blocks from the first one on.
    """
    for i in range(group.size):
        at = rows.at[group[i]]
        at.serial = serial
        at.is_pending = i > 0 and at.num_tokens > 0
        at.chain_hash = root_hash(at.salt)
        at.chain_serial = ROOT


def load_row(rows: Rows, row: int, seq: Sequence, *, salt: int) -> Rows:
    """Fill a free row with a sequence; return rows, whose table of stop ids may have grown."""
    group, known = seq.group, seq.token_ids
    rows.tokens[row, : len(known)] = known
    values = {
        "num_tokens": len(known),
        "num_prompt_tokens": len(group.prompt_token_ids),
        "num_lost_tokens": seq.num_lost_tokens,
        "max_total_tokens": group.max_total_tokens,
        "prompt_logprobs_end": seq.prompt_logprobs_end,
        "salt": salt,
        "priority": group.priority,
        "arrival": group.arrival,
        "is_beam": group.is_beam,
    }
    rows.at[row] = tuple(values.get(name, 0) for name in ROW.names or ())
    table = _write_ids(rows.stop_token_ids, row, group.stop_token_ids)
    return rows if table is rows.stop_token_ids else rows._replace(stop_token_ids=table)


def unload_row(rows: Rows, row: int, seq: Sequence) -> None:
    """Keep in the sequence what its row knew; a token in flight will be sampled anew, and be the same."""
    at = rows.at[row]
    seq.token_ids = rows.tokens[row, : at.num_tokens].copy()
    seq.num_lost_tokens = max(int(at.num_computed_tokens), int(at.num_lost_tokens))
    seq.prompt_logprobs_end = int(at.prompt_logprobs_end)


def load_sampling_row(sampling: SamplingRows, row: int, seq: Sequence) -> SamplingRows:
    """Fill a row with a sequence's parameters; return sampling, whose table of banned ids may have grown."""
    group, params = seq.group, seq.group.params
    logprobs = group.num_candidates if group.is_beam else params.logprobs
    prompt_logprobs = params.prompt_logprobs if seq.index == 0 else None  # of one prompt, once
    seed_low, seed_high = np.array([group.seed % 2**64], np.uint64).view(np.int32).tolist()
    values = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_k": params.top_k,
        "seed_low": seed_low,
        "seed_high": seed_high,
        "group_index": seq.index,
        "num_logprobs": -1 if logprobs is None else logprobs,
        "num_prompt_logprobs": -1 if prompt_logprobs is None else prompt_logprobs,
        "min_tokens": params.min_tokens,
        "scales_logprobs": group.is_beam,
    }
    sampling.at[row] = tuple(values.get(name, 0) for name in SAMPLING.names or ())
    table = _write_ids(sampling.banned_token_ids, row, group.banned_token_ids)
    return sampling if table is sampling.banned_token_ids else sampling._replace(banned_token_ids=table)
