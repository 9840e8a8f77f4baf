import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.hub import resolve_model


def resolve_in_fresh_python(model: str, before: str = "", **env: str) -> str:
    """Return what resolve_model returns or how it fails; huggingface_hub reads its variables at import."""
    code = f"""
{before}
from cupaged.hub import resolve_model
try:
    print(resolve_model({model!r}))
except ValueError as error:
    print("ValueError:", error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()

    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "no/such/place", "../org/name"])
def test_path_that_is_not_there_is_refused_without_asking_the_hub(model: str) -> None:
    with pytest.raises(ValueError, match="is no directory, and no org/name of a repository either"):
        resolve_model(model)


def test_missing_package_is_an_error_that_names_the_extra() -> None:
    said = resolve_in_fresh_python("org/name", before="import sys; sys.modules['huggingface_hub'] = None")

    assert said.startswith("ValueError: ")
    assert "pip install 'cupaged[hub]'" in said


def test_repository_that_is_not_cached_is_a_clear_error_offline(tmp_path: Path) -> None:
    said = resolve_in_fresh_python("org/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))

    assert "ValueError: model 'org/name' is no directory, is not in the cache" in said


@pytest.mark.parametrize("with_weights", [True, False])
def test_weights_are_downloaded_where_they_are_wanted(tmp_path: Path, with_weights: bool) -> None:
    said = resolve_in_fresh_python(
        "org/name",
        before=f"""
import functools, huggingface_hub
from cupaged import hub

def snapshot_download(name, allow_patterns):
    return {str(tmp_path)!r} + "/" + " ".join(allow_patterns)

huggingface_hub.snapshot_download = snapshot_download
hub.resolve_model = functools.partial(hub.resolve_model, with_weights={with_weights})
""",
    )

    assert Path(said).name == "*.json *.jinja" + " *.safetensors" * with_weights


def test_repository_in_the_cache_of_hf_home_is_found_offline(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")

    said = resolve_in_fresh_python("org/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))

    assert Path(said) == snapshot
