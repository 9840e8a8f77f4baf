"""README's examples run as they stand, with a tiny model in place of the demo's."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cupaged.models import load_model_class

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
DEMO_MODEL = "~/.cache/cupaged/models/SmolLM2-135M-Instruct"


def example(language: str, containing: str) -> str:
    """Return the one fenced block of `language` that contains `containing`."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    found = [block for block in blocks if containing in block]
    assert len(found) == 1, f"{len(found)} blocks of {language} contain {containing!r}"
    return found[0]


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Run the server's command on a free port; yield its address."""
    command = example("sh", "cupaged.serve").strip().splitlines()[-1]
    words = command.replace(DEMO_MODEL, str(model)).replace("--port 8000", "--port 0").split()
    with subprocess.Popen([sys.executable, *words[1:]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            yield ready.removeprefix("ready: ").strip()
        finally:
            process.terminate()


def run_python(containing: str, model: Path) -> None:
    """Run the example that contains `containing`."""
    code = example("python", containing).replace(DEMO_MODEL, str(model))
    exec(compile(code, "README.md", "exec"), {})


def run_shell(containing: str, model: Path, directory: Path) -> None:
    """Run the example in a directory; it must succeed."""
    code = example("sh", containing).replace(DEMO_MODEL, str(model))
    command = ["sh", "-ec", code.replace("python ", f"'{sys.executable}' ")]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_library_example(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("llm.chat(", tiny_llama_dir)

    assert "The capital of France is ->" in capsys.readouterr().out


def test_example_of_several_outputs(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("llm.beam_search(", tiny_llama_dir)

    shown = capsys.readouterr().out
    assert re.findall(r"^(\d) ", shown, re.MULTILINE) == ["0", "1", "2", "3"]
    assert len(re.findall(r"^-\d+\.\d\d Once upon a time", shown, re.MULTILINE)) == 4


def test_memory_example(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("reset_prefix_cache()", tiny_llama_dir)

    cached = [
        int(n) for n in re.findall(r"^(\d+) of \d+ prompt tokens", capsys.readouterr().out, re.MULTILINE)
    ]
    assert len(cached) == 2
    assert cached[0] > 64
    assert cached[1] == 0


def test_shell_examples(tiny_llama_dir: Path, tmp_path: Path) -> None:
    run_shell("--output answers.jsonl", tiny_llama_dir, tmp_path)

    assert (tmp_path / "answers.jsonl").read_text(encoding="utf-8").count("\n") == 1


def test_trace_example(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time", "max_tokens": 8}\n')

    run_shell("cupaged.trace replay", tiny_llama_dir, tmp_path)

    assert "<html" in (tmp_path / "map.html").read_text(encoding="utf-8")


def test_server_example(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = example("python", "OpenAI(")

    with server(tiny_llama_dir) as url:
        exec(compile(code.replace("http://127.0.0.1:8000", url), "README.md", "exec"), {})

    assert capsys.readouterr().out


def test_table_of_models_is_what_there_is() -> None:
    (section,) = re.findall(r"^## Models\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)

    with pytest.raises(ValueError, match=f"there are {', '.join(listed)}$"):
        load_model_class("no such family")


def test_every_tool_is_in_the_readme_of_tools() -> None:
    tools = Path(__file__).parents[1] / "tools"
    text = (tools / "README.md").read_text(encoding="utf-8")

    names = {path.stem for path in tools.iterdir() if path.is_file()} - {"__init__", "README"}
    assert {name for name in names if name not in text} == set()
