"""A model without arithmetic: the next token is a fixed function of the last input id and its position.

ScriptedExecutor runs it at once, or late: only when the result is asked for, with two steps in flight, so
that a loop that reuses a batch's buffer too early, or that needs a token too soon, goes wrong.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cupaged.backend.base import Limits, MemoryUse
from cupaged.batch import Batch, Flag, StepOutput, TokenLogprobs
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.memory_plan import MemoryPlan

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


def next_token(token_id: int, position: int) -> int:
    """Return the id that follows `token_id` at `position`; never one below 8, so that EOS is out of reach."""
    return 8 + (5 * token_id + 3 * position + 1) % (VOCAB_SIZE - 8)


def continuation(prompt: list[int], length: int, follow: NextToken = next_token) -> list[int]:
    """Return the `length` ids that the scripted model gives after `prompt`."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(follow(ids[-1], len(ids) - 1))
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
    """Executor over `follow`; late = two steps in flight, each run when its result is asked for."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int = 64,
        late: bool = False,
        follow: NextToken = next_token,
    ) -> None:
        self.plan = MemoryPlan(
            limits=Limits(
                num_tokens=config.max_num_batched_tokens,
                num_seqs=config.max_num_seqs,
                seq_len=config.max_model_len or 256,
                block_size=config.block_size,
                num_slots=num_blocks * config.block_size,
            ),
            use=MemoryUse(weights=0, workspace=0, activations=0, reserve=0),
            num_blocks=num_blocks,
            block_bytes=1,
            available=num_blocks,
        )
        self.model_config = MODEL_CONFIG
        self.max_in_flight = 2 if late else 1
        self.begun: deque[_Step] = deque()  # not run yet
        self.is_closed = False
        self._late = late
        self._follow = follow
        self._last_token = np.zeros(config.max_num_seqs, np.int32)

    def submit(self, batch: Batch) -> _Step:
        """Run the step now, or leave it to result()."""
        step = _Step(self, batch)
        self.begun.append(step)
        if not self._late:
            self.synchronize()
        return step

    def run_next(self) -> None:
        """Run the first step in line."""
        step = self.begun.popleft()
        step.output = self._execute(step.batch)

    def synchronize(self) -> None:
        """Run all steps in line."""
        while self.begun:
            self.run_next()

    def close(self) -> None:
        """Wait, and remember that it was closed."""
        self.is_closed = True
        self.synchronize()

    def _execute(self, batch: Batch) -> StepOutput:
        token_ids = np.full((batch.num_seqs, 1), -1, np.int32)
        for i in range(batch.num_seqs):
            last = batch.query_start[i + 1] - 1
            if batch.flags[i] & Flag.INPUT_FROM_LAST_TOKEN:
                batch.input_ids[last] = self._last_token[batch.rows[i]]
            if batch.flags[i] & Flag.SAMPLES:
                token_ids[i] = self._follow(int(batch.input_ids[last]), int(batch.positions[last]))
                self._last_token[batch.rows[i]] = token_ids[i, 0]
        samples = (batch.flags & Flag.SAMPLES).astype(np.int32)
        return StepOutput(token_ids, samples, _logprobs(batch, token_ids))


def _logprobs(batch: Batch, token_ids: np.ndarray) -> TokenLogprobs | None:
    """Return log-probability -id/8 for each token that asked, its own first and then ids 0 and 1."""
    entries = []
    for seq, target in zip(batch.logit_seq.tolist(), batch.logit_target.tolist(), strict=True):
        wanted = batch.num_prompt_logprobs[seq] if target >= 0 else batch.num_logprobs[seq]
        if wanted >= 0:
            entries.append((seq, target >= 0, target if target >= 0 else int(token_ids[seq, 0])))
    if not entries:
        return None
    ids = np.array([[token_id, 0, 1] for _, _, token_id in entries], np.int32)
    return TokenLogprobs(
        seq=np.array([seq for seq, _, _ in entries], np.int32),
        is_prompt=np.array([is_prompt for _, is_prompt, _ in entries]),
        token_ids=ids,
        logprobs=(-ids / 8).astype(np.float32),
        ranks=ids[:, 0] + 1,
    )


def scripted(
    num_blocks: int = 64, late: bool = False, follow: NextToken = next_token
) -> Callable[[EngineConfig, Path], ScriptedExecutor]:
    """Return what LLMEngine takes as create_executor."""
    return lambda config, _: ScriptedExecutor(config, num_blocks=num_blocks, late=late, follow=follow)
