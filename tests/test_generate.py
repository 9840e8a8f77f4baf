"""python -m cupaged.generate: a prompt, or a file of them; bad input harms nobody else."""

import json
from pathlib import Path
from typing import Any

import pytest

from cupaged.generate import main

SHORT = ("--max-model-len", "64")


def run_file(model: Path, tmp_path: Path, lines: list[Any], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    code = main(
        [str(model), "--max-model-len", "64", "--input", str(source), "--output", str(target), *flags]
    )
    return code, [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def test_a_prompt_is_answered_on_stdout(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [str(tiny_llama_dir), "hello", "--max-model-len", "64", "--max-tokens", "5", "--temperature", "0"]
    )

    assert code == 0
    assert capsys.readouterr().out.strip()


def test_chat_wraps_the_prompt_in_the_template(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-model-len", "128", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    main([str(tiny_llama_dir), "hello", *flags])
    plain = capsys.readouterr().out

    main([str(tiny_llama_dir), "hello", "--chat", *flags])

    assert capsys.readouterr().out != plain


def test_every_line_gets_its_answer_in_order(tiny_llama_dir: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello", "max_tokens": 3, "ignore_eos": True},
        {"prompt_token_ids": [5, 6], "max_tokens": 1, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True},
    ]

    code, answers = run_file(tiny_llama_dir, tmp_path, lines)

    assert code == 0
    assert [len(answer["token_ids"]) for answer in answers] == [3, 1, 2]
    assert answers[1]["num_prompt_tokens"] == 2


def test_flags_are_defaults_that_a_line_overrides(tiny_llama_dir: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "hello"}, {"prompt": "hello", "max_tokens": 2}]

    _, answers = run_file(tiny_llama_dir, tmp_path, lines, "--max-tokens", "4", "--ignore-eos")

    assert [len(answer["token_ids"]) for answer in answers] == [4, 2]


def test_a_bad_line_gets_an_error_and_harms_no_other(tiny_llama_dir: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        "no json",
        {"prompt": "hello", "max_tokens": 2, "ignore_eos": True},
        {"prompt": "hello", "temperature": -1},
        {"prompt": "hello", "colour": "red"},
        {"prompt_token_ids": [10**6]},
        {"max_tokens": 2},
        {"messages": "hi"},
        {"prompt": "hello", "prompt_token_ids": [1]},
        {"prompt": None},
        [1, 2],
    ]

    code, answers = run_file(tiny_llama_dir, tmp_path, lines)

    assert code == 1
    assert [number for number, answer in enumerate(answers) if "error" not in answer] == [1]
    assert all(f"line {number + 1}" in answers[number]["error"] for number in (0, *range(2, 10)))


def test_a_missing_model_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/model", "hello"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--max-tokens", "0"], ["--block-size", "8"]])
def test_a_bad_option_is_one_line_on_stderr(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main([str(tiny_llama_dir), "hello", *flags]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("argv", [["model"], ["model", "prompt", "--input", "file"]])
def test_prompt_or_input_but_not_both(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert "one of them" in capsys.readouterr().err
