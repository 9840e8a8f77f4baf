"""What the prefix cache finds, when, for whom, and what gives way when blocks run out."""

import itertools
from typing import Any

import numpy as np
import pytest

from cupaged.sampling_params import SamplingParams
from cupaged.scheduler import block_manager
from cupaged.scheduler.counters import Counter as Event
from cupaged.scheduler.prefix_cache import PrefixCache, create_prefix_cache
from cupaged.sequence import SequenceGroup
from tests.scheduler.groups import make_group, make_scheduler
from tests.scheduler.harness import Harness, assert_all_as_expected, count, start

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]  # a block each


def caching(*groups: SequenceGroup, **options: Any) -> Harness:
    return start(*groups, enable_prefix_caching=True, **options)


def run(harness: Harness, *groups: SequenceGroup) -> None:
    harness.add(*groups)
    harness.run()


class TestHits:
    def test_full_blocks_of_a_prompt_are_found(self) -> None:
        first, second = make_group([*A, *B, 9, 9]), make_group([*A, *B, 8, 8])
        harness = caching(first)
        harness.run()

        run(harness, second)

        assert second.num_cached_tokens == 8
        assert next(step[second] for step in harness.steps if second in step) == 2
        assert_all_as_expected(harness, [first, second])

    def test_output_is_found_as_far_as_its_keys_are_written(self) -> None:
        first = make_group(A, 8)
        harness = caching(first)
        harness.run()
        follow_up = make_group([*A, *harness.output(first), 5])  # 13 tokens, the 12th was never computed

        run(harness, follow_up)

        assert follow_up.num_cached_tokens == 8
        assert_all_as_expected(harness, [follow_up])

    def test_prompt_that_differs_in_its_first_token_finds_nothing(self) -> None:
        harness = caching(make_group([*A, *B]))
        harness.run()
        other = make_group([0, 2, 3, 4, *B])

        run(harness, other)

        assert other.num_cached_tokens == 0

    def test_equal_block_behind_another_prefix_is_not_found(self) -> None:
        harness = caching(make_group([*A, *C, 1]), make_group([*B, 1]))
        harness.run()
        other = make_group([*B, *C, 1])

        run(harness, other)

        assert other.num_cached_tokens == 4
        assert_all_as_expected(harness, [other])

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_fully_cached_prompt_computes_its_last_token_and_writes_nothing(self, max_in_flight: int) -> None:
        harness = caching(make_group([*A, *B]), max_in_flight=max_in_flight)
        harness.run()
        again = make_group([*A, *B])
        harness.add(again)

        batch = harness.schedule()

        assert batch is not None
        assert batch.positions.tolist() == [7]
        assert batch.slot_mapping.tolist() == [-1]
        assert again.num_cached_tokens == 7
        harness.run()
        assert_all_as_expected(harness, [again])

    def test_blocks_in_use_are_shared_not_copied(self) -> None:
        first, second = make_group([*A, *B, 1], 9), make_group([*A, *B, 2], 9)
        harness = caching(first)
        harness.step()
        harness.add(second)

        harness.step()

        assert harness.scheduler.num_used_blocks == 4  # 2 shared, and the tail of each
        assert count(harness, Event.COPIED_BLOCKS) == 0
        harness.run()
        assert_all_as_expected(harness, [first, second])

    def test_prompts_with_log_probabilities_do_not_look_but_are_found(self) -> None:
        wants = SamplingParams(max_tokens=None, prompt_logprobs=0)
        groups = [make_group([*A, *B, 1], params=wants) for _ in range(2)]
        harness = caching(groups[0])
        harness.run()
        run(harness, groups[1])
        assert groups[1].num_cached_tokens == 0
        assert harness.prompt_positions[groups[1]] == list(range(8))
        plain = make_group([*A, *B, 1])

        run(harness, plain)

        assert plain.num_cached_tokens == 8

    def test_nothing_is_found_with_the_cache_off(self) -> None:
        harness = start(make_group([*A, *B, 1]))
        harness.run()
        again = make_group([*A, *B, 1])

        run(harness, again)

        assert again.num_cached_tokens == 0
        assert not harness.cached_blocks()
        assert count(harness, Event.PREFIX_QUERIED_TOKENS) == 0

    def test_queried_and_hit_tokens_are_counted(self) -> None:
        harness = caching(make_group([*A, *B, 1]))
        harness.run()

        run(harness, make_group([*A, *B, 2, 2]))

        assert count(harness, Event.PREFIX_QUERIED_TOKENS) == 9 + 10
        assert count(harness, Event.PREFIX_HIT_TOKENS) == 8

    @pytest.mark.parametrize("sliding_window", [0, 6])
    def test_each_siblings_tokens_are_found_by_who_continues_them(self, sliding_window: int) -> None:
        group = make_group(18, 14, n=2)
        harness = caching(group, sliding_window=sliding_window, max_num_batched_tokens=7)
        harness.run()

        for sequence in group.sequences:
            turn = make_group([*group.prompt_token_ids.tolist(), *harness.outputs[sequence], 5], 2)
            run(harness, turn)
            assert turn.num_cached_tokens == 28


