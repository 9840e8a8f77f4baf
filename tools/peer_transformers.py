"""The workload of bench_offline through Hugging Face transformers, in padded batches; run by bench_offline.

Reads its order as JSON from standard input and prints a line of JSON. It runs under an interpreter that has
torch and transformers, and imports nothing of cupaged.
"""

import json
import sys
from importlib import import_module
from time import perf_counter
from typing import Any


def main() -> None:
    """Generate for all prompts, left-padded, batch after batch."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    order = json.load(sys.stdin)
    torch.set_num_threads(order["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=getattr(torch, order["dtype"])
    ).eval()

    def generate(prompts: list[list[int]], length: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )

    generate([[1] * 8] * 2, 2)  # warm up
    prompts, lengths, batch = order["prompts"], order["output_lengths"], order["batch"]
    start = perf_counter()
    for i in range(0, len(prompts), batch):
        generate(prompts[i : i + batch], max(lengths[i : i + batch]))
    seconds = perf_counter() - start
    attention = model.config._attn_implementation
    what = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, padded batches of {batch}, "
        f"{order['dtype']}, {order['threads']} threads, {attention} attention"
    )
    print(json.dumps({"what": what, "seconds": seconds, "output_tokens_per_second": sum(lengths) / seconds}))


if __name__ == "__main__":
    main()
