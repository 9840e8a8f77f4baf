"""Compile what an engine needs before a request does, in several processes: Numba itself compiles one
function at a time. They fill the on-disk cache, which the engine then loads; a bar says how far they are.

Without a folder for the cache, or another Python to start, the engine's own process compiles.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import IO, Any, NamedTuple

import numba
from numba.core import event
from numba.core.dispatcher import Dispatcher
from tqdm import tqdm

from cupaged.jit import cache_dir, is_compiled, set_compiled, specialize
from cupaged.threads import available_cpus

FIRST = 48  # the byte that stands for the first task in the queue; lower ones mean something to a pipe


class Task(NamedTuple):
    """What to compile: a function for a signature; without one, all that it calls, by calling it."""

    function: Callable[..., Any]
    signature: str = ""
    num_functions: int = 1  # that this compiles, for the bar

    def run(self) -> None:
        """Compile it, or load it from the cache."""
        if self.signature:
            specialize(self.function, self.signature)
        else:
            self.function()
            set_compiled(self.function)


def count_functions(package: str) -> int:
    """Return how many functions of a loaded package can be called from Python once they are compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    functions = {each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)}
    return sum(not each.targetoptions.get("no_cpython_wrapper") for each in functions)


class Compilation:
    """Tasks, and up to num_processes processes for those that the cache lacks; leaving it ends them."""

    def __init__(self, tasks: Sequence[Task], num_processes: int) -> None:
        """Start the processes."""
        self._tasks = tasks
        self._missing = [task for task in tasks if not is_compiled(task.function, task.signature)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._news: IO[str] | None = None
        if self._missing and num_processes > 0 and _may_start(self._missing[0]):
            self._start(min(num_processes, len(self._missing)))

    def __enter__(self) -> "Compilation":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        if self._news is not None:
            self._news.close()

    def wait(self, title: str) -> None:
        """Return when all is compiled and loaded; what no other process could compile, this one has."""
        total = sum(task.num_functions for task in self._missing)
        look = "{l_bar}{bar}| {n_fmt} of {total_fmt}, {elapsed}{postfix}"
        hide = None if total else True  # None: where nobody watches
        with tqdm(total=total, desc=title, disable=hide, dynamic_ncols=True, bar_format=look) as bar:

            def show(name: str) -> None:
                if name:
                    bar.set_postfix_str(name)
                else:
                    bar.update(min(1, total - bar.n))

            for line in self._news or ():
                show(line.strip())
            with event.install_listener("numba:compile", _Compiler(show)):
                for task in self._tasks:
                    task.run()
            bar.update(total - bar.n)

    def _start(self, num_processes: int) -> None:
        """Start processes that take their tasks from one pipe, and say on another what they do."""
        names = [
            (each.function.__module__, each.function.__qualname__, each.signature) for each in self._missing
        ]
        command = [sys.executable, "-c", "from cupaged.compile_ahead import work; work()", json.dumps(names)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        queue, put = os.pipe()
        news, say = os.pipe()
        os.write(put, bytes(range(FIRST, FIRST + len(names))))
        try:
            for _ in range(num_processes):
                process = subprocess.Popen(
                    command, stdin=queue, stdout=say, stderr=subprocess.DEVNULL, env=environment
                )
                self._processes.append(process)
        except OSError:  # what has been started does all
            pass
        for end in (queue, put, say):
            os.close(end)
        self._news = os.fdopen(news, encoding="utf-8")


def compile_all(title: str, wanted: Sequence[tuple[Callable[..., Any], str]]) -> None:
    """Compile each function for its signature, in other processes where there are processors for them.

    One processor is left to whoever else compiles.
    """
    others = available_cpus() - 1
    tasks = [Task(*each) for each in wanted]
    with Compilation(tasks, others if others > 1 else 0) as compilation:
        compilation.wait(title)


def _may_start(task: Task) -> bool:
    """Return whether another Python could put what it compiles where this one finds it."""
    config: Any = numba.config  # untyped
    if config.DISABLE_JIT or not sys.executable or hasattr(sys, "frozen"):
        return False
    return os.access(cache_dir(task.function.__code__.co_filename), os.W_OK)


class _Compiler(event.Listener):
    """Says the name of each function that this process begins to compile, and nothing when it is compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._depth = 0

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._say(event.data["dispatcher"].py_func.__name__)
        self._depth += 1

    def on_end(self, event: Any) -> None:  # noqa: ARG002
        self._depth -= 1
        if self._depth == 0:
            self._say("")


def work() -> None:
    """Do tasks of argv[1] by their numbers on stdin, until there are none; say on stdout what is compiled."""
    names = json.loads(sys.argv[1])
    with event.install_listener("numba:compile", _Compiler(lambda name: print(name, flush=True))):
        while byte := os.read(0, 1):
            module, function, signature = names[byte[0] - FIRST]
            Task(getattr(import_module(module), function), signature).run()
