"""For all tests: what several floors share, the same hypothesis examples in every run, no skips in CI."""

from pathlib import Path

import hypothesis
import pytest

from tests.cuda_on_cpu.skips import pytest_runtest_call, pytest_runtest_setup
from tests.skips import pytest_sessionfinish, pytest_terminal_summary
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_chat_model, write_tiny_tokenizer

__all__ = ["pytest_runtest_call", "pytest_runtest_setup", "pytest_sessionfinish", "pytest_terminal_summary"]

hypothesis.settings.register_profile("cupaged", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("cupaged")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with a byte-level tokenizer and a chat template; leave it as it is."""
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def clear_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that CUDA kernels take, its likeliest tokens clear of the others, with a tokenizer."""
    directory = write_clear_model(tmp_path_factory.mktemp("clear_llama"), CLEAR_CASES["clear_llama"])
    write_tiny_tokenizer(directory)
    return directory
