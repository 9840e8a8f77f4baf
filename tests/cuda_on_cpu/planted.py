"""Kernels with planted bugs: mode check must find each, name its line, and accept the right twin."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.device import EmulatedDevice, EmulatorError

KERNELS = Path(__file__).parent / "kernels"


def line(file: str, mark: str) -> str:
    """Return the place of the comment "// here: mark" as messages name it."""
    for number, text in enumerate((KERNELS / f"{file}.cu").read_text(encoding="utf-8").splitlines(), 1):
        if text.endswith(f"// here: {mark}"):
            return f"{file}.cu:{number}"
    raise ValueError(f"{file}.cu has no line marked {mark}")


def device(mode: str = "check", **options: Any) -> EmulatedDevice:
    """Return a device that runs the kernels of this folder."""
    return EmulatedDevice(mode, sources=KERNELS, **options)


def zeros(*shape: int, dtype: Any = np.int32) -> np.ndarray[Any, Any]:
    """Return an array that kernels write to."""
    return np.zeros(shape, dtype)


def complaint(kernel: Any, *launch: Any) -> str:
    """Return what the emulator says against a launch."""
    with pytest.raises(EmulatorError) as raised:
        kernel(*launch)
    return str(raised.value)


def threads_in(message: str) -> tuple[int, int]:
    """Return block x and thread that a message blames."""
    found = re.search(r"\n  in \w+, block \((\d+), \d+, \d+\), thread (\d+)", message)
    assert found, message
    return int(found[1]), int(found[2])
