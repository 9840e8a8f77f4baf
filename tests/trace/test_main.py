"""The commands: what they print, and what their exit codes say."""

import json
import re
from pathlib import Path

import pytest

from cupaged.trace.__main__ import main
from cupaged.trace.records import TraceFile, read_records
from tests.trace.runs import record, small_config


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    record(path, small_config(num_blocks=14), seed=1)
    return path


def test_replay_says_that_plans_are_the_same(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace)]) == 0

    assert re.match(r"\d+ requests, \d+ steps: every plan is the same, bit for bit", capsys.readouterr().out)


def test_replay_with_settings_prints_both(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--step-ms", "500", "--token-us", "100", "--context-ns", "0"]  # so slow that all wait at once

    assert main(["replay", str(trace), "--num-blocks", "100", "--no-enable-prefix-caching", *given]) == 0

    out = capsys.readouterr().out
    assert "changed: num_blocks 14 -> 100, enable_prefix_caching True -> False" in out
    assert "a step takes 500 ms + 100 us a token + 0 ns a token of context (given)" in out
    (used,) = [line.split() for line in out.splitlines() if line.startswith("blocks in use, mean, %")]
    assert 100 > float(used[-3]) > float(used[-2]) > 0


def test_replay_fits_a_model_to_the_traces_steps(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--policy", "fcfs", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["model"]["per_step"] + found["model"]["per_token"] + found["model"]["per_context"] > 0
    assert found["recorded"]["requests finished"] == found["changed"]["requests finished"] > 20


def test_another_block_size_keeps_the_pools_bytes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--block-size", "8"]) == 0

    changed = capsys.readouterr().out.splitlines()[0]
    assert "num_blocks 14 -> 7, block_size 4 -> 8" in changed
    assert "block_bytes 1000 -> 2000" in changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block-size", "6"], "knows prefixes by 4 tokens; give a multiple"),
        (["--num-blocks", "0"], "--num-blocks must be at least 1 and below 2147483648, got 0"),
        (["--sliding-window", "1" + 20 * "0"], "--sliding-window must be at least 0 and below 2147483648"),
        (["--num-batches", "3"], "--num-batches must be 1 or 2, got 3"),
        (["--swap-bandwidth", "nan"], "--swap-bandwidth must be at least 1 and below inf, got nan"),
        (["--prefill-rate", "inf"], "--prefill-rate must be at least 1 and below inf, got inf"),
        (["--num-blocks", "3"], "max_model_len is 48 but the KV cache holds 12 tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["replay", str(trace), *options]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "recorded_blocks", "missing"),
    [
        ("swap", 0, ["--swap-bandwidth"]),
        ("swap", 9, ["--swap-bandwidth"]),
        ("auto", 0, ["--swap-bandwidth", "--prefill-rate"]),
    ],
)
def test_rates_that_were_not_measured_are_asked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    recorded_blocks: int,
    missing: list[str],
) -> None:
    unmeasured = {"swap_bandwidth": 1.0, "prefill_rate": 1.0, "num_host_blocks": recorded_blocks}
    record(tmp_path / "a.trace", small_config(num_blocks=14, preemption_mode=mode, **unmeasured), seed=1)
    command = ["replay", str(tmp_path / "a.trace"), "--num-host-blocks", "16"]
    given = [word for flag in missing for word in (flag, "1e4")]

    assert main(command) == 2
    assert f"did not measure; give {' and '.join(missing)}" in capsys.readouterr().err
    assert main([*command, *given]) == 0
    assert main([*command, "--preemption-mode", "recompute", *given]) == 0


def test_of_several_schedulers_the_one_with_the_most_steps_is_shown(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_records(trace).records
    file = TraceFile(tmp_path / "a.trace", with_text=False)
    for kind, payload in [records[0], *records, records[0]]:
        file.write(kind, payload)
    file.close()

    assert main(["replay", str(tmp_path / "a.trace"), "--policy", "fcfs"]) == 0
    assert main(["view", str(tmp_path / "a.trace"), "-o", str(tmp_path / "a.html")]) == 0

    assert "3 schedulers followed one another" in capsys.readouterr().err


def test_half_a_model_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(trace), "--step-ms", "5"])

    assert "together" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_step_that_takes_no_time_that_there_is_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(trace), "--step-ms", value, "--token-us", "1", "--context-ns", "0"])

    assert "--step-ms must be a number >= 0" in capsys.readouterr().err


def test_the_page_does_not_overwrite_its_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()

    assert main(["view", str(trace), "-o", str(trace)]) == 2

    assert "is the trace itself" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_file_that_ends_early_is_replayed_and_it_is_said(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.trace").write_bytes(trace.read_bytes()[:-3])

    assert main(["replay", str(tmp_path / "cut.trace")]) == 0

    assert "ends within a record: its last" in capsys.readouterr().err


def test_plans_that_differ_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, other, mixed = (tmp_path / name for name in ("a.trace", "other.trace", "mixed.trace"))
    record(trace, small_config(num_blocks=25), seed=1, number=10)
    record(other, small_config(num_blocks=24), seed=1, number=10)
    file = TraceFile(mixed, with_text=False)
    for kind, payload in read_records(trace).records[:1] + read_records(other).records[1:]:
        file.write(kind, payload)
    file.close()

    assert main(["replay", str(mixed)]) == 1

    assert "the plans differ: step " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["replay", "FILE"], ["view", "FILE", "-o", "page.html"]])
def test_what_is_no_trace_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "a.trace").write_bytes(b"hello")
    command = [str(tmp_path / "a.trace") if word == "FILE" else word for word in command]

    assert main(command) == 2

    assert "is no trace of this version" in capsys.readouterr().err
