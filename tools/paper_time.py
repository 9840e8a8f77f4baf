"""Figures of time, ours beside the paper's: block size (18b), swap or recompute (19), static batching.

And the table of the design text that this engine follows. Times are by paper_machine's model.
"""

import numpy as np

from tools.paper_machine import NUM_SLOTS, NUM_SLOTS_80GB, TOKEN_SECONDS, swap_seconds
from tools.paper_memory import MIDDLE, MemoryShare
from tools.paper_paged import Case, num_swapped, worst_waste
from tools.paper_reference import StaticRun, reserve, run_static
from tools.paper_table import Sizes, Submit, Table, percent, times
from tools.paper_workload import ALPACA, MAX_TOKENS, SHAREGPT, Dataset

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STATIC_BATCH = NUM_SLOTS // MAX_TOKENS  # what reservations of the maximum leave room for
# Copies that a block takes: ours is one piece; in the paper's layout each layer's keys and values are one.
COPIES = {"swap, 1 copy": 1, "swap, 80 copies": 80}
VICTIM = round(SHAREGPT.prompt_mean + SHAREGPT.output_mean)  # tokens
LOADS = (0.5, 0.8, 0.95)  # of what static batching can serve


class BlockSize:
    """Fig. 18b: what the size of a block does to memory and throughput, requests always waiting."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the runs."""
        self.runs = {
            (dataset, size): submit(Case(dataset=dataset, num_requests=sizes.of(dataset), block_size=size))
            for dataset in (SHAREGPT, ALPACA)
            for size in BLOCK_SIZES
        }

    def rates(self, dataset: Dataset) -> list[float]:
        """Return output tokens per second by block size, of the best."""
        rates = [self.runs[dataset, size].result().output_rate for size in BLOCK_SIZES]
        return [rate / max(rates) for rate in rates]

    def token_shares(self, dataset: Dataset) -> list[float]:
        """Return the share of memory that holds tokens, by block size."""
        return [self.runs[dataset, size].result().token_share for size in BLOCK_SIZES]

    def table(self) -> Table:
        """Return ours by block size; of the paper's there are words only."""
        rows = []
        for i, size in enumerate(BLOCK_SIZES):
            cells = []
            for dataset in (SHAREGPT, ALPACA):
                batch = self.runs[dataset, size].result().mean_batch
                cells += [percent(self.token_shares(dataset)[i]), f"{batch:.1f}"]
                cells.append(percent(self.rates(dataset)[i]))
            rows.append((str(size), *cells))
        columns = [(f"{d.name}: tokens", "batch", "of the best rate") for d in (SHAREGPT, ALPACA)]
        return Table(
            "Fig. 18b: block size (paper: best are 16 to 128 for ShareGPT, 16 and 32 for Alpaca)",
            ("block size", *columns[0], *columns[1]),
            rows,
            [
                "Small blocks differ: here they cost nothing. The paper's are slow below 16 because of its "
                "kernel, which reads a block with a group of threads; no kernel is simulated here.",
            ],
        )


