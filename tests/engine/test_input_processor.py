"""InputProcessor: every kind of prompt that is taken, and one clear error for each that is not."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import BeamSearchParams, SamplingParams
from cupaged.engine.input_processor import InputProcessor
from cupaged.engine.tokenizer import Tokenizer
from cupaged.sampling_params import MAX_STOPS
from tests.engine.scripted import VOCAB_SIZE

MAX_MODEL_LEN = 32
MAX_NUM_SEQS = 8


def make_inputs(
    scripted_dir: Path, eos_token_ids: Iterable[int] = (0,), seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> InputProcessor:
    return InputProcessor(
        Tokenizer.from_directory(scripted_dir),
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        eos_token_ids=eos_token_ids,
        seed=seed,
    )


@pytest.fixture
def inputs(scripted_dir: Path) -> InputProcessor:
    return make_inputs(scripted_dir)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        [np.int64(1), np.uint8(2), 3],
        "abc",
        np.str_("abc"),
        {"prompt": "abc"},
        {"prompt_token_ids": np.array([1, 2, 3], np.int16)},
        {"prompt_token_ids": [1, 2, 3], "prompt": None},
    ],
)
def test_every_kind_of_prompt_becomes_the_same_ids(inputs: InputProcessor, prompt: Any) -> None:
    request = inputs.make_request("r", prompt, SamplingParams())

    assert request.prompt_token_ids == [1, 2, 3]
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    assert request.group.prompt_token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "text or a list of token ids, got bytes"),
        (None, "got NoneType"),
        (1.5, "got float"),
        ({1, 2}, "got set"),
        (np.array(5), "got ndarray"),
        (np.array([[1, 2]]), "got ndarray"),
        ([[1, 2]], r"whole numbers, got \[1, 2\]"),
        ([np.float32(1)], "whole numbers"),
        ([np.True_], "whole numbers"),
        ([10**30], rf"contains {10**30}, but the model's ids are 0\.\.63"),
        ({"prompt": [1, 2]}, "'prompt' is text, got list"),
        ({"prompt_token_ids": "abc"}, "'prompt_token_ids' is a list of token ids, got str"),
        ({"prompt": "abc", "multi_modal_data": {}}, "nothing else, got .*multi_modal_data"),
        ({"prompt": None}, r"needs 'prompt' or .*, got \[\]"),
        ({"cache_salt": "a"}, r"needs 'prompt' or .*, got \[\]"),
        ({"prompt": "a", "cache_salt": ""}, r"cache_salt must be text of 1\.\.1024 characters, got 0"),
        ({"prompt": "a", "cache_salt": "s" * 1025}, r"cache_salt must be text .*, got 1025"),
        ({"prompt": "a", "cache_salt": "a\ud800"}, r"cache_salt has half a surrogate pair, '\\ud800'"),
        ({"prompt": "a", "cache_salt": 7}, r"cache_salt must be text .*, got 7"),
    ],
)
def test_any_other_prompt_is_refused(inputs: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inputs.make_request("r", prompt, SamplingParams())


def test_text_beside_token_ids_is_shown_and_not_encoded(inputs: InputProcessor) -> None:
    request = inputs.make_request("r", {"prompt": "xyz", "prompt_token_ids": [1, 2]}, SamplingParams())

    assert (request.prompt, request.prompt_token_ids) == ("xyz", [1, 2])


def test_prompt_of_all_but_one_token_leaves_room_for_one(inputs: InputProcessor) -> None:
    request = inputs.make_request("r", [1] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=10**20))

    assert request.group.max_total_tokens == MAX_MODEL_LEN


def test_min_tokens_with_every_token_banned_is_refused(inputs: InputProcessor) -> None:
    params = SamplingParams(stop_token_ids=range(1, VOCAB_SIZE), min_tokens=1)  # and 0 is EOS

    with pytest.raises(ValueError, match=r"all 64 tokens.*min_tokens=1"):
        inputs.make_request("r", [1], params)


def test_eos_ids_that_the_model_cannot_sample_are_left_out(scripted_dir: Path) -> None:
    inputs = make_inputs(scripted_dir, eos_token_ids=(-1, 0, VOCAB_SIZE))

    group = inputs.make_request("r", [1], SamplingParams(min_tokens=1)).group

    assert group.stop_token_ids == group.banned_token_ids == (0,)


def test_seeds_are_drawn_from_the_engines_seed_and_differ(scripted_dir: Path) -> None:
    def seeds(seed: int) -> list[int]:
        inputs = make_inputs(scripted_dir, seed=seed)
        return [inputs.make_request(str(i), [1], SamplingParams()).group.seed for i in range(4)]

    assert seeds(5) == seeds(5)
    assert len({*seeds(5), *seeds(6), *seeds(-5)}) == 12


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_a_requests_own_seed_is_its_64_bits(inputs: InputProcessor, seed: int) -> None:
    assert inputs.make_request("r", [1], SamplingParams(seed=seed)).group.seed == 2**64 - 1


def test_more_eos_tokens_than_a_device_has_room_for_are_refused(scripted_dir: Path) -> None:
    inputs = make_inputs(scripted_dir, range(MAX_STOPS), vocab_size=2 * MAX_STOPS + 1)
    stops = range(MAX_STOPS, 2 * MAX_STOPS)
    request = inputs.make_request("r", [1], SamplingParams(min_tokens=1, stop_token_ids=stops))
    assert len(request.group.banned_token_ids) == 2 * MAX_STOPS

    with pytest.raises(ValueError, match=f"names {MAX_STOPS + 1} EOS tokens, at most {MAX_STOPS} .* shorten"):
        make_inputs(scripted_dir, range(MAX_STOPS + 1), vocab_size=2 * MAX_STOPS)


@pytest.mark.parametrize("prompt", [{"prompt": "abc"}, {"prompt_token_ids": [1, 2, 3]}])
def test_a_salt_goes_with_the_kind_of_salt_that_it_is(inputs: InputProcessor, prompt: dict[str, Any]) -> None:
    plain = inputs.make_request("r", prompt, SamplingParams())
    salted = inputs.make_request("r", {**prompt, "cache_salt": "mine"}, SamplingParams())

    assert plain.group.cache_salts == ()
    assert salted.group.cache_salts == (("cache_salt", "mine"),)
    assert salted.prompt_token_ids == plain.prompt_token_ids
    assert prompt.keys() == {next(iter(prompt))}


def test_salt_and_priority_go_with_a_beam_search_too(inputs: InputProcessor) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)

    request = inputs.make_beam_request("r", {"prompt": "abc", "cache_salt": "mine"}, params, 5)

    assert request.group.cache_salts == (("cache_salt", "mine"),)
    assert request.group.priority == 5


@pytest.mark.parametrize(("n", "best_of"), [(3, None), (1, 3), (2, 3)])
def test_a_group_has_a_sequence_for_each_that_is_run(
    inputs: InputProcessor, n: int, best_of: int | None
) -> None:
    request = inputs.make_request("r", [1], SamplingParams(n=n, best_of=best_of))

    assert request.group.num_sequences == len(request.completions) == 3


@pytest.mark.parametrize(("logprobs", "wanted"), [(None, 0), (2, 2)])
def test_the_best_are_found_by_log_probabilities_that_the_user_need_not_ask_for(
    inputs: InputProcessor, logprobs: int | None, wanted: int
) -> None:
    request = inputs.make_request("r", [1], SamplingParams(best_of=2, logprobs=logprobs))

    assert (request.group.params.logprobs, request.params.logprobs) == (wanted, logprobs)


@pytest.mark.parametrize(("name", "options"), [("n", {"n": 10**9}), ("best_of", {"best_of": 9, "n": 2})])
def test_more_sequences_than_run_at_once_are_refused_with_both_numbers(
    inputs: InputProcessor, name: str, options: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is \d+ but max_num_seqs is 8, .* lower {name} or raise"):
        inputs.make_request("r", [1], SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("priority", "kept"), [(-(2**63), -(2**63)), (np.int32(7), 7)])
def test_a_priority_is_any_whole_number_of_64_bits(inputs: InputProcessor, priority: Any, kept: int) -> None:
    assert inputs.make_request("r", [1], SamplingParams(), priority).group.priority == kept


@pytest.mark.parametrize("priority", [1.5, True, None, "high", 2**63])
def test_any_other_priority_is_refused(inputs: InputProcessor, priority: Any) -> None:
    with pytest.raises(ValueError, match=r"^priority must be a whole number"):
        inputs.make_request("r", [1], SamplingParams(), priority)
