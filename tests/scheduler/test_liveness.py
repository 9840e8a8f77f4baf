"""Nothing starves: the bound that Scheduler states, and the two reasons it gives for it."""

import numpy as np
import pytest

from cupaged.sequence import SequenceGroup, SequenceStatus
from tests.scheduler.groups import make_group
from tests.scheduler.harness import Harness, start
from tests.scheduler.scripted import VOCAB_SIZE

MAX_MODEL_LEN = 24


def order(group: SequenceGroup) -> tuple[int, int]:
    return group.priority, group.arrival


def work(group: SequenceGroup) -> int:
    return group.num_sequences * group.max_total_tokens


class Watch:
    """Adds groups, steps, and asserts the bound and its reasons after every step."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.num_rows = harness.scheduler.config.max_num_seqs
        self.bounds: dict[SequenceGroup, int] = {}  # number of the step in which it has finished at last
        self.first: SequenceGroup | None = None  # of the unfinished, in the order
        self.num_waits = 0  # steps since it last had a turn, or became the first
        self.num_preemptions = 0  # of the first, when it became that

    def add(self, group: SequenceGroup) -> None:
        """Queue a group; it delays those that it goes before, and no others."""
        self.harness.add(group)
        unfinished = [other for other in self.bounds if other.status is not SequenceStatus.FINISHED]
        for other in unfinished:
            if order(group) < order(other):
                self.bounds[other] += (self.num_rows + 1) * work(group)
        ahead = sum(work(other) for other in unfinished if order(other) < order(group))
        self.bounds[group] = len(self.harness.steps) + (self.num_rows + 1) * (ahead + work(group))

    def step(self) -> None:
        """Step, then check whose turn it was."""
        self.harness.step()
        unfinished = [group for group in self.bounds if group.status is not SequenceStatus.FINISHED]
        for group in unfinished:
            assert len(self.harness.steps) <= self.bounds[group], "a group takes longer than its bound"
        first = min(unfinished, key=order, default=None)
        if first is not self.first:
            self.first, self.num_waits = first, 0
            self.num_preemptions = first.num_preemptions if first else 0
        elif first and first not in self.harness.steps[-1]:
            self.num_waits += 1
            assert self.num_waits <= self.num_rows + 1, "the first of all has no turn"
        else:
            self.num_waits = 0
        if first:
            assert first.num_preemptions == self.num_preemptions, "the first of all is preempted"


@pytest.mark.parametrize("seed", range(24))
def test_group_finishes_within_the_stated_bound_whatever_arrives_behind_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = str(rng.choice(["fcfs", "priority"]))
    block_size = int(rng.integers(2, 5))
    harness = start(
        num_blocks=2 * -(-MAX_MODEL_LEN // block_size) + int(rng.integers(0, 3)),
        block_size=block_size,
        max_num_seqs=int(rng.integers(2, 6)),
        max_num_batched_tokens=int(rng.choice([1, 2, 3, 8])),
        max_model_len=MAX_MODEL_LEN,
        policy=policy,
        preemption_mode=str(rng.choice(["swap", "recompute"])),
        num_host_blocks=int(rng.choice([0, 8])),
        enable_prefix_caching=bool(rng.integers(2)),
        max_in_flight=int(rng.integers(1, 3)),
    )
    watch = Watch(harness)

    for _ in range(12):
        for _ in range(rng.integers(1, 3)):
            num_prompt = int(rng.integers(1, 14))
            watch.add(
                make_group(
                    rng.integers(0, VOCAB_SIZE, num_prompt).tolist(),
                    int(rng.integers(1, 10)),
                    n=int(rng.integers(1, 3)),
                    is_beam=bool(rng.random() < 0.2),
                    priority=int(rng.integers(3)) if policy == "priority" else 0,
                )
            )
        for _ in range(rng.integers(1, 8)):
            watch.step()
    while harness.scheduler.has_unfinished():
        watch.step()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_endless_stream_of_short_groups_starves_nobody(max_in_flight: int) -> None:
    harness = start(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=2, max_model_len=32)
    harness.max_in_flight = max_in_flight
    watch = Watch(harness)
    slow = make_group(20, 12)
    watch.add(slow)

    while slow.status is not SequenceStatus.FINISHED:
        watch.add(make_group([len(harness.steps) % VOCAB_SIZE], 1))
        watch.step()
