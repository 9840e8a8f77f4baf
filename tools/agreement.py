"""Agreement: whether a backend computes what the CPU backend computes, but for rounding.

The reference generates greedily on the CPU. The other backend is then led along the reference's tokens by the
real scheduler and worker, with so small a budget that there are prefill chunks and mixed batches, and in one
of WAYS: with so few blocks that requests are preempted, and recomputed or swapped; out of the prefix cache;
or forked. Its logits are held to the reference's wherever a token is sampled. The rule:

    no logit differs by more than a tolerance, which follows from the roundings that a backend does
    the sampled token is the reference's wherever the reference's two largest logits lie further apart than
    twice the tolerance, and they lie nearer in at most 3 % of the positions

    lead = reference(model_dir)  # of make_tiny_model.CLEAR_CASES
    trace = follow(model_dir, lead, way=WAYS["swapped"], device="cuda")
    print(compare(lead, trace, tolerance(model_dir)))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, create_backend
from cupaged.batch import Batch, StepOutput
from cupaged.config import EngineConfig, PreemptionMode
from cupaged.engine.llm_engine import scheduler_config
from cupaged.models import load_model_config
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler import Scheduler
from cupaged.sequence import SequenceGroup
from cupaged.worker.executor import Executor, UniprocExecutor
from cupaged.worker.kv_cache import block_bytes

CreateBackend = Callable[[EngineConfig, str], Backend]

# Around blocks of 16 tokens, prefill tiles of 64 and decode splits of 512, which the first outgrows.
PROMPT_LENGTHS = (506, 1, 15, 47, 16, 64, 17, 31, 95, 3, 97)  # tokens
OUTPUT_LENGTH = 16  # tokens, of each request
MAX_MODEL_LEN = 528  # tokens
MAX_NUM_BATCHED_TOKENS = 72
NUM_BLOCKS = MAX_MODEL_LEN // 16 + 2  # of 16 tokens: the longest fits beside two short ones

MAX_EXCLUDED = 0.03  # share of positions
# The largest relative error of one rounding.
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Of a layer's results, the residual twice: norm, qkv, rope, attention, o, residual, norm, gate_up, silu_mul,
# down, residual.
ROUNDINGS = 11
LARGEST_DEVIATION = 5.0  # standard deviations: a normal error passes it once in 1.7 million logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the requests are run."""

    num_blocks: int
    num_host_blocks: int = 0
    preemption_mode: PreemptionMode = "recompute"
    caches_prefixes: bool = False
    num_rounds: int = 1  # all requests come so often, each time after the last one's end
    num_sequences: int = 1  # of each request
    interval: int = 0  # steps between two requests, of which each goes before those that are there
    happens: tuple[Counter, ...] = ()  # what must really have happened


WAYS = {
    "recomputed": Way(num_blocks=NUM_BLOCKS, happens=(Counter.PREEMPTIONS, Counter.RECOMPUTED_TOKENS)),
    "swapped": Way(
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_BLOCKS,
        preemption_mode="swap",
        interval=1,
        happens=(Counter.SWAPPED_OUT_BLOCKS, Counter.SWAPPED_IN_BLOCKS),
    ),
    "cached": Way(
        num_blocks=2 * NUM_BLOCKS, caches_prefixes=True, num_rounds=2, happens=(Counter.PREFIX_HIT_TOKENS,)
    ),
    "forked": Way(num_blocks=2 * NUM_BLOCKS, num_sequences=3, happens=(Counter.FORKS, Counter.COPIED_BLOCKS)),
}


class Trace(NamedTuple):
    """What a backend made of the requests: a row for each sampled token, request by request.

    With several rounds or sequences, all requests' rows for one come before those for the next.
    """

    logits: NDArray[np.float32]  # [num_samples, vocab_size]
    token_ids: NDArray[np.int32]  # [num_samples], as the backend sampled them: the most likely ones
    num_chunks: int  # prefill chunks that sampled nothing
    num_mixed_steps: int  # of decodes and prefills
    counters: NDArray[np.int64]  # of the scheduler, by Counter

    @property
    def num_preemptions(self) -> int:
        """Return how many requests were preempted."""
        return int(self.counters[Counter.PREEMPTIONS])


