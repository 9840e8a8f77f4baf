"""profile_step and bench_shape: all kernels of a step are noted, and the last line has the figures."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.models import load_model_config
from cupaged.sampling_params import SamplingParams
from tools import bench_shape, cpu_steps, profile_step
from tools.cpu_steps import add_arguments, decoding, make_engine, model_of
from tools.kernel_traffic import name_of, traffic
from tools.profile_step import timed_kernels

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[LLMEngine]:
    made = LLMEngine(EngineConfig.create(tiny_llama_dir, max_model_len=64, max_num_seqs=4))
    yield made
    made.close()


def generate(engine: LLMEngine, count: int = 3) -> list[int]:
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids


def test_every_kernel_of_a_step_is_noted_and_nothing_is_changed(engine: LLMEngine) -> None:
    expected = generate(engine)

    with timed_kernels() as calls:
        tokens = generate(engine)

    assert tokens == expected
    per_step = {"linear": 4 * NUM_LAYERS + 1, "paged_attention": NUM_LAYERS, "sample": 1, "embedding": 1}
    counts = Counter(name_of(call.kernel) for call in calls)
    assert {name: counts[name] for name in per_step} == {name: 3 * count for name, count in per_step.items()}
    assert all(call.seconds > 0 and traffic(call.kernel, call.args).num_bytes > 0 for call in calls)
    generate(engine)
    assert len(calls) == sum(counts.values())


def run(
    main: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> dict[str, Any]:
    """Run a command; return its last line."""
    monkeypatch.setattr("sys.argv", ["tool", *arguments, "--steps", "2", "--context", "9"])
    main()
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


def test_profile_has_each_step_that_was_asked_for(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_llama_dir), "--batch", "1,3", "--prefill", "20"]

    figures = run(profile_step.main, arguments, monkeypatch, capsys)

    for name in ("decode_1", "decode_3", "prefill_20"):
        found = figures[name]
        assert 0 < found["outside_share"] < 1
        assert found["bandwidth"] > 0
        flops = {row["name"]: row["flops"] for row in found["kernels"]}
        assert sum(row["num_calls"] for row in found["kernels"] if row["flops"]) == 5 * NUM_LAYERS + 1
        assert flops["paged_attention"] > 0
    products = {
        name: sum(row["flops"] for row in figures[name]["kernels"] if row["name"].startswith("linear"))
        for name in ("decode_1", "decode_3")
    }
    assert products["decode_3"] == 3 * products["decode_1"]


def test_shape_is_measured_beside_its_prediction(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run(bench_shape.main, [str(tiny_llama_dir), "--batch", "1,2"], monkeypatch, capsys)

    assert 0 < figures["planned_bytes"] < 1 << 28
    for name in ("batch_1", "batch_2"):
        found = figures[name]
        assert found["ratio"] == found["tokens_per_second"] / found["predicted_tokens_per_second"]
        assert found["ratio"] > 0


def test_prediction_is_what_a_step_reads_over_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(step=None, kv_block_bytes=32, config=SimpleNamespace(block_size=16))
    monkeypatch.setattr(bench_shape, "decoding", lambda *_: nullcontext())
    monkeypatch.setattr(bench_shape, "seconds_of", lambda _, count: [0.5] * count)
    monkeypatch.setattr(bench_shape, "read_bandwidth", lambda *_: 1000.0)

    found = bench_shape.measure_speed(engine, 2, 140, argparse.Namespace(context=10, steps=4, num_threads=1))

    cached = 2 * (10 + bench_shape.WARM_UP + 2) * 2  # bytes, of as many tokens as in the middle of the steps
    assert found["predicted_tokens_per_second"] == 2 * 1000 / (140 + cached)
    assert found["tokens_per_second"] == 4


def test_an_embedding_that_is_not_the_head_is_not_read(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(engine: LLMEngine, _batch: int, num_bytes: int, _args: Any) -> float:
        return num_bytes / engine.executor.plan.use.weights

    monkeypatch.setattr(bench_shape, "count_weights", lambda _: (4, 3))
    monkeypatch.setattr(bench_shape, "measure_speed", measure)

    figures = run(bench_shape.main, [str(tiny_llama_dir), "--batch", "1"], monkeypatch, capsys)

    assert figures["batch_1"] == pytest.approx(0.75, abs=1e-4)


def test_engine_is_the_one_that_was_asked_for(tiny_llama_dir: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, batch="1,3")
    asked = ["--quantization", "int8", "--dtype", "bfloat16", "--num-threads", "1", "--context", "9"]

    engine = make_engine(str(tiny_llama_dir), parser.parse_args([str(tiny_llama_dir), *asked]), 5)
    engine.close()

    config = engine.config
    assert (config.quantization, config.dtype, config.num_threads) == ("int8", "bfloat16", 1)
    assert (config.max_num_seqs, engine.max_model_len) == (3, 9 + 2 + 5)  # two steps of prompts
    assert not config.enable_prefix_caching


def test_all_sequences_decode_in_every_step_however_long_their_prompts_took(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "PREFILLED", 32)
    parser = argparse.ArgumentParser()
    add_arguments(parser, batch="1")
    args = parser.parse_args([str(tiny_llama_dir), "--batch", "30", "--context", "16"])
    engine = make_engine(str(tiny_llama_dir), args, num_steps=6)

    with decoding(engine, 30, args.context):
        outputs = [len(engine.step()) for _ in range(5)]

    engine.close()
    assert outputs == [30] * 5


@pytest.mark.parametrize(
    ("name", "billions", "is_tied"), [("llama-3.2-1b", 1.236, True), ("llama-3.1-8b", 8.030, False)]
)
def test_shape_has_as_many_weights_as_the_model(name: str, billions: float, is_tied: bool) -> None:
    with model_of(name) as (directory, options):
        config = load_model_config(Path(directory))

    everything, read = bench_shape.count_weights(config)

    assert options == {"load_format": "dummy"}
    assert everything / 1e9 == pytest.approx(billions, abs=0.001)
    assert everything - read == (0 if is_tied else config.vocab_size * config.hidden_size)


def test_directory_is_taken_as_it_is(tiny_llama_dir: Path) -> None:
    with model_of(str(tiny_llama_dir)) as found:
        assert found == (str(tiny_llama_dir), {})
