"""The workloads of bench_peers through Hugging Face transformers; run by bench_peers.

Reads its order as JSON from standard input and prints a line of JSON. It runs under an interpreter that has
torch and transformers, and imports nothing of cupaged. Many requests go through `generate` in padded batches,
or through its continuous batching; a single one through `generate`.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from typing import Any

PAGE_SIZE = 32  # tokens of a page of continuous batching


class Stamps:
    """Stands where `generate` expects a streamer, and notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Note the time; the first call brings the prompt."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is left to write."""


def generate(model: Any, prompts: list[list[int]], length: int, streamer: Stamps | None = None) -> None:
    """Generate `length` tokens for each of `prompts`, left-padded."""
    torch = import_module("torch")
    longest = max(map(len, prompts))
    with torch.inference_mode():
        model.generate(
            torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )


def run_batches(model: Any, order: dict[str, Any]) -> float:
    """Answer batch after batch, each as long as its longest output; return the seconds."""
    prompts, lengths, batch = order["prompts"], order["output_lengths"], order["batch"]
    start = perf_counter()
    for i in range(0, len(prompts), batch):
        generate(model, prompts[i : i + batch], max(lengths[i : i + batch]))
    return perf_counter() - start


def run_continuous(model: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Answer all requests by continuous batching; return the seconds without its set-up."""
    transformers = import_module("transformers")
    pages = sum(-(-(len(p) + n) // PAGE_SIZE) for p, n in zip(prompts, lengths, strict=True))
    config = transformers.ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=pages + len(prompts),
        max_batch_tokens=2048,
        allow_block_sharing=False,  # no run finds what one before it has cached
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
        start = perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        num_tokens = num_finished = 0
        while num_finished < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                num_finished += 1
                num_tokens += len(result.generated_tokens)
            elif not manager.is_running():
                sys.exit("continuous batching ended early")
        seconds = perf_counter() - start
    if num_tokens != sum(lengths):
        sys.exit(f"continuous batching gave {num_tokens} tokens of {sum(lengths)}")
    return seconds


def run_single(model: Any, prompt: list[int], length: int) -> list[float]:
    """Answer one request; return the seconds to its first and to its last token."""
    stamps = Stamps()
    start = perf_counter()
    generate(model, [prompt], length, stamps)
    return [stamps.times[1] - start, stamps.times[-1] - start]


def repeated(run: Callable[[], float], order: dict[str, Any]) -> list[float]:
    """Return the seconds of each run, as many as the order wants and has the patience for."""
    found: list[float] = []
    while len(found) < order["repeat"] and sum(found) < order["patience"]:
        found.append(run())
    return found


def main() -> None:
    """Run what the order says, as often as it says."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    order = json.load(sys.stdin)
    torch.set_num_threads(order["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=getattr(torch, order["dtype"])
    ).eval()
    single = []
    if order["continuous"]:
        run_continuous(model, order["prompts"][:2], [2, 2])  # warms up
        requests = order["prompts"], order["output_lengths"]
        offline = repeated(lambda: run_continuous(model, *requests), order)
    else:
        generate(model, [[1] * 8] * 2, 2)
        offline = repeated(lambda: run_batches(model, order), order)
        single = [run_single(model, order["prompt"], order["length"]) for _ in range(order["repeat"])]
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"version": version, "offline": offline, "single": single}))


if __name__ == "__main__":
    main()
