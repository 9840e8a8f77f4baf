"""Two steps in flight: tokens that exist on the device and are not known here yet."""

import numpy as np
import pytest

from cupaged.batch import Flag, StepOutput
from cupaged.sequence import SequenceStatus
from tests.scheduler.groups import expected_output, make_group, make_scheduler
from tests.scheduler.harness import assert_all_as_expected, start


class TestInFlight:
    def test_second_step_takes_its_input_from_the_device(self) -> None:
        harness = start(make_group(3))
        harness.schedule()

        batch = harness.schedule()

        assert batch is not None
        assert batch.flags.tolist() == [Flag.SAMPLES | Flag.INPUT_FROM_LAST_TOKEN]
        assert batch.positions.tolist() == [3]

    def test_known_token_is_not_taken_from_the_device(self) -> None:
        harness = start(make_group(3))
        harness.step()

        batch = harness.schedule()

        assert batch is not None
        assert batch.flags.tolist() == [Flag.SAMPLES]

    def test_nothing_is_scheduled_beyond_max_total_tokens(self) -> None:
        harness = start(make_group(3, 1))
        harness.schedule()

        assert harness.schedule() is None

    def test_third_step_in_flight_is_refused(self) -> None:
        harness = start(make_group(3, 9))
        harness.schedule()
        harness.schedule()

        with pytest.raises(AssertionError, match="oldest batch"):
            harness.schedule()

    def test_batches_come_back_in_order(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_group(3, 9))
        scheduler.schedule()
        second = scheduler.schedule()
        assert second is not None

        with pytest.raises(AssertionError, match="in the order they went"):
            scheduler.update(second, StepOutput(np.ones((1, 1), np.int32), np.ones(1, np.int32)))

    def test_second_batch_leaves_the_first_untouched(self) -> None:
        harness = start(make_group(3, 9))
        first = harness.schedule()
        assert first is not None
        before = first.input_ids.copy()

        harness.schedule()

        assert np.array_equal(first.input_ids, before)

    def test_token_in_flight_of_a_sequence_preempted_meanwhile_is_sampled_anew(self) -> None:
        groups = [make_group([i, 5, 6, 7], 8) for i in range(3)]
        harness = start(*groups, num_blocks=4, max_model_len=16, max_in_flight=2)
        harness.schedule()
        harness.schedule()
        assert groups[2].status is SequenceStatus.PREEMPTED

        harness.update()

        assert harness.output(groups[2]) == []
        harness.run()
        assert_all_as_expected(harness, groups)

    def test_last_group_waits_for_a_block_that_a_step_in_flight_may_give_back(self) -> None:
        old, young = make_group([1, 5, 6, 7], 5), make_group([2, 5, 6, 7], 8)
        harness = start(old, young, num_blocks=4, max_model_len=16)
        harness.schedule()
        for _ in range(4):
            harness.schedule()
            harness.update()
        assert harness.schedule() is None  # old waits for its last token, young found no third block
        assert young.status is SequenceStatus.RUNNING
        harness.update()

        batch = harness.schedule()

        assert batch is not None
        assert batch.seq_lens.tolist() == [9]
        assert batch.flags.tolist() == [Flag.SAMPLES]
        harness.run()
        assert young.num_preemptions == 0
        assert_all_as_expected(harness, [old, young])

    def test_step_after_the_stop_token_is_discarded(self) -> None:
        group = make_group(3, 8, stop=tuple(expected_output(make_group(3, 1))))
        harness = start(group, max_in_flight=2)

        harness.run()

        assert len(harness.steps) == 2
        assert_all_as_expected(harness, [group])

    def test_one_batch_at_a_time_is_enough(self) -> None:
        groups = [make_group(5) for _ in range(3)]
        harness = start(*groups, num_batches=1)

        harness.run()

        assert_all_as_expected(harness, groups)
