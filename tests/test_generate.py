"""python -m cupaged.generate: a prompt, or a file of them; bad input harms nobody else."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM
from cupaged.generate import main, parse_args


def run_file(model: Path, tmp_path: Path, lines: list[Any], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    source.write_text(text, encoding="utf-8", newline="")
    code = main(
        [str(model), "--max-model-len", "64", "--input", str(source), "--output", str(target), *flags]
    )
    return code, [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n")[:-1]]


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


def test_several_outputs_of_a_line_are_a_list(tiny_llama_dir: Path, tmp_path: Path) -> None:
    line = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "seed": 1}

    _, (alone, several) = run_file(tiny_llama_dir, tmp_path, [line, {**line, "n": 3}])

    assert [len(output["token_ids"]) for output in several["outputs"]] == [3, 3, 3]
    assert several["outputs"][0].items() <= alone.items()
    assert several.keys() == {"outputs", "num_prompt_tokens", "num_cached_tokens"}


def test_n_answers_to_a_prompt_are_printed_when_all_are_there(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-model-len", "64", "--max-tokens", "4", "--n", "2", "--temperature", "0"]

    assert main([str(tiny_llama_dir), "hello", *flags]) == 0

    shown = capsys.readouterr().out
    first, second = shown.removeprefix("[0]").split("[1]")
    assert shown.startswith("[0]")
    assert first == second


def test_salts_and_priorities_go_with_their_lines(tiny_llama_dir: Path, tmp_path: Path) -> None:
    line = {"prompt_token_ids": list(range(5, 45)), "max_tokens": 1}
    lines = [{**line, "priority": -i, **salt} for i, salt in enumerate([{}, {}, {"cache_salt": "s"}])]

    flags = ["--max-num-seqs", "1", "--scheduling-policy", "priority"]
    _, answers = run_file(tiny_llama_dir, tmp_path, lines, *flags)

    assert [answer["num_cached_tokens"] for answer in answers] == [32, 0, 0]  # the last goes first


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
        '{"prompt": "\\ud800"}',
        '{"messages": [{"role": "\\ud800", "content": []}]}',
        "[" * 100_000,
        {"prompt": "hello", "n": 0},
        {"prompt": "hello", "n": 256, "max_tokens": 60},
        {"prompt": "hello", "priority": 1},
        {"prompt": "hello", "cache_salt": ""},
    ]

    with LLM(tiny_llama_dir, max_model_len=64) as probe:
        memory = 32 * probe.engine.kv_block_bytes  # too few for 256 outputs

    code, answers = run_file(tiny_llama_dir, tmp_path, lines, "--kv-cache-memory", str(memory))

    assert code == 1
    assert [number for number, answer in enumerate(answers) if "error" not in answer] == [1]
    assert all(f"line {number + 1}" in answers[number]["error"] for number in (0, *range(2, len(lines))))


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c", "\r"])
def test_a_line_ends_at_a_newline_only(tiny_llama_dir: Path, tmp_path: Path, separator: str) -> None:
    line = json.dumps({"prompt": f"a{separator}b", "max_tokens": 1}, ensure_ascii=False)

    code, answers = run_file(tiny_llama_dir, tmp_path, [line, "", line + "\r"])

    assert code == 0
    assert len(answers) == 2


def test_log_probabilities_are_written_where_asked_for(tiny_llama_dir: Path, tmp_path: Path) -> None:
    line = {"prompt_token_ids": [5, 6], "max_tokens": 3, "ignore_eos": True, "temperature": 0}

    _, (plain, asked) = run_file(
        tiny_llama_dir, tmp_path, [line, {**line, "logprobs": 1, "prompt_logprobs": 0}]
    )

    assert "logprobs" not in plain
    assert [entry[0]["token_id"] for entry in asked["logprobs"]] == asked["token_ids"] == plain["token_ids"]
    assert asked["prompt_logprobs"][0] is None
    assert asked["prompt_logprobs"][1][0].keys() == {"token_id", "logprob", "rank", "decoded_token"}


def test_an_unknown_field_is_named(tiny_llama_dir: Path, tmp_path: Path) -> None:
    _, (answer,) = run_file(tiny_llama_dir, tmp_path, [{"prompt": "a", "colour": "red"}])

    assert "colour" in answer["error"]


def test_the_models_own_sampling_is_the_default(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    (model / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')

    _, answers = run_file(model, tmp_path, [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}] * 2)

    assert [len(answer["token_ids"]) for answer in answers] == [3, 2, 3, 2]
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_bytes(content)

    assert main(["/no/such/model", "--input", str(source)]) == 1
    assert "in.jsonl" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line_on_stderr(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")

    code = main([str(tiny_llama_dir), "--input", str(source), "--output", str(tmp_path / "no" / "out")])

    assert code == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_model_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/model", "hello"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--max-tokens", "0"], ["--block-size", "8"]])
def test_a_bad_option_is_one_line_on_stderr(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main([str(tiny_llama_dir), "hello", *flags]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model"], "one of them"),
        (["model", "prompt", "--input", "file"], "one of them"),
        (["model", "prompt", "--output", "file"], "--output goes with --input"),
        (["model", "--chat", "--input", "file"], "--chat goes with a PROMPT"),
    ],
)
def test_flags_that_do_not_go_together(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_memory_plan_is_shown_where_a_human_watches(tiny_llama_dir: Path, is_watched: bool) -> None:
    program = f"""
import sys
from cupaged import generate
sys.stderr.isatty = lambda: {is_watched}
generate.main([{str(tiny_llama_dir)!r}, "hi", "--max-tokens", "1"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    if not is_watched:
        assert done.stderr == ""
    else:  # and bars, if anything is compiled
        shown = [line.split(" ")[:2] for line in done.stderr.splitlines()]
        assert [words for words in shown if words[0] != "Compiling" and words != [""]] == [
            ["Loading", str(tiny_llama_dir)],
            ["INFO:", "memory"],
        ]


def test_flags_may_stand_between_model_and_prompt() -> None:
    args = parse_args(["model", "--max-tokens", "3", "a prompt", "--chat"])

    assert (args.model, args.prompt, args.max_tokens, args.chat) == ("model", "a prompt", 3, True)


@pytest.mark.parametrize("source", ["prompt", "lines"])
def test_a_reader_that_closes_the_pipe_ends_it_without_a_traceback(
    tiny_llama_dir: Path, tmp_path: Path, source: str
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "abc"}\n')
    arguments = ["abc"] if source == "prompt" else ["--input", str(lines)]
    read_end, write_end = os.pipe()
    os.close(read_end)

    command = [sys.executable, "-m", "cupaged.generate", str(tiny_llama_dir), *arguments]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)

    assert result.returncode == 1
    assert "Broken" not in result.stderr


def test_ctrl_c_ends_it_at_once_without_a_traceback(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    os.mkfifo(source)
    command = [sys.executable, "-m", "cupaged.generate", "m", "--input", str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with source.open("w"):  # returns once the program reads
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)

    assert (process.returncode, *output) == (-signal.SIGINT, "", "")
