"""The linear layers on AMX as they stand, with nothing compiled: they run on the stand-in for the tiles."""

import importlib.util
from typing import Any

import numba as _numba

from cupaged.kernels import linear_amx

numba: Any = _numba


def load_plain() -> Any:
    """Return linear_amx anew."""
    spec = importlib.util.spec_from_file_location("plain_linear_amx", linear_amx.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 1
    try:
        spec.loader.exec_module(module)
    finally:
        numba.config.DISABLE_JIT = before
    return module


plain = load_plain()
