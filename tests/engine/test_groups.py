"""LLMEngine over a scripted model: several outputs of one prompt share its blocks, and end one by one."""

from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import CompletionOutput, RequestOutput
from cupaged.sampling_params import RequestOutputKind
from tests.engine.conftest import ALPHABET, PROMPT, MakeEngine, finish, greedy, run
from tests.engine.scripted import VOCAB_SIZE, continuation, next_token


def sampled(n: int, max_tokens: int = 8, **options: Any) -> SamplingParams:
    """Return parameters with which the scripted model gives each sequence its own tokens."""
    return SamplingParams(temperature=1, n=n, max_tokens=max_tokens, **options)


def continuations(prompt: list[int], n: int, length: int = 8) -> list[list[int]]:
    return [continuation(prompt, length, index=index) for index in range(n)]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def text_of(token_ids: list[int]) -> str:
    return "".join(ALPHABET[i] for i in token_ids)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_greedy_outputs_of_one_prompt_are_equal_and_computed_once(
    make_engine: MakeEngine, late: bool, budget: int
) -> None:
    engine = make_engine(late=late, max_num_batched_tokens=budget)

    output = run(engine, greedy(n=4))

    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert tokens_of(output) == [continuation(PROMPT, 8)] * 4
    metrics = engine.get_metrics()
    assert metrics["forks"] == 3
    assert metrics["copied_blocks"] == 3, "the prompt's block is written by all but one in a copy"
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [9] * 15, [9] * 16, [9] * 17, [9] * 40])
def test_sampled_outputs_differ_and_come_by_index(
    make_engine: MakeEngine, late: bool, prompt: list[int]
) -> None:
    output = run(make_engine(late=late), sampled(5), prompt)

    assert tokens_of(output) == continuations(prompt, 5)
    assert [completion.text for completion in output.outputs] == list(map(text_of, tokens_of(output)))


def test_delta_outputs_of_each_sequence_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=2)  # so that not all have news in a step
    engine.add_request("r", PROMPT, sampled(3, output_kind=RequestOutputKind.DELTA))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()

    parts: list[list[CompletionOutput]] = [[], [], []]
    for output in outputs:
        assert output.outputs
        for completion in output.outputs:
            assert completion.token_ids
            parts[completion.index].append(completion)
    assert [[i for part in own for i in part.token_ids] for own in parts] == continuations(PROMPT, 3)
    assert ["".join(part.text for part in own) for own in parts] == list(
        map(text_of, continuations(PROMPT, 3))
    )
    assert any(len(output.outputs) < 3 for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [bool(output.prompt_token_ids) for output in outputs] == [True] + [False] * (len(outputs) - 1)


def test_cumulative_outputs_have_all_sequences(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=2)
    engine.add_request("r", PROMPT, sampled(3))
    while engine.has_unfinished():
        for output in engine.step():
            assert [completion.index for completion in output.outputs] == [0, 1, 2]


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_string_ends_its_sequence_and_the_others_go_on(make_engine: MakeEngine, late: bool) -> None:
    texts = list(map(text_of, continuations(PROMPT, 3)))
    stop = texts[1][2:5]
    assert stop not in texts[0] + texts[2]

    output = run(make_engine(late=late), sampled(3, stop=stop))

    assert [completion.text for completion in output.outputs] == [texts[0], texts[1][:2], texts[2]]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "stop", "length"]
    assert [completion.stop_reason for completion in output.outputs] == [None, stop, None]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [2, 64])
def test_prompt_logprobs_come_once_and_logprobs_by_sequence(
    make_engine: MakeEngine, late: bool, budget: int
) -> None:
    prompt = [10, 20, 30, 40, 50]
    engine = make_engine(late=late, max_num_batched_tokens=budget)

    output = run(engine, sampled(3, prompt_logprobs=0, logprobs=0), prompt)

    assert output.prompt_logprobs is not None
    assert [list(entry or {}) for entry in output.prompt_logprobs] == [[], [20], [30], [40], [50]]
    for completion in output.outputs:
        assert [next(iter(entry)) for entry in completion.logprobs or ()] == completion.token_ids
        assert completion.cumulative_logprob == -sum(completion.token_ids) / 8


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_best_of_gives_the_n_most_likely_at_the_end(make_engine: MakeEngine, late: bool, n: int) -> None:
    engine = make_engine(late=late)
    engine.add_request("r", PROMPT, sampled(n, best_of=5))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()

    (output,) = outputs if n < 5 else outputs[-1:]
    expected = continuations(PROMPT, 5)
    if n < 5:  # the scripted model's log-probabilities are -id/8
        expected = sorted(expected, key=sum)[:n]
    assert tokens_of(output) == expected
    assert [completion.index for completion in output.outputs] == list(range(n))


