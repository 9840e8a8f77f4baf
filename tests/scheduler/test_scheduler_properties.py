"""Random arrivals, shapes, ends, pools and budgets: nothing leaks, everybody finishes, order is fair."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cupaged.sampling_params import SamplingParams
from cupaged.sequence import FinishReason, SequenceGroup, SequenceStatus
from tests.scheduler.groups import expected_output, make_group, make_scheduler
from tests.scheduler.harness import Harness
from tests.scheduler.scripted import VOCAB_SIZE

TOKENS = st.integers(0, VOCAB_SIZE - 1)
PREFIX = list(range(24))  # prompts begin with some of it, so that they share

SCHEDULERS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 3, 2, 1]),
        "max_model_len": st.sampled_from([16, 24, 11, 6]),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.sampled_from([16, 8, 5, 3, 2, 1]),
        "num_batches": st.integers(1, 2),
        "num_host_blocks": st.sampled_from([12, 3, 12, 0]),
        "sliding_window": st.sampled_from([0, 0, 3, 7]),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "preemption_mode": st.sampled_from(["swap", "auto", "recompute"]),
        "prefill_rate": st.sampled_from([0.1, 2.0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler under everything that an engine may do to it, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness

    @initialize(options=SCHEDULERS, room=st.sampled_from([1.3, 1.6, 1.0, 2.0]), data=st.data())
    def start(self, options: dict[str, Any], room: float, data: st.DataObject) -> None:
        """Start with a pool of `room` times what the longest sequence takes, and some groups."""
        self.max_model_len = options["max_model_len"]
        longest = -(-self.max_model_len // options["block_size"])
        scheduler = make_scheduler(num_blocks=max(2, int(room * longest)), **options)
        self.harness = Harness(scheduler, options["num_batches"])
        for times in range(1, 4):
            self.add(data, times)

    @rule(data=st.data(), times=st.integers(1, 4))
    def arrive(self, data: st.DataObject, times: int) -> None:
        self.add(data, times)

    def add(self, data: st.DataObject, times: int) -> None:
        """Add equal groups; those that could never run are refused and leave nothing behind."""
        config = self.harness.scheduler.config
        shared = data.draw(st.integers(0, self.max_model_len - 2))
        own = data.draw(st.lists(TOKENS, min_size=1, max_size=min(4, self.max_model_len - 1 - shared)))
        most = self.max_model_len - shared - len(own)
        max_tokens = data.draw(st.one_of(st.just(most), st.integers(1, most)))
        is_beam = data.draw(st.sampled_from([False, False, True]))
        stop = () if is_beam else tuple(data.draw(st.lists(TOKENS, max_size=5)))
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            max_tokens=max_tokens,
            min_tokens=0 if is_beam else data.draw(st.integers(0, max_tokens)),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0])),
        )
        n = data.draw(st.integers(1, min(3, config.max_num_seqs)))
        priority = data.draw(st.integers(0, 2)) if config.policy == "priority" else 0
        salts = data.draw(st.sampled_from([(), (), (("cache_salt", "x"),)]))
        for _ in range(times):
            group = make_group(
                [*PREFIX[:shared], *own],
                max_tokens,
                n=n,
                params=params,
                stop=stop,
                banned=stop,
                is_beam=is_beam,
                priority=priority,
                cache_salts=salts,
            )
            refusal = ""
            try:
                self.harness.add(group)
            except ValueError as error:
                refusal = str(error)
            assert not refusal or (n > 1 and "KV blocks" in refusal)

    @precondition(lambda self: len(self.harness.in_flight) < self.harness.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @rule(steps=st.integers(1, 16))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(self.harness.groups)))

    @precondition(lambda self: any(not group.is_beam for group in self.harness.groups))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        groups = [group for group in self.harness.groups if not group.is_beam]
        group = data.draw(st.sampled_from(groups))
        self.harness.stop(data.draw(st.sampled_from(group.sequences)))

    @rule()
    def reset(self) -> None:
        self.harness.scheduler.reset_prefix_cache()
        self.harness.check()
        assert not self.harness.cached_blocks()

    def teardown(self) -> None:
        """Let everybody finish; then all must be as if each had run alone."""
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.run()
        scheduler = harness.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_blocks) == (0, 0, 0)
        assert scheduler.num_free_blocks == scheduler.config.num_blocks
        host_blocks = scheduler.block_manager.host_blocks
        assert host_blocks.num.free[0] == scheduler.config.num_host_blocks
        for group in harness.groups:
            self.check_outputs(group)
        if scheduler.config.policy == "fcfs":
            entered = [group for group in harness.groups if group in harness.admitted]
            assert harness.admitted == entered, "admission is not by arrival"

    def check_outputs(self, group: SequenceGroup) -> None:
        assert group.status is SequenceStatus.FINISHED
        positions = self.harness.prompt_positions[group]
        assert positions == list(range(len(positions)))
        if not self.harness.ended.intersection(group.sequences):
            wanted = group.params.prompt_logprobs is not None
            assert len(positions) == (len(group.prompt_token_ids) - 1 if wanted else 0)
        for seq in group.sequences:
            assert seq.row == -1
            if group.is_beam:
                continue
            output, expected = self.harness.outputs[seq], expected_output(group, seq.index)
            assert output == expected[: len(output)]
            if seq.finish_reason is FinishReason.ABORT or output != expected:
                assert seq in self.harness.ended


SchedulerMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