class Agreement(NamedTuple):
    """What the rule says of a backend."""

    num_samples: int
    largest: float  # difference of two logits
    tolerance: float
    spread: float  # of the reference's logits: the standard deviation over the vocabulary
    num_excluded: int  # positions whose two largest logits are too near each other to tell
    num_different: int  # tokens that differ elsewhere

    @property
    def excluded(self) -> float:
        """Return the share of positions that are excluded."""
        return self.num_excluded / self.num_samples

    @property
    def problems(self) -> list[str]:
        """Return what breaks the rule; nothing if the backend agrees."""
        found = []
        if not self.largest <= self.tolerance:  # nor is NaN
            found.append(f"logits differ by up to {self.largest:.4g}, more than {self.tolerance:.4g}")
        if self.num_different:
            found.append(f"{self.num_different} of {self.num_samples} tokens differ")
        if self.excluded > MAX_EXCLUDED:
            found.append(f"{self.excluded:.1%} of positions are too near to tell, over {MAX_EXCLUDED:.0%}")
        return found

    def __str__(self) -> str:
        verdict = "; ".join(self.problems) or "agrees"
        return (
            f"{verdict}: {self.num_samples} positions, largest difference {self.largest:.4g} of at most "
            f"{self.tolerance:.4g}, logits' spread {self.spread:.3g}, {self.excluded:.1%} excluded"
        )


class Recorder:
    """A backend that also keeps the logits it samples from."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.chunks: list[Callable[[], NDArray[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        """Return all else as the backend has it."""
        return getattr(self._backend, name)

    def run_sampling(self, batch: Batch, hidden: Array, sample: Callable[[], Any]) -> Any:  # noqa: ARG002
        """Return sample(): a replay would not come by here."""
        return sample()

    def sample(self, logits: Array, batch: Batch, first: int) -> None:
        """Fetch the logits, also in a rehearsal, so that there is room for them."""
        self.chunks.append(self._backend.fetch(logits))
        self._backend.sample(logits, batch, first)


def reference(model_dir: Path) -> Trace:
    """Return what the CPU backend generates, each prompt in one piece and with room for all."""
    way = Way(num_blocks=len(PROMPT_LENGTHS) * NUM_BLOCKS)
    return _trace(model_dir, create_backend, way, device="cpu", num_threads=1)


def follow(
    model_dir: Path,
    lead: Trace,
    create_backend: CreateBackend = create_backend,
    way: Way = WAYS["recomputed"],
    **options: Any,
) -> Trace:
    """Return what a backend makes of the tokens of `lead`; `options` are EngineConfig's."""
    options = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, **options}
    return _trace(model_dir, create_backend, way, lead, **options)


def tolerance(model_dir: Path) -> float:
    """Return how far two logits may be apart, as a share of their spread.

    A rounding moves a value by an error that is uniform within the unit, the squares of independent errors
    add up, and the sum of so many is normal. Norms keep the error in proportion, and so the logits have it,
    whose spread is what random weights make of a random vector. Weights that are rounded are no error: both
    backends read the same ones. Seen in the emulator: the largest differences were 0.49 to 0.75 of this, over
    six seeds of each of CLEAR_CASES.
    """
    model = load_model_config(model_dir)
    return LARGEST_DEVIATION * UNITS[model.dtype] * sqrt(ROUNDINGS * model.num_layers / 3)


def compare(lead: Trace, trace: Trace, share: float) -> Agreement:
    """Apply the rule; the tolerance is that share of the logits' spread."""
    spread = float(lead.logits.std(axis=1).mean())
    tolerance = share * spread
    second, first = np.partition(lead.logits, -2, axis=1)[:, -2:].T
    is_clear = first - second > 2 * tolerance  # [num_samples of the lead]
    is_other = (trace.token_ids.reshape(-1, len(is_clear)) != lead.token_ids) & is_clear
    errors = np.abs(trace.logits.reshape(-1, *lead.logits.shape) - lead.logits)
    return Agreement(
        num_samples=len(trace.logits),
        largest=float(errors.max()),
        tolerance=tolerance,
        spread=spread,
        num_excluded=int((~is_clear).sum()) * len(errors),
        num_different=int(is_other.sum()),
    )


