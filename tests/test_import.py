import json
import subprocess
import sys

import pytest


def modules_loaded_by(statement: str) -> set[str]:
    """Return the modules, without the standard library's, that a fresh Python loads for `statement`."""
    code = f"""
import json, sys
before = set(sys.modules)
{statement}
new = set(sys.modules) - before
print(json.dumps([name for name in new if name.split(".")[0] not in sys.stdlib_module_names]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_import_loads_the_two_modules_it_shows_and_nothing_heavy() -> None:
    loaded = modules_loaded_by("import cupaged")

    assert loaded == {"cupaged", "cupaged.config", "cupaged.sampling_params"}


@pytest.mark.parametrize("statement", ["from cupaged import LLM", "import cupaged.serve"])
def test_engine_and_server_load_no_cuda_and_no_other_framework(statement: str) -> None:
    roots = {name.split(".")[0] for name in modules_loaded_by(statement)}

    assert roots & {"cupy", "cupyx", "cuda", "torch", "transformers", "triton", "huggingface_hub"} == set()


def test_unknown_name_is_an_attribute_error() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from cupaged import Nothing"], capture_output=True, text=True
    )

    assert "ImportError: cannot import name 'Nothing'" in result.stderr
