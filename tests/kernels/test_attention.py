"""The factors that make scores exponents of 2 against the definition of softcap; arrays that do not fit."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from cupaged.kernels.attention import ALL_TOKENS, element_of, score_factors, strides_of, window_of


def test_scores_are_scaled_to_exponents_of_2() -> None:
    factor, tanh_factor = score_factors(0.125, 0.0)

    assert tanh_factor == 0.0
    assert 2 ** (factor * 7.0) == pytest.approx(np.exp(0.125 * 7.0))


@pytest.mark.parametrize("score", [-1000.0, -3.0, 0.0, 0.01, 40.0])
def test_softcap_is_the_tanh_of_scaled_scores(score: float) -> None:
    factor, tanh_factor = score_factors(0.125, 2.5)

    softened = 1.0 - 2.0 / (1.0 + np.exp2(tanh_factor * score))

    assert 2 ** (factor * softened) == pytest.approx(np.exp(2.5 * np.tanh(0.125 * score / 2.5)))


@pytest.mark.parametrize("softcap", [-1.0, np.nan])
def test_softcap_that_is_not_positive_is_refused(softcap: float) -> None:
    with pytest.raises(ValueError, match=f"softcap is {softcap} but must be positive, or 0 for none"):
        score_factors(0.125, softcap)


def test_window_of_0_is_all_tokens_and_a_negative_one_is_refused() -> None:
    assert (window_of(0), window_of(17)) == (ALL_TOKENS, 17)
    with pytest.raises(ValueError, match="sliding_window is -1 but must be positive, or 0 for all tokens"):
        window_of(-1)


def test_places_are_counted_in_elements() -> None:
    qkv, pool = np.zeros((3, 6, 64), np.float16), np.zeros((5, 4, 2, 2, 16, 64), np.float16)
    tables = np.zeros((3, 9), np.int32)[:, :7]

    assert strides_of(qkv[:, :2], pool, 3, tables) == (6 * 64, 4 * 4096, 3 * 4096, 9)


def test_arrays_that_kernels_would_misread_are_no_launch() -> None:
    q, pool = np.zeros((3, 4, 64), np.float16), np.zeros((5, 4, 2, 2, 16, 64), np.float16)
    tables, out = np.zeros((3, 7), np.int32), np.zeros((3, 256), np.float16)
    wrong: list[Callable[[], object]] = [
        lambda: element_of(q.astype(ml_dtypes.bfloat16), pool, out),  # another dtype than the cache
        lambda: element_of(q, pool, out.astype(np.float32)),
        lambda: element_of(q[:, :3], pool, out),  # 3 heads share 2
        lambda: element_of(q, pool[..., :32], out),
        lambda: element_of(q, pool, np.zeros((3, 512), np.float16)[:, ::2]),
        lambda: strides_of(q.swapaxes(1, 2), pool, 0, tables),
        lambda: strides_of(q, pool[:, :, :, :1], 0, tables),  # some of the cache's heads
        lambda: strides_of(q, pool, 4, tables),
        lambda: strides_of(q, pool, 0, np.zeros((3, 7), np.int32).T),
    ]

    assert element_of(q, pool, out) == "f16"
    for each in wrong:
        with pytest.raises(AssertionError):
            each()


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan])
def test_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"attention scale is {scale} but must be positive"):
        score_factors(scale, 0.0)
