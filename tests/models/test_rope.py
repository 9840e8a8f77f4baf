"""The rope zoo: tables against transformers', and what no golden shows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.config import HFConfig, ModelConfig
from cupaged.models import load_model_class
from cupaged.models.rope import attention_factor, cos_sin_table, inverse_frequencies
from tools.make_tiny_model import LLAMA, ROPES

GOLDEN = Path(__file__).parent / "goldens" / "rope.npz"


def make_config(values: dict[str, Any]) -> ModelConfig:
    return load_model_class("llama").config(HFConfig(LLAMA | values))


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[Any]]:
    """Transformers' frequencies, and its cosines and sines at `positions`, by name of ROPES."""
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(golden: dict[str, NDArray[Any]], name: str) -> None:
    max_model_len = int(golden["positions"][-1]) + 1

    actual = inverse_frequencies(make_config(ROPES[name]), max_model_len)

    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, golden[f"{name}_inv_freq"], rtol=3e-7)  # the last bit or two


@pytest.mark.parametrize("name", ROPES)
def test_table_far_out_equals_transformers(golden: dict[str, NDArray[Any]], name: str) -> None:
    positions = golden["positions"]

    table = cos_sin_table(make_config(ROPES[name]), int(positions[-1]) + 1)

    assert table.dtype == np.float32
    # One bit of a frequency turns position 20,000 by up to 20,000 * 6e-8.
    limits = 1e-6 + 1.2e-7 * positions[:, None] * np.ones(table.shape[1])
    assert (np.abs(table[positions] - golden[f"{name}_cos_sin"]) <= limits).all()


def test_table_is_as_long_as_the_runtime_length_not_the_models() -> None:
    config = make_config({"max_position_embeddings": 16})

    assert cos_sin_table(config, 40).shape == (40, config.head_dim)


def test_dynamic_base_is_the_original_up_to_the_original_length() -> None:
    plain = make_config({"max_position_embeddings": 32})
    dynamic = make_config({"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 1.7}})

    np.testing.assert_array_equal(cos_sin_table(dynamic, 32), cos_sin_table(plain, 32))
    assert np.abs(cos_sin_table(dynamic, 33)[:32] - cos_sin_table(plain, 32)).max() > 0.01


def test_dynamic_base_depends_on_max_model_len_alone() -> None:
    config = make_config({"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    base = LLAMA["rope_theta"] * (2.0 * 96 / 32 - 1.0) ** (12 / 10)

    expected = np.float64(base) ** (-np.arange(0, 12, 2) / 12)

    np.testing.assert_allclose(inverse_frequencies(config, 96), expected, rtol=1e-6)


def test_llama3_scales_low_frequencies_only() -> None:
    config = make_config(ROPES["llama_3.2"])
    plain = make_config({"head_dim": 64, "rope_theta": 500000.0})

    ratio = inverse_frequencies(plain, 100) / inverse_frequencies(config, 100)

    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(32)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"factor": 4.0}, 0.1 * np.log(4.0) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 4.0, "attention_factor": 0.5}, 0.5),
        (
            {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * np.log(4.0) + 1) / (0.05 * np.log(4.0) + 1),
        ),
        ({"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * np.log(4.0) + 1),
    ],
)
def test_yarn_attention_factor(scaling: dict[str, float], expected: float) -> None:
    config = make_config({"rope_scaling": {"type": "yarn"} | scaling})

    assert attention_factor(config.rope) == pytest.approx(expected)
    table = cos_sin_table(config, 3)
    assert table[0, 0] == pytest.approx(expected)
