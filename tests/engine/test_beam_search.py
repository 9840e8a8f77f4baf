"""Beam search: transformers' outputs on tables of logits, a slow reference on random ones, the request."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupaged.engine.beam_search import BeamRequest, BeamSearch, beam_group
from cupaged.engine.tokenizer import Tokenizer
from cupaged.kernels.logprobs import MAX_TOP
from cupaged.outputs import RequestMetrics, RequestOutput
from cupaged.sampling_params import MAX_CANDIDATES, BeamSearchParams
from cupaged.sequence import FinishReason
from tools.beam_cases import GOLDENS, TABLE_CASES, TABLE_PERIOD, BeamCase, make_table
from tools.beam_reference import Logprobs, Reference, log_softmax


def golden(name: str) -> Any:
    """Return transformers' token_ids and scores."""
    return json.loads(GOLDENS.read_text(encoding="utf-8"))[name]


def params_of(case: BeamCase) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=case.beam_width,
        max_tokens=case.max_tokens,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
    )


class TableModel:
    """The log-probabilities that a table gives after an output."""

    def __init__(self, case: BeamCase) -> None:
        self._table, self._case = make_table(case.seed), case

    def __call__(self, output: tuple[int, ...]) -> Logprobs:
        tokens = (*self._case.prompt_token_ids, *output)
        logits = self._table[tokens[-1], (len(tokens) - 1) % TABLE_PERIOD]
        return log_softmax(logits).astype(np.float32).astype(np.float64)


