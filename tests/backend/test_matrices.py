"""The forms of weight matrices: what they take, and that one handle multiplies and looks up alike."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Limits, MemoryUse
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.matrices import choose_form
from cupaged.kernels import amx
from cupaged.kernels.intrinsics import HAS_BF16
from cupaged.kernels.linear_tile import WIDTH
from tests.kernels.plain_amx import plain

LIMITS = Limits(num_tokens=64, num_seqs=4, seq_len=64, block_size=16, num_slots=64)
HIDDEN, VOCAB = 40, 97
OUTPUTS = -(-VOCAB // WIDTH) * WIDTH  # of panels that hold the vocabulary
FORMS = [None, "int8", "int8_w8a8"]


def random(*shape: int, kind: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(kind)


def create(dtype: str = "float32", quantization: Any = None) -> CpuBackend:
    backend = CpuBackend(dtype, num_threads=1, quantization=quantization)
    backend.allocate(LIMITS, MemoryUse(weights=0, workspace=0, activations=1 << 20, reserve=0))
    return backend


@pytest.mark.parametrize(
    ("quantization", "dtype", "stored", "num_bytes"),
    [
        (None, "float32", np.float32, OUTPUTS * (4 * HIDDEN + 4)),
        (None, "float32", ml_dtypes.bfloat16, OUTPUTS * (2 * HIDDEN + 4)),
        (None, "bfloat16", np.float32, OUTPUTS * (2 * HIDDEN + 4)),
        ("int8", "bfloat16", np.float16, OUTPUTS * (HIDDEN + 8)),
        ("int8", "float32", ml_dtypes.bfloat16, OUTPUTS * (HIDDEN + 8)),
        ("int8_w8a8", "bfloat16", np.float32, OUTPUTS * (HIDDEN + 12)),
    ],
)
def test_matrix_takes_its_numbers_and_what_belongs_to_each_output(
    quantization: Any, dtype: str, stored: Any, num_bytes: int
) -> None:
    backend = CpuBackend(dtype, num_threads=1, quantization=quantization)
    weight = random(VOCAB, HIDDEN, kind=stored)

    use = backend.measure(LIMITS, lambda: backend.prepare_linear([{"weight": weight}]))

    arrays = 4  # at most, that begin on a cache line each; so does the memory that they are cut from
    assert num_bytes <= use.weights < num_bytes + (arrays + 1) * 64


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_embedding_returns_is_what_linear_multiplies_by(dtype: str, quantization: Any) -> None:
    backend = create(dtype, quantization)
    handle = backend.prepare_linear([{"weight": random(VOCAB, HIDDEN, kind=ml_dtypes.bfloat16)}])
    units = np.eye(HIDDEN, dtype=np.float32)
    x = (
        units
        if backend.rms_norm(units, np.ones(HIDDEN, np.float32), 0.0).dtype == np.float32
        else units.astype(ml_dtypes.bfloat16)
    )

    rows = backend.embedding(np.arange(VOCAB, dtype=np.int32), handle)

    np.testing.assert_allclose(backend.linear(x, handle).T, rows, rtol=1e-6)


def test_parts_of_bfloat16_do_not_round_those_of_float32() -> None:
    weights = [random(16, HIDDEN, kind=kind) for kind in (ml_dtypes.bfloat16, np.float32)]
    single, half = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

    assert choose_form(weights, single, single, None).arrays(32, HIDDEN)[0][1] == single
    assert choose_form(weights[:1], single, single, None).arrays(16, HIDDEN)[0][1] == half


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("in_features", [1, 37, 38, 39])
def test_any_number_of_inputs_is_multiplied(in_features: int, quantization: Any) -> None:
    backend, weight, x = create(quantization=quantization), random(VOCAB, in_features), random(9, in_features)

    out = backend.linear(x, backend.prepare_linear([{"weight": weight}]))

    exact = x @ weight.T
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < 0.02


@pytest.mark.parametrize("quantization", FORMS)
def test_logits_are_near_those_of_the_weights_as_they_were(quantization: Any) -> None:
    backend, weight, x = create(quantization=quantization), random(VOCAB, HIDDEN), random(9, HIDDEN)
    exact = x @ weight.T

    logits = backend.logits(x, backend.prepare_linear([{"weight": weight}]))

    error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
    assert error < (1e-6 if quantization is None else 0.02)
    assert (quantization is None) == (error < 1e-4)


@pytest.mark.parametrize(
    ("dtype", "quantization", "is_half"),
    [
        ("bfloat16", None, True),
        ("bfloat16", "int8", True),
        ("bfloat16", "int8_w8a8", False),
        ("float16", "int8", False),
        ("float32", "int8", False),
    ],
)
def test_inputs_are_rounded_to_bfloat16_only_where_they_are_multiplied_so(
    dtype: str, quantization: Any, is_half: bool
) -> None:
    normed = create(dtype, quantization).rms_norm(random(2, 8), np.ones(8, np.float32), 0.0)

    assert (normed.dtype == ml_dtypes.bfloat16) == (is_half and HAS_BF16)


@pytest.mark.parametrize("quantization", FORMS[1:])
def test_weights_that_have_no_form_of_8_bits_are_refused(quantization: Any) -> None:
    weight = random(VOCAB, HIDDEN)
    weight[3, 3] = np.inf

    with pytest.raises(ValueError, match="leave quantization out"):
        create(quantization=quantization).prepare_linear([{"weight": weight}])


@pytest.mark.parametrize(
    ("quantization", "inputs", "in_features", "tiles"),
    [
        (None, ml_dtypes.bfloat16, 64, True),
        ("int8", ml_dtypes.bfloat16, 64, True),
        ("int8_w8a8", np.float32, 64, True),
        (None, ml_dtypes.bfloat16, 48, False),  # no whole rows of a tile
        ("int8_w8a8", np.float32, 96, False),
        (None, np.float32, 64, False),
        ("int8", np.float32, 64, False),
    ],
)
def test_tiles_of_amx_are_used_where_they_fit(
    quantization: Any, inputs: Any, in_features: int, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "HAS_AMX", True)
    weights = [random(16, in_features, kind=ml_dtypes.bfloat16)]

    form: Any = choose_form(weights, np.dtype(inputs), np.dtype(inputs), quantization)

    kernels = [kernel.__name__ for kernel, _ in form.kernels(weights)]
    assert form.tiles == tiles
    assert any(name.endswith("_amx") for name in kernels) == tiles


def multiply_by(weight: NDArray[Any], x: NDArray[Any], quantization: Any) -> tuple[str, NDArray[np.float32]]:
    """Return which kernel multiplies, and what it returns; one for tiles runs on the stand-in for them."""
    form: Any = choose_form([weight], np.dtype(ml_dtypes.bfloat16), x.dtype, quantization)
    arrays = [np.empty(shape, kind) for shape, kind in form.arrays(*weight.shape)]
    packed, out = form.name(arrays, *weight.shape), np.full((len(x), len(weight)), np.nan, np.float32)
    form.pack([weight], None, packed)
    kernel, *args = form.multiply(x if x.dtype == np.float32 else x.view(np.uint16), packed, out, np.empty)
    getattr(plain, kernel.__name__, kernel)(*args)
    return kernel.__name__, out


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("quantization", FORMS)
def test_tiles_of_amx_multiply_by_what_is_packed_for_them(
    quantization: Any, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = (random(count, 64, kind=ml_dtypes.bfloat16) for count in (33, num_rows))
    monkeypatch.setattr(amx, "HAS_AMX", False)
    _, expected = multiply_by(weight, x.astype(np.float32), quantization)
    monkeypatch.setattr(amx, "HAS_AMX", True)

    is_w8a8 = quantization == "int8_w8a8"
    name, out = multiply_by(weight, x.astype(np.float32) if is_w8a8 else x, quantization)

    assert name.endswith("_amx")
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert not is_w8a8 or np.array_equal(out, expected)  # its sums are integers
