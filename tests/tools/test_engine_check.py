"""What gpu_check holds the engine to: what it finds wrong, it says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cupaged.backend.base import MemoryUse
from cupaged.scheduler.counters import create_counters
from tools import engine_check
from tools.agreement import Trace
from tools.emulated_machine import EmulatedMachine
from tools.engine_check import check_agreement, check_emulator, check_graphs, check_memory
from tools.engine_timed import TimedEngine

USE = MemoryUse(weights=512, workspace=256, activations=1024, reserve=100)


def loaded(allocations: list[int], driver: int) -> TimedEngine:
    """Return an engine whose plan is USE and 3 blocks of 64 bytes."""
    backend = SimpleNamespace(driver_bytes=lambda: driver, driver_bytes_before=[30, 40, 60, 80])
    executor = SimpleNamespace(backend=backend, allocations=allocations)
    plan = SimpleNamespace(use=USE, num_blocks=3, block_bytes=64)
    return cast(TimedEngine, SimpleNamespace(plan=plan, executor=executor))


def test_memory_as_planned() -> None:
    found = check_memory(loaded([512, 256, 1024, 192], 100))

    assert found["planned_bytes"] == [512, 256, 1024, 192]
    assert (found["driver_bytes"], found["reserve_bytes"]) == (100, 100)
    assert (found["driver_bytes_without_graphs"], found["num_graphs"]) == (40, 3)


@pytest.mark.parametrize("allocations", [[512, 256, 1024, 193], [512, 256, 1024], [512, 256, 1024, 192, 1]])
def test_a_byte_that_was_not_planned_is_found(allocations: list[int]) -> None:
    with pytest.raises(ValueError, match=r"bytes were allocated, but \[512, 256, 1024, 192\] were planned"):
        check_memory(loaded(allocations, 0))


def test_a_driver_that_takes_more_than_its_reserve_is_found() -> None:
    with pytest.raises(ValueError, match=r"take 101 bytes, .* but the plan has a reserve of 100"):
        check_memory(loaded([512, 256, 1024, 192], 101))


def test_graphs_give_the_same_bits(clear_dir: Path) -> None:
    assert check_graphs(EmulatedMachine(), clear_dir)["num_tokens"] > 50


def test_what_the_driver_takes_is_no_matter_of_graphs(
    monkeypatch: pytest.MonkeyPatch, clear_dir: Path
) -> None:
    monkeypatch.setattr("cupaged.backend.cuda.MODULES_RESERVE", -(1 << 40))

    assert check_graphs(EmulatedMachine(), clear_dir)["num_tokens"] > 50


def test_another_log_probability_with_graphs_is_found(
    monkeypatch: pytest.MonkeyPatch, clear_dir: Path
) -> None:
    def generate(*_: Any, enforce_eager: bool) -> list[list[tuple[int, float]]]:
        return [[(3, -1.0)], [(4, -1.0), (5, -0.25 if enforce_eager else -0.5)]]

    monkeypatch.setattr(engine_check, "_generate", generate)

    with pytest.raises(
        ValueError, match=r"request 1 gets \(5, -0.5\) at 1 with CUDA graphs and \(5, -0.25\) without"
    ):
        check_graphs(EmulatedMachine(), clear_dir)


def trace(*, off: float = 0.0, eager_off: float = 0.0) -> Any:
    """Return what stands in for follow: logits that are off by so much, and by more without graphs."""

    def follow(*_: Any, enforce_eager: bool = False) -> Trace:
        logits = np.array([[0, 9], [9, 0]], np.float32) + np.float32(off + eager_off * enforce_eager)
        return Trace(logits, np.array([1, 0], np.int32), 0, 0, create_counters())

    return follow


def test_logits_too_far_off_are_found(monkeypatch: pytest.MonkeyPatch, clear_dir: Path) -> None:
    monkeypatch.setattr(engine_check, "reference", trace())
    monkeypatch.setattr(engine_check, "follow", trace(off=2.0))

    with pytest.raises(ValueError, match="logits differ by up to 2"):
        check_agreement(EmulatedMachine(), clear_dir)


def test_logits_that_graphs_change_are_found(monkeypatch: pytest.MonkeyPatch, clear_dir: Path) -> None:
    monkeypatch.setattr(engine_check, "reference", trace())
    monkeypatch.setattr(engine_check, "follow", trace(eager_off=1e-6))

    said = r"4 of 4 logits with CUDA graphs are not those without, by up to 1e-06; without them it agrees"
    with pytest.raises(ValueError, match=said):
        check_agreement(EmulatedMachine(), clear_dir)


def test_logits_that_are_off_without_graphs_too_are_said_to_be(
    monkeypatch: pytest.MonkeyPatch, clear_dir: Path
) -> None:
    monkeypatch.setattr(engine_check, "reference", trace())
    monkeypatch.setattr(engine_check, "follow", trace(off=2.0, eager_off=1.0))

    with pytest.raises(ValueError, match="logits differ by up to 3"):
        check_agreement(EmulatedMachine(), clear_dir)


def test_without_a_compiler_there_is_no_emulator_to_agree_with(
    monkeypatch: pytest.MonkeyPatch, clear_dir: Path
) -> None:
    monkeypatch.setenv("PATH", "")

    assert check_emulator(EmulatedMachine(), clear_dir) == {"skipped": "g++ is not installed"}
