"""What shared KV blocks gain: in prompts that begin alike, and where one prompt has several outputs.

Runs with and without are made in turn, and of each the one of median time counts. Every run begins with a
prefix cache that is empty but for the prefix, which a request before has left there, as in a service whose
system prompt is older than its requests.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cupaged.engine.llm_engine import LLMEngine
from tools.offline_runs import LONGEST, Result, Workload, make_workload, run

CreateEngine = Callable[..., LLMEngine]  # (max_num_seqs, options of EngineConfig)

# What follows a shared prefix, and what is generated: a sentence or two, as where the prefix holds examples.
OWN_PROMPT_MEAN, OWN_OUTPUT_MEAN = 32, 32  # tokens


def compare_prefixes(
    create_engine: CreateEngine, lengths: Sequence[int], num_requests: int, seed: int, repeat: int
) -> dict[str, Any]:
    """Print what the prefix cache gains where all prompts begin with the same so many tokens."""
    max_model_len = max(lengths) + 2 * LONGEST
    on, off = _engines(create_engine, num_requests, max_model_len=max_model_len)
    vocab_size = on.model_config.vocab_size
    own = make_workload(num_requests, seed, OWN_PROMPT_MEAN, OWN_OUTPUT_MEAN, vocab_size)
    table = {}
    for length in lengths:
        prefix = np.random.default_rng(seed + 1).integers(0, vocab_size, length).tolist()
        workload = own._replace(prompts=[prefix + prompt for prompt in own.prompts])
        before = Workload([prefix], [2])
        found = _in_turn(
            {"cache on": partial(run_fresh, on, workload, before), "cache off": partial(run, off, workload)},
            repeat,
        )
        table[str(length)] = _report(
            f"{num_requests} prompts, {length} tokens shared", found, "cache on", "cache off"
        )
    on.close()
    off.close()
    return table


def compare_sampling(
    create_engine: CreateEngine,
    make: Callable[[LLMEngine], Workload],
    max_num_seqs: int,
    num_sequences: int,
    repeat: int,
) -> dict[str, Any]:
    """Print what `num_sequences` outputs of one request gain over as many requests, and the cache beside."""
    on, off = _engines(create_engine, max_num_seqs)
    sampled = make(on)._replace(num_sequences=num_sequences, temperature=1.0)
    apart = Workload(
        prompts=[prompt for prompt in sampled.prompts for _ in range(num_sequences)],
        output_lengths=[length for length in sampled.output_lengths for _ in range(num_sequences)],
        temperature=1.0,
    )
    runs = {
        "cache on": partial(run_fresh, on, sampled),
        "cache off": partial(run, off, sampled),
        "requests of their own": partial(run, off, apart),
    }
    found = _in_turn(runs, repeat)
    on.close()
    off.close()
    title = f"{len(sampled.prompts)} prompts, n = {num_sequences}"
    return {
        "over_cache_off": _report(title, found, "cache on", "cache off"),
        "over_requests_of_their_own": _report(title, found, "cache on", "requests of their own"),
    }


def run_fresh(engine: LLMEngine, workload: Workload, before: Workload | None = None) -> Result:
    """Run with nothing in the prefix cache but what `before` leaves there."""
    engine.reset_prefix_cache()
    if before is not None:
        run(engine, before)
    return run(engine, workload)


def _engines(create_engine: CreateEngine, max_num_seqs: int, **options: Any) -> tuple[LLMEngine, LLMEngine]:
    """Return an engine with the prefix cache, and one without."""
    on, off = (create_engine(max_num_seqs, enable_prefix_caching=is_on, **options) for is_on in (True, False))
    return on, off


def _in_turn(runs: Mapping[str, Callable[[], Result]], repeat: int) -> dict[str, Result]:
    """Make each run so often, one after the other; return those of median time."""
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, make in runs.items():
            results[name].append(make())
    return {name: sorted(found, key=lambda r: r.seconds)[len(found) // 2] for name, found in results.items()}


def _report(title: str, found: Mapping[str, Result], name: str, other: str) -> dict[str, float]:
    """Print one comparison for people; return it for scripts."""
    ours, theirs = found[name], found[other]
    row = {
        "seconds": ours.seconds,
        "other_seconds": theirs.seconds,
        "speedup": theirs.seconds / ours.seconds,
        "peak_blocks": ours.peak_blocks,
        "other_peak_blocks": theirs.peak_blocks,
        "memory_saved": 1 - ours.peak_blocks / theirs.peak_blocks,
        "shared_blocks": ours.shared,
    }
    print(
        f"{title}: {name} {ours.seconds:.2f} s, {other} {theirs.seconds:.2f} s: {row['speedup']:.2f}x; "
        f"{ours.peak_blocks} and {theirs.peak_blocks} KV blocks at most: {row['memory_saved']:.0%} saved; "
        f"of the blocks in its tables sharing saves {ours.shared:.0%}",
        flush=True,
    )
    return row
