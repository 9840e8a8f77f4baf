"""The workloads of bench_peers through cupaged, and the memory's bandwidth; run by bench_peers as peers are.

Reads its order as JSON from standard input and prints a line of JSON. Between single streams the same threads
read as many bytes as the weights have, so that both see the same machine.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

import cupaged
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.worker.weights import read_headers
from tools.offline_runs import Workload, run
from tools.offline_sharing import run_fresh

MAX_NUM_SEQS = 256
NUM_READS = 20  # before each single stream
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}  # of a weight


@njit("int64(int64[::1])", nogil=True)
def read(numbers: NDArray[np.int64]) -> int:
    """Read all of `numbers` and return their sum, so that reading cannot be left out."""
    total = 0
    for i in range(len(numbers)):
        total += numbers[i]
    return total


def num_weights(model: Path) -> int:
    """Return the numbers that a token's forward reads: all, but of an embedding that is not the head too."""
    shapes = {name: tensor.shape for name, tensor in read_headers(model).items()}
    is_tied = "lm_head.weight" not in shapes
    return sum(prod(shape) for name, shape in shapes.items() if is_tied or "embed_tokens" not in name)


def bandwidth(data: NDArray[np.int64], threads: ThreadPoolExecutor, num_threads: int) -> list[float]:
    """Return the bytes per second of each of NUM_READS parallel reads of `data`."""
    parts = np.array_split(data, num_threads)
    found = []
    for _ in range(NUM_READS):
        start = perf_counter()
        list(threads.map(read, parts))
        found.append(data.nbytes / (perf_counter() - start))
    return found


def create_engine(order: dict[str, Any]) -> LLMEngine:
    """Build and warm an engine; ValueError if this version lacks what the order asks for."""
    options = {"quantization": order["quantization"]} if order["quantization"] else {}
    config = EngineConfig.create(
        order["model"],
        dtype=order["dtype"],
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=order["max_model_len"],
        num_threads=order["threads"],
        **options,
    )
    engine = LLMEngine(config)
    run(engine, Workload(order["prompts"][:4], [8] * 4))
    return engine


def run_single(engine: LLMEngine, prompt: list[int], length: int) -> list[float]:
    """Answer one request; return the seconds to its first and to its last token."""
    result = run_fresh(engine, Workload([prompt], [length]))
    first = result.first_token[0]
    return [first, first + sum(result.between_tokens)]


def measure(engine: LLMEngine, order: dict[str, Any]) -> dict[str, Any]:
    """Run both workloads as often as the order says; a single stream only where it asks for one."""
    workload = Workload(order["prompts"], order["output_lengths"])
    offline = [run_fresh(engine, workload).seconds for _ in range(order["repeat"])]
    num_bytes = num_weights(Path(order["model"])) * BYTES[order["quantization"] or order["dtype"]]
    data = np.ones(num_bytes // 8, np.int64)
    rates, single = [], []
    with ThreadPoolExecutor(order["threads"]) as threads:
        for _ in range(order["repeat"] if order["length"] else 0):
            rates += bandwidth(data, threads, order["threads"])
            single.append(run_single(engine, order["prompt"], order["length"]))
    return {"offline": offline, "single": single, "weight_bytes": num_bytes, "bandwidth": rates}


def main() -> None:
    """Measure; say so where this version has no such quantization."""
    order = json.load(sys.stdin)
    answer: dict[str, Any] = {"version": f"cupaged {cupaged.__version__}"}
    try:
        engine = create_engine(order)
    except ValueError as error:
        if not order["quantization"]:
            raise
        answer["missing"] = str(error)
    else:
        answer |= measure(engine, order)
        engine.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
