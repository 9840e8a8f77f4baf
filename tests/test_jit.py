"""The compiled cache: its key follows every source that matters, and the host's setting stays."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import llvmlite.binding
import numba
import pytest
from numba.core.dispatcher import Dispatcher

from cupaged import jit
from cupaged.jit import cache_dir, njit, source_files, specialize
from tests.test_floors import imports

CALLER = """
from cupaged.jit import njit
from cupaged.callee import answer

@njit
def ask():
    return answer()
"""
CALLEE = "from cupaged.jit import njit\n\n@njit\ndef answer():\n    return {}\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the same name: our jit and what it imports, a caller and its callee."""
    root = tmp_path / "src" / "cupaged"
    root.mkdir(parents=True)
    for name in ("jit", "paths", "threads"):
        shutil.copy(jit.ROOT / f"{name}.py", root)
    (root / "__init__.py").touch()
    (root / "caller.py").write_text(CALLER)
    (root / "callee.py").write_text(CALLEE.format(1))
    return root


def run(package: Path, code: str) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(package.parent.parent / "cache"), "PYTHONPATH": ""}
    command = [sys.executable, "-B", "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r}); {code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


ASK = "from cupaged.caller import ask; print(ask(), sum(ask.stats.cache_hits.values()))"


def test_edited_callee_changes_what_its_importer_returns(package: Path) -> None:
    before = run(package, ASK)
    (package / "callee.py").write_text(CALLEE.format(2))

    assert (before, run(package, ASK)) == ("1 0", "2 0")


def test_unchanged_sources_are_loaded_from_the_cache(package: Path) -> None:
    run(package, ASK)

    assert run(package, ASK) == "1 1"


def test_edit_elsewhere_compiles_nothing_again(package: Path) -> None:
    run(package, ASK)
    (package / "stranger.py").write_text("x = 1\n")

    assert run(package, ASK) == "1 1"


@pytest.mark.parametrize(
    ("place", "name", "other"),
    [
        (numba, "__version__", "0.1"),
        (jit, "llvmlite_version", "0.1"),
        (sys, "version", "2.7"),
        (llvmlite.binding, "get_host_cpu_name", lambda: "z80"),
        (llvmlite.binding, "get_host_cpu_features", lambda: SimpleNamespace(flatten=lambda: "+none")),
    ],
    ids=["numba", "llvm", "python", "cpu", "features"],
)
def test_another_compiler_or_cpu_has_another_cache(
    place: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = jit.source_key.__wrapped__
    before = key(Path(__file__))
    assert key(Path(__file__)) == before

    monkeypatch.setattr(place, name, other)

    assert key(Path(__file__)) != before


IS_COMPILED = """
from cupaged.caller import ask
from cupaged.jit import is_compiled, specialize
print(is_compiled(ask, "i8()"))
specialize(ask, "i8()")
print(is_compiled(ask, "i8()"), is_compiled(ask, "f8()"))
"""


def test_what_was_compiled_is_known_as_long_as_the_cache_has_it(package: Path) -> None:
    program = f"exec({IS_COMPILED!r})"

    assert run(package, program).split() == ["False", "True", "False"]
    assert run(package, program).split() == ["True", "True", "False"]
    os.utime(package / "callee.py")  # installed once more, so Numba compiles once more
    assert run(package, program).split() == ["False", "True", "False"]


def test_cache_folder_of_the_host_is_kept(package: Path) -> None:
    code = "import numba; numba.config.CACHE_DIR = 'mine'; from cupaged.caller import ask; ask()"

    assert run(package, f"{code}; print(numba.config.CACHE_DIR)") == "mine"


TWO_DEFINE = """
import threading
import numba

numba.config.CACHE_DIR = 'mine'
from cupaged.jit import njit
first_inside, second_inside, first_done = threading.Event(), threading.Event(), threading.Event()

def compile_slowly(*_, **__):
    def decorate(function):
        if not first_inside.is_set():
            first_inside.set()
            second_inside.wait(0.3)
        else:
            second_inside.set()
            first_done.wait(0.3)
        return function
    return decorate

def define():
    njit(lambda: 1)
    first_done.set()

numba.njit = compile_slowly
threads = [threading.Thread(target=define) for _ in range(2)]
threads[0].start()
first_inside.wait()
threads[1].start()
for thread in threads: thread.join()
print(numba.config.CACHE_DIR)
"""


def test_cache_folder_of_the_host_is_kept_when_two_threads_import_at_once(package: Path) -> None:
    assert run(package, TWO_DEFINE) == "mine"


def test_folders_long_unused_are_removed_when_a_new_one_is_made(package: Path) -> None:
    run(package, ASK)
    numba_dir = package.parent.parent / "cache" / "cupaged" / "numba"
    used = set(numba_dir.iterdir())
    for name, days in (("old", 31), ("recent", 29)):
        (numba_dir / name).mkdir()
        os.utime(numba_dir / name, (time.time() - days * 86400,) * 2)

    (package / "callee.py").write_text(CALLEE.format(2))
    run(package, ASK)

    assert not (numba_dir / "old").exists()
    assert (used | {numba_dir / "recent"}) <= set(numba_dir.iterdir())


def test_folder_that_is_used_does_not_grow_old(package: Path) -> None:
    run(package, "import cupaged.caller")
    numba_dir = package.parent.parent / "cache" / "cupaged" / "numba"
    for folder in numba_dir.iterdir():
        os.utime(folder, (time.time() - 40 * 86400,) * 2)

    run(package, "import cupaged.caller")

    assert all(time.time() - folder.stat().st_mtime < 86400 for folder in numba_dir.iterdir())


def test_home_that_cannot_be_written_still_compiles(package: Path) -> None:
    (package.parent.parent / "cache").touch()  # a file where the folder would be

    before = run(package, ASK)
    (package / "callee.py").write_text(CALLEE.format(2))

    assert (before, run(package, ASK)) == ("1 0", "2 0")


def test_what_two_processes_cached_under_one_name_is_compiled_anew(package: Path) -> None:
    (package / "twice.py").write_text(
        "from cupaged.jit import njit, specialize\n\n@njit\ndef twice(x):\n    return x * 2\n"
    )
    mix_up = """
from numba import float64
from cupaged.twice import specialize, twice
specialize(twice, "i8(i8)")
cache, context = twice._cache, twice.targetctx
index = cache._cache_file._load_index()
index[cache._index_key((float64,), context.codegen())] = next(iter(index.values()))
cache._cache_file._save_index(index)
"""
    use = """
from cupaged.twice import specialize, twice
for signature in ("f8(f8)", "i8(i8)"):
    specialize(twice, signature)
print(twice(1.5), twice(3), sum(twice.stats.cache_hits.values()))
"""
    code = "exec({!r})".format
    run(package, code(mix_up))

    assert [run(package, code(use)) for _ in range(2)] == ["3.0 6 1", "3.0 6 2"]


def test_sources_of_a_module_are_all_it_imports_at_any_depth() -> None:
    names = [path.name for path in source_files(jit.ROOT / "kernels" / "sample.py", jit.ROOT)]

    assert {
        "sample.py",
        "bits.py",
        "philox.py",
        "exact.py",
        "jit.py",
        "team.py",
        "atomics.py",
        "paths.py",
    } <= set(names)
    assert "linear.py" not in names


def test_every_import_of_ours_is_seen() -> None:
    for path in jit.ROOT.rglob("*.py"):
        for _, name in imports(path.read_text(encoding="utf-8")):
            assert {name, name.rpartition(".")[0]} & set(jit._imported_names(path)), f"{path}: {name}"


def test_relative_import_would_escape_the_key_so_there_is_none() -> None:
    for path in (
        *jit.ROOT.rglob("*.py"),
        *(jit.ROOT / "kernels").glob("*.py"),
        *(jit.ROOT / "models").glob("*.py"),
    ):
        assert "\nfrom ." not in path.read_text(encoding="utf-8"), path


def test_cache_lies_in_our_folder() -> None:
    assert "cupaged" in Path(cache_dir(__file__)).parts


def test_specialized_function_takes_contiguous_arrays_for_strided_ones_and_nothing_else() -> None:
    import numpy as np

    @njit
    def first(x: object) -> object:
        return x[0]  # type: ignore[index]

    specialize(first, "f4(f4[:])")
    specialize(first, "u2(u2[:])")

    assert first(np.ones(3, np.float32)) == first(np.ones(6, np.float32)[::2]) == 1
    assert first(np.ones(3, np.uint16)) == 1
    if not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="No matching definition"):
            first(np.ones(3, np.float64))


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="the compiler is off")  # type: ignore[attr-defined]
def test_who_calls_a_function_while_it_is_specialized_again_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy as np

    @njit
    def function(x: Any) -> Any:
        return x[-1]

    last, disable = cast(Any, function), Dispatcher.disable_compile

    def call_meanwhile(self: Any, val: bool = True) -> None:
        disable(self, val)
        if self is last and self.overloads:
            assert last(np.ones(3, np.float32)) == 1

    monkeypatch.setattr(Dispatcher, "disable_compile", call_meanwhile)
    for _ in range(2):
        specialize(last, "f4(f4[:])")

    assert len(last.overloads) == 1