def _trace(
    model_dir: Path, create_backend: CreateBackend, way: Way, lead: Trace | None = None, **options: Any
) -> Trace:
    """Run the requests to their end, along the tokens of `lead`."""
    model = load_model_config(model_dir)
    config = EngineConfig.create(
        model_dir,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(PROMPT_LENGTHS),
        preemption_mode=way.preemption_mode,
        enable_prefix_caching=way.caches_prefixes,
        scheduling_policy="priority" if way.interval else "fcfs",
        **options,
    )
    recorder = Recorder(create_backend(config, model.dtype))
    size = block_bytes(model, config.block_size, recorder.kv_dtype.itemsize)
    memory, swap_space = way.num_blocks * size, way.num_host_blocks * size / 2**30
    executor = UniprocExecutor(
        replace(config, kv_cache_memory=memory, swap_space=swap_space),
        model_dir,
        create_backend=lambda config, dtype: cast(Backend, recorder),  # noqa: ARG005
    )
    # One step at a time, so that the host knows all input tokens, and may exchange them.
    scheduler = Scheduler(replace(scheduler_config(config, executor), num_batches=1))
    trace = _Run(executor, recorder, scheduler, model.vocab_size).trace(way, lead)
    executor.close()
    for counter in way.happens:
        assert trace.counters[counter] > 0, f"{counter.name} are 0, so the run does not show what it should"
    return trace


class _Run:
    """Scheduler and executor over the requests, a step at a time."""

    def __init__(self, executor: Executor, recorder: Recorder, scheduler: Scheduler, vocab_size: int) -> None:
        self._executor, self._recorder, self._scheduler = executor, recorder, scheduler
        rng = np.random.Generator(np.random.PCG64(0))
        self._prompts = [rng.integers(0, vocab_size, length, np.int32) for length in PROMPT_LENGTHS]
        self._vocab_size = vocab_size
        self._num_chunks = self._num_mixed_steps = 0

    def trace(self, way: Way, lead: Trace | None) -> Trace:
        """Return what the backend makes of the requests."""
        num_samples = way.num_rounds * way.num_sequences * len(PROMPT_LENGTHS) * OUTPUT_LENGTH
        logits = np.full((num_samples, self._vocab_size), np.nan, np.float32)
        token_ids = np.full(num_samples, -1, np.int32)
        by_round = [np.split(each, way.num_rounds) for each in (logits, token_ids)]
        for round_logits, round_ids in zip(*by_round, strict=True):
            self._run_round(way, round_logits, round_ids, lead)
        counters = self._scheduler.counters.copy()
        return Trace(logits, token_ids, self._num_chunks, self._num_mixed_steps, counters)

    def _run_round(
        self,
        way: Way,
        logits: NDArray[np.float32],
        token_ids: NDArray[np.int32],
        lead: Trace | None,
    ) -> None:
        """Run all requests to their end and fill their rows."""
        scheduler = self._scheduler
        groups = [
            SequenceGroup(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0),
                max_total_tokens=len(prompt) + OUTPUT_LENGTH,
                num_sequences=way.num_sequences,
                priority=-i if way.interval else 0,
            )
            for i, prompt in enumerate(self._prompts)
        ]
        num_added = num_steps = 0
        while num_added < len(groups) or scheduler.has_unfinished():
            while num_added < len(groups) and num_added * way.interval <= num_steps:
                scheduler.add(groups[num_added])
                num_added += 1
            num_steps += 1
            batch = scheduler.schedule()
            assert batch is not None, "nothing is in flight, so something can run"
            self._num_chunks += batch.num_seqs - batch.num_logits
            self._num_mixed_steps += 0 < batch.num_decodes < batch.num_seqs
            samples = _samples(groups, batch)
            output, logits[samples] = self._step(batch)
            token_ids[samples] = output.token_ids[batch.logit_seq, 0]
            if lead is not None:
                output.token_ids[batch.logit_seq, 0] = lead.token_ids[samples % len(lead.token_ids)]
            scheduler.update(batch, output)

    def _step(self, batch: Batch) -> tuple[StepOutput, NDArray[np.float32]]:
        """Run a step; return what it gives back and its logits, [num_logits, vocab_size]."""
        self._recorder.chunks.clear()
        output = self._executor.submit(batch).result()
        none = np.empty((0, self._vocab_size), np.float32)
        logits = np.concatenate([none, *(fetch() for fetch in self._recorder.chunks)])
        return output, logits[: batch.num_logits]


def _samples(groups: Sequence[SequenceGroup], batch: Batch) -> NDArray[np.int64]:
    """Return which of a round's samples the logits of the batch are."""
    first = {
        seq.row: (seq.index * len(groups) + i) * OUTPUT_LENGTH
        for i, group in enumerate(groups)
        for seq in group.sequences
        if seq.row >= 0
    }
    by_seq = np.array([first[row] for row in batch.rows.tolist()]) + batch.output_position
    samples: NDArray[np.int64] = by_seq[batch.logit_seq]
    return samples
