"""Each row of the table is what it is called."""

from cupaged.scheduler.counters import Counter
from cupaged.trace.report import as_json
from cupaged.trace.simulation import Outcome

OUTCOME = Outcome(
    num_refused=3,
    num_finished=40,
    num_prompt_tokens=300,
    num_output_tokens=100,
    num_computed_tokens=800,
    seconds=4.0,
    busy_seconds=2.0,
    num_steps=7,
    queue_seconds=[0.0, 0.001, 0.101],
    first_token_seconds=[0.0, 0.002, 0.202],
    request_seconds=[0.0, 0.003, 0.303],
    mean_running=5.5,
    mean_used=0.75,
    mean_stored=0.5,
    counters={
        Counter.PREEMPTIONS: 2,
        Counter.SWAPPED_OUT_BLOCKS: 11,
        Counter.SWAPPED_IN_BLOCKS: 13,
        Counter.RECOMPUTED_TOKENS: 20,
        Counter.COPIED_BLOCKS: 17,
        Counter.FORKS: 19,
        Counter.PREFIX_QUERIED_TOKENS: 250,
        Counter.PREFIX_HIT_TOKENS: 90,
        Counter.EVICTED_BLOCKS: 23,
    },
)
ROWS = {
    "requests finished": 40,
    "requests refused": 3,
    "time until all have finished, s": 4,
    "throughput, output, tokens/s": 25,
    "throughput, prompt + output, tokens/s": 100,
    "steps": 7,
    "sequences in a step, mean": 5.5,
    "queue time, median, ms": 1,
    "queue time, 99 %, ms": 99,
    "time to first token, median, ms": 2,
    "time to first token, 99 %, ms": 198,
    "request time, median, ms": 3,
    "request time, 99 %, ms": 297,
    "blocks in use, mean, %": 75,
    "pool's slots that hold tokens, %": 50,
    "preemptions": 2,
    "blocks swapped out": 11,
    "blocks swapped in": 13,
    "tokens recomputed": 20,
    "recompute tax, of all tokens computed, %": 2.5,
    "prompt tokens found in the cache, %": 36,
    "cached blocks evicted": 23,
    "blocks copied on write": 17,
}


def test_each_row_is_read_of_the_outcome() -> None:
    assert as_json(OUTCOME) == ROWS


def test_shares_and_times_of_nothing_are_0() -> None:
    nothing = as_json(Outcome(counters=dict.fromkeys(Counter, 0)))

    assert set(nothing.values()) == {0}
