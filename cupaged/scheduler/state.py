"""Rows: what the scheduler knows of every live sequence, as arrays allocated once.

A live sequence is a row. Large arrays start as untouched zero pages, so a row costs memory only as
far as it is filled.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.sequence import Sequence

NO_SERIAL = -1
_WORD = 0xFFFFFFFF


class Rows(NamedTuple):
    """What every step reads and writes, by row; int32[num_rows] unless noted.

    [0, num_computed_tokens)                    in the KV cache once the submitted steps are done
    [num_computed_tokens, num_tokens)           known, to be computed
    [num_tokens, num_tokens + num_in_flight)    being sampled: on the device, not known here yet
    """

    tokens: NDArray[np.int32]  # [num_rows, max_model_len], prompt and output
    num_tokens: NDArray[np.int32]
    num_prompt_tokens: NDArray[np.int32]
    num_in_flight: NDArray[np.int32]  # 0 or 1 when a step is planned, up to the steps in flight after it
    num_computed_tokens: NDArray[np.int32]
    num_new: NDArray[np.int32]  # tokens that the step being planned computes
    max_total_tokens: NDArray[np.int32]
    serial: NDArray[np.int64]  # ascending by arrival, never used twice; NO_SERIAL = the row is free
    last_scheduled: NDArray[np.int64]  # number of the row's last step
    reset: NDArray[np.bool_]  # no step yet since it was admitted or resumed
    prompt_logprobs_end: NDArray[np.int32]  # positions below have had their prompt log-probabilities
    stop_token_ids: NDArray[np.int32]  # [num_rows, n], ended by -1; n grows
    running: NDArray[np.int32]  # running[:num_running] are the rows that run, by arrival
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
    wants_history: NDArray[np.bool_]  # its sampling needs the ids of all its tokens on the device


def create_rows(num_rows: int, max_model_len: int) -> Rows:
    """Return `num_rows` free rows."""
    dtypes: dict[str, Any] = {"serial": np.int64, "last_scheduled": np.int64, "reset": np.bool_}
    shapes = {"tokens": (num_rows, max_model_len), "stop_token_ids": (num_rows, 1), "num_running": (1,)}
    rows = Rows(**{n: np.zeros(shapes.get(n, num_rows), dtypes.get(n, np.int32)) for n in Rows._fields})
    rows.serial.fill(NO_SERIAL)
    return rows


def create_sampling_rows(num_rows: int) -> SamplingRows:
    """Return the sampling side of `num_rows` free rows."""
    dtypes: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "min_p"), np.float32)
    dtypes["wants_history"] = np.bool_
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


def load_row(rows: Rows, row: int, seq: Sequence, serial: int) -> Rows:
    """Fill a free row with a new sequence; return rows, whose table of stop ids may have grown."""
    num_prompt = len(seq.prompt_token_ids)
    rows.tokens[row, :num_prompt] = seq.prompt_token_ids
    rows.num_tokens[row] = rows.num_prompt_tokens[row] = num_prompt
    rows.num_in_flight[row] = rows.num_computed_tokens[row] = rows.num_new[row] = 0
    rows.max_total_tokens[row] = seq.max_total_tokens
    rows.serial[row] = serial
    rows.prompt_logprobs_end[row] = 0
    return rows._replace(stop_token_ids=_write_ids(rows.stop_token_ids, row, seq.stop_token_ids))


def load_sampling_row(sampling: SamplingRows, row: int, seq: Sequence) -> SamplingRows:
    """Fill a row with a sequence's parameters; return sampling, whose table of banned ids may have grown."""
    params = seq.params
    sampling.temperature[row] = params.temperature
    sampling.top_p[row] = params.top_p
    sampling.min_p[row] = params.min_p
    sampling.top_k[row] = params.top_k
    sampling.seed[row] = np.array([seq.seed & _WORD, seq.seed >> 32 & _WORD], np.uint32).view(np.int32)
    sampling.group_index[row] = seq.index
    sampling.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
    sampling.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
    sampling.min_tokens[row] = params.min_tokens
    sampling.wants_history[row] = False
    return sampling._replace(
        banned_token_ids=_write_ids(sampling.banned_token_ids, row, seq.banned_token_ids)
    )
