"""The factors that make scores exponents of 2, as the kernels use them, against the definition of softcap."""

import numpy as np
import pytest

from cupaged.kernels.attention import score_factors


def test_scores_are_scaled_to_exponents_of_2() -> None:
    factor, tanh_factor = score_factors(0.125, 0.0)

    assert tanh_factor == 0.0
    assert 2 ** (factor * 7.0) == pytest.approx(np.exp(0.125 * 7.0))


@pytest.mark.parametrize("score", [-1000.0, -3.0, 0.0, 0.01, 40.0])
def test_softcap_is_the_tanh_of_scaled_scores(score: float) -> None:
    factor, tanh_factor = score_factors(0.125, 2.5)

    softened = 1.0 - 2.0 / (1.0 + np.exp2(tanh_factor * score))

    assert 2 ** (factor * softened) == pytest.approx(np.exp(2.5 * np.tanh(0.125 * score / 2.5)))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"attention scale is {scale} but must be positive"):
        score_factors(scale, 0.0)
