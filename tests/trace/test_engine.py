"""An engine that records: what it writes is replayed plan by plan, and it answers as it does without."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM, SamplingParams
from cupaged.batch import Batch
from cupaged.sampling_params import BeamSearchParams
from cupaged.trace.__main__ import main
from cupaged.trace.records import Kind, read_records
from cupaged.trace.replay import replay
from cupaged.trace.workload import read_segments
from cupaged.worker.executor import StepHandle

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "kv_cache_memory": 64 * 1024,
    "max_num_seqs": 4,
}
PROMPTS = ["The quick brown fox jumps over the lazy dog", "The quick brown fox", "Hello"]


def generate(model_dir: Path, **options: Any) -> list[list[str]]:
    params = [
        SamplingParams(max_tokens=20, temperature=0),
        SamplingParams(max_tokens=20, n=3, seed=5),
        SamplingParams(max_tokens=12, stop=["e", "a"], prompt_logprobs=1),
    ]
    with LLM(str(model_dir), **OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        texts = [[completion.text for completion in output.outputs] for output in outputs]
        beams = llm.beam_search([{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=3, max_tokens=6))
        llm.reset_prefix_cache()
        llm.engine.add_request("aborted", PROMPTS[0], SamplingParams(max_tokens=30))
        llm.engine.step()
        llm.engine.abort("aborted")
        return [*texts, [sequence.text for sequence in beams[0].sequences]]


@pytest.mark.parametrize("with_text", [False, True])
def test_a_recorded_run_answers_the_same_and_is_replayed(
    tiny_llama_dir: Path, tmp_path: Path, with_text: bool
) -> None:
    plain = generate(tiny_llama_dir)

    traced = generate(tiny_llama_dir, trace=str(tmp_path / "a.trace"), trace_text=with_text)

    assert traced == plain
    (segment,) = read_segments(read_records(tmp_path / "a.trace"))
    *_, last = replay(segment)
    assert not last.scheduler.has_unfinished()
    kinds = {record.kind for record in segment.records}
    assert {Kind.ADD, Kind.PLAN, Kind.UPDATE, Kind.FINISH_GROUP, Kind.CONTINUE_BEAMS} <= kinds
    assert Kind.RESET_PREFIX_CACHE in kinds
    assert len(segment.requests) == 5


def lose(_batch: Batch) -> StepHandle:
    """Fail as a device does that is lost."""
    raise RuntimeError("lost")


def test_a_step_that_fails_begins_a_second_scheduler_in_the_same_file(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.trace"
    with LLM(str(tiny_llama_dir), **OPTIONS, trace=str(path)) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.executor, "submit", lose)
            with pytest.raises(RuntimeError, match="lost"):
                llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)

    assert len(read_segments(read_records(path))) == 2
    assert main(["replay", str(path)]) == 0


KILLED = """
import os, signal, sys
from cupaged import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, kv_cache_memory=65536, trace=sys.argv[2])
llm.engine.add_request("0", "The quick brown fox", SamplingParams(max_tokens=30))
for _ in range(5):
    llm.engine.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trace_survives_a_process_that_is_killed(tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"

    subprocess.run([sys.executable, "-c", KILLED, tiny_llama_dir, path], check=False, timeout=300)

    (segment,) = read_segments(read_records(path))
    assert len(segment.steps) == 5
    assert main(["replay", str(path)]) == 0