def test_two_threads_may_specialize_one_function_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    second_inside, first_done = threading.Event(), threading.Event()
    compile_now, failed = Dispatcher.compile, []

    def compile_slowly(self: Any, signature: str) -> Any:
        if signature == "f4(f4)":
            second_inside.wait(0.3)
        else:
            second_inside.set()
            first_done.wait(0.3)
        return compile_now(self, signature)

    @njit
    def double(x: float) -> float:
        return x + x

    def specialize_for(signature: str, done: threading.Event) -> None:
        try:
            specialize(double, signature)
        except RuntimeError as error:
            failed.append(error)
        done.set()

    monkeypatch.setattr(Dispatcher, "compile", compile_slowly)
    first, second = (
        threading.Thread(target=specialize_for, args=args)
        for args in (("f4(f4)", first_done), ("f8(f8)", threading.Event()))
    )
    first.start()
    time.sleep(0.05)
    second.start()
    first.join()
    second.join()

    assert failed == []
    assert double(1.5) == 3


def test_function_that_others_call_is_compiled_for_python_when_python_calls_it() -> None:
    @njit
    def double(x: int) -> int:
        return 2 * x

    @njit
    def add(x: int) -> int:
        return double(x) + 1

    assert add(3) == 7
    if not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        assert double.signatures == []  # type: ignore[attr-defined]
    assert double(3) == 6


def test_what_functions_call_may_make_arrays_and_raise() -> None:
    import numpy as np

    @njit
    def squares(n: int) -> object:
        found = np.empty(n)
        for i in range(n):
            found[i] = i * i
        if n > 3:
            raise ValueError("too many")
        return found

    @njit
    def total(n: int) -> float:
        return squares(n).sum()  # type: ignore[attr-defined, no-any-return]

    assert total(3) == 5
    with pytest.raises(ValueError, match="too many"):
        total(4)
