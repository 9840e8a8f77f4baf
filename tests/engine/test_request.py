"""Request: how sampled tokens end it, and what its outputs carry."""

from pathlib import Path
from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.engine.input_processor import InputProcessor
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.sampling_params import RequestOutputKind
from cupaged.sequence import FinishReason
from tests.engine.tiny_tokenizers import byte_level, write_directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_directory(tmp_path, byte_level()))


def make_request(tokenizer: Tokenizer, **options: Any) -> Request:
    inputs = InputProcessor(
        tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=64, eos_token_ids=(2,), seed=0
    )
    return inputs.make_request("r", "Paris", SamplingParams(**options))


def half_a_character(tokenizer: Tokenizer) -> int:
    """Return the token of the first byte of é."""
    return tokenizer.encode("é", add_special_tokens=False)[0]


def test_half_a_character_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, stop="\ufffd")

    request.append([half_a_character(tokenizer)], FinishReason.LENGTH)

    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\ufffd")
    output = request.output()
    assert output is not None
    assert output.outputs[0].text == ""


def test_a_stop_string_within_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("AB AB", add_special_tokens=False)
    request = make_request(tokenizer, stop="AB", min_tokens=2)

    for token_id in ids:
        request.append([token_id], None)

    assert request.stop_reason == "AB"
    output = request.output()
    assert output is not None
    assert output.outputs[0].text == "AB "


def test_without_detokenize_there_is_no_text(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, detokenize=False, logprobs=1)
    request.add_logprobs(False, [5, 7, 8], [-0.5, -0.1, -0.2], 3)

    request.append([5], FinishReason.LENGTH)

    output = request.output()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5])
    assert output.outputs[0].logprobs is not None
    assert {i: token.rank for i, token in output.outputs[0].logprobs[0].items()} == {5: 3, 7: 1}


def test_delta_outputs_show_the_prompt_once(tokenizer: Tokenizer) -> None:
    request = make_request(tokenizer, output_kind=RequestOutputKind.DELTA, prompt_logprobs=0)
    outputs = []
    for token_id in (5, 6):
        request.append([token_id], None)
        outputs.append(request.output())

    first, second = outputs
    assert first is not None
    assert second is not None
    assert (first.prompt_token_ids, second.prompt_token_ids) == (tokenizer.encode("Paris"), [])
    assert (first.prompt_logprobs, second.prompt_logprobs) == ([None], None)
