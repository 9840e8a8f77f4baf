"""bench_start: what it times and weighs; a start that fails is no figure."""

import json
import os
import sys
from pathlib import Path

import pytest

from tools.bench_start import PROMPT, look_inside, main, memory, report, seconds_to_output

INSIDE = {
    "import_s": 0.25,
    "load_s": 0.5,
    "first_step_s": 0.125,
    "weights": 3 << 20,
    "resident_imported": 5 << 20,
    "resident_loaded": 9 << 20,
    "peak_loading": 10 << 20,
}


def test_time_ends_with_the_first_byte_though_the_command_goes_on() -> None:
    program = (
        "import sys, time; sys.stdout.write('a'); sys.stdout.flush(); time.sleep(0.01); print('b' * 99999)"
    )

    assert seconds_to_output([sys.executable, "-c", program], dict(os.environ)) > 0


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('half'); raise SystemExit(3)", "pass"])
def test_command_that_fails_or_says_nothing_is_no_start(program: str) -> None:
    with pytest.raises(SystemExit, match="ended with code"):
        seconds_to_output([sys.executable, "-c", program], dict(os.environ))


def test_memory_is_in_bytes() -> None:
    found = memory()

    assert 10 << 20 < found["VmRSS"] <= found["VmHWM"]


def test_a_start_is_looked_into(tiny_llama_dir: Path) -> None:
    flags = ["--kv-cache-memory", str(1 << 20), "--max-model-len", "64", "--device", "cpu"]

    found = look_inside([str(tiny_llama_dir), PROMPT, *flags], dict(os.environ))

    assert found.keys() == INSIDE.keys()
    assert 0 < found["weights"] < 1 << 20
    assert found["resident_imported"] < found["resident_loaded"] <= found["peak_loading"]


def test_last_line_is_json_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report(20.0, [3.0, 1.0, 2.0], INSIDE)

    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"cold_s": 20.0, "warm_s": 2.0, "runs": 3, **INSIDE}
    assert [line.split()[-1] for line in table if line[-1:].isdigit()] == [
        *("20.00", "2.00", "0.25", "0.50", "0.12"),
        *("3", "5", "9", "10"),
    ]


def test_flags_of_generate_go_to_generate_and_only_its_first_start_is_cold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    folders = []

    def start(command: list[str], environment: dict[str, str]) -> float:
        commands.append(command)
        folders.append(environment["XDG_CACHE_HOME"])
        assert os.listdir(folders[0]) == ["compiled"] * (len(folders) > 1)
        Path(folders[0], "compiled").touch()
        return 1.0

    monkeypatch.setattr("tools.bench_start.seconds_to_output", start)
    monkeypatch.setattr("tools.bench_start.look_inside", lambda *_: INSIDE)

    main(["some/model", "--runs", "2", "--quantization", "int8"])

    assert len(commands) == 3
    assert commands[0][1:5] == ["-m", "cupaged.generate", "some/model", PROMPT]
    assert commands[0][5:7] == ["--quantization", "int8"]
    assert len(set(folders)) == 1  # empty before the first start alone