def top(logprobs: list[Logprobs], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the k most likely tokens of each row as the kernels do, the lower id first among equals."""
    rows = np.array(logprobs, np.float32)
    token_ids = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    return token_ids, np.take_along_axis(rows, token_ids, axis=1)


def run(case: BeamCase, model: Any, more: int = 0) -> BeamSearch:
    """Run to the end, on the candidates that are needed and so many `more` of each beam."""
    search = BeamSearch(params_of(case), case.max_tokens, frozenset(case.eos_token_ids))
    going_on: Any = ()
    while going_on is not None:
        before = [beam.token_ids for beam in search.beams]
        k = case.beam_width + len(case.eos_token_ids) + more
        going_on = search.advance(*top([model(tuple(token_ids)) for token_ids in before], k))
        if going_on is not None:
            pairs = zip(*going_on, strict=True)
            assert [beam.token_ids for beam in search.beams] == [[*before[i], t] for i, t in pairs]
    return search


@pytest.mark.parametrize("name", TABLE_CASES)
def test_outputs_equal_transformers(name: str) -> None:
    case, expected = TABLE_CASES[name], golden(name)

    ended = run(case, TableModel(case)).ended

    assert [output.token_ids for output in ended] == expected["token_ids"]
    if case.beam_width > 1:
        np.testing.assert_allclose([output.score for output in ended], expected["scores"], rtol=1e-5)
    by_eos = [output.token_ids[-1] in case.eos_token_ids for output in ended]
    assert [output.reason == FinishReason.STOP for output in ended] == by_eos


def test_goldens_tell_the_rules_apart() -> None:
    several = {name: case for name, case in TABLE_CASES.items() if case.beam_width > 1}
    others: dict[str, Any] = {
        "early_stopping": (True, False, "never"),
        "length_penalty": (0.0, 1.0, 2.0, -1.0),
        "eos_token_ids": ((), (3,)),
    }

    for name, values in others.items():
        for value in values:
            changed = [replace(case, **{name: value}) for case in several.values()]
            found = [run(case, TableModel(case)).ended for case in changed]
            differ = [
                [output.token_ids for output in ended] != golden(case_name)["token_ids"]
                for case_name, ended in zip(several, found, strict=True)
            ]
            assert sum(differ) >= 3, (name, value)


@st.composite
def random_searches(draw: st.DrawFn) -> tuple[BeamCase, Any]:
    """Draw a search over few whole numbers as logits, so that ties are common."""
    vocab = draw(st.integers(5, 9))
    eos = draw(st.sets(st.integers(0, vocab - 1), max_size=2))
    case = BeamCase(
        seed=0,
        prompt_token_ids=(0,),
        beam_width=draw(st.integers(1, vocab - len(eos) - 1)),
        max_tokens=draw(st.integers(1, 7)),
        eos_token_ids=tuple(eos),
        length_penalty=draw(st.sampled_from([-1.5, 0.0, 0.5, 1.0, 3.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
    )
    spread = draw(st.sampled_from([2, 5, 1000]))
    seed = draw(st.integers(0, 2**32 - 1))
    table = np.random.Generator(np.random.PCG64(seed)).integers(0, spread, (vocab, 8, vocab))

    def model(output: tuple[int, ...]) -> Logprobs:
        logits = table[output[-1] if output else 0, len(output)] * np.float32(4 / spread)
        return log_softmax(logits).astype(np.float32).astype(np.float64)

    return case, model


@settings(max_examples=500)
@given(random_searches())
def test_outputs_equal_the_reference(drawn: tuple[BeamCase, Any]) -> None:
    case, model = drawn

    ended = run(case, model).ended

    expected = Reference(model, case)
    assert [tuple(output.token_ids) for output in ended] == [out.token_ids for out in expected.outputs]
    assert [output.logprob for output in ended] == [out.logprob for out in expected.outputs]
    assert [output.score for output in ended] == [out.score for out in expected.outputs]


@given(random_searches())
def test_more_candidates_than_needed_change_nothing(drawn: tuple[BeamCase, Any]) -> None:
    case, model = drawn

    assert run(case, model, more=3).ended == run(case, model).ended


def test_one_beam_is_greedy_and_ends_with_its_first_eos() -> None:
    table = np.array([[0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [3.0, 0.0, 0.0]], np.float32)
    case = BeamCase(seed=0, prompt_token_ids=(0,), beam_width=1, max_tokens=9, eos_token_ids=(2,))

    ended = run(case, lambda output: log_softmax(table[output[-1] if output else 0])).ended

    assert [output.token_ids for output in ended] == [[1, 2]]


def test_a_beam_that_only_equals_the_worst_output_ends_the_search() -> None:
    case = BeamCase(seed=0, prompt_token_ids=(0,), beam_width=2, max_tokens=9, length_penalty=0.0)
    search = BeamSearch(params_of(case), case.max_tokens, frozenset({0}))

    def advance(logprobs: list[list[float]]) -> Any:
        return search.advance(np.array([[0, 1, 2]] * len(logprobs)), np.array(logprobs, np.float32))

    assert advance([[-1.0, -1.0, -2.0]]) == ([0, 0], [1, 2])
    assert advance([[-1.0, -1.0, -9.0], [-9.0, -9.0, -9.0]]) is None


# The group.


def make_group(**changes: Any) -> Any:
    options: dict[str, Any] = {"eos_token_ids": frozenset({0}), "vocab_size": 64, "max_model_len": 100}
    options |= {"cache_salts": (), "priority": 0}
    params = BeamSearchParams(beam_width=4, max_tokens=20, temperature=0.5)
    return beam_group("r", [10, 20, 30], params, **(options | changes))


def test_group_asks_for_as_many_candidates_as_the_selection_needs() -> None:
    group = make_group(priority=3, cache_salts=(("cache_salt", "a"),))

    assert (group.num_sequences, group.is_beam, group.num_candidates) == (4, True, 5)
    assert (group.max_total_tokens, group.stop_token_ids, group.params.temperature) == (23, (), 0.5)
    assert (group.priority, group.cache_salts) == (3, (("cache_salt", "a"),))


def test_as_many_candidates_can_be_had_as_kernels_give() -> None:
    assert MAX_CANDIDATES == MAX_TOP


def test_group_never_passes_max_model_len() -> None:
    assert make_group(max_model_len=9).max_total_tokens == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 4}, "beam_width is 4 .* 1 EOS tokens.* 5 most likely .* at most 4 .*vocabulary 4"),
        ({"eos_token_ids": frozenset(range(125)), "vocab_size": 999}, "the 129 most likely .* at most 128"),
    ],
)
def test_more_candidates_than_there_are_is_refused_with_the_numbers(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_group(**changes)


# The request.

EOS = 5


@pytest.fixture
def make_request(scripted_dir: Path) -> Any:
    """Return a function that makes a request of two beams over the tokenizer of one-character tokens."""
    tokenizer = Tokenizer.from_directory(scripted_dir)

    def make(**options: Any) -> BeamRequest:
        params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | options)
        eos_token_ids = frozenset({EOS})
        group = beam_group(
            "r",
            [10],
            params,
            eos_token_ids=eos_token_ids,
            vocab_size=64,
            max_model_len=99,
            cache_salts=(),
            priority=0,
        )
        return BeamRequest(
            request_id="r",
            prompt=None,
            prompt_token_ids=[10],
            group=group,
            params=params,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            metrics=RequestMetrics(arrival_time=0.0),
        )

    return make


def report(request: BeamRequest, index: int, logprobs: dict[int, float]) -> None:
    """Report `logprobs` as the most likely ones, behind a sampled token that counts for nothing."""
    request.add_logprobs(index, False, [63, *logprobs], [0.0, *logprobs.values()], 1)


def finish(request: BeamRequest) -> RequestOutput:
    """Let the outputs end by EOS and by length."""
    report(request, 0, {11: -1.0, 12: -2.0, 13: -9.0})
    request.advance()
    report(request, 0, {EOS: -0.5, 14: -7.0, 15: -8.0})
    report(request, 1, {16: -1.0, 17: -7.5, 18: -9.0})
    assert request.advance() is None
    return request.output()


def test_request_is_ready_once_every_beam_has_reported(make_request: Any) -> None:
    request = make_request()

    assert not request.is_ready
    report(request, 0, {11: -1.0, 12: -2.0, 13: -3.0})
    assert request.is_ready
    assert request.advance() == ([0, 0], [11, 12])
    assert not request.is_ready
    report(request, 1, {11: -1.0, 12: -2.0, 13: -3.0})
    assert not request.is_ready
    report(request, 0, {11: -1.0, 12: -2.0, 13: -3.0})
    assert request.is_ready


def test_a_beam_that_reports_again_is_heard_once(make_request: Any) -> None:
    request = make_request()
    report(request, 0, {11: -1.0, 12: -2.0, 13: -3.0})
    request.advance()

    report(request, 1, {21: -9.0, 22: -9.0, 23: -9.0})
    report(request, 1, {21: -0.5, 22: -0.6, 23: -9.0})

    assert not request.is_ready


def test_candidates_that_others_asked_for_are_left_out(make_request: Any) -> None:
    request = make_request()

    report(request, 0, {11: -1.0, 12: -2.0, 13: -3.0, 14: -0.1, 15: -0.1})

    assert request.advance() == ([0, 0], [11, 12])


def test_outputs_are_best_first(make_request: Any) -> None:
    output = finish(make_request())

    first, second = output.outputs
    assert output.finished
    assert (first.index, second.index) == (0, 1)
    assert (first.token_ids, first.finish_reason, first.stop_reason) == ([11, EOS], "stop", None)
    assert (second.token_ids, second.finish_reason) == ([12, 16], "length")
    assert (first.cumulative_logprob, second.cumulative_logprob) == (-1.5, -3.0)


@pytest.mark.parametrize(("includes", "text"), [(False, "k"), (True, "ke")])
def test_text_shows_the_eos_token_only_if_asked(make_request: Any, includes: bool, text: str) -> None:
    output = finish(make_request(include_stop_str_in_output=includes))

    assert [completion.text for completion in output.outputs] == [text, "lp"]


def test_times_are_those_of_the_first_and_the_last_step(make_request: Any) -> None:
    request = make_request()
    request.group.num_preemptions = 2

    metrics = finish(request).metrics

    assert metrics is request.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time < metrics.finished_time
    assert metrics.num_preemptions == 2
