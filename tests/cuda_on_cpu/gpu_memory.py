"""Memory of an emulated GPU: what is allocated on the device and pinned on the host, by weak references.

Device memory is host memory that only work on the stream touches: what the host holds is a DeviceArray,
which has a shape and can be cut, and refuses all that would read, write or compute.
"""

import mmap
import sys
import weakref
import zlib
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tests.cuda_on_cpu.build import EmulatorError

FILL = 0xFF  # in every byte of new memory: NaN as a float of any size, -1 as an integer


class DeviceArray:
    """An array in device memory, as the lines above Device may use one."""

    __slots__ = ("memory",)
    __iter__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: NDArray[Any]) -> None:
        self.memory = memory  # where it lies; for work on the stream

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.memory.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        return self.memory.strides

    @property
    def ndim(self) -> int:
        return self.memory.ndim

    @property
    def size(self) -> int:
        return self.memory.size

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, index: Any) -> "DeviceArray":
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not _cuts_view(part):
                raise TypeError(f"{part!r} cuts no view out of a device array")
        return DeviceArray(self.memory[parts if Ellipsis in parts else (*parts, ...)])

    def reshape(self, *shape: Any) -> "DeviceArray":
        """Return a view of another shape; TypeError if it needs a copy."""
        view = self.memory.reshape(*shape)
        if self.size and not np.may_share_memory(view, self.memory):
            raise TypeError(f"{self} cannot have shape {shape} without a copy")
        return DeviceArray(view)

    def view(self, dtype: Any) -> "DeviceArray":
        """Return the same bytes as elements of another type."""
        return DeviceArray(self.memory.view(dtype))

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a device array has no values on the host; tests read it with gpu.read(array)")

    __array__ = __bool__ = __eq__ = __setitem__ = _refuse


def _cuts_view(part: Any) -> bool:
    """Return whether a part of an index gives a view that runs forward; NumPy would else copy."""
    if isinstance(part, slice):
        return part.step is None or part.step > 0
    return part is Ellipsis or type(part) is int or isinstance(part, np.integer)


class Piece:
    """One allocation; it does not keep the memory, only says whether it is still there."""

    def __init__(self, root: NDArray[np.uint8]) -> None:
        self.begin: int = root.ctypes.data
        self.num_bytes = len(root)
        self._root = weakref.ref(root)
        self.watches: list[Watch] = []  # of copies under way, if this is pinned memory

    def root(self) -> NDArray[np.uint8]:
        """Return all its bytes; EmulatorError if it was freed."""
        root = self._root()
        if root is None:
            raise EmulatorError(f"memory of {self.num_bytes} bytes was freed, but is still in use")
        return root

    def watches_of(self, offset: int, num_bytes: int) -> "list[Watch]":
        """Return those of any of these bytes."""
        return [each for each in self.watches if each.begin < offset + num_bytes and offset < each.end]

    def holds(self, address: int, num_bytes: int) -> bool:
        """Return whether these bytes are within it."""
        return self.begin <= address and address + num_bytes <= self.begin + self.num_bytes


class Watch:
    """Pinned bytes that the host must leave alone while a copy is under way."""

    def __init__(self, piece: Piece, offset: int, num_bytes: int) -> None:
        self._piece, self.begin, self.end = piece, offset, offset + num_bytes
        self.renew()
        piece.watches.append(self)

    def renew(self) -> None:
        """Take what is there now for right: the device itself has written."""
        self._sum = self._sum_now()

    def has_changed(self) -> bool:
        """Return whether the host has written meanwhile, and stop watching."""
        self._piece.watches.remove(self)
        return self._sum_now() != self._sum

    def _sum_now(self) -> int:
        return zlib.crc32(self._piece.root()[self.begin : self.end].data)


class Memory:
    """All memory of one kind, and how much of it there is."""

    def __init__(self, num_bytes: int = sys.maxsize) -> None:
        self.num_bytes = self.free = num_bytes
        self._pieces: dict[int, Piece] = {}  # by where they begin

    def take(self, num_bytes: int) -> None:
        """Count bytes as used for good; ValueError if they are not there."""
        if num_bytes > self.free:
            raise ValueError(
                f"{num_bytes} bytes of GPU memory are wanted but {self.free} are free; lower "
                "gpu_memory_utilization, max_num_seqs or max_num_batched_tokens"
            )
        self.free -= num_bytes

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return bytes that begin a page; they go back when nothing refers to them any more."""
        self.take(num_bytes)
        root: NDArray[np.uint8] = np.ndarray((num_bytes,), np.uint8, mmap.mmap(-1, max(num_bytes, 1)))
        root.fill(FILL)
        piece = self._pieces[root.ctypes.data] = Piece(root)
        weakref.finalize(root, self._return, piece).atexit = False
        return root

    def _return(self, piece: Piece) -> None:
        del self._pieces[piece.begin]
        self.free += piece.num_bytes

    def piece(self, address: int, num_bytes: int) -> Piece | None:
        """Return the allocation that has these bytes; None if there is none."""
        for piece in list(self._pieces.values()):  # a collection of garbage may free one meanwhile
            if piece.holds(address, num_bytes):
                return piece
        return None
