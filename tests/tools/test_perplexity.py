"""perplexity: each token is scored once, with the past that is promised, and rows compare token by token."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from tools import perplexity
from tools.perplexity import Window, compare, documentation, score, windows


def test_text_is_prose_of_this_python_and_long_enough() -> None:
    paragraphs = documentation().split("\n")

    assert len(set(paragraphs)) == len(paragraphs) > 150
    assert sum(map(len, paragraphs)) > 48_000  # characters: 8192 tokens of any tokenizer
    assert all(text[0].isupper() and text.endswith(".") and "  " not in text for text in paragraphs)


def test_windows_are_cut_as_told() -> None:
    assert windows(10, 6, 3) == [Window(0, 1, 6), Window(3, 6, 9), Window(4, 9, 10)]
    assert windows(4, 6, 3) == [Window(0, 1, 4)]


@pytest.mark.parametrize("num_tokens", [2, 63, 64, 65, 96, 97, 500])
def test_every_token_but_the_first_is_scored_once_with_a_past(num_tokens: int) -> None:
    cut = windows(num_tokens, 64, 32)

    assert [i for window in cut for i in range(window.scored, window.last)] == list(range(1, num_tokens))
    assert all(window.last - window.first <= 64 for window in cut)
    assert all(window.scored - window.first >= 32 for window in cut[1:])


def test_scores_are_the_models_log_probabilities_within_the_windows(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, device="cpu", num_threads=1, max_model_len=17) as llm:
        token_ids = llm.get_tokenizer().encode(documentation())[:20]
        scores = score(llm, token_ids, 12, 8)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        pasts = [(first, 12) if first == 0 else (first, first + 12) for first in (0, 8)]
        (whole, second) = llm.generate(
            [{"prompt_token_ids": token_ids[first:last]} for first, last in pasts], params, use_tqdm=False
        )

    entries = [*(whole.prompt_logprobs or [])[1:], *(second.prompt_logprobs or [])[4:]]
    expected = [entry[i].logprob for i, entry in zip(token_ids[1:], entries, strict=True) if entry]
    assert scores.tolist() == expected


def test_a_row_is_perplexity_ratio_and_error() -> None:
    reference, scores = np.log([0.5, 0.25, 0.125, 0.5]), np.log([0.5, 0.25, 0.125, 0.25])

    row = compare("int8", scores, reference)

    assert row["perplexity"] == pytest.approx(2 ** (8 / 4), abs=1e-4)
    assert row["ratio"] == pytest.approx(2**0.25, abs=1e-5)
    assert row["standard_error"] == pytest.approx(2**0.25 * np.log(2) * (3 / 16) ** 0.5 / 2, abs=1e-5)
    assert not row["within_limit"]
    assert compare("none", reference, reference)["within_limit"]


def test_command_prints_a_row_for_each_quantization_and_json(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["perplexity", str(tiny_llama_dir), "--quantization", "none,none", "--tokens", "40"]
    monkeypatch.setattr(sys, "argv", [*argv, "--window", "24", "--stride", "12"])

    perplexity.main()

    *_, second, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert second.split()[2:] == ["1.0000", "0.0000", "yes"]
    assert (report["tokens"], len(report["results"])) == (39, 2)
    assert report["results"][0] == report["results"][1]
