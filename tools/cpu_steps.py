"""Steps of an engine on the CPU, to be timed: of a checkpoint, or of a shape's name with random weights.

What profile_step and bench_shape have in common: their arguments, the engine, its steps, and how fast the
memory is read meanwhile.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, get_args

import numpy as np

from cupaged.config import EngineConfig, QuantizationName
from cupaged.engine.llm_engine import LLMEngine
from cupaged.sampling_params import RequestOutputKind, SamplingParams
from tools.engine_model import FIRST_TOKEN, write_model
from tools.kernel_cases.paged import Heads
from tools.peer_cupaged import bandwidth
from tools.steps import LLAMA_8B, Shape

SHAPES = {
    "llama-3.2-1b": Shape(
        name="llama-3.2-1b",
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        heads=Heads("bf16", 32, 8, 64),
        vocab_size=128_256,
    ),
    "llama-3.1-8b": LLAMA_8B,
}
TIED = {"llama-3.2-1b"}
PREFILLED = 2048  # tokens of prompts in a step
MOST_READ = 1 << 30  # bytes; more would not be read faster or slower


def add_arguments(parser: argparse.ArgumentParser, *, batch: str) -> None:
    """Add what says which engine and which steps."""
    parser.add_argument("model", help=f"directory of a checkpoint, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--batch", default=batch, help="sequences of a step of decodes, such as 1,16,64")
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence's prompt")
    parser.add_argument("--steps", type=int, default=32, help="that are timed; the median counts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=get_args(QuantizationName))
    parser.add_argument("--num-threads", type=int, default=os.cpu_count())


@contextmanager
def model_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a directory, and options of EngineConfig: `name` itself, or the shape of that name."""
    if name not in SHAPES:
        yield name, {}
        return
    with TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPES[name], tie_word_embeddings=name in TIED)
        yield directory, {"load_format": "dummy"}


def batches_of(args: argparse.Namespace) -> list[int]:
    """Return the sizes of the steps of decodes."""
    return [int(batch) for batch in args.batch.split(",") if batch]


def make_engine(directory: str, args: argparse.Namespace, num_steps: int, **options: Any) -> LLMEngine:
    """Return an engine with room for the largest batch, and num_steps decodes after its prompts."""
    largest = max([1, *batches_of(args)])
    # The first sequences decode while the prompts of the last ones are computed.
    num_prefills = -(-largest * args.context // PREFILLED) + 1
    given = {"max_num_seqs": largest, "max_num_batched_tokens": PREFILLED + largest}
    given |= {"dtype": args.dtype, "quantization": args.quantization, "enable_prefix_caching": False}
    given |= {"max_model_len": args.context + num_prefills + num_steps, "num_threads": args.num_threads}
    return LLMEngine(EngineConfig.create(directory, device="cpu", **given | options))


@contextmanager
def decoding(engine: LLMEngine, batch: int, context: int) -> Iterator[None]:
    """Let all steps meanwhile be decodes of `batch` sequences, whose prompts have `context` tokens."""
    rng = np.random.default_rng(0)
    last = engine.model_config.vocab_size
    params = SamplingParams(
        temperature=0,
        max_tokens=engine.max_model_len - context,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    names = [f"decode-{i}" for i in range(batch)]
    for name in names:
        engine.add_request(name, rng.integers(FIRST_TOKEN, last, context).tolist(), params)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step()}
    yield
    assert engine.scheduler.num_running == batch, "a sequence has ended before it was to"
    for name in names:
        engine.abort(name)


def prefill(engine: LLMEngine, num_tokens: int) -> None:
    """Compute a prompt of so many tokens, in as few steps as the engine's budget allows."""
    prompt = np.random.default_rng(0).integers(FIRST_TOKEN, engine.model_config.vocab_size, num_tokens)
    engine.add_request("prefill", prompt.tolist(), SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished():
        engine.step()


def seconds_of(step: Any, count: int) -> list[float]:
    """Return the seconds of so many calls."""
    found = []
    for _ in range(count):
        start = perf_counter()
        step()
        found.append(perf_counter() - start)
    return found


def read_bandwidth(num_bytes: int, num_threads: int) -> float:
    """Return the bytes per second, the median, at which the threads read so many bytes."""
    data = np.ones(max(1, min(num_bytes, MOST_READ) // 8), np.int64)
    with ThreadPoolExecutor(num_threads) as threads:
        return float(np.median(bandwidth(data, threads, num_threads)))
