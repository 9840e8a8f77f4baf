"""The workloads of bench_peers through llama.cpp, by what llama-cpp-python binds of it; run by bench_peers.

Reads its order as JSON from standard input and prints a line of JSON. It runs under an interpreter that has
llama-cpp-python, and imports nothing of cupaged. Many requests are answered as llama.cpp's own server answers
them: a batch holds one token of each running sequence, and prompts fill what is left.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from typing import Any

BATCH = 512  # tokens of a batch, as many sequences at most


class Context:
    """A model and room for `num_seqs` sequences of `length` tokens each."""

    def __init__(self, path: str, threads: int, num_seqs: int, length: int) -> None:
        self.lib: Any = import_module("llama_cpp.llama_cpp")
        lib = self.lib
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = num_seqs * length, BATCH, num_seqs
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.greedy = lib.llama_sampler_init_greedy()

    def clear(self) -> None:
        """Forget all sequences."""
        self.batch.n_tokens = 0
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def add(self, token: int, position: int, seq: int, samples: bool) -> None:
        """Put a token into the batch."""
        batch, i = self.batch, self.batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, samples
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        batch.n_tokens = i + 1

    def decode(self) -> None:
        """Compute the batch and empty it."""
        if code := self.lib.llama_decode(self.context, self.batch):
            sys.exit(f"llama_decode returned {code}")
        self.batch.n_tokens = 0

    def sample(self, i: int) -> int:
        """Return the likeliest token after token `i` of the last batch."""
        return int(self.lib.llama_sampler_sample(self.greedy, self.context, i))


def run_all(context: Context, prompts: list[list[int]], lengths: list[int]) -> float:
    """Answer all requests at once; return the seconds."""
    context.clear()
    start = perf_counter()
    waiting = [(seq, 0) for seq in reversed(range(len(prompts)))]  # with the prompt tokens computed
    running: dict[int, tuple[int, int]] = {}  # sequence -> its last token and that one's position
    while waiting or running:
        sampling: dict[int, int] = {}  # sequence -> its token of the batch
        for seq, (token, position) in running.items():
            sampling[seq] = context.batch.n_tokens
            context.add(token, position, seq, True)
        while waiting and (room := BATCH - context.batch.n_tokens) > 0:
            seq, done = waiting.pop()
            prompt = prompts[seq]
            end = min(len(prompt), done + room)
            for position in range(done, end):
                context.add(prompt[position], position, seq, position + 1 == len(prompt))
            if end < len(prompt):
                waiting.append((seq, end))
            else:
                sampling[seq] = context.batch.n_tokens - 1
        context.decode()
        for seq, i in sampling.items():
            token = context.sample(i)
            position = running[seq][1] + 1 if seq in running else len(prompts[seq])
            running[seq] = token, position
            if position + 1 == len(prompts[seq]) + lengths[seq]:
                del running[seq]
    return perf_counter() - start


def run_single(context: Context, prompt: list[int], length: int) -> list[float]:
    """Answer one request; return the seconds to its first and to its last token."""
    context.clear()
    start = perf_counter()
    for position, token in enumerate(prompt):
        context.add(token, position, 0, position + 1 == len(prompt))
    times = []
    for position in range(len(prompt), len(prompt) + length):
        context.decode()
        token = context.sample(-1)
        times.append(perf_counter() - start)
        context.add(token, position, 0, True)
    return [times[0], times[-1]]


def repeated(run: Callable[[], float], order: dict[str, Any]) -> list[float]:
    """Return the seconds of each run, as many as the order wants and has the patience for."""
    found: list[float] = []
    while len(found) < order["repeat"] and sum(found) < order["patience"]:
        found.append(run())
    return found


def main() -> None:
    """Run both workloads as often as the order says."""
    order = json.load(sys.stdin)
    prompts, lengths = order["prompts"], order["output_lengths"]
    longest = max(map(sum, zip(map(len, prompts), lengths, strict=True)), default=0)
    room = -(-max(longest, len(order["prompt"]) + order["length"]) // 256) * 256
    offline: list[float] = []
    if prompts:
        context = Context(order["gguf"], order["threads"], len(prompts), room)
        run_all(context, prompts[:2], [2, 2])  # warms up
        offline = repeated(lambda: run_all(context, prompts, lengths), order)
    alone = Context(order["gguf"], order["threads"], 1, room)
    run_single(alone, order["prompt"], 2)
    single = [run_single(alone, order["prompt"], order["length"]) for _ in range(order["repeat"])]
    description = ctypes.create_string_buffer(128)
    alone.lib.llama_model_desc(alone.model, description, len(description))
    answer = {
        "version": f"llama-cpp-python {import_module('llama_cpp').__version__}",
        "dtype": description.value.decode().split()[-1],  # such as "llama 256M Q4_1"
        "offline": offline,
        "single": single,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
