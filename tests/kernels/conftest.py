"""The device that CUDA kernels run on in the tests: the CPU, plainly and with every access checked."""

import pytest

from tests.cuda_on_cpu.device import EmulatedDevice


@pytest.fixture(params=["fast", "check"])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    """Run the test in each mode of the emulator that runs kernels for their results."""
    return EmulatedDevice(request.param)
