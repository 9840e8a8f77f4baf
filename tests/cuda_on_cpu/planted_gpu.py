"""An emulated GPU for its own tests: it runs kernels of this folder, and order shows in what they do."""

from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.gpu import DeviceArray, EmulatedGpu
from tests.cuda_on_cpu.planted import KERNELS

I32 = np.int32
Values = np.ndarray[Any, Any]


def gpu(mode: str = "fast", **options: Any) -> EmulatedGpu:
    """Return a GPU that runs the kernels of this folder."""
    return EmulatedGpu(mode, sources=KERNELS, **options)


@pytest.fixture
def device() -> EmulatedGpu:
    """Return a GPU whose stream waits."""
    return gpu()


def ints(device: EmulatedGpu, value: int) -> DeviceArray:
    """Return int32[32] of one value."""
    return device.array(np.full(32, value, I32))


def append(device: EmulatedGpu, out: DeviceArray, x: Any, base: int = 10) -> None:
    """Do out = base * out + x, one digit more."""
    device.kernel("gpu", "append")((1, 1, 1), 32, (out, x, base))


def pinned(device: EmulatedGpu, value: int) -> Values:
    """Return pinned int32[32] of one value."""
    array: Values = device.pin(128).view(I32)
    array[:] = value
    return array
