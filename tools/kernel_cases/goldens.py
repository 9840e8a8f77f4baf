"""Goldens: what the emulator gives for the small cases, kept so that a GPU can be held to it.

A file keeps the outputs and a checksum of the inputs, which are made anew from the case's name.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels.launch import Array, Device
from tools.kernel_cases.case import Case, HostArrays

GOLDENS_DIR = Path(__file__).parents[2] / "tests" / "kernels" / "goldens"
Outputs = dict[str, NDArray[Any]]


def run(
    case: Case,
    device: Device,
    to_device: Callable[[NDArray[Any]], Array] = np.array,
    to_host: Callable[[Array], NDArray[Any]] = np.array,
) -> Outputs:
    """Return the outputs of a case on a device."""
    made = case.make(HostArrays(case.name))
    arrays = {name: to_device(array) for name, array in made.items()}
    case.launch(device, arrays)
    return {name: to_host(arrays[name]) for name in case.outputs}


def checksum(case: Case) -> str:
    """Return a hash over all arrays that a case reads."""
    digest = hashlib.sha256()
    for name, array in case.make(HostArrays(case.name)).items():
        content = array.tobytes()
        if content.strip(b"\xff"):  # else it is to be written
            digest.update(f"{name} {array.dtype} {array.shape} ".encode() + content)
    return digest.hexdigest()


def save(case: Case, outputs: Outputs) -> int:
    """Write a case's golden; return its bytes."""
    path = GOLDENS_DIR / f"{case.name}.npz"
    bits = {name: array.view(f"u{array.dtype.itemsize}") for name, array in outputs.items()}
    np.savez_compressed(path, checksum=np.array(checksum(case)), **bits)  # type: ignore[arg-type]
    return path.stat().st_size


def load(case: Case) -> Outputs:
    """Return what a case must give; ValueError if there is no golden of these inputs."""
    path = GOLDENS_DIR / f"{case.name}.npz"
    remedy = f"make it again: python -m tools.make_kernel_goldens {case.name}"
    if not path.is_file():
        raise ValueError(f"{path.name} is not there; {remedy}")
    with np.load(path) as kept:
        if str(kept["checksum"]) != checksum(case):
            raise ValueError(f"{path.name} is of other inputs than the case has now; {remedy}")
        made = case.make(HostArrays(case.name))
        return {name: kept[name].view(made[name].dtype) for name in case.outputs}


def difference(case: Case, actual: Outputs, expected: Outputs) -> str:
    """Return what a result differs in beyond the case's tolerance; "" if it is as it must be."""
    for name in case.outputs:
        a, b = actual[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if a.dtype.kind in "iu":
            wrong, error = a != b, np.abs(a.astype(np.int64) - b.astype(np.int64)).astype(np.float64)
        else:
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            with np.errstate(invalid="ignore"):  # inf - inf
                error = np.abs(wide_a - wide_b)
                near = error <= case.tolerance.relative * np.abs(wide_b) + case.tolerance.absolute
            same = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
            wrong = ~(same | (near & np.isfinite(wide_b)))
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            return (
                f"{name}: {np.count_nonzero(wrong)} of {wrong.size} wrong, first at {list(first)}: "
                f"{a[first]} for {b[first]}; error max {error[wrong].max():.2e}, "
                f"mean {error[wrong].mean():.2e}"
            )
    return ""
