"""Rehearsal: what stands in for a device while memory is measured.

Arrays have no memory and kernels do nothing. So all that launch functions check of shapes is checked before
anything is allocated, and the kernels that steps will need are known.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cupaged.kernels import launch
from cupaged.kernels.launch import Constant, Grid


def outline(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return what has the shape and strides of a packed array; reading it is a wild access."""
    kind = np.dtype(dtype)
    strides = [kind.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return as_strided(np.zeros(1, kind), shape, strides, writeable=False)


class Rehearsal:
    """A launch.Device that launches nothing and remembers what it was asked for."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Any, ...], tuple[str, str, dict[str, Constant]]] = {}

    def kernel(self, file: str, name: str, **constants: Constant) -> launch.Kernel:
        """Return a kernel that does nothing."""
        key = (file, name, *sorted(constants.items()))
        self._asked[key] = (file, name, constants)
        return _do_nothing

    def load(self, device: launch.Device) -> None:
        """Have `device` compile and load all that was asked for."""
        for file, name, constants in self._asked.values():
            device.kernel(file, name, **constants)


def _do_nothing(grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
    pass
