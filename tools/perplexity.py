"""Perplexity of a model on a text that ships with Python, and what quantization changes of it.

    python -m tools.perplexity MODEL [--quantization none,int8,int8_w8a8] [--tokens 8192]

The text is the prose of Python's language reference, which `help` shows (pydoc_data.topics, part of every
Python): the paragraphs of topics that have hardly changed since 3.10, each once, lines joined. So versions
of Python differ little, and their ratios less.

Windows of --window tokens begin --stride tokens apart; in each, the tokens that no window before has scored
are scored by the engine's prompt_logprobs. Perplexity is exp(-mean). The ratio to the first quantization in
the list is by the same tokens, with the standard error of their mean difference. The last line is JSON.
"""

import argparse
import hashlib
import json
import pydoc_data.topics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged import LLM, SamplingParams

TOPICS = (  # at least nine tenths of their prose are the same from Python 3.10 to 3.13
    "assert async attribute-access bitwise booleans class comparisons del exceptions execmodel formatstrings "
    "global import in raise return sequence-types slicings specialnames subscriptions typesseq unary while "
    "with yield"
)
SHORTEST = 120  # characters of a paragraph: no headings, no lists of names
LIMIT = 0.01  # of a ratio's distance from 1


class Window(NamedTuple):
    """A run of tokens, of which those in [scored, last) count."""

    first: int
    scored: int
    last: int


def documentation() -> str:
    """Return the prose of TOPICS, a paragraph a line."""
    found: dict[str, None] = {}
    for topic in TOPICS.split():
        for block in pydoc_data.topics.topics.get(topic, "").split("\n\n"):
            lines = [line for line in block.split("\n") if line]
            text = " ".join(" ".join(lines).replace("`", '"').split())
            is_plain = all(line[0] != " " for line in lines)  # else code, or an item of a list
            if is_plain and len(text) >= SHORTEST and text[0].isupper() and text[-1] == ".":
                found.setdefault(text)  # some topics repeat others' paragraphs
    return "\n".join(found)


def windows(num_tokens: int, size: int, stride: int) -> list[Window]:
    """Cut num_tokens into windows that score each token but the first once, with a past of size - stride."""
    found = [Window(0, 1, min(size, num_tokens))]
    while found[-1].last < num_tokens:
        scored = found[-1].last
        last = min(scored + stride, num_tokens)
        found.append(Window(max(0, last - size), scored, last))
    return found


def score(llm: LLM, token_ids: Sequence[int], size: int, stride: int) -> NDArray[np.float64]:
    """Return the log-probability of each token but the first, [num_tokens - 1]."""
    cut = windows(len(token_ids), size, stride)
    prompts = [{"prompt_token_ids": list(token_ids[window.first : window.last])} for window in cut]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    scores: list[float] = []
    for window, output in zip(cut, llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()), strict=True):
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[window.scored - window.first :]
        for token_id, entry in zip(token_ids[window.scored : window.last], entries, strict=True):
            assert entry is not None
            scores.append(entry[token_id].logprob)
    return np.array(scores)


def compare(quantization: str, scores: NDArray[np.float64], reference: NDArray[np.float64]) -> dict[str, Any]:
    """Return a row: the perplexity, its ratio to the reference's, and the ratio's standard error."""
    worse = reference - scores
    ratio = float(np.exp(worse.mean()))
    return {
        "quantization": quantization,
        "perplexity": round(float(np.exp(-scores.mean())), 4),
        "ratio": round(ratio, 5),
        "standard_error": round(ratio * float(worse.std()) / len(worse) ** 0.5, 5),
        "within_limit": abs(ratio - 1) <= LIMIT,
    }


def main() -> None:
    """Print the table and a last line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("--quantization", default="none", help="a list, such as none,int8,int8_w8a8")
    parser.add_argument("--dtype", default="auto", help="of the engine, as its own --dtype (default: auto)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most (default: 8192)")
    parser.add_argument("--window", type=int, default=1024, help="tokens (default: 1024)")
    parser.add_argument("--stride", type=int, default=512, help="tokens (default: 512)")
    args = parser.parse_args()
    if args.tokens < 2 or not 0 < args.stride < args.window:
        parser.error("--tokens must be at least 2, and --stride in 1..window - 1")
    text = documentation()
    rows: list[dict[str, Any]] = []
    reference: NDArray[np.float64] | None = None
    num_scored = 0
    for name in args.quantization.split(","):
        options: dict[str, Any] = {} if name == "none" else {"quantization": name}
        with LLM(
            args.model, dtype=args.dtype, max_model_len=args.window + 1, max_num_seqs=4, **options
        ) as llm:
            token_ids = llm.get_tokenizer().encode(text)[: args.tokens]
            scores = score(llm, token_ids, args.window, args.stride)
        if reference is None:
            reference, num_scored = scores, len(scores)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            print(f"{num_scored} tokens of Python {sys.version.split()[0]}'s documentation, sha256 {digest}")
            print(f"{'quantization':16}{'perplexity':>12}{'ratio':>10}{'+-':>10}  within {LIMIT:.0%}")
        row = compare(name, scores, reference)
        rows.append(row)
        ratio = f"{row['ratio']:10.4f}{row['standard_error']:10.4f}"
        print(
            f"{name:16}{row['perplexity']:12.3f}{ratio}  {'yes' if row['within_limit'] else 'no'}", flush=True
        )
    print(json.dumps({"bench": "perplexity", "dtype": args.dtype, "tokens": num_scored, "results": rows}))


if __name__ == "__main__":
    main()
