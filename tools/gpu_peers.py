"""What others do of the same work on the GPU, through PyTorch: its attention, and transformers' generate.

No engine of ours lives in their process, so that they have the GPU to themselves.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.kernels.launch import ceil_div
from tools.kernel_cases.case import Attention
from tools.machine import NUM_REPEATS, Generate, Times, calls_of_a_graph, repeat, summarize

NUM_RUNS = 2  # of a workload, the best counts


def version_of(package: str) -> str:
    """Return a package's version without importing it, which takes seconds of torch."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def import_torch() -> Any:
    """Return torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def time_sdpa(torch: Any, attention: Attention, l2_bytes: int) -> Times:
    """Return the time of torch's attention, in a CUDA graph over several sets of inputs too."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[attention.element]
    q_shape = (attention.num_seqs, attention.num_heads, attention.num_queries, attention.head_dim)
    kv_shape = (attention.num_seqs, attention.num_kv_heads, attention.length, attention.head_dim)
    num_bytes = 2 * (np.prod(q_shape, dtype=int) + 2 * np.prod(kv_shape, dtype=int))
    num_sets = max(2, ceil_div(3 * l2_bytes, int(num_bytes)))
    sets = [
        [torch.randn(shape, dtype=dtype, device="cuda") for shape in (q_shape, kv_shape, kv_shape)]
        for _ in range(num_sets)
    ]

    def launch(num_calls: int) -> None:
        for i in range(num_calls):
            torch.nn.functional.scaled_dot_product_attention(
                *sets[i % num_sets], is_causal=attention.num_queries > 1, enable_gqa=True
            )

    def record() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(work: Callable[[], Any], num_repeats: int = NUM_REPEATS) -> list[float]:
        return repeat(work, record, lambda start, end: float(start.elapsed_time(end)), num_repeats)

    launch(num_sets)
    num_calls = calls_of_a_graph(min(seconds(lambda: launch(num_sets), 2)) / num_sets, num_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(num_calls)
    return summarize(seconds(graph.replay), num_calls, num_sets)


def load_transformers(torch: Any, config: Mapping[str, Any], device: str = "cuda") -> Generate:
    """Return generate of a model with random weights in bfloat16, by PyTorch's attention.

    One static batch, greedy; all its prompts are equally long, so that nothing is padding.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    made: Any = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()

    def once(num_seqs: int, prompt_length: int, output_length: int) -> float:
        ids = torch.randint(5, config["vocab_size"], (num_seqs, prompt_length), device=device)
        start = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_length,
                min_new_tokens=output_length,
                do_sample=False,
                pad_token_id=0,
            )
        num_tokens = out.cpu().shape[1]  # waits for the GPU
        assert num_tokens == prompt_length + output_length, f"{num_tokens} tokens came back"
        return perf_counter() - start

    def generate(*work: int) -> float:
        return min(once(*work) for _ in range(NUM_RUNS))

    once(1, 16, 2)  # compiles and loads
    return generate