class SwapOrRecompute:
    """Fig. 19: a preempted request's blocks are swapped or recomputed, by block size."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the runs, with requests always waiting."""
        self.runs = {
            (mode, size): submit(
                Case(
                    dataset=SHAREGPT,
                    num_requests=sizes.sharegpt,
                    block_size=size,
                    preemption_mode="swap" if mode == "swap" else "recompute",
                )
            )
            for mode in ("swap", "recompute")
            for size in BLOCK_SIZES
        }

    @staticmethod
    def victim_seconds(size: int) -> dict[str, float]:
        """Return what one preemption of a mean request costs: out and in, or its prefill once more."""
        blocks = -(-VICTIM // size)
        swaps = {name: 2 * swap_seconds(blocks, size, copies) for name, copies in COPIES.items()}
        return {"recompute": VICTIM * TOKEN_SECONDS} | swaps

    def run_seconds(self, size: int) -> dict[str, float]:
        """Return what a whole run takes, the copies included."""
        swap = self.runs["swap", size].result()
        whole = {"recompute": self.runs["recompute", size].result().seconds}
        for name, copies in COPIES.items():
            whole[name] = swap.seconds + swap_seconds(num_swapped(swap), size, copies)
        return whole

    def table(self) -> Table:
        """Return ours by block size; of the paper's there are words only."""
        rows = []
        for size in BLOCK_SIZES:
            one, whole = self.victim_seconds(size), self.run_seconds(size)
            cells = [f"{1e3 * seconds:.0f} ms" for seconds in one.values()]
            rows.append((str(size), *cells, *(f"{seconds:.0f} s" for seconds in whole.values())))
        names = ("recompute", *COPIES)
        return Table(
            f"Fig. 19: swap or recompute, one victim of {VICTIM} tokens and a whole run of ShareGPT",
            ("block size", *names, *(f"run: {name}" for name in names)),
            rows,
            [
                "Paper: swap is bad at small blocks, equal from 16 to 64; recompute never costs 1.2 times "
                "as much.",
                "In 1 copy a block it differs: ours with all its layers is one piece of memory. In 80, a "
                "layer's keys or values each, small blocks are as bad as the paper says.",
            ],
        )


class FirstToken:
    """Time to the first token, static against continuous batching, at loads that static can serve."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the continuous runs, run the static ones."""
        waiting = Case(dataset=SHAREGPT, num_requests=sizes.sharegpt).workload()
        self.capacity_run = run_static(waiting, STATIC_BATCH)
        capacity = self.capacity_run.output_rate / SHAREGPT.output_mean
        cases = [Case(dataset=SHAREGPT, num_requests=sizes.sharegpt, rate=load * capacity) for load in LOADS]
        self.static = [run_static(case.workload(), STATIC_BATCH).first_token for case in cases]
        self.continuous = [submit(case) for case in cases]
        self._rates = [load * capacity for load in LOADS]

    def table(self) -> Table:
        """Return medians and 90th percentiles by load."""
        rows = []
        for load, rate, static, continuous in zip(
            LOADS, self._rates, self.static, self.continuous, strict=True
        ):
            both = (static, continuous.result().first_token)
            cells = [f"{np.percentile(seconds, q):.2f} s" for q in (50, 90) for seconds in both]
            rows.append((f"{load:.0%} ({rate:.2f} requests per second)", *cells))
        return Table(
            f"Time to first token (ShareGPT; static batches of {STATIC_BATCH}; the paper has no such figure)",
            ("load of static batching", "median: static", "paged", "90 %: static", "paged"),
            rows,
            ["A prompt that comes enters the next step; a static batch first ends with its longest output."],
        )


class DesignText:
    """The table of the design text that this engine follows."""

    def __init__(self, submit: Submit, sizes: Sizes, shares: MemoryShare, static: StaticRun) -> None:
        """Submit the run on the card of 80 GB; `static` is of the same requests as `shares`."""
        self._shares, self._static = shares, static
        self._large = submit(Case(dataset=SHAREGPT, num_requests=sizes.large_card, num_slots=NUM_SLOTS_80GB))

    def table(self) -> Table:
        """Return ours beside the text's."""
        shares = self._shares.shares()
        continuous = self._shares.contiguous["maximum"][MIDDLE].output_rate
        paged = self._shares.paged[MIDDLE].result().output_rate
        static = self._static.output_rate
        large = self._large.result().mean_batch
        return Table(
            "The design text's table",
            ("", "before", "paged", "text"),
            [
                (
                    "worst internal fragmentation, tokens",
                    str(reserve("maximum", 1, 1) - 1),
                    str(worst_waste(16)),
                    "2047 -> 15",
                ),
                (
                    "memory that holds tokens (before: oracle)",
                    percent(shares["oracle"][0]),
                    percent(shares["paged"][0]),
                    "40 % -> 96 %",
                ),
                (
                    "requests at once, 13B on 80 GB",
                    str(NUM_SLOTS_80GB // MAX_TOKENS),
                    f"{large:.0f}",
                    "15 -> 50",
                ),
                (
                    "output rate over static batching's, same memory",
                    times(continuous / static),
                    times(paged / static),
                    "3x to 5x",
                ),
            ],
            [
                f"80 GB leave {NUM_SLOTS_80GB} tokens beside the weights, so the text's 15 and 50 would take "
                f"{NUM_SLOTS_80GB // 15} and {NUM_SLOTS_80GB // 50} each; but a maximum is {MAX_TOKENS}, and "
                f"ShareGPT's hold {NUM_SLOTS_80GB * shares['paged'][0] / large:.0f}.",
                f"Static batching runs {STATIC_BATCH}; before: continuous in the same reservations; paged: "
                "in a larger batch, too. The text's lies between.",
            ],
        )
