"""exact.cuh and philox.cuh have the bits of exact.py and philox.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.kernels.exact import goal, inverse, log_of, portion, rank_key, to_mass
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.test_philox import ANSWERS

PROBE = """
#include "exact.cuh"
#include "philox.cuh"

KERNEL(32) floats(uint64_t* mass, uint32_t* key, float* back, float* inverted, const float* x, int n) {
  for (int i = blockIdx.x * 32 + threadIdx.x; i < n; i += 32 * gridDim.x) {
    mass[i] = to_mass(exponent(x[i], {0.0f, 1.0f}));
    key[i] = rank_key(x[i]);
    back[i] = from_key(key[i]);
    inverted[i] = inverse(fabsf(x[i]));
  }
}

KERNEL(32) totals(uint64_t* part, uint64_t* aim, uint64_t* log, const uint64_t* total, const uint32_t* word,
                  const float* fraction, int n) {
  for (int i = threadIdx.x; i < n; i += 32) {
    part[i] = portion(total[i], word[i]);
    aim[i] = goal(total[i], fraction[i]);
    log[i] = log_of(total[i]);
  }
}

KERNEL(32) words(uint32_t* out, const uint32_t* key, const uint32_t* counter) {
  if (threadIdx.x > 0) return;
  const uint4 position = make_uint4(counter[0], counter[1], counter[2], counter[3]);
  const uint4 c = philox(make_uint2(key[0], key[1]), position);
  out[0] = c.x, out[1] = c.y, out[2] = c.z, out[3] = c.w;
  out[4] = random_word(key[0], key[1], counter[0], counter[1]);
}
"""


@pytest.fixture
def probe(tmp_path: Path) -> EmulatedDevice:
    (tmp_path / "probe.cu").write_text(PROBE)
    return EmulatedDevice(sources=tmp_path)


@njit
def twin_of_floats(x: Any, mass: Any, key: Any, inverted: Any) -> None:
    bits = x.view(np.uint32)
    for i in range(x.shape[0]):
        mass[i] = to_mass(x[i])
        key[i] = rank_key(bits[i])
        inverted[i] = inverse(abs(x[i]))


def every_exponent() -> NDArray[np.float32]:
    """Return numbers <= 0: many between 0 and -29, some of every exponent, NaN."""
    rng = np.random.default_rng(0)
    spread = (
        rng.integers(0, 2**23, 100_000, np.uint32) | rng.integers(0, 256, 100_000, np.uint32) << 23
    ).view(np.float32)
    return -np.concatenate([rng.random(300_000, np.float32) * 29, np.abs(spread)]).astype(np.float32)


def test_floats_have_the_twins_bits(probe: EmulatedDevice) -> None:
    x = every_exponent()
    mass, key, back = np.zeros(x.size, np.uint64), np.zeros(x.size, np.uint32), np.zeros_like(x)
    inverted, twin_inverted = np.zeros_like(x), np.zeros_like(x)
    twin_mass, twin_key = np.zeros(x.size, np.int64), np.zeros_like(key)

    args = (mass, key, back, inverted, x, x.size)
    probe.kernel("probe", "floats")((64, 1, 1), 32, args)
    twin_of_floats(x, twin_mass, twin_key, twin_inverted)

    assert np.array_equal(mass, twin_mass)
    assert np.array_equal(key, twin_key)
    assert np.array_equal(back, np.where(np.isnan(x), np.float32(-np.inf), x))
    a_number = ~np.isnan(x)
    assert np.array_equal(inverted[a_number], twin_inverted[a_number])


def test_totals_have_the_twins_bits(probe: EmulatedDevice) -> None:
    rng = np.random.default_rng(1)
    n = 500
    total = np.concatenate([[2**40, 2**62], (2 ** rng.uniform(40, 58, n - 2)).astype(np.uint64)]).astype(
        np.uint64
    )
    word = rng.integers(0, 2**32, n, np.uint32)
    fraction = rng.choice([2.0**-126, 1e-9, 1e-3, 0.5, 0.9, 1 - 2.0**-24], n).astype(np.float32)
    part, aim, log = (np.zeros(n, np.uint64) for _ in range(3))

    probe.kernel("probe", "totals")((1, 1, 1), 32, (part, aim, log, total, word, fraction, n))

    for i in range(n):
        each = int(total[i])
        assert (part[i], aim[i], log[i]) == (portion(each, word[i]), goal(each, fraction[i]), log_of(each))


@pytest.mark.parametrize(("key", "counter", "words"), ANSWERS)
def test_philox_words_are_the_published_ones(
    probe: EmulatedDevice, key: Any, counter: Any, words: Any
) -> None:
    out = np.zeros(5, np.uint32)

    probe.kernel("probe", "words")(
        (1, 1, 1), 32, (out, np.array(key, np.uint32), np.array(counter, np.uint32))
    )

    assert tuple(out[:4].tolist()) == words
    assert (out[4] == words[0]) == (counter[2:] == (0, 0))
