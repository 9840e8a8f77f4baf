"""Random arrivals, lengths, aborts, pools and budgets: nothing leaks, everybody finishes, order is fair."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cupaged.sampling_params import SamplingParams
from cupaged.sequence import FinishReason, Sequence, SequenceStatus
from tests.scheduler.scripted import VOCAB_SIZE, Harness, expected_output, make_scheduler, make_sequence

TOKENS = st.integers(0, VOCAB_SIZE - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler under everything that an engine may do to it, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness
        self.arrived: list[Sequence] = []
        self.num_waits: dict[Sequence, int] = {}  # steps since the last one, while it decodes

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(4, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 9),
        max_in_flight=st.integers(1, 2),
    )
    def start(
        self, *, block_size: int, num_blocks: int, max_num_seqs: int, budget: int, max_in_flight: int
    ) -> None:
        self.max_model_len = min(24, block_size * num_blocks)
        self.max_num_seqs = max_num_seqs
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            num_batches=max_in_flight,
        )
        self.harness = Harness(scheduler, max_in_flight)

    @rule(data=st.data(), count=st.integers(1, 3))
    def arrive(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=self.max_model_len - 1))
            max_tokens = data.draw(st.integers(1, self.max_model_len - len(prompt)))
            stop = tuple(data.draw(st.lists(TOKENS, max_size=5)))
            min_tokens = data.draw(st.integers(0, max_tokens))
            wanted = data.draw(st.sampled_from([None, 0, 3]))
            params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=wanted)
            seq = make_sequence(prompt, max_tokens, stop=stop, banned=stop, params=params)
            self.harness.add(seq)
            self.arrived.append(seq)

    @precondition(lambda self: len(self.harness.in_flight) < self.harness.max_in_flight)
    @rule()
    def schedule(self) -> None:
        if self.harness.schedule() is not None:
            self.check_turns()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(self.arrived)))

    def check_turns(self) -> None:
        """Assert that a sequence that decodes never waits longer than for one turn of all others."""
        step = self.harness.steps[-1]
        for seq in self.arrived:
            if seq.status is not SequenceStatus.RUNNING or not self.harness.outputs[seq]:
                self.num_waits.pop(seq, None)
            elif step[seq] == 1:
                self.num_waits[seq] = 0
            elif seq in self.num_waits and not self.is_last_in_flight(seq):
                self.num_waits[seq] += 1
                assert self.num_waits[seq] <= self.max_num_seqs + 1

    def is_last_in_flight(self, seq: Sequence) -> bool:
        known = len(seq.prompt_token_ids) + len(self.harness.outputs[seq])
        pending = sum(seq in seqs for _, seqs in self.harness.in_flight)
        return known + pending >= seq.max_total_tokens

    def teardown(self) -> None:
        """Let everybody finish; then all must be as if each had run alone."""
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        scheduler = self.harness.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_blocks) == (0, 0, 0)
        for seq in self.arrived:
            output, expected = self.harness.outputs[seq], expected_output(seq)
            assert output == expected[: len(output)]
            positions = self.harness.prompt_positions[seq]
            assert positions == list(range(len(positions)))
            if seq.finish_reason is not FinishReason.ABORT:
                assert output == expected
                wanted = seq.params.prompt_logprobs is not None
                assert len(positions) == (len(seq.prompt_token_ids) - 1 if wanted else 0)
        entered = [seq for seq in self.arrived if seq in self.harness.admitted]
        assert self.harness.admitted == entered, "admission is not by arrival"


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
