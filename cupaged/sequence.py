"""One prompt and what has been generated for it, as the scheduler and the engine share it.

A Sequence names things; the numbers that change every step live in the scheduler's arrays at `row`.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cupaged.sampling_params import SamplingParams


class SequenceStatus(IntEnum):
    """Where a sequence stands with the scheduler."""

    WAITING = 0  # not admitted yet: no row, no blocks
    RUNNING = 1  # has a row and blocks
    PREEMPTED = 2  # keeps its row and tokens, has no blocks; will be recomputed
    FINISHED = 3


class FinishReason(IntEnum):
    """Why a sequence ended; `str()` gives OpenAI's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    def __str__(self) -> str:
        return self.name.lower()


NOT_FINISHED = -1  # in arrays of FinishReason


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One prompt with its sampling parameters; `seed` is already drawn."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]  # [num_prompt_tokens]
    params: SamplingParams
    max_total_tokens: int  # prompt + output, never above max_model_len
    stop_token_ids: tuple[int, ...]  # end the sequence; includes EOS unless ignore_eos
    banned_token_ids: tuple[int, ...] = ()  # not sampled while fewer than min_tokens are out
    seed: int = 0  # 64 bits, the Philox key
    index: int = 0  # in its group, part of the Philox counter
    row: int = -1  # index in the scheduler's arrays, -1 while it has none
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
