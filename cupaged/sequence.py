"""A request's sequences as the scheduler and the engine share them: one prompt, what is generated for it.

A SequenceGroup and its sequences name things; the numbers that change every step live in the scheduler's
arrays, at each sequence's `row`.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cupaged.sampling_params import SamplingParams


class SequenceStatus(IntEnum):
    """Where a group stands with the scheduler; all its sequences move together."""

    WAITING = 0  # not admitted yet: no rows, no blocks
    RUNNING = 1  # has rows and blocks
    PREEMPTED = 2  # keeps its tokens, has neither rows nor blocks; will be recomputed
    SWAPPED = 3  # keeps its rows and tokens; its blocks are in host memory
    FINISHED = 4


class FinishReason(IntEnum):
    """Why a sequence ended; `str()` gives OpenAI's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    def __str__(self) -> str:
        return self.name.lower()


NOT_FINISHED = -1  # in arrays of FinishReason


_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a group's outputs, or one of its beams."""

    group: "SequenceGroup"
    index: int  # in the group, part of the Philox counter
    row: int = -1  # index in the scheduler's arrays, -1 while it has none
    finish_reason: FinishReason | None = None
    # What its row knew, while it has none; the scheduler's own.
    token_ids: NDArray[np.int32] = field(init=False)  # all that are known
    num_lost_tokens: int = 0  # had been computed when the group was preempted
    prompt_logprobs_end: int = 0  # positions below have had their prompt log-probabilities

    def __post_init__(self) -> None:
        """Begin with the prompt; a beam behind the first begins with nothing."""
        takes_part = self.index == 0 or not self.group.is_beam
        self.token_ids = self.group.prompt_token_ids if takes_part else _NO_TOKENS


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """The sequences of one request: one prompt, which they share; `seed` is already drawn."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]  # [num_prompt_tokens]
    params: SamplingParams
    max_total_tokens: int  # prompt + output of a sequence, never above max_model_len
    stop_token_ids: tuple[int, ...] = ()  # end a sequence; includes EOS unless ignore_eos
    banned_token_ids: tuple[int, ...] = ()  # not sampled while fewer than min_tokens are out
    seed: int = 0  # 64 bits, the Philox key
    num_sequences: int = 1
    # The engine chooses each token (beam search); beams take part once Scheduler.continue_beams says so.
    is_beam: bool = False
    num_candidates: int = 0  # beams: log-probabilities of the most likely tokens that the engine chooses from
    priority: int = 0  # lower goes first
    cache_salts: tuple[tuple[str, str], ...] = ()  # (kind, text): whose cached prefixes it may share
    sequences: list[Sequence] = field(init=False)  # by index
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = -1  # ascending in the order of Scheduler.add, which gives it
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was admitted

    def __post_init__(self) -> None:
        """Make the sequences."""
        self.sequences = [Sequence(self, index) for index in range(self.num_sequences)]

    @property
    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended, by index."""
        return [seq for seq in self.sequences if seq.finish_reason is None]
