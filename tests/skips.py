"""With CI=true a skipped test is a failure, because there nothing that tests need may be missing."""

import os

import pytest


def _number_that_fail(config: pytest.Config) -> int:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return 0
    return len(reporter.stats.get("skipped", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn success into failure."""
    if _number_that_fail(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why."""
    if number := _number_that_fail(config):
        terminalreporter.write_line(f"CI=true: {number} skipped, which is a failure here", red=True)