class TestHash:
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_collisions_never_give_a_wrong_block(
        self, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hits = []
        for hash_bits in (64, 2, 0):  # 0: all hashes are equal

            def create(*args: Any, mask: int = (1 << hash_bits) - 1, **options: Any) -> PrefixCache:
                return create_prefix_cache(*args, **options)._replace(hash_mask=np.uint64(mask))

            monkeypatch.setattr(block_manager, "create_prefix_cache", create)
            scheduler = make_scheduler(enable_prefix_caching=True, num_blocks=24, num_batches=max_in_flight)
            harness = Harness(scheduler, max_in_flight)
            rng = np.random.default_rng(1)
            groups = []
            for _ in range(40):
                parts = [(A, B, C)[i] for i in rng.integers(0, 3, rng.integers(1, 6))]
                prompt = [*itertools.chain(*parts), *rng.integers(0, 9, rng.integers(1, 3)).tolist()]
                salts = ((), (("cache_salt", "x"),))[rng.integers(2)]
                n, max_tokens = int(rng.integers(1, 3)), int(rng.integers(1, 9))
                groups.append(make_group(prompt, max_tokens, n=n, cache_salts=salts))
                harness.add(groups[-1])
                harness.step()
            harness.run()
            assert_all_as_expected(harness, groups)
            hits.append([group.num_cached_tokens for group in groups])

        assert hits[0] == hits[1] == hits[2]
        assert sum(hits[0]) > 50
        assert count(harness, Event.EVICTED_BLOCKS) > 0


class TestWhen:
    def test_block_is_found_only_once_its_step_has_come_back(self) -> None:
        first, second, third = (make_group([*A, *B, 1], 9) for _ in range(3))
        harness = caching(first, max_in_flight=2)
        harness.schedule()
        harness.add(second)
        harness.schedule()
        assert second.num_cached_tokens == 0
        harness.update()
        harness.add(third)

        harness.schedule()

        assert third.num_cached_tokens == 8
        harness.run()
        assert_all_as_expected(harness, [first, second, third])

    def test_blocks_of_a_prompt_are_found_chunk_by_chunk(self) -> None:
        harness = caching(make_group([*A, *B, *C]), max_num_batched_tokens=6)

        harness.step()
        assert len(harness.cached_blocks()) == 1
        harness.step()
        assert len(harness.cached_blocks()) == 3

    def test_preempted_group_finds_its_own_blocks_again(self) -> None:
        groups = [make_group([i, 5, 6, 7], 8) for i in range(3)]
        harness = caching(*groups, num_blocks=5, max_model_len=16, preemption_mode="recompute")

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert [group.num_cached_tokens for group in groups] == [0, 0, 0]  # what counts is the first time
        assert_all_as_expected(harness, groups)


class TestSalts:
    @pytest.mark.parametrize(
        ("one", "other", "shares"),
        [
            ((), (), True),
            ((("cache_salt", "x"),), (("cache_salt", "x"),), True),
            ((), (("cache_salt", "x"),), False),
            ((("cache_salt", "x"),), (("cache_salt", "y"),), False),
            ((("cache_salt", "x"),), (("adapter", "x"),), False),
            ((("cache_salt", "x"),), (("cache_salt", "x"), ("adapter", "x")), False),
        ],
    )
    def test_only_equal_salts_share(
        self, one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...], shares: bool
    ) -> None:
        harness = caching(make_group([*A, 1], cache_salts=one))
        harness.run()
        second = make_group([*A, 1], cache_salts=other)

        run(harness, second)

        assert second.num_cached_tokens == (4 if shares else 0)
        assert_all_as_expected(harness, [second])


