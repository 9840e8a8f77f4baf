"""What is installed is what is here: package list, links, wheel and sdist, extras."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LINKED = ("models", "kernels")
BUILD = "import sys; from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def pyproject() -> dict[str, Any]:
    values: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return values


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", requirement)[0] for requirement in requirements}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel from a copy that has two CUDA files in it; return their folder."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("cupaged", *LINKED):
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    (copy / "kernels" / "copied.cu").touch()
    (copy / "kernels" / "copied.cuh").touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


def folders_with_modules() -> set[Path]:
    found = {path.parent for folder in ("cupaged", *LINKED) for path in (ROOT / folder).rglob("*.py")}
    return {path.relative_to(ROOT) for path in found}


def test_package_list_names_every_folder_with_modules() -> None:
    packages = {".".join(folder.parts) for folder in folders_with_modules()}
    packages = {f"cupaged.{name}" if name.split(".")[0] in LINKED else name for name in packages}

    assert set(pyproject()["tool"]["setuptools"]["packages"]) == packages


def test_every_folder_with_modules_is_a_package() -> None:
    missing = [folder for folder in folders_with_modules() if not (ROOT / folder / "__init__.py").is_file()]

    assert missing == []


@pytest.mark.parametrize("name", LINKED)
def test_link_in_the_package_leads_to_the_folder_beside_it(name: str) -> None:
    link = ROOT / "cupaged" / name

    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert (link / "__init__.py").is_file()


def test_wheel_holds_every_module_and_cuda_source(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    own = {f"cupaged/{path.relative_to(ROOT)}" for name in LINKED for path in (ROOT / name).rglob("*.py")} | {
        str(path.relative_to(ROOT)) for path in (ROOT / "cupaged").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == own
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "cupaged" / "trace").glob("page*")}
    assert "cupaged/trace/page.html" in page
    assert {"cupaged/py.typed", "cupaged/kernels/copied.cu", "cupaged/kernels/copied.cuh", *page} <= names


def test_wheel_has_no_top_level_package_but_cupaged(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    roots = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {root for root in roots if not root.endswith(".dist-info")} == {"cupaged"}


def test_sdist_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "LICENSE", "models/llama.py", "kernels/copied.cu", "cupaged/py.typed"} <= names


def test_base_install_needs_neither_cuda_nor_a_server_nor_torch() -> None:
    base = distributions(pyproject()["project"]["dependencies"])

    assert base == {
        "numpy",
        "numba",
        "safetensors",
        "tokenizers",
        "ml_dtypes",
        "jinja2",
        "tqdm",
    }


def test_extras_are_those_that_the_readme_and_errors_name() -> None:
    extras = pyproject()["project"]["optional-dependencies"]

    assert set(extras) == {"cuda12", "cuda13", "serve", "hub", "demo", "plots", "test", "dev"}


def test_version_is_stated_once_more_in_the_package_and_agrees() -> None:
    text = (ROOT / "cupaged" / "__init__.py").read_text(encoding="utf-8")

    assert f'__version__ = "{pyproject()["project"]["version"]}"' in text
