"""LLMEngine over a scripted model: random groups in a tiny pool, by priority, with prefixes and aborts."""

import numpy as np
import pytest

from cupaged import SamplingParams
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from tests.engine.conftest import ALPHABET, MakeEngine
from tests.engine.scripted import VOCAB_SIZE, continuation

NUM_REQUESTS = 24


class Workload:
    """Requests, when each arrives and is aborted, and what comes of those that are not."""

    def __init__(self, seed: int) -> None:
        """Draw them."""
        self.rng = np.random.default_rng(seed)
        self.prefixes = [self.ids(length) for length in (0, 17, 32, 45)]
        self.prompts = [[*self.prefixes[i % 4], *self.ids(1 + i % 5)] for i in range(NUM_REQUESTS)]
        self.params = [self.draw_params(i) for i in range(NUM_REQUESTS)]
        self.arrivals = self.rng.integers(0, 40, NUM_REQUESTS).tolist()
        self.aborts = {
            i: at + int(self.rng.integers(0, 30)) for i, at in enumerate(self.arrivals) if i % 5 == 4
        }

    def ids(self, length: int) -> list[int]:
        return [int(token_id) for token_id in self.rng.integers(8, VOCAB_SIZE, length)]

    def draw_params(self, i: int) -> SamplingParams:
        n = 1 + i % 4
        return SamplingParams(
            temperature=1,
            n=n,
            best_of=n + 1 if i % 6 == 1 else None,
            max_tokens=int(self.rng.integers(1, 40)),
            stop=ALPHABET[int(self.rng.integers(8, VOCAB_SIZE))] if i % 3 == 0 else None,
            prompt_logprobs=0 if i % 7 == 2 else None,
        )

    def expected(self, i: int) -> list[str]:
        """Return the texts of a request's outputs."""
        params = self.params[i]
        assert params.max_tokens is not None
        found = []
        for index in range(params.num_sequences):
            ids = continuation(self.prompts[i], params.max_tokens, index=index)
            stops = [ALPHABET.index(text) for text in params.stop or ()]
            end = next((at for at, token_id in enumerate(ids) if token_id in stops), len(ids))
            mean = np.mean(ids[: end + 1])  # the scripted model's log-probabilities are -id/8
            found.append((mean, "".join(ALPHABET[token_id] for token_id in ids[:end])))
        if params.num_sequences > params.n:
            found.sort(key=lambda pair: pair[0])
        return [text for _, text in found[: params.n]]

    def run(self, engine: LLMEngine) -> dict[int, RequestOutput]:
        """Run all; return the last output of each that finished."""
        finished = {}
        for step in range(10_000):
            for i in np.flatnonzero(np.equal(self.arrivals, step)).tolist():
                engine.add_request(str(i), self.prompts[i], self.params[i], priority=i % 3)
            for i in [i for i, at in self.aborts.items() if at == step]:
                engine.abort(str(i))
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
            engine.scheduler.check_invariants()
            if step > 100 and not engine.has_unfinished():
                return finished
        raise AssertionError(f"{NUM_REQUESTS - len(finished)} requests have not ended in {step} steps")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [9, 64])
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_every_output_is_its_own_whatever_happens_around_it(
    make_engine: MakeEngine, seed: int, late: bool, budget: int, mode: str
) -> None:
    workload = Workload(seed)
    engine = make_engine(
        num_blocks=18,
        num_host_blocks=24,
        late=late,
        max_num_batched_tokens=budget,
        max_model_len=96,
        scheduling_policy="priority",
        preemption_mode=mode,
    )

    outputs = workload.run(engine)

    assert outputs.keys() >= set(range(NUM_REQUESTS)) - workload.aborts.keys()
    for i, output in outputs.items():
        assert [completion.text for completion in output.outputs] == workload.expected(i), f"request {i}"
        if workload.params[i].prompt_logprobs is not None:
            scored = [next(iter(entry)) for entry in (output.prompt_logprobs or [])[1:] if entry]
            assert scored == workload.prompts[i][1:]
    metrics = engine.get_metrics()
    for name in ("preemptions", "forks", "copied_blocks", "prefix_hit_tokens"):
        assert metrics[name] > 0, name
    if budget == 64:  # with 9, a victim may have nothing to swap yet
        assert (metrics["swapped_out_blocks"] > 0) == (mode != "recompute")
    assert engine.scheduler.num_used_blocks == 0
