"""Memory of an emulated GPU is counted, and nobody but work on the stream touches it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.backend.device import ALIGNMENT
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.cuda_on_cpu.planted import complaint
from tests.cuda_on_cpu.planted_gpu import I32, append, device, gpu, ints, pinned

__all__ = ["device"]


def test_new_memory_is_aligned_and_holds_nothing_useful(device: EmulatedGpu) -> None:
    memory, host = device.allocate(1000), device.pin(100)

    assert device.address(memory) % ALIGNMENT == 0
    assert {*device.read(memory), *host} == {0xFF}
    assert np.isnan(device.read(device.view(memory, 8, (3, 2), np.float16))).all()


def test_memory_is_counted_and_comes_back(device: EmulatedGpu) -> None:
    before = device.memory_info()

    memory = device.allocate(1000)
    view = device.view(memory, 256, (2,), I32)
    held = device.memory_info()
    del memory
    kept = device.memory_info()
    del view

    assert before == device.memory_info() == (1 << 30, 1 << 30)
    assert held == kept == (before[0] - 1000, before[1])
    assert device.allocations == [1000]


def test_memory_that_is_not_there_is_refused() -> None:
    device = gpu(memory=1000)
    held = device.allocate(600)

    with pytest.raises(ValueError, match="401 bytes of GPU memory are wanted but 400 are free; lower"):
        device.allocate(401)
    del held
    device.allocate(1000)


def test_driver_takes_memory_for_kernels_and_graphs() -> None:
    device = gpu(memory=1000, driver_bytes=300)

    device.kernel("gpu", "append")
    device.kernel("gpu", "append")
    graph = device.capture(lambda: None)

    assert device.memory_info() == (400, 1000)
    assert len(graph) == len(device.allocations) == 0
    with pytest.raises(ValueError, match="500 bytes of GPU memory are wanted but 400 are free"):
        device.allocate(500)


def test_arrays_are_cut_as_numpy_cuts_them(device: EmulatedGpu) -> None:
    values = np.arange(48, dtype=I32).reshape(4, 12)
    array = device.array(values)

    cuts: list[Callable[[Any], Any]] = [
        lambda x: x[1:3, 4:8],
        lambda x: x[1:3, 4:8].reshape(2, 2, 2),
        lambda x: x[::2],
        lambda x: x[..., -1],
        lambda x: x[3, 2],
        lambda x: x[2].view(np.int16),
        lambda x: x.reshape(-1, 6)[:0],
    ]
    for cut in cuts:
        mine, numpys = cut(array), cut(values)
        assert np.array_equal(device.read(mine), numpys)
        assert (mine.shape, mine.dtype, mine.size, mine.nbytes, mine.ndim) == (
            *(numpys.shape, numpys.dtype, numpys.size, numpys.nbytes, numpys.ndim),
        )
    assert array[:, 1:].strides == values[:, 1:].strides
    assert len(array) == 4


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "+": lambda x: x + 1,
    "numpy +": lambda x: np.float32(1) + x,
    "sum": lambda x: np.sum(x),
    "==": lambda x: x == x,
    "bool": bool,
    "asarray": np.asarray,
    "iter": list,
    "set": lambda x: x.__setitem__(0, 1),
    "fancy": lambda x: x[[0, 1]],
    "mask": lambda x: x[np.ones(4, np.bool_)],
    "one bool": lambda x: x[True],
    "new axis": lambda x: x[None],
    "backwards": lambda x: x[::-1],
    "reshape that copies": lambda x: x[:, 1:].reshape(-1),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_host_that_touches_a_device_array_is_found(device: EmulatedGpu, name: str) -> None:
    array = device.array(np.zeros((4, 4), I32))

    with pytest.raises(TypeError):
        FORBIDDEN[name](array)


@pytest.mark.parametrize("name", ["copy", "astype", "fill", "T", "tolist", "item"])
def test_device_array_has_no_more_than_the_seam_may_use(device: EmulatedGpu, name: str) -> None:
    assert not hasattr(ints(device, 0), name)


def test_argument_that_is_not_on_the_device_is_found(device: EmulatedGpu) -> None:
    out, foreign = ints(device, 0), ints(gpu(), 0)

    host = complaint(lambda: append(device, out, pinned(device, 0)))
    other = complaint(lambda: append(device, out, foreign))

    assert "append: argument 'x': ndarray is not on the device" in host
    assert "append: argument 'x': 1 bytes at" in other
    assert "are not allocated on this device" in other


def test_view_that_is_not_within_the_memory_or_misaligned_is_found(device: EmulatedGpu) -> None:
    memory = device.allocate(64)

    assert device.view(memory, 60, (1,), I32).shape == (1,)
    assert "is not within" in complaint(lambda: device.view(memory, 60, (2,), I32))
    assert "is not within" in complaint(lambda: device.view(memory, -4, (1,), I32))
    assert "is not within" in complaint(lambda: device.view(device.view(memory, 0, (4,), I32), 0, (1,), I32))
    assert "is misaligned" in complaint(lambda: device.view(memory, 2, (1,), I32))


def test_memory_that_begins_where_other_memory_ends_is_told_apart(device: EmulatedGpu) -> None:
    pages = [device.allocate(4096) for _ in range(64)]
    places = [device.address(page) for page in pages]
    freed = places.index(next(place for place in places if place + 4096 in places))
    append(device, ints(device, 0), ints(device, 0))
    follower = places.index(places[freed] + 4096)
    x = device.view(pages[follower], 0, (32,), I32)
    graph = device.capture(lambda: append(device, x, x))

    pages[freed] = device.allocate(0)

    graph.launch()
