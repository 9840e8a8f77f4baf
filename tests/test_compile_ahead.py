"""What other processes compile is loaded here; what they do not is compiled here; nothing is left behind."""

import os
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

from cupaged import compile_ahead
from cupaged.compile_ahead import Compilation, Task, compile_all, count_functions

SOURCE = """
import time
from cupaged.jit import njit, njit_inner

@njit_inner
def double(x):
    return 2 * x

@njit
def add(x):
    return double(x) + 1

@njit
def subtract(x):
    return double(x) - 1

def call_both():
    add(1.5)
    subtract(1.5)

def sleep():
    time.sleep(60)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """A module of functions that no cache has; "no cache" has none at all."""
    if getattr(request, "param", "") == "no cache":
        (tmp_path / "cache").touch()  # a file where the folder would be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    monkeypatch.syspath_prepend(tmp_path)
    name = re.sub(r"\W", "_", f"functions_of_{request.node.name}")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return import_module(name)


def tasks(functions: ModuleType) -> list[Task]:
    return [Task(functions.add, "i8(i8)"), Task(functions.subtract, "i8(i8)")]


def num_loaded(functions: ModuleType) -> int:
    each = (functions.add, functions.subtract)
    return sum(sum(function.stats.cache_hits.values()) for function in each)


def run(tasks: list[Task], num_processes: int = 2) -> int:
    """Compile; return how many processes there were."""
    with Compilation(tasks, num_processes) as compilation:
        compilation.wait("Compiling")
        return len(compilation._processes)


def test_what_other_processes_compile_is_loaded(functions: ModuleType) -> None:
    assert run(tasks(functions)) == 2

    assert num_loaded(functions) == 2
    assert functions.add(3) == 7


def test_a_call_compiles_what_it_calls(functions: ModuleType) -> None:
    run([Task(functions.call_both)])

    assert num_loaded(functions) == 2


def test_what_the_cache_has_starts_no_process(functions: ModuleType) -> None:
    run(tasks(functions), num_processes=0)

    assert run(tasks(functions)) == 0


def test_no_more_processes_than_tasks_are_missing(functions: ModuleType) -> None:
    run(tasks(functions)[:1], num_processes=0)

    assert run(tasks(functions)) == 1


@pytest.mark.parametrize("python", ["", "no_such_python"])
def test_without_another_python_this_one_compiles(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(sys, "executable", python)

    assert run(tasks(functions)) == 0

    assert num_loaded(functions) == 0
    assert functions.subtract(3) == 5


def test_what_a_process_could_not_compile_this_one_does(functions: ModuleType) -> None:
    Path(str(functions.__file__)).unlink()  # so that no other can import it

    assert run(tasks(functions)) == 2

    assert num_loaded(functions) == 0
    assert functions.add(3) == 7


@pytest.mark.parametrize("functions", ["no cache"], indirect=True)
def test_without_a_folder_for_the_cache_this_process_compiles(functions: ModuleType) -> None:
    assert run(tasks(functions)) == 0
    assert functions.add(3) == 7


def test_where_the_compiler_is_off_no_process_starts(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)

    with Compilation(tasks(functions), 2) as compilation:
        assert compilation._processes == []


@pytest.mark.parametrize(("num_cpus", "expected"), [(1, 0), (2, 0), (3, 2), (64, 63)])
def test_one_processor_is_left_and_one_process_would_be_no_faster(
    num_cpus: int, expected: int, functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Noting(Compilation):
        def __init__(self, tasks: list[Task], num_processes: int) -> None:
            asked.append((tasks, num_processes))
            super().__init__([], 0)

    monkeypatch.setattr(compile_ahead, "available_cpus", lambda: num_cpus)
    monkeypatch.setattr(compile_ahead, "Compilation", Noting)

    compile_all("Compiling", [(functions.add, "i8(i8)")])

    assert asked == [([Task(functions.add, "i8(i8)")], expected)]


def test_no_file_stays_open(functions: ModuleType) -> None:
    before = os.listdir("/dev/fd")

    run(tasks(functions))

    assert os.listdir("/dev/fd") == before


def test_leaving_ends_the_processes(functions: ModuleType) -> None:
    with Compilation([Task(functions.sleep)], 1) as compilation:
        (process,) = compilation._processes
        begun = time.monotonic()

    assert process.poll() is not None
    assert time.monotonic() - begun < 30


class Bar:
    """Notes what it is told."""

    def __init__(self, total: int, desc: str, disable: bool | None, **_: Any) -> None:
        self.total, self.title, self.disable, self.n = total, desc, disable, 0
        self.names: list[str] = []
        bars.append(self)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, name: str) -> None:
        self.names.append(name)

    def update(self, n: int) -> None:
        self.n += n


bars: list[Bar] = []


@pytest.mark.parametrize("num_processes", [0, 1])
def test_bar_names_what_is_compiled_and_ends_full(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    monkeypatch.setattr(compile_ahead, "tqdm", Bar)
    bars.clear()

    run(tasks(functions), num_processes)
    run(tasks(functions), num_processes)

    first, second = bars
    assert (first.title, first.total, first.n, first.names) == ("Compiling", 2, 2, ["add", "subtract"])
    assert first.disable is None  # as the terminal says
    assert (second.disable, second.names) == (True, [])


def test_functions_that_only_others_call_do_not_count(functions: ModuleType) -> None:
    sys.modules["package_of_functions.a"] = functions
    try:
        assert count_functions("package_of_functions") == 2
    finally:
        del sys.modules["package_of_functions.a"]
    assert os.environ["NUMBA_DISABLE_JIT"] == "0"
