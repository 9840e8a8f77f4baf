"""SamplingParams: defaults, normalisation, and one clear error for every bad field."""

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupaged import BeamSearchParams, SamplingParams
from cupaged.sampling_params import RequestOutputKind


def test_defaults_are_vllms() -> None:
    params = SamplingParams()

    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n) == (16, 0, 1)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_zero_and_minus_one_both_mean_all(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == 0


def test_a_single_stop_string_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", 1e39),
        ("temperature", [1.0]),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", np.array([1, 2])),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**64),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 5),
        ("stop", b"END"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", "yes"),
        ("detokenize", 1),
        ("output_kind", 7),
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("n", 2**31),
        ("best_of", 0),
        ("best_of", True),
        ("best_of", 2.0),
        ("best_of", 2**31),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", 1),
        ("logit_bias", np.array([1.0, 2.0])),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {5: 1.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", {"json": {}}),
        ("truncate_prompt_tokens", 4),
    ],
)
def test_option_of_a_later_version_is_refused_but_for_its_neutral_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*not supported yet"):
        SamplingParams(**{name: value})


def test_neutral_values_of_later_options_are_accepted() -> None:
    params = SamplingParams(presence_penalty=0, repetition_penalty=1, logit_bias={}, bad_words=[])

    assert params == SamplingParams(logit_bias={}, bad_words=[])


@pytest.mark.parametrize(("n", "best_of", "num_sequences"), [(1, None, 1), (3, None, 3), (2, 5, 5)])
def test_best_of_sequences_are_run_else_n(n: int, best_of: int | None, num_sequences: int) -> None:
    assert SamplingParams(n=n, best_of=best_of).num_sequences == num_sequences


def test_best_of_below_n_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"best_of must be >= n, which is 3, and below .*, got 2"):
        SamplingParams(n=3, best_of=2)


def test_the_best_of_more_cannot_be_streamed() -> None:
    with pytest.raises(ValueError, match=r"best_of is 3 but n is 2: .* do not stream"):
        SamplingParams(n=2, best_of=3, output_kind=RequestOutputKind.DELTA)

    assert SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA).n == 2


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_k", np.int64(4), 4),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("max_tokens", np.int32(7), 7),
        ("logprobs", np.int8(0), 0),
        ("n", np.int64(1), 1),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("stop_token_ids", np.array([0]), (0,)),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("stop_token_ids", (i for i in (3, 4)), (3, 4)),
        ("stop", None, ()),
    ],
)
def test_numbers_and_lists_of_other_kinds_are_kept_as_pythons_own(name: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)

    assert found == kept
    assert type(found) is type(kept)
    if isinstance(kept, tuple):
        assert [type(item) for item in found] == [type(item) for item in kept]


@pytest.mark.parametrize("top_p", [1e-300, 5e-324])
def test_top_p_below_any_float32_is_kept_above_zero(top_p: float) -> None:
    assert np.float32(SamplingParams(top_p=top_p).top_p) > 0


@pytest.mark.parametrize(("name", "entry"), [("stop", "a"), ("stop_token_ids", 7)])
def test_more_stops_than_a_step_can_bear_are_refused(name: str, entry: Any) -> None:
    enough: dict[str, Any] = {name: [entry] * 1024}
    too_many: dict[str, Any] = {name: [entry] * 1025}

    assert len(getattr(SamplingParams(**enough), name)) == 1024
    with pytest.raises(ValueError, match=f"{name} has 1025 entries, at most 1024"):
        SamplingParams(**too_many)


def test_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        SamplingParams(colour="red")  # type: ignore[call-arg]


def test_copies_and_pickles_are_equal() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], seed=1, logprobs=2)

    for twin in (replace(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"min_tokens is 9 but max_tokens is 4"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_negative_seed_is_accepted() -> None:
    assert SamplingParams(seed=-1).seed == -1


def test_beam_search_defaults_are_vllms() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8)

    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    assert params.early_stopping is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 129),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("temperature", -1),
        ("temperature", math.nan),
        ("length_penalty", math.inf),
        ("length_penalty", 16.5),
        ("length_penalty", "long"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "no"),
    ],
)
def test_bad_beam_search_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*got"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})


def test_beam_search_takes_numpy_scalars_and_whole_numbers() -> None:
    params = BeamSearchParams(
        beam_width=np.int64(3), max_tokens=4, length_penalty=np.float32(0.5), temperature=2
    )

    assert type(params.beam_width) is int
    assert (params.length_penalty, params.temperature) == (0.5, 2.0)
    assert type(params.temperature) is float
