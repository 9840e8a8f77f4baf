import re
import subprocess
from pathlib import Path

import pytest

from cupaged.paths import user_cache_dir
from cupaged.sampling_params import RequestOutputKind, SamplingParams
from tools.demo import MODEL_DIR, answer, check_sha256, demo_model, load

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=5, output_kind=RequestOutputKind.DELTA)


def test_answer_is_streamed_and_ends_in_figures(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = load(str(tiny_llama_dir))

    figures = answer(engine, "Hello", PARAMS)
    engine.close()

    assert re.fullmatch(
        r"[1-5] tokens, \d+\.\d tokens/s, first token after \d+\.\d{3} s, [1-9]\d* of \d+ KV blocks used",
        figures,
    )
    assert capsys.readouterr().out.endswith("\n")


def test_model_that_was_made_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = user_cache_dir() / MODEL_DIR
    made.mkdir(parents=True)

    assert demo_model() == made
    assert list(made.parent.iterdir()) == [made]


def test_file_with_another_sha256_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")

    check_sha256(tmp_path / "file", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(ValueError, match="file has SHA-256 ba78"):
        check_sha256(tmp_path / "file", "00")


@pytest.mark.parametrize(
    ("shell", "script"),
    [("sh", "tools/demo"), ("sh", "tools/test"), ("sh", "tools/venv.sh"), ("bash", ".ci/run")],
)
def test_shell_script_parses(shell: str, script: str) -> None:
    assert subprocess.run([shell, "-n", ROOT / script]).returncode == 0
