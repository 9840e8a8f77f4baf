"""What is listed is all that requests need: none waits for the compiler, whatever it asks for."""

from pathlib import Path
from typing import Any

import pytest
from numba.core import event

from cupaged import LLM, BeamSearchParams, SamplingParams, recording

PROMPTS = [[5, 6, 7], list(range(5, 40))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_once_the_engine_is_loaded(
    tiny_llama_dir: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_entries", {})
    options = {"device": "cpu", "dtype": dtype, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    with LLM(tiny_llama_dir, **options) as llm, event.install_recorder("numba:compile") as compiled:
        entries = list(recording._entries)
        sampled = SamplingParams(n=2, temperature=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=4, logprobs=2)
        llm.generate(PROMPTS, sampled, use_tqdm=False)
        llm.generate(PROMPTS, SamplingParams(temperature=0, min_tokens=3, max_tokens=4), use_tqdm=False)
        llm.generate(PROMPTS * 20, SamplingParams(prompt_logprobs=1, max_tokens=2), use_tqdm=False)
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)

    assert list(recording._entries) == entries != []
    assert [each.data["dispatcher"].py_func.__name__ for _, each in compiled.buffer] == []
