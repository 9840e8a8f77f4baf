"""bench_peers: what engines are asked for, what is made of their answers, and what ours says."""

import ast
import io
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import bench_peers, peer_cupaged
from tools.bench_peers import Job, answer, busy_process, parse_args
from tools.offline_runs import make_workload
from tools.peer_cupaged import num_weights
from tools.peer_report import BUSY, ONE_THREAD, Goal, Row, goals, make_row, table

ANSWER = {"version": "peer 1.0", "offline": [4.0, 1.0, 2.0], "single": [[0.5, 1.5], [0.5, 2.5], [1.0, 1.5]]}
FAKE = """#!{python}
import json, os, sys
order = json.load(sys.stdin)
with open({log!r}, "a") as log:
    print(json.dumps([sys.argv[1:], order, dict(os.environ)]), file=log)
print("a banner, which is no answer")
if {fails!r} in sys.argv[1]:
    sys.exit("no such model")
print(json.dumps({answer!r}))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where fake interpreters write what they are asked for."""
    return tmp_path / "log"


def make_interpreter(log: Path, fails: str = "no script") -> str:
    """Make an interpreter that answers whatever it is to run, but for a script of which `fails` is a part."""
    path = log.with_name("python")
    path.write_text(FAKE.format(python=sys.executable, log=str(log), fails=fails, answer=ANSWER))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], python: str, *arguments: str
) -> tuple[str, Any]:
    """Run bench_peers with `python` in place of ours; return what it printed, and the JSON."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(sys, "argv", ["bench_peers", *arguments])
    bench_peers.main()
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_every_engine_gets_the_same_requests_in_a_process_of_its_own(
    log: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_interpreter(log)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("PYTHONPATH", "ours")
    peers = ["--vllm", python, "--transformers", python, "--llama-cpp", python, "--gguf", "a", "--gguf", "b"]

    _, figures = run_command(
        monkeypatch, capsys, python, str(tiny_llama_dir), "--busy", "--num-threads", "2", *peers
    )

    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(asked) == len(figures["rows"]) == 3 + 2 + 3 + 4
    vocab_size = json.loads((tiny_llama_dir / "config.json").read_text())["vocab_size"]
    workload = make_workload(64, 0, prompt_mean=128, output_mean=96, vocab_size=vocab_size)
    for _, order, environment in asked:
        is_one_thread = order["threads"] == 1
        assert order["prompts"] == ([] if is_one_thread else workload.prompts)
        assert order["output_lengths"] == ([] if is_one_thread else workload.output_lengths)
        assert len(order["prompt"]) == 64
        assert order["repeat"] == (1 if order["dtype"] == "float32" else 3)
        assert environment["OMP_WAIT_POLICY"] == "passive"
        assert not environment.keys() & {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH"}
    assert [order["quantization"] for _, order, _ in asked[:3]] == [None, None, "int8"]
    assert [order["length"] for _, order, _ in asked[:3]] == [128, 0, 128]
    assert [order["one_process"] for _, order, _ in asked[3:5]] == [False, True]
    assert [(order["dtype"], order["continuous"]) for _, order, _ in asked[5:8]] == [
        ("bfloat16", False),
        ("float32", False),
        ("bfloat16", True),
    ]
    assert [(Path(order["gguf"]).name, order["threads"]) for _, order, _ in asked[8:]] == [
        ("a", 2),
        ("a", 1),
        ("b", 2),
        ("b", 1),
    ]


def test_a_peer_that_fails_is_said_and_does_not_end_the_run(
    log: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_interpreter(log, fails="peer_vllm")

    with pytest.raises(SystemExit, match="1"):
        run_command(
            monkeypatch, capsys, python, str(tiny_llama_dir), "--vllm", python, "--transformers", python
        )

    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, True, False, False, False]
    assert "vllm as it comes bfloat16: failed: no such model" in out
    assert "not measured: 64 requests: bfloat16 over vllm" in out


@pytest.fixture
def ours(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Run ours on a tiny order."""
    order = {
        "model": str(tiny_llama_dir),
        "dtype": "float32",
        "threads": 1,
        "repeat": 2,
        "max_model_len": 64,
        "prompts": [[5] * 9, [6] * 20, [7] * 3, [8] * 3],
        "output_lengths": [4, 1, 6, 2],
        "prompt": [5] * 8,
        "length": 12,
        "quantization": None,
    }

    def run(**changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order | changes)))
        peer_cupaged.main()
        answered: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answered

    return run


def test_ours_measures_as_peers_do(ours: Callable[..., dict[str, Any]], tiny_llama_dir: Path) -> None:
    found = ours()

    assert len(found["offline"]) == len(found["single"]) == 2
    assert all(0 < first < last for first, last in found["single"])
    assert found["weight_bytes"] == 4 * num_weights(tiny_llama_dir)
    assert len(found["bandwidth"]) == 2 * peer_cupaged.NUM_READS
    assert min(found["bandwidth"]) > 0


def test_ours_leaves_out_the_single_stream_where_none_is_asked_for(
    ours: Callable[..., dict[str, Any]],
) -> None:
    found = ours(length=0, repeat=1)

    assert len(found["offline"]) == 1
    assert found["single"] == found["bandwidth"] == []


def test_ours_counts_a_byte_for_a_weight_of_int8(
    ours: Callable[..., dict[str, Any]], tiny_llama_dir: Path
) -> None:
    assert ours(length=0, repeat=1, quantization="int8")["weight_bytes"] == num_weights(tiny_llama_dir)


