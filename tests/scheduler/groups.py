"""Sequence groups and small schedulers for tests, and what each sequence must generate."""

from typing import Any

import numpy as np

from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import SequenceGroup
from tests.scheduler.scripted import cells, next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
SEEDED = SamplingParams(temperature=1.0, max_tokens=None)  # siblings say different things


def make_group(
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    n: int = 1,
    params: SamplingParams = SEEDED,
    stop: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **fields: Any,
) -> SequenceGroup:
    """Return a waiting group; a prompt given as a length is tokens 1, 2, 3, ..."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    return SequenceGroup(
        request_id="",
        prompt_token_ids=np.array(tokens, np.int32),
        params=params,
        max_total_tokens=len(tokens) + max_tokens,
        num_sequences=n,
        stop_token_ids=stop,
        banned_token_ids=banned,
        **fields,
    )


def expected_output(group: SequenceGroup, index: int = 0) -> list[int]:
    """Return what a group's sequence must have generated when it ends by itself."""
    index = index if group.params.temperature > 0 else 0
    last = cells(group.prompt_token_ids.tolist())[-1]
    output: list[int] = []
    while last.position + 1 < group.max_total_tokens:
        early = len(output) < group.params.min_tokens
        output.append(next_token(last, index, group.banned_token_ids if early else ()))
        last = last.follow(output[-1])
        if output[-1] in group.stop_token_ids:
            break
    return output


def make_scheduler(**options: Any) -> Scheduler:
    """Return a small scheduler; the prefix cache is off unless asked for, since prompts here look alike."""
    small: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "enable_prefix_caching": False,
    }
    return Scheduler(SchedulerConfig(**{**small, **options}))
