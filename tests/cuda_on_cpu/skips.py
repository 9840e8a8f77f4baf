"""A test that needs g++ is skipped where there is none."""

from collections.abc import Generator

import pytest

from tests.cuda_on_cpu.build import NoCompilerError


def _skipping() -> Generator[None, object, object]:
    try:
        return (yield)
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Make the compiler that a fixture misses a skip."""
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Make the compiler that a test misses a skip."""
    return (yield from _skipping())
