"""A test that needs g++ is skipped where there is none."""

from collections.abc import Generator

import pytest

from tests.cuda_on_cpu.build import NoCompilerError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Make the missing compiler a skip."""
    try:
        return (yield)
    except NoCompilerError as error:
        pytest.skip(str(error))
