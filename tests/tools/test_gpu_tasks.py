"""gpu_check's tasks: their order, and that they should fit into its time."""

import pytest

from tools import agreement
from tools.gpu_check import TOTAL_SECONDS
from tools.gpu_tasks import (
    NEED_ENGINE,
    WAYS,
    cases_by_task,
    kind_of,
    limit_seconds,
    parts,
    planned_seconds,
    total_seconds,
)


def kinds(*, kernels_only: bool) -> list[str]:
    return [kind_of(task) for part in parts(False, kernels_only=kernels_only) for task in part.tasks]


@pytest.mark.parametrize("kernels_only", [True, False])
def test_what_decides_comes_first_and_what_others_do_last(kernels_only: bool) -> None:
    found = kinds(kernels_only=kernels_only)

    assert found[:3] == ["versions", "compile", "resources"]
    assert found == sorted(found, key=found.index), "a kind is in several places"
    assert max(found.index("golden"), found.index("copy"), found.index("matmul")) < found.index("time")
    assert found[-1] == ("sdpa" if kernels_only else "transformers")


def test_the_engine_is_right_before_it_is_measured_and_gone_before_others_need_its_memory() -> None:
    found = kinds(kernels_only=False)

    assert found.index("time") < found.index("twins") < found.index("agreement") < found.index("graphs")
    assert found.index("agreement") < min(map(found.index, WAYS)) < found.index("graphs")
    assert found.index("graphs") < found.index("load") < found.index("step") < found.index("memory")
    assert max(found.index("fork"), found.index("swap")) < found.index("memory") < found.index("gemm")


def test_kernels_are_the_first_part_of_all() -> None:
    assert parts(False, kernels_only=True)[0] == parts(False, kernels_only=False)[0]


def test_only_the_engine_waits_for_numba() -> None:
    by_numba = {kind_of(part.tasks[0]): part.uses_numba for part in parts(False, kernels_only=False)}

    assert by_numba == {"versions": False, "twins": True, "load": True, "gemm": False, "sdpa": False}


def test_an_engine_that_does_not_load_is_not_loaded_again_for_each_task() -> None:
    planned = parts(False, kernels_only=False)

    (engine,) = (part for part in planned if {*map(kind_of, part.tasks)} & {*NEED_ENGINE})
    assert (engine.tasks[0], engine.first_decides) == ("load engine", True)
    assert "twins" not in engine.tasks, "other engines would take some of the driver's memory before it does"


@pytest.mark.parametrize("kernels_only", [True, False])
def test_all_should_be_done_in_time(kernels_only: bool) -> None:
    assert total_seconds(parts(False, kernels_only=kernels_only)) < 0.9 * TOTAL_SECONDS[kernels_only]


def test_a_task_has_more_time_than_it_should_need() -> None:
    for task in [*cases_by_task(False), "load engine", "twins", "memory"]:
        assert limit_seconds(task) >= max(20, 4 * planned_seconds(task))


def test_a_task_may_load_the_engine_anew() -> None:
    assert limit_seconds("step 8b-decode-1x1024") >= 20 + planned_seconds("load engine")


def test_ways_are_those_of_agreement() -> None:
    assert {*WAYS, "recomputed"} == agreement.WAYS.keys()


def test_a_dry_run_has_a_task_of_every_kind_but_the_emulator() -> None:
    dry = {kind_of(task) for part in parts(True, kernels_only=False) for task in part.tasks}

    assert set(kinds(kernels_only=False)) - dry == {"emulator"}
