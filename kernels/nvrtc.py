"""NVRTC by ctypes: CUDA C++ to a cubin for one architecture, without a GPU and without CuPy.

The library comes from a pip wheel or the system, found by cuda-pathfinder. What is missing or does not fit is
one error, CudaUnavailable, that says what to install.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple

INSTALL = "install cupaged[cuda13] for a driver of CUDA 13, or cupaged[cuda12] for one of CUDA 12"
BUILTIN_OPERATION_FAILURE = 7  # its second library, nvrtc-builtins, is of another version or missing
CACHES = (12, 9)  # the first version that looks into the driver's cache; what it finds there has no log

_STRINGS, _POINTER, _SIZE = POINTER(c_char_p), POINTER(c_void_p), POINTER(c_size_t)
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (_POINTER, c_char_p, c_char_p, c_int, _STRINGS, _STRINGS),
    "nvrtcCompileProgram": (c_void_p, c_int, _STRINGS),
    "nvrtcDestroyProgram": (_POINTER,),
    "nvrtcGetProgramLogSize": (c_void_p, _SIZE),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, _SIZE),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
}


class CudaUnavailable(RuntimeError):  # noqa: N818  it names a state of the machine
    """A CUDA library or the driver is missing, too old, or does not fit the others."""


class Program(NamedTuple):
    """What is compiled."""

    name: str  # of the file, as errors show it
    source: str
    headers: Mapping[str, str]  # by the name in #include


class Nvrtc:
    """One loaded NVRTC library. Compiling in several threads at once is fine."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, argtypes in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise CudaUnavailable(f"the NVRTC found is too old, it has no {name}; {INSTALL}")
            function.argtypes, function.restype = argtypes, c_int
        major, minor = c_int(), c_int()
        self._check("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)
        count = c_int()
        self._check("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", numbers)
        self.archs = tuple(f"sm_{number}" for number in numbers)

    def compile(self, program: Program, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Return cubin and log; ValueError with the log if the program is wrong."""
        if arch.rstrip("af") not in self.archs:
            version = ".".join(map(str, self.version))
            raise CudaUnavailable(
                f"NVRTC {version} cannot compile for {arch}, only for {', '.join(self.archs)} (sm_100 needs "
                f"12.8 or newer); {INSTALL}"
            )
        handle = self._create(program)
        try:
            own = ["--no-cache"] if self.version >= CACHES else []
            options = [f"--gpu-architecture={arch}", *own, *options]
            status = self._library.nvrtcCompileProgram(handle, len(options), _strings(options))
            log = self._get("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", handle).rstrip(b"\0").decode()
            if status == BUILTIN_OPERATION_FAILURE:
                raise CudaUnavailable(f"NVRTC's two libraries do not fit ({log.strip()}); {INSTALL}")
            if status:
                raise ValueError(f"{program.name} does not compile with {' '.join(options)}:\n{log}")
            cubin = self._get("nvrtcGetCUBINSize", "nvrtcGetCUBIN", handle)
            if not cubin:
                raise RuntimeError(f"NVRTC compiled {program.name} for {arch} but returned no cubin")
            return cubin, log
        finally:
            self._check("nvrtcDestroyProgram", byref(handle))

    def _create(self, program: Program) -> c_void_p:
        handle = c_void_p()
        self._check(
            "nvrtcCreateProgram",
            byref(handle),
            program.source.encode(),
            program.name.encode(),
            len(program.headers),
            _strings(program.headers.values()),
            _strings(program.headers),
        )
        return handle

    def _get(self, size_function: str, function: str, handle: c_void_p) -> bytes:
        size = c_size_t()
        self._check(size_function, handle, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(function, handle, buffer)
        return buffer.raw

    def _check(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")


def _strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _find_library() -> Any:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)


def open_nvrtc(find_library: Callable[[], Any] = _find_library) -> Nvrtc:
    """Return the NVRTC library of this machine; CudaUnavailable if there is none."""
    try:
        library = find_library()
    except ImportError as error:
        raise CudaUnavailable(f"no NVRTC: {error.name or error} is not installed; {INSTALL}") from None
    except (RuntimeError, OSError) as error:  # pathfinder found none, or it does not load
        reason = str(error).strip().split("\n")[0]
        raise CudaUnavailable(f"no NVRTC, which compiles the kernels: {reason}; {INSTALL}") from None
    return Nvrtc(library)


@functools.cache
def nvrtc() -> Nvrtc:
    """Return the NVRTC library, loaded once."""
    return open_nvrtc()
