"""A model without arithmetic: the next token is a fixed function of all ids before it and its position.

ScriptedExecutor keeps the ids in a paged cache and reads them through the block tables, so that a block that
is wrong, lost or overwritten gives other tokens. It runs a step at once, or late: only when the result is
asked for, with two steps in flight, so that a loop that reuses a batch's buffer too early, or that needs a
token too soon, goes wrong. Or it runs some at once and others late, as the CPU does.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Limits, MemoryUse
from cupaged.batch import Batch, Flag, StepOutput, TokenLogprobs
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.memory_plan import MemoryPlan
from cupaged.worker.swap_rates import SwapRates

VOCAB_SIZE = 64

MODEL_CONFIG = ModelConfig(
    model_type="scripted",
    vocab_size=VOCAB_SIZE,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=256,
)

NextToken = Callable[[int, int], int]
Late = bool | Literal["decodes"]  # which steps are


def next_token(seen: int, position: int) -> int:
    """Return the id after what was `seen` up to `position`; never one below 8, so EOS is out of reach."""
    return 8 + (5 * seen + 3 * position + 1) % (VOCAB_SIZE - 8)


def seen(token_ids: NDArray[np.int32], index: int = 0) -> int:
    """Return what stands for all these ids, and for the index of a sequence that draws at random."""
    return int(token_ids @ np.arange(1, len(token_ids) + 1)) + index


def continuation(
    prompt: list[int], length: int, follow: NextToken = next_token, *, index: int = 0
) -> list[int]:
    """Return the `length` ids that the scripted model gives after `prompt`."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(follow(seen(np.array(ids, np.int32), index), len(ids) - 1))
    return ids[len(prompt) :]


class _Step:
    """A step in line."""

    def __init__(self, executor: "ScriptedExecutor", batch: Batch) -> None:
        self.batch = batch
        self.output: StepOutput | None = None
        self._executor = executor

    def result(self) -> StepOutput:
        """Run what is before it, then it, unless they have run."""
        while self.output is None:
            self._executor.run_next()
        return self.output


class ScriptedExecutor:
    """Executor over `follow`; late = two steps in flight, run when their result is asked for."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        late: Late = False,
        follow: NextToken = next_token,
    ) -> None:
        self.plan = MemoryPlan(
            limits=Limits(
                num_tokens=config.max_num_batched_tokens,
                num_seqs=config.max_num_seqs,
                seq_len=config.max_model_len or 256,
                block_size=config.block_size,
                num_slots=num_blocks * config.block_size,
                num_host_blocks=num_host_blocks,
            ),
            use=MemoryUse(weights=0, workspace=0, activations=0, reserve=0),
            num_blocks=num_blocks,
            block_bytes=1,
            available=num_blocks,
        )
        self.model_config = MODEL_CONFIG
        self.swap_rates = SwapRates(bandwidth=1.0, prefill_rate=1.0)
        self.max_in_flight = 2 if late else 1
        self.begun: deque[_Step] = deque()  # not run yet
        self.num_run = 0  # steps
        self.is_closed = False
        self._late = late
        self._follow = follow
        self._last_token = np.zeros(config.max_num_seqs, np.int32)
        self._blocks = np.full((num_blocks, config.block_size), -1, np.int32)
        self._host_blocks = np.full((num_host_blocks, config.block_size), -1, np.int32)

    def submit(self, batch: Batch) -> _Step:
        """Run the step now, or leave it to result()."""
        step = _Step(self, batch)
        self.begun.append(step)
        if not self.is_async(batch):
            self.synchronize()
        return step

    def is_async(self, batch: Batch) -> bool:
        """Return whether the step is left to result()."""
        return batch.num_decodes == batch.num_seqs if self._late == "decodes" else self._late

    def run_next(self) -> None:
        """Run the first step in line."""
        step = self.begun.popleft()
        step.output = self._execute(step.batch)
        self.num_run += 1

    def synchronize(self) -> None:
        """Run all steps in line."""
        while self.begun:
            self.run_next()

    def close(self) -> None:
        """Wait, and remember that it was closed."""
        self.is_closed = True
        self.synchronize()

    def _execute(self, batch: Batch) -> StepOutput:
        self._host_blocks[batch.swap_out[:, 1]] = self._blocks[batch.swap_out[:, 0]]
        self._blocks[batch.swap_in[:, 1]] = self._host_blocks[batch.swap_in[:, 0]]
        self._blocks[batch.copy[:, 1]] = self._blocks[batch.copy[:, 0]]
        last = batch.query_start[1:] - 1
        chained = (batch.flags & Flag.INPUT_FROM_LAST_TOKEN) != 0
        batch.input_ids[last[chained]] = self._last_token[batch.rows[chained]]
        is_written = batch.slot_mapping >= 0
        self._blocks.reshape(-1)[batch.slot_mapping[is_written]] = batch.input_ids[is_written]
        token_ids = np.full((batch.num_seqs, 1), -1, np.int32)
        samples = (batch.flags & Flag.SAMPLES) != 0
        for i in np.flatnonzero(samples).tolist():
            index = int(batch.group_index[i]) if batch.temperature[i] > 0 else 0
            end = int(batch.seq_lens[i])
            context = self._blocks[batch.block_tables[i]].reshape(-1)[:end]
            token_ids[i] = self._follow(seen(context, index), end - 1)
        self._last_token[batch.rows[samples]] = token_ids[samples, 0]
        return StepOutput(token_ids, samples.astype(np.int32), _logprobs(batch, token_ids))


def _logprobs(batch: Batch, token_ids: NDArray[np.int32]) -> TokenLogprobs | None:
    """Return log-probability -id/8 for each token that asked, its own first and then ids 0, 1 and so on."""
    entries = []
    num_top = 2
    for seq, target in zip(batch.logit_seq.tolist(), batch.logit_target.tolist(), strict=True):
        wanted = int((batch.num_prompt_logprobs if target >= 0 else batch.num_logprobs)[seq])
        if wanted >= 0:
            entries.append((seq, target >= 0, target if target >= 0 else int(token_ids[seq, 0])))
            num_top = max(num_top, wanted)
    if not entries:
        return None
    ids = np.array([[token_id, *range(num_top)] for _, _, token_id in entries], np.int32)
    return TokenLogprobs(
        seq=np.array([seq for seq, _, _ in entries], np.int32),
        is_prompt=np.array([is_prompt for _, is_prompt, _ in entries]),
        token_ids=ids,
        logprobs=(-ids / 8).astype(np.float32),
        ranks=ids[:, 0] + 1,
    )


def scripted(
    num_blocks: int = 64,
    late: Late = False,
    follow: NextToken = next_token,
    num_host_blocks: int = 0,
) -> Callable[[EngineConfig, Path], ScriptedExecutor]:
    """Return what LLMEngine takes as create_executor."""
    return lambda config, _: ScriptedExecutor(
        config, num_blocks=num_blocks, num_host_blocks=num_host_blocks, late=late, follow=follow
    )
