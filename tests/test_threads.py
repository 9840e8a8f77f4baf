"""Numba's threads in processes of their own: with and without TBB, and beside a host program's settings."""

import subprocess
import sys
import textwrap
import threading

import numba
import numpy as np
import pytest

from cupaged.threads import ParallelRunner, tbb_candidates

NO_TBB = """
import importlib.metadata, sys
sys.prefix = "/nowhere"
importlib.metadata.files = lambda name: None
"""
TWO_ENGINES = """
import threading
import numpy as np
from cupaged.backend.base import Limits, MemoryUse
from cupaged.backend.cpu import CpuBackend

weight = np.random.default_rng(0).standard_normal((960, 576), np.float32)
x = np.ones((8, 576), np.float32)
expected = x @ weight.T
right = []

def serve():
    backend = CpuBackend("float32", num_threads=2)
    backend.allocate(Limits(8, 1, 8, 16, 16), MemoryUse(0, 0, 1 << 20, 0))
    handle = backend.prepare_linear([{"weight": weight}])
    for _ in range(300):
        backend.begin_forward()
        right.append(np.abs(backend.linear(x, handle) - expected).max() < 1e-3)

engines = [threading.Thread(target=serve) for _ in range(2)]
for engine in engines: engine.start()
for engine in engines: engine.join()
import numba
print(numba.threading_layer(), sum(right))
"""


def run_python(*code: str) -> list[str]:
    """Run the code in a fresh process and return the words it prints."""
    script = "\n".join(map(textwrap.dedent, code))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


def fail() -> None:
    raise ValueError("kernel")


def has_tbb() -> bool:
    return bool(tbb_candidates())


def test_tbb_is_used_where_pip_installed_it() -> None:
    layer = run_python("from cupaged.threads import launch_threads", "print(launch_threads())")

    assert layer == ["tbb" if has_tbb() else "workqueue"]


def test_numpy_imported_first_changes_nothing() -> None:
    code = "import numpy as np; np.ones((99, 99)) @ np.ones((99, 99))", TWO_ENGINES

    assert run_python(*code) == ["tbb" if has_tbb() else "workqueue", "600"]


def test_two_engines_run_at_once_without_tbb() -> None:
    assert run_python(NO_TBB, TWO_ENGINES) == ["workqueue", "600"]


def test_layer_that_the_host_chose_is_kept() -> None:
    choose = "import numba; numba.config.THREADING_LAYER = 'workqueue'"
    show = "print(numba.config.THREADING_LAYER, *numba.config.THREADING_LAYER_PRIORITY)"

    words = run_python(choose, TWO_ENGINES, show)

    assert words == ["workqueue", "600", "workqueue", "tbb", "omp", "workqueue"]


def test_layer_that_the_host_has_running_is_kept() -> None:
    start = "import numba; numba.config.THREADING_LAYER = 'workqueue'; numba.get_num_threads()"
    reset = "numba.config.THREADING_LAYER = 'default'"

    assert run_python(start, reset, TWO_ENGINES) == ["workqueue", "600"]


def test_priority_of_layers_is_restored() -> None:
    code = "from cupaged.threads import launch_threads", "launch_threads()", "import numba"

    assert run_python(*code, "print(*numba.config.THREADING_LAYER_PRIORITY)") == ["tbb", "omp", "workqueue"]


def test_settings_of_the_calling_thread_are_restored() -> None:
    seen = []
    runner = ParallelRunner(1)
    before = numba.get_num_threads(), numba.get_parallel_chunksize()

    runner.run([(lambda: seen.append((numba.get_num_threads(), numba.get_parallel_chunksize())), ())])
    with pytest.raises(ValueError, match="kernel"):
        runner.run([(fail, ())])

    assert seen == [(1, 1)]
    assert (numba.get_num_threads(), numba.get_parallel_chunksize()) == before


def test_more_threads_than_there_are_become_as_many_as_there_are() -> None:
    assert ParallelRunner(10_000).num_threads == ParallelRunner().num_threads


def test_kernels_of_two_threads_take_turns() -> None:
    running, most = [0], [0]

    def kernel() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        np.linalg.inv(np.eye(60))
        running[0] -= 1

    def engine() -> None:
        runner = ParallelRunner()
        for _ in range(100):
            runner.run([(kernel, ())])

    threads = [threading.Thread(target=engine) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == [1]


@pytest.mark.skipif(not has_tbb(), reason="pip has no TBB for this machine")
def test_tbb_is_found_by_pips_record_of_it() -> None:
    code = "import sys; sys.prefix = '/nowhere'", "from cupaged.threads import launch_threads"

    assert run_python(*code, "print(launch_threads())") == ["tbb"]
