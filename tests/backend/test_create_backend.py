"""create_backend: the GPU if there is one, else the CPU, and the dtype that its kernels have."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from cupaged.backend import cuda, cupy_device
from cupaged.backend.base import create_backend
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.cuda import MODULES_RESERVE, CudaBackend, choose_dtype
from cupaged.config import EngineConfig
from cupaged.kernels.nvrtc import CudaUnavailable
from tests.backend.cuda_steps import LIMITS
from tests.cuda_on_cpu.gpu import EmulatedGpu

Install = Callable[[Callable[[], Any]], None]


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="x", num_threads=1, **options)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return what makes this a machine that has CuPy, whose GPU is made by a function."""

    def install(create_device: Callable[[], Any]) -> None:
        monkeypatch.setattr(cuda, "find_spec", lambda _: True)
        monkeypatch.setattr(cupy_device, "CudaDevice", create_device)

    return install


def no_gpu() -> None:
    raise CudaUnavailable("no NVIDIA driver is installed")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpu_is_taken_if_there_is_one(with_gpu: Install, device: Any) -> None:
    with_gpu(EmulatedGpu)

    backend = create_backend(config(device=device), "float16")

    assert isinstance(backend, CudaBackend)
    assert backend.kv_dtype == "float16"


def test_gpu_is_left_alone_where_the_cpu_is_asked_for(with_gpu: Install) -> None:
    with_gpu(no_gpu)

    assert isinstance(create_backend(config(device="cpu"), "bfloat16"), CpuBackend)


@pytest.mark.parametrize(("enforce_eager", "has_graphs"), [(False, True), (True, False)])
def test_graphs_are_the_users_to_turn_off(with_gpu: Install, enforce_eager: bool, has_graphs: bool) -> None:
    with_gpu(EmulatedGpu)
    backend = create_backend(config(enforce_eager=enforce_eager), "bfloat16")

    reserve = backend.measure(LIMITS, lambda: None).reserve

    assert (reserve > MODULES_RESERVE) == has_graphs


def test_gpu_that_cannot_be_used_is_a_warning_and_the_cpu(
    with_gpu: Install, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpu(no_gpu)

    with caplog.at_level(logging.INFO, logger="cupaged"):
        backend = create_backend(config(), "bfloat16")

    assert isinstance(backend, CpuBackend)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.endswith("the model runs on the CPU: no NVIDIA driver is installed")


def test_gpu_that_cannot_be_used_is_an_error_where_it_is_asked_for(with_gpu: Install) -> None:
    with_gpu(no_gpu)

    with pytest.raises(ValueError, match="device='cuda' cannot be used: no NVIDIA driver is installed"):
        create_backend(config(device="cuda"), "bfloat16")


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_auto_is_the_cpu_in_silence_and_cuda_an_error(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(create_backend(config(), "bfloat16"), CpuBackend)
    assert caplog.messages == []
    with pytest.raises(ValueError, match=r"device='cuda' cannot be used: CuPy is not installed; install"):
        create_backend(config(device="cuda"), "bfloat16")


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "chosen"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("float16", "bfloat16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtype_on_a_gpu_is_one_that_kernels_have(wanted: str, checkpoint: str, chosen: str) -> None:
    assert choose_dtype(wanted, checkpoint) == chosen


def test_dtype_that_is_not_the_checkpoints_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cupaged"):
        choose_dtype("auto", "float32")

    assert caplog.messages == ["the checkpoint is float32, the GPU computes in bfloat16"]


def test_float32_on_a_gpu_is_refused_with_the_ways_out(with_gpu: Install) -> None:
    with_gpu(EmulatedGpu)

    with pytest.raises(ValueError, match=r"'float32' is not supported on a GPU.*bfloat16.*device='cpu'"):
        create_backend(config(dtype="float32"), "float32")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_quantization_on_a_gpu_is_refused_with_the_ways_out(with_gpu: Install, device: Any) -> None:
    with_gpu(EmulatedGpu)

    with pytest.raises(ValueError, match=r"^quantization='int8' .*GPU yet; leave it out.*device='cpu'"):
        create_backend(config(device=device, quantization="int8"), "bfloat16")