class TestEviction:
    def test_cached_block_unused_for_longest_goes_first(self) -> None:
        harness = caching(num_blocks=3, max_model_len=12)
        run(harness, make_group([*A, 1], 1))
        run(harness, make_group([*B, 1], 1))
        run(harness, make_group([*A, 2], 1))  # so that B is the older one

        run(harness, make_group([*C, 1, 1, 1, 1], 1))

        assert [len(self.probe(harness, prompt)) for prompt in (A, B, C)] == [1, 0, 1]
        assert count(harness, Event.EVICTED_BLOCKS) == 1

    def test_end_of_a_prefix_goes_before_its_beginning(self) -> None:
        harness = caching(num_blocks=3, max_model_len=12)
        run(harness, make_group([*A, *B, 1], 1))

        run(harness, make_group([*C, 1, 1], 1))

        assert len(self.probe(harness, [*A, *B])) == 1

    def test_what_a_prompt_finds_is_not_evicted_for_its_own_blocks(self) -> None:
        harness = caching(num_blocks=4, max_model_len=16)
        run(harness, make_group([*A, *B, 1], 1))
        run(harness, make_group([*C, 9, 9, 9, 9, 1], 1))
        group = make_group([*A, *B, 3, 3, 3, 3, 3], 1)

        run(harness, group)

        assert group.num_cached_tokens >= 4
        assert_all_as_expected(harness, [group])

    def test_found_blocks_do_not_count_as_free_too(self) -> None:
        harness = caching(num_blocks=6, max_model_len=20)
        run(harness, make_group([*A, *B, 1], 1))
        runs = make_group([7, 7, 7, 7, 7], 8)
        harness.add(runs)
        harness.step()
        large = make_group([*A, *B, 3, 3, 3, 3, 3], 4)  # finds 2, needs 2 or 3 more of the 2 that are left

        run(harness, large)

        assert_all_as_expected(harness, [runs, large])

    def test_running_out_of_free_blocks_evicts_rather_than_preempts(self) -> None:
        harness = caching(num_blocks=4, max_model_len=16)
        run(harness, make_group([*A, *B, 1], 1))

        run(harness, make_group([*C], 12))

        assert count(harness, Event.PREEMPTIONS) == 0
        assert count(harness, Event.EVICTED_BLOCKS) == 2

    @staticmethod
    def probe(harness: Harness, prompt: list[int]) -> list[int]:
        """Return the cached blocks that hold a prefix of `prompt`, in order."""
        blocks = harness.scheduler.block_manager.blocks
        by_tokens = {tuple(blocks.cache.tokens[block].tolist()): block for block in harness.cached_blocks()}
        parts = [tuple(prompt[i : i + 4]) for i in range(0, len(prompt), 4)]
        return [by_tokens[part] for part in parts if part in by_tokens]


class TestReset:
    def test_nothing_cached_before_is_found(self) -> None:
        harness = caching(make_group([*A, *B, 1]))
        harness.run()

        harness.scheduler.reset_prefix_cache()

        again = make_group([*A, *B, 1])
        run(harness, again)
        assert again.num_cached_tokens == 0
        assert_all_as_expected(harness, [again])

    def test_blocks_in_use_stay_and_are_not_found_later(self) -> None:
        group = make_group([*A, *B, 1], 9)
        harness = caching(group)
        harness.step()

        harness.scheduler.reset_prefix_cache()

        harness.check()
        harness.run()
        assert_all_as_expected(harness, [group])
        again = make_group([*A, *B, 1])
        run(harness, again)
        assert again.num_cached_tokens == 0

    def test_what_is_being_written_is_not_found_later(self) -> None:
        harness = caching(make_group([*A, *B, 1]))
        harness.schedule()

        harness.scheduler.reset_prefix_cache()

        harness.run()
        again = make_group([*A, *B, 1])
        run(harness, again)
        assert again.num_cached_tokens == 0

    def test_what_is_cached_afterwards_is_found(self) -> None:
        harness = caching(make_group([*A, *B, 1]))
        harness.run()
        harness.scheduler.reset_prefix_cache()
        run(harness, make_group([*A, *B, 1]))
        again = make_group([*A, *B, 1])

        run(harness, again)

        assert again.num_cached_tokens == 8


class TestDuplicates:
    def test_content_is_registered_once(self) -> None:
        twins = [make_group([*A, *B, 1], 1) for _ in range(2)]
        harness = caching(*twins)

        harness.run()

        assert len(harness.cached_blocks()) == 2
        assert_all_as_expected(harness, twins)

    def test_what_continues_a_duplicate_is_found(self) -> None:
        twins = [make_group([*A, *B, 1], 1), make_group([*A, *B, *C, 1], 1)]
        harness = caching(*twins)
        harness.run()
        third = make_group([*A, *B, *C, 2])

        run(harness, third)

        assert third.num_cached_tokens == 12
        assert_all_as_expected(harness, [third])
