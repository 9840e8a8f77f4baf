"""Request: how sampled tokens end its sequences, and what its outputs carry."""

from pathlib import Path
from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.engine.input_processor import InputProcessor
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput
from cupaged.sampling_params import RequestOutputKind
from cupaged.sequence import FinishReason
from tests.engine.tiny_tokenizers import byte_level, write_directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_directory(tmp_path, byte_level()))


def make_request(tokenizer: Tokenizer, **options: Any) -> Request:
    inputs = InputProcessor(
        tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=64,
        max_num_seqs=8,
        eos_token_ids=(2,),
        seed=0,
    )
    return inputs.make_request("r", "Paris", SamplingParams(**options))


def half_a_character(tokenizer: Tokenizer) -> int:
    """Return the token of the first byte of é."""
    return tokenizer.encode("é", add_special_tokens=False)[0]


def test_half_a_character_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, stop="\ufffd")

    ended = request.append(0, [half_a_character(tokenizer)], FinishReason.LENGTH)

    assert (ended, request.completions[0].stop_reason) == (FinishReason.STOP, "\ufffd")
    output = request.output()
    assert output is not None
    assert output.outputs[0].text == ""


def test_a_stop_string_within_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("AB AB", add_special_tokens=False)
    request = make_request(tokenizer, stop="AB", min_tokens=2)

    for token_id in ids:
        request.append(0, [token_id], None)

    assert request.completions[0].stop_reason == "AB"
    output = request.output()
    assert output is not None
    assert output.outputs[0].text == "AB "


def test_without_detokenize_there_is_no_text(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, detokenize=False, logprobs=1)
    request.add_logprobs(0, False, [5, 7, 8], [-0.5, -0.1, -0.2], 3)

    request.append(0, [5], FinishReason.LENGTH)

    output = request.output()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5])
    assert output.outputs[0].logprobs is not None
    assert {i: token.rank for i, token in output.outputs[0].logprobs[0].items()} == {5: 3, 7: 1}


def test_delta_outputs_show_the_prompt_once(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, output_kind=RequestOutputKind.DELTA, prompt_logprobs=0)
    outputs = []
    for token_id in (5, 6):
        request.append(0, [token_id], None)
        outputs.append(request.output())

    first, second = outputs
    assert first is not None
    assert second is not None
    assert (first.prompt_token_ids, second.prompt_token_ids) == (tokenizer.encode("Paris"), [])
    assert (first.prompt_logprobs, second.prompt_logprobs) == ([None], None)


def test_preemptions_are_in_the_metrics_when_all_have_ended(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer)
    request.group.num_preemptions = 2

    request.append(0, [5], FinishReason.LENGTH)

    assert request.metrics.num_preemptions == 2


def outputs_of(request: Request) -> list[CompletionOutput]:
    output = request.output()
    assert output is not None
    return output.outputs


def test_every_sequence_has_its_own_text_and_end(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "AB")
    request = make_request(tokenizer, n=2, stop="B")

    assert request.append(0, [a], None) is None
    assert request.append(1, [b], None) is FinishReason.STOP

    assert not request.finished
    assert request.metrics.finished_time is None
    assert [(part.index, part.text, part.finish_reason) for part in outputs_of(request)] == [
        (0, "A", None),
        (1, "", "stop"),
    ]
    assert request.append(0, [a], FinishReason.LENGTH) is FinishReason.LENGTH
    assert request.finished
    assert request.metrics.finished_time is not None
    assert outputs_of(request)[0].text == "AA"


def test_delta_outputs_are_those_with_news(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, n=3, output_kind=RequestOutputKind.DELTA)
    request.append(2, [5], None)
    request.append(0, [6], FinishReason.LENGTH)
    first = [(part.index, part.token_ids) for part in outputs_of(request)]
    request.append(1, [7, 8], None)
    second = [(part.index, part.token_ids) for part in outputs_of(request)]

    assert (first, second) == ([(0, [6]), (2, [5])], [(1, [7, 8])])


def best_of(tokenizer: Tokenizer, **options: Any) -> Request:
    """Return a request whose sequences got -1.5, -1, -0.5 and -1 a token, the first of one token."""
    request = make_request(tokenizer, best_of=4, **options)
    for index, logprobs in enumerate([[-1.5], [-1.5, -0.5], [-0.25, -0.75], [-1.0, -1.0]]):
        for logprob in logprobs:
            assert request.output() is None
            request.add_logprobs(index, False, [10 + index], [logprob], 1)
            is_last = request.completions[index].cumulative_logprob == sum(logprobs)
            request.append(index, [10 + index], FinishReason.LENGTH if is_last else None)
    return request


def test_best_of_returns_the_n_of_the_best_mean_logprob_when_all_have_ended(tokenizer: Tokenizer) -> None:
    parts = outputs_of(best_of(tokenizer, n=3))

    assert [(part.index, part.token_ids) for part in parts] == [(0, [12, 12]), (1, [11, 11]), (2, [13, 13])]
    assert [(part.logprobs, part.cumulative_logprob) for part in parts] == [(None, None)] * 3


def test_best_of_shows_log_probabilities_where_asked_for(tokenizer: Tokenizer) -> None:
    (part,) = outputs_of(best_of(tokenizer, logprobs=0))

    assert part.cumulative_logprob == -1.0
    assert [list(entry) for entry in part.logprobs or ()] == [[12], [12]]