def mixed_groups(engine: LLMEngine, num_requests: int = 8) -> dict[str, list[list[int]]]:
    """Add groups of 1 to 3 sequences; return their tokens by request_id."""
    expected = {}
    for i in range(num_requests):
        prompt = [8 + (i * k) % 50 for k in range(1, 5 + 4 * i)]
        n, length = 1 + i % 3, 10 + 3 * i
        engine.add_request(str(i), prompt, sampled(n, length))
        expected[str(i)] = continuations(prompt, n, length)
    return expected


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [3, 16, 64])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_groups_in_a_tiny_pool_get_their_own_tokens(
    make_engine: MakeEngine, late: bool, budget: int, mode: str
) -> None:
    engine = make_engine(
        num_blocks=14,
        num_host_blocks=30 if mode == "swap" else 0,
        late=late,
        max_num_batched_tokens=budget,
        max_model_len=96,
        preemption_mode=mode,
    )
    expected = mixed_groups(engine)

    outputs = finish(engine)

    assert {request_id: tokens_of(output) for request_id, output in outputs.items()} == expected
    metrics = engine.get_metrics()
    if budget > 3:
        assert metrics["preemptions"] > 0
        assert (metrics["swapped_out_blocks"] > 0) == (mode == "swap")
        assert (metrics["recomputed_tokens"] > 0) == (mode == "recompute")
    assert metrics["swapped_in_blocks"] == metrics["swapped_out_blocks"]
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_an_aborted_group_frees_everything(make_engine: MakeEngine, late: bool, num_steps: int) -> None:
    engine = make_engine(late=late, max_num_batched_tokens=16)
    engine.add_request("gone", [9] * 20, sampled(4, 50))
    engine.add_request("kept", PROMPT, sampled(3, 20))
    for _ in range(num_steps):
        engine.step()

    engine.abort("gone")
    outputs = finish(engine)

    assert set(outputs) == {"kept"}
    assert tokens_of(outputs["kept"]) == continuations(PROMPT, 3, 20)
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_drops_whole_groups_and_keeps_what_was_counted(
    make_engine: MakeEngine, late: bool
) -> None:
    failures = [RuntimeError("no memory")]

    def fail_once(seen: int, position: int) -> int:
        if position == 6 and failures:
            raise failures.pop()
        return next_token(seen, position)

    engine = make_engine(late=late, follow=fail_once)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, sampled(3))
    with pytest.raises(RuntimeError, match="no memory"):
        finish(engine)

    assert not engine.has_unfinished()
    assert engine.scheduler.num_used_blocks == 0
    assert engine.get_metrics()["forks"] == 4
    assert tokens_of(run(engine, sampled(3))) == continuations(PROMPT, 3)
    assert engine.get_metrics()["forks"] == 6


def test_a_group_that_can_never_fit_is_refused_and_harms_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6, max_model_len=96)
    engine.add_request("r", PROMPT, greedy())

    with pytest.raises(ValueError, match=r"\b8\b.*\bblocks\b.*\b6\b"):
        engine.add_request("large", PROMPT, greedy(90, n=8))

    assert tokens_of(finish(engine)["r"]) == [continuation(PROMPT, 8)]


def test_more_sequences_than_run_at_once_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="n is 9 but max_num_seqs is 8"):
        make_engine().add_request("r", PROMPT, greedy(n=9))


def test_every_size_of_group_gets_its_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(late=True)
    prompts = [[8 + (7 * i + k) % (VOCAB_SIZE - 8) for k in range(1 + 5 * i)] for i in range(8)]
    for n, prompt in enumerate(prompts, start=1):
        engine.add_request(str(n), prompt, sampled(n))

    outputs = finish(engine)

    assert [tokens_of(outputs[str(n)]) for n in range(1, 9)] == [
        continuations(prompt, n) for n, prompt in enumerate(prompts, start=1)
    ]