def test_single_stream_ends_when_all_its_tokens_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(first_token=[0.5], between_tokens=[0.25, 0.125])
    monkeypatch.setattr(peer_cupaged, "run_fresh", lambda *_: result)
    engine: Any = None

    assert peer_cupaged.run_single(engine, [5], 3) == [0.5, 0.875]


def test_quantization_that_this_version_lacks_is_said(ours: Callable[..., dict[str, Any]]) -> None:
    found = ours(quantization="int2")

    row = make_row("cupaged", "", {"quantization": "int2"}, found)
    assert "int2" in row.missing
    assert any("cupaged int2: this version has none: " in line for line in table([row]))


def test_ours_runs_as_a_module() -> None:
    commands = [job.command for job in bench_peers.our_jobs(parse_args(["model"]))]

    assert commands == [[sys.executable, "-m", peer_cupaged.__name__]] * 2


def test_what_a_token_reads_is_all_weights_but_the_rows_of_an_embedding(tiny_llama_dir: Path) -> None:
    config = json.loads((tiny_llama_dir / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert not config["tie_word_embeddings"]

    found = num_weights(tiny_llama_dir)

    assert found == config["num_hidden_layers"] * layer + hidden + config["vocab_size"] * hidden


def test_row_has_medians_of_rates() -> None:
    order = {"output_lengths": [6, 2], "length": 5, "dtype": "bfloat16"}
    measured = ANSWER | {"weight_bytes": 50, "bandwidth": [800.0, 200.0, 400.0]}

    row = make_row("cupaged", "", order, measured)

    assert row.version == "peer 1.0"
    assert row.dtype == "bfloat16"
    assert row.offline == 8 / 2
    assert row.decode == 4 / 1.0  # of 4, 2, 8
    assert row.whole == 5 / 1.5  # of 5 / 1.5, 2, 5 / 1.5
    assert row.first_ms == 500
    assert row.bandwidth_share == 50 * 4 / 400


ROWS = [
    Row("cupaged", "", "bfloat16", offline=130.0, decode=80.0, bandwidth=2e9, bandwidth_share=0.79),
    Row("cupaged", BUSY, "bfloat16", offline=64.0),
    Row("cupaged", "", "int8", offline=999.0, decode=101.0, bandwidth=2e9, bandwidth_share=0.6),
    Row("vllm", "as it comes", "bfloat16", offline=70.0, decode=60.0),
    Row("vllm", "in one process", "bfloat16", offline=100.0, decode=30.0),
    Row("transformers", "batches of 8", "bfloat16", offline=20.0, decode=30.0),
    Row("transformers", "batches of 8, one run", "float32", offline=10.0, decode=41.0),
    Row("llama.cpp", "", "F16", decode=50.0),
    Row("llama.cpp", ONE_THREAD, "F16", decode=100.0),
    Row("llama.cpp", "", "Q4_1", decode=100.0),
]


def test_goals_are_held_against_the_best_form_of_a_peer() -> None:
    found = [(round(goal.measured or 0, 3), goal.text.split(":")[0]) for goal in goals(ROWS)]

    assert found == [
        (1.3, "met"),
        (0.79, "missed"),
        (0.6, "met"),
        (1.01, "met"),
        (1.951, "missed"),
        (1.6, "met"),
        (0.492, "missed"),
    ]
    assert [goal.over_one_thread for goal in goals(ROWS)] == [None] * 5 + [0.8, None]
    assert "over llama.cpp's F16 1.6 (0.8 over its one thread), goal 1.60" in goals(ROWS)[5].text


def test_what_runs_beside_a_busy_process_is_held_to_ours_alone() -> None:
    faster = [row._replace(offline=260.0) if row.how == BUSY else row for row in ROWS]

    found = goals(faster)

    assert (found[0].measured, found[-1].measured) == (1.3, 2.0)


def test_goal_without_its_peer_is_not_measured() -> None:
    found = goals(ROWS[:1])

    assert [goal.measured for goal in found] == [None, 0.79, None, None, None, None, None]
    assert Goal("a over b", 1.5, None).text == "not measured: a over b, goal 1.50 or more"


def test_table_sets_each_row_beside_our_first() -> None:
    lines = list(table(ROWS))

    line = next(line for line in lines if "in one process" in line)
    assert line.split()[-6:] == ["100.0", "1.30x", "30.0", "2.67x", "-", "-"]
    assert any("bfloat16: 2.0 GB/s read, of which the single stream uses 79%" in line for line in lines)


def test_busy_process_ends_with_what_it_stood_beside() -> None:
    with busy_process() as neighbour:
        assert neighbour.poll() is None

    assert neighbour.poll() is not None


@pytest.mark.parametrize(
    "arguments", [("--gguf", "a"), ("--llama-cpp", "python"), ("--repeat", "0"), ("--num-threads", "0")]
)
def test_option_that_makes_no_run_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["model", *arguments])


@pytest.mark.parametrize("peer", ["vllm", "transformers", "llama_cpp"])
def test_peers_need_nothing_that_their_environments_lack(peer: str) -> None:
    tree = ast.parse((bench_peers.ROOT / "tools" / f"peer_{peer}.py").read_text())

    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }

    assert imported <= sys.stdlib_module_names


def test_missing_module_is_named() -> None:
    job = Job("vllm", "", [sys.executable, str(bench_peers.ROOT / "tools" / "peer_vllm.py")], {})

    found = answer(job, {"threads": os.cpu_count(), "one_process": False, "model": "model"})

    assert "No module named 'vllm'" in found["error"]
