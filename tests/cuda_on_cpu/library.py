"""A compiled library: its kernels and its function, as runtime.h, memory.h and launch.cpp declare them."""

import ctypes
from pathlib import Path


class ParameterType(ctypes.Structure):
    """What the compiler knows of a kernel's parameter."""

    _fields_ = (
        ("code", ctypes.c_char),
        ("is_const", ctypes.c_bool),
        ("size", ctypes.c_uint8),
        ("element", ctypes.c_char),
    )


class KernelType(ctypes.Structure):
    """What the compiler knows of a kernel."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("threads", ctypes.c_uint),
        ("num_parameters", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ParameterType)),
        ("parameter_bytes", ctypes.c_size_t),
        ("call", ctypes.c_void_p),
    )


class ArraySpan(ctypes.Structure):
    """An array of a launch, or several that overlap."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("phase", ctypes.c_size_t),
        ("element_bytes", ctypes.c_uint32),
        ("is_const", ctypes.c_uint32),
    )


class LaunchRequest(ctypes.Structure):
    """All that a launch needs."""

    _fields_ = (
        ("kernel", ctypes.POINTER(KernelType)),
        ("parameters", ctypes.c_char_p),
        ("arrays", ctypes.POINTER(ArraySpan)),
        ("num_arrays", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("early_copies", ctypes.c_uint32),
    )


def load(path: Path) -> ctypes.PyDLL:
    """Load a library; it is called with Python's lock held, for it serves one thread at a time."""
    library = ctypes.PyDLL(str(path))
    library.launch.argtypes = (ctypes.POINTER(LaunchRequest),)
    library.launch.restype = ctypes.c_char_p
    return library


def kernel_type(library: ctypes.PyDLL, name: str) -> KernelType:
    """Return what the library says of its kernel."""
    return KernelType.in_dll(library, f"{name}_kernel")
