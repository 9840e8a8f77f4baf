"""Who may import what, as data, checked against every import in the sources.

Also those inside functions count. A floor imports the ones listed for it, never sideways, never up.
"""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Floor(NamedTuple):
    """Modules (and all below them), what of ours they may import beside themselves, and which packages."""

    modules: tuple[str, ...]
    ours: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


GROUND = tuple(
    f"cupaged.{name}" for name in ("config", "sampling_params", "sequence", "batch", "outputs", "paths")
)
# Ground, but importing it loads Numba.
NUMBA = (
    "cupaged.jit",
    "cupaged.words",
    "cupaged.recording",
    "cupaged.atomics",
    "cupaged.team",
    "cupaged.threads",
    "cupaged.compile_ahead",
)

# A module belongs to the longest name that fits it.
FLOORS = {
    "front door": Floor(("cupaged",), ("cupaged.config", "cupaged.sampling_params", "cupaged.llm")),
    "6 commands": Floor(
        ("cupaged.serve", "cupaged.generate", "cupaged.flags"),
        (*GROUND, "cupaged.flags", "cupaged.server", "cupaged.llm", "cupaged.engine"),
    ),
    "6 server": Floor(
        ("cupaged.server",),
        (*GROUND, "cupaged.__version__", "cupaged.engine", "cupaged.llm"),
        ("starlette", "uvicorn", "msgspec"),
    ),
    "5b llm": Floor(("cupaged.llm",), (*GROUND, "cupaged.engine"), ("tqdm",)),
    "5 engine": Floor(
        ("cupaged.engine",),
        (
            *GROUND,
            "cupaged.compile_ahead",
            "cupaged.hub",
            "cupaged.scheduler",
            "cupaged.worker",
            "cupaged.trace",
        ),
        ("numpy", "tokenizers", "jinja2"),
    ),
    "3 trace": Floor(("cupaged.trace",), (*GROUND, "cupaged.jit", "cupaged.scheduler"), ("numpy",)),
    "4 worker": Floor(
        ("cupaged.worker",),
        (*GROUND, "cupaged.models", "cupaged.backend.base", "cupaged.backend.comm"),
        ("numpy", "safetensors", "ml_dtypes", "tqdm"),
    ),
    # No NumPy: arrays come from the backend. numpy.typing names them; rope's tables are made on the host.
    "3 models": Floor(("cupaged.models",), (*GROUND, "cupaged.backend.base"), ("numpy.typing",)),
    "3 models, tables": Floor(("cupaged.models.rope",), (*GROUND, "cupaged.models"), ("numpy",)),
    "2 backend": Floor(("cupaged.backend",), (*GROUND, *NUMBA, "cupaged.kernels"), ("numpy", "ml_dtypes")),
    "2 device": Floor(
        ("cupaged.backend.cupy_device",), ("cupaged.kernels",), ("numpy", "cupy", "cupy_backends")
    ),
    "2 cuBLASLt": Floor(("cupaged.backend.cublaslt",), ("cupaged.kernels",), ("cuda.pathfinder",)),
    "2 seam": Floor(
        ("cupaged.backend.base",), (*GROUND, "cupaged.backend.cpu", "cupaged.backend.cuda"), ("numpy",)
    ),
    "2 scheduler": Floor(("cupaged.scheduler",), (*GROUND, "cupaged.jit", "cupaged.words"), ("numpy",)),
    "1 kernels": Floor(("cupaged.kernels",), NUMBA, ("numpy", "numba", "llvmlite", "ml_dtypes")),
    # What meets a GPU imports nothing that is slow to import, so that a compiler needs no Numba.
    "1 kernels, launch": Floor(("cupaged.kernels.launch",)),
    "1 kernels, compile": Floor(("cupaged.kernels.compile",), ("cupaged.paths",)),
    "1 kernels, NVRTC": Floor(("cupaged.kernels.nvrtc",), (), ("cuda.pathfinder",)),
    "0 ground": Floor(GROUND, GROUND, ("numpy",)),
    "0 ground, Numba": Floor(NUMBA, (*NUMBA, "cupaged.paths"), ("numba", "llvmlite", "numpy")),
    "0 ground, bar": Floor(("cupaged.compile_ahead",), NUMBA, ("numba", "tqdm")),
    "0 ground, hub": Floor(("cupaged.hub",), (), ("huggingface_hub",)),
}
# Where a name that no reader of imports can see may be imported.
DYNAMIC = {"cupaged", "cupaged.models", "cupaged.compile_ahead"}


class Import(NamedTuple):
    """One imported name and where it stands."""

    line: int
    name: str  # of the module, with the imported name behind it


