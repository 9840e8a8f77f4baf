"""The paper's figures of memory, ours beside theirs: shares (Fig. 2), batches (Fig. 13), sharing (Fig. 15).

A figure submits its runs when it is made, and waits for them when it is asked for its table.
"""

from collections.abc import Mapping
from concurrent.futures import Future

from tools.paper_machine import NUM_SLOTS
from tools.paper_paged import Case, PagedRun
from tools.paper_reference import RESERVATIONS, Contiguous, ContiguousRun
from tools.paper_table import Sizes, Submit, Table, percent
from tools.paper_workload import ALPACA, MAX_TOKENS, SHAREGPT, SIGMA, SIGMAS, Dataset

PAPER_SHARES = {  # Fig. 2: tokens, reserved, internal, external and others
    "maximum": (0.204, 0.133, 0.573, 0.089),
    "power of two": (0.268, 0.179, 0.136, 0.416),
    "oracle": (0.382, 0.252, 0.0, 0.366),
    "paged": (0.963, 0.0, 0.0, 0.037),
}
PAPER_BATCHES = {  # Fig. 13: requests
    SHAREGPT: {"maximum": 7.00, "power of two": 9.81, "oracle": 13.62, "paged": 30.42},
    ALPACA: {"maximum": 7.00, "power of two": 43.24, "oracle": 72.75, "paged": 132.44},
}
# Fig. 15 for Alpaca, by outputs or beams; section 6.3 states the two ends for ShareGPT.
NUM_SEQUENCES = (2, 4, 6)
PAPER_SAVED: dict[tuple[Dataset, bool], tuple[float | None, ...]] = {
    (ALPACA, False): (0.0609, 0.0853, 0.0979),
    (ALPACA, True): (0.3756, 0.5313, 0.5516),
    (SHAREGPT, False): (0.162, None, 0.305),
    (SHAREGPT, True): (0.443, None, 0.663),
}
MIDDLE = SIGMAS.index(SIGMA)


