"""For the tests of CuPy's device: a CuPy without a GPU."""

import pytest

from tests.backend.fake_cupy import FakeCuPy, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    """A machine with two GPUs, of which the second is current."""
    fake = install(monkeypatch)
    fake.set_current(1)
    return fake