def sources() -> dict[str, Path]:
    """Return the file of every module of the package, by dotted name."""
    found = {}
    for folder in ("cupaged", "models", "kernels"):
        package = "cupaged" if folder == "cupaged" else f"cupaged.{folder}"
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(text: str) -> list[Import]:
    """Return all imports of a source, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [Import(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def is_within(name: str, modules: tuple[str, ...]) -> bool:
    """Return whether `name` is one of the modules or below one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def floor_of(module: str) -> str:
    """Return the name of the floor whose module name fits longest."""
    fits = [
        (len(prefix), floor)
        for floor, rule in FLOORS.items()
        for prefix in rule.modules
        if (module == prefix if prefix == "cupaged" else is_within(module, (prefix,)))
    ]
    assert fits, f"{module} is on no floor: add it to FLOORS in {Path(__file__).name}"
    return max(fits)[1]


def violations(module: str, text: str) -> list[str]:
    """Return a sentence for each import that the module's floor does not allow."""
    floor = floor_of(module)
    rule = FLOORS[floor]
    family = ".".join(module.split(".")[:2])  # the folder that a module may import its neighbours from
    found = []
    for line, name in imports(text):
        root = name.split(".")[0]
        if root in sys.stdlib_module_names:
            allowed = name != "importlib.import_module" or module in DYNAMIC
        elif root == "cupaged":
            neighbour = is_within(name, (family,)) and family not in ("cupaged", *GROUND)
            allowed = is_within(name, rule.ours) or (neighbour and floor != "2 seam")
        else:
            allowed = is_within(name, rule.packages)
        if not allowed:
            found.append(f"line {line}: floor {floor!r} may not import {name}")
    return found


@pytest.mark.parametrize("module", sources())
def test_module_imports_only_what_its_floor_may(module: str) -> None:
    path = sources()[module]

    assert violations(module, path.read_text(encoding="utf-8")) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("cupaged.scheduler.plan", "import cupy"),
        ("cupaged.scheduler.plan", "from cupaged.worker.worker import Worker"),
        ("cupaged.scheduler.plan", "def f():\n    import cupaged.backend.cpu"),
        ("cupaged.worker.worker", "from cupaged.scheduler import scheduler"),
        ("cupaged.models.llama", "import numpy"),
        ("cupaged.models.llama", "from cupaged.kernels import linear"),
        ("cupaged.models.llama", "from .layers import Linear"),
        ("cupaged.models.llama", "from importlib import import_module"),
        ("cupaged.kernels.linear", "from cupaged.batch import Batch"),
        ("cupaged.backend.base", "from cupaged.backend.arena import Arena"),
        ("cupaged.backend.cuda", "import cupy"),
        ("cupaged.backend.gemm", "from cuda.pathfinder import load_nvidia_dynamic_lib"),
        ("cupaged.engine.tokenizer", "from cupaged.llm import LLM"),
        ("cupaged.engine.tokenizer", "import transformers"),
        ("cupaged.config", "from cupaged.jit import njit"),
        ("cupaged", "from cupaged import engine"),
    ],
)
def test_forbidden_import_is_found(module: str, text: str) -> None:
    assert len(violations(module, text)) == 1


def test_imports_of_parent_packages_count_as_what_they_name() -> None:
    assert imports("from cupaged import kernels") == [Import(1, "cupaged.kernels")]


@pytest.mark.parametrize("folder", ["cupaged", "models", "kernels", "tests", "tools"])
def test_models_and_kernels_are_imported_below_cupaged_only(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in (ROOT / folder).rglob("*.py")
        for line, name in imports(path.read_text(encoding="utf-8"))
        if is_within(name, ("models", "kernels"))
    ]

    assert found == []


def chances(text: str) -> list[str]:
    """Return a sentence for each use of a clock, of random numbers, or of what the system knows."""
    refused = ("time", "datetime", "random", "secrets", "os", "numpy.random")
    found = [f"line {line}: imports {name}" for line, name in imports(text) if is_within(name, refused)]
    attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    return found + [f"line {node.lineno}: uses .random" for node in attributes if node.attr == "random"]


def test_scheduler_reads_no_clock_and_draws_no_numbers() -> None:
    """So the same calls give the same plans, which a trace's replay relies on."""
    found = {
        path.name: chances(path.read_text(encoding="utf-8"))
        for module, path in sources().items()
        if is_within(module, ("cupaged.scheduler",))
    }

    assert len(found) > 10
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from time import perf_counter",
        "def f():\n    import os",
        "from numpy import random",
        "import numpy as np\nnp.random.rand()",
        "import numpy\nrng = numpy.random.default_rng",
    ],
)
def test_clock_or_random_number_is_found(text: str) -> None:
    assert len(chances(text)) == 1


def test_floors_name_only_modules_that_exist() -> None:
    named = {name for floor in FLOORS.values() for name in (*floor.modules, *floor.ours)}

    assert named - sources().keys() == {"cupaged.__version__"}
