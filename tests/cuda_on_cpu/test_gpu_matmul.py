"""Matrix products of an emulated GPU wait on its stream, and touch nothing but its memory."""

import ctypes
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.backend.cublaslt import CublasLt, Product
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.cuda_on_cpu.planted import complaint

BF16 = ml_dtypes.bfloat16
WORKSPACE = 4096  # bytes


class Products:
    """x [4, 16] @ weight [8, 16].T on a device of its own."""

    def __init__(self, *, deferred: bool = True) -> None:
        self.device = EmulatedGpu(deferred=deferred)
        self.cublaslt = CublasLt(self.device.cublaslt, WORKSPACE)
        self.x = self.device.array(np.full((4, 16), 2, BF16))
        self.weight = self.device.array(np.full((8, 16), 3, BF16))
        self.out = self.device.view(self.device.allocate(64), 0, (4, 8), BF16)
        self.workspace = self.device.allocate(WORKSPACE)
        self.operation = self.cublaslt.operation(None)
        self.layouts = self.cublaslt.layouts(Product(8, 16, "bfloat16", "bfloat16", False), 4)
        self._algorithms = self.cublaslt.heuristics(self.operation, self.layouts, 8)

    def put(self, **options: Any) -> None:
        """Put the product on the stream."""
        assert self.call(**options) == 0

    def call(
        self, *, x: int | None = None, algorithm: int = 0, stream: int | None = None, scale: float = 1.0
    ) -> int:
        """Call the library, forget what it was given, and return its status."""
        weight, out, workspace = map(self.device.address, (self.weight, self.out, self.workspace))
        scalars = (ctypes.c_float * 2)(scale, 0.0)
        alpha, beta = ctypes.addressof(scalars), ctypes.addressof(scalars) + 4
        words = ctypes.create_string_buffer(self._algorithms[algorithm])
        layouts, device = self.layouts, self.device
        status: int = self.cublaslt.matmul(
            *(self.cublaslt.handle, self.operation),
            *(alpha, weight, layouts.weight, device.address(self.x) if x is None else x, layouts.x),
            *(beta, out, layouts.out, out, layouts.out, ctypes.addressof(words)),
            *(workspace, WORKSPACE, device.stream if stream is None else stream),
        )
        for given in (scalars, words):
            ctypes.memset(given, 0xFF, ctypes.sizeof(given))
        return status

    def results(self) -> list[float]:
        """Return the different values in out once all is done."""
        return sorted({*self.device.read(self.out).astype(float).ravel().tolist()})


@pytest.fixture
def products() -> Products:
    """Return products whose stream waits."""
    return Products()


@pytest.mark.parametrize("deferred", [False, True])
def test_product_is_done_in_its_turn_with_what_the_call_was_given(deferred: bool) -> None:
    products = Products(deferred=deferred)
    device, first, second = products.device, *(products.device.pin(64).view(BF16) for _ in range(2))
    source = device.pin(128).view(BF16).reshape(4, 16)
    source[:] = 4

    products.put()
    device.to_host(first.reshape(4, 8), products.out)
    device.to_device(products.x, source)
    products.put(scale=0.25)
    device.to_host(second.reshape(4, 8), products.out)

    assert np.isnan(first.astype(float)).all() == deferred
    device.synchronize()
    assert ({*first.tolist()}, {*second.tolist()}) == ({2 * 3 * 16}, {4 * 3 * 16 / 4})
    assert device.launches == ["matmul", "matmul"]


def test_product_can_be_recorded_once_it_has_run(products: Products) -> None:
    products.put()
    graph = products.device.capture(products.put)
    assert products.results() == [96]

    products.device.write(products.x, 1)
    graph.launch()

    assert products.results() == [48]


def test_product_that_is_first_run_in_a_capture_is_found(products: Products) -> None:
    products.put(algorithm=0)

    message = complaint(products.device.capture, partial(products.put, algorithm=1))

    assert "a matrix product is first run in a capture" in message


def test_what_is_not_on_the_device_or_not_all_of_it_is_found(products: Products) -> None:
    host, short = np.zeros((5, 16), BF16), products.device.allocate(64)

    for address in (host.ctypes.data + -host.ctypes.data % 16, products.device.address(short)):
        assert "matrix product: 128 bytes at" in complaint(partial(products.put, x=address))


def test_other_stream_is_found(products: Products) -> None:
    assert "on stream 0x0, not the device's" in complaint(partial(products.put, stream=0))


def test_graph_of_a_weight_that_was_freed_is_found(products: Products) -> None:
    products.put()
    graph = products.device.capture(products.put)
    products.device.synchronize()

    del products.weight

    assert "freed" in complaint(graph.launch)


def test_what_the_library_refuses_is_not_done(products: Products, capfd: pytest.CaptureFixture[str]) -> None:
    status = products.call(x=products.device.address(products.x) + 2)

    assert status != 0
    assert "stand-in cublasLt" in capfd.readouterr().err
    assert products.device.launches == []


def test_seconds_tell_algorithms_apart_and_are_the_same_in_every_run(products: Products) -> None:
    times = [products.device.seconds(partial(products.put, algorithm=each)) for each in (0, 1, 0, 1)]

    assert times[:2] == times[2:]
    assert times[0] != times[1]