def held(shares: Mapping[str, tuple[float, ...]]) -> float:
    """Return how many tokens a request holds on average, when each has reserved the maximum."""
    return shares["maximum"][0] * NUM_SLOTS / (NUM_SLOTS // MAX_TOKENS)


class MemoryShare:
    """Fig. 2: which share of the KV memory holds tokens while requests wait."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the runs."""
        cases = [Case(dataset=SHAREGPT, num_requests=sizes.sharegpt, sigma=sigma) for sigma in SIGMAS]
        self.paged = [submit(case) for case in cases]
        self.contiguous = {
            name: [Contiguous(case.workload(), name, NUM_SLOTS).run() for case in cases]
            for name in RESERVATIONS
        }

    def shares(self) -> dict[str, tuple[float, ...]]:
        """Return ours at SIGMA as the paper splits them."""
        tokens = self.paged[MIDDLE].result().token_share
        contiguous = {name: tuple(runs[MIDDLE].shares) for name, runs in self.contiguous.items()}
        return contiguous | {"paged": (tokens, 0.0, 0.0, 1 - tokens)}

    def table(self) -> Table:
        """Return ours by sigma beside the paper's."""
        ours = {name: [run.shares.tokens for run in runs] for name, runs in self.contiguous.items()}
        ours["paged"] = [future.result().token_share for future in self.paged]
        rows = [
            (name, *map(percent, shares), percent(PAPER_SHARES[name][0])) for name, shares in ours.items()
        ]
        return Table(
            "Fig. 2: share of the KV memory that holds tokens (ShareGPT, requests always waiting)",
            ("reservation", *(f"sigma {sigma:g}" for sigma in SIGMAS), "paper"),
            rows,
            [
                "Differs by how long requests are, of which only the means are known: the paper's hold "
                f"{held(PAPER_SHARES):.0f} tokens at a time ({percent(PAPER_SHARES['maximum'][0])} of "
                f"{NUM_SLOTS} among {NUM_SLOTS // MAX_TOKENS}), ours {held(self.shares()):.0f}.",
            ],
        )


class MeanBatch:
    """Fig. 13: how many requests run at once."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the runs: at the paper's rate, then with requests always waiting, by sigma."""
        self.contiguous: dict[tuple[Dataset, str], list[ContiguousRun]] = {}
        self.paged: dict[Dataset, list[Future[PagedRun]]] = {}
        for dataset in PAPER_BATCHES:
            n = sizes.of(dataset)
            cases = [Case(dataset=dataset, num_requests=n, rate=dataset.rate)]
            cases += [Case(dataset=dataset, num_requests=n, sigma=sigma) for sigma in SIGMAS]
            self.paged[dataset] = [submit(case) for case in cases]
            for name in RESERVATIONS:
                runs = [Contiguous(case.workload(), name, NUM_SLOTS).run() for case in cases]
                self.contiguous[dataset, name] = runs

    def batches(self, dataset: Dataset) -> dict[str, list[float]]:
        """Return ours by reservation, in the order of the runs."""
        ours = {name: [run.mean_batch for run in self.contiguous[dataset, name]] for name in RESERVATIONS}
        return ours | {"paged": [future.result().mean_batch for future in self.paged[dataset]]}

    def table(self) -> Table:
        """Return ours beside the paper's."""
        rows = [
            (f"{dataset.name}, {name}", *(f"{x:.1f}" for x in ours), f"{PAPER_BATCHES[dataset][name]:.1f}")
            for dataset in PAPER_BATCHES
            for name, ours in self.batches(dataset).items()
        ]
        return Table(
            "Fig. 13: mean batch (ShareGPT at 2 requests per second, Alpaca at 30)",
            ("", f"at the rate, sigma {SIGMA:g}", *(f"waiting, {sigma:g}" for sigma in SIGMAS), "paper"),
            rows,
            [
                "At the rate fewer run at once, because a modelled step is shorter than one of 2023's engine "
                "was; with requests always waiting, memory alone decides.",
                "Waiting, ShareGPT's are more because each holds fewer tokens (Fig. 2); Alpaca's because its "
                "lengths spread wider than ours, or because at 30 per second few waited.",
            ],
        )


class Sharing:
    """Fig. 15: blocks saved by sharing, of those that there would be without."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Submit the runs, by sigma."""
        self.runs: dict[tuple[Dataset, bool, int], list[Future[PagedRun]]] = {}
        for dataset, is_beam in PAPER_SAVED:
            for n in NUM_SEQUENCES:
                cases = [
                    Case(
                        dataset=dataset,
                        num_requests=sizes.shared(dataset),
                        sigma=sigma,
                        num_sequences=n,
                        is_beam=is_beam,
                    )
                    for sigma in SIGMAS
                ]
                self.runs[dataset, is_beam, n] = [submit(case) for case in cases]

    def saved(self, dataset: Dataset, is_beam: bool) -> list[float]:
        """Return ours at SIGMA by number of sequences."""
        return [self.runs[dataset, is_beam, n][MIDDLE].result().sharing for n in NUM_SEQUENCES]

    def table(self) -> Table:
        """Return ours by sigma beside the paper's."""
        rows = []
        for (dataset, is_beam), paper in PAPER_SAVED.items():
            for n, theirs in zip(NUM_SEQUENCES, paper, strict=True):
                what = f"{dataset.name}, {n} {'beams' if is_beam else 'outputs'}"
                ours = [percent(future.result().sharing) for future in self.runs[dataset, is_beam, n]]
                rows.append((what, *ours, "-" if theirs is None else percent(theirs)))
        return Table(
            "Fig. 15: blocks saved by sharing, of those without it",
            ("", *(f"sigma {sigma:g}" for sigma in SIGMAS), "paper"),
            rows,
            [
                "Beams save more than the paper's, the more they are: parents drawn at random soon leave all "
                "one ancestor, so that only their last blocks differ; beams of real text part for longer.",
            ],
        )
