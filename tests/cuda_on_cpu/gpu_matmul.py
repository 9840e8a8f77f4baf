"""The stand-in for cuBLASLt as an emulated GPU has it: products wait on the stream."""

from typing import TYPE_CHECKING, Any

from tests.cuda_on_cpu.build import EmulatorError
from tests.cuda_on_cpu.cublaslt import load, prepare
from tests.cuda_on_cpu.gpu_stream import Launch

if TYPE_CHECKING:
    from tests.cuda_on_cpu.gpu import EmulatedGpu


class Cublaslt:
    """The library's functions by name; cublasLtMatmul is ours."""

    def __init__(self, gpu: "EmulatedGpu") -> None:
        self._library = load()
        self.cublasLtMatmul = MatmulFunction(gpu, self._library)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class MatmulFunction:
    """cublasLtMatmul: what it is told is read at the call, the arrays when the stream comes to it."""

    def __init__(self, gpu: "EmulatedGpu", library: Any) -> None:
        self._gpu, self._library = gpu, library
        self._known: set[object] = set()  # what ran before: problems and algorithms
        self.argtypes: Any = None  # as of any function of a library
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        """Put a matrix product on the stream; return cuBLAS's status."""
        gpu = self._gpu
        status, matmul = prepare(self._library, args)
        if matmul is None:
            return int(status)
        if matmul.stream != gpu.stream:
            raise EmulatorError(f"a matrix product on stream {matmul.stream:#x}, not the device's")
        if gpu.is_capturing and matmul.key not in self._known:
            raise EmulatorError("a matrix product is first run in a capture, where no module can be loaded")
        self._known.add(matmul.key)
        pieces = tuple(gpu.piece_at(begin, size, "matrix product") for begin, size, _ in matmul.spans)
        gpu.launches.append("matmul")
        gpu.put(Launch(matmul.run, pieces, matmul.seconds))
        return int(status)
