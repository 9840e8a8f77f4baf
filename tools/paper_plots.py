"""Draw reproduce_paper's figures as small PNGs; the only file here that needs matplotlib (extra `plots`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Rectangle

from tools.paper_figures import Figures
from tools.paper_memory import MIDDLE, NUM_SEQUENCES, PAPER_BATCHES, PAPER_SAVED, PAPER_SHARES
from tools.paper_time import BLOCK_SIZES, LOADS
from tools.paper_workload import ALPACA, SHAREGPT

OURS, PAPER, LIGHT = "#1f6f8b", "#e07a3f", "#9fc9d6"
SHARE_COLORS = ("#1f6f8b", "#9fc9d6", "#e07a3f", "#d9d9d9")
SHARE_NAMES = ("tokens", "reserved", "internal fragmentation", "external and others")


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure of small panels side by side."""
    figure, axes = pyplot.subplots(1, count, figsize=(7.6, 3.0), layout="constrained", squeeze=False)
    for panel in axes[0]:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    # No date and no version in it: the same figures give the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def _bars(panel: Any, names: Sequence[str], groups: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    """Draw bars side by side, by legend: (color, a value per name), each with its value above it."""
    width = 0.8 / len(groups)
    for i, (legend, (color, values)) in enumerate(groups.items()):
        places = np.arange(len(names)) + (i - (len(groups) - 1) / 2) * width
        bars = panel.bar(places, values, width, color=color, label=legend)
        labels = ["" if np.isnan(value) else f"{value:.0f}" for value in values]
        panel.bar_label(bars, labels, fontsize=7)
    panel.set_xticks(np.arange(len(names)), names, fontsize=8)
    panel.margins(y=0.15)


def _block_sizes(panel: Any) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES], fontsize=8)
    panel.set_xlabel("tokens a block")


def draw_memory_share(figures: Figures, path: Path) -> None:
    """Fig. 2, each bar of ours above the paper's."""
    figure, (panel,) = _panels(1)
    names: list[str] = []
    for name, ours in figures.share.shares().items():
        for whose, shares in (("ours", ours), ("paper", PAPER_SHARES[name])):
            left = 0.0
            for share, color in zip(shares, SHARE_COLORS, strict=True):
                panel.barh(len(names), 100 * share, left=left, color=color)
                left += 100 * share
            panel.text(1, len(names), f"{100 * shares[0]:.1f} %", va="center", color="white", fontsize=8)
            names.append(f"{name}, {whose}")
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the KV memory (ShareGPT, requests always waiting)")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in SHARE_COLORS]
    figure.legend(handles, SHARE_NAMES, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    _save(figure, path)


def draw_mean_batch(figures: Figures, path: Path) -> None:
    """Fig. 13."""
    figure, panels = _panels(2)
    for panel, (dataset, paper) in zip(panels, PAPER_BATCHES.items(), strict=True):
        ours = figures.batch.batches(dataset)
        groups = {
            f"ours, {dataset.rate:g} requests/s": (LIGHT, [values[0] for values in ours.values()]),
            "ours, always waiting": (OURS, [values[1 + MIDDLE] for values in ours.values()]),
            "paper": (PAPER, list(paper.values())),
        }
        _bars(panel, [name.replace(" of ", "\nof ") for name in ours], groups)
        panel.set_title(f"{dataset.name}: mean batch", fontsize=9)
        panel.legend(fontsize=7, frameon=False, loc="upper left")
    _save(figure, path)


def draw_sharing(figures: Figures, path: Path) -> None:
    """Fig. 15."""
    figure, panels = _panels(2)
    for panel, is_beam in zip(panels, (False, True), strict=True):
        what = "beams" if is_beam else "outputs"
        names: list[str] = []
        ours: list[float] = []
        paper: list[float] = []
        for dataset in (ALPACA, SHAREGPT):
            names += [f"{n}\n{dataset.name}" if n == 4 else str(n) for n in NUM_SEQUENCES]
            ours += [100 * share for share in figures.sharing.saved(dataset, is_beam)]
            theirs = PAPER_SAVED[dataset, is_beam]
            paper += [np.nan if share is None else 100 * share for share in theirs]
        _bars(panel, names, {"ours": (OURS, ours), "paper": (PAPER, paper)})
        panel.set_title(f"% of blocks saved, by number of {what}", fontsize=9)
        panel.legend(fontsize=7, frameon=False, loc="upper left")
    _save(figure, path)


def draw_block_size(figures: Figures, path: Path) -> None:
    """Fig. 18b."""
    figure, panels = _panels(2)
    titles = ("% of the memory that holds tokens", "output tokens per second, % of the best")
    for dataset, color in ((SHAREGPT, OURS), (ALPACA, PAPER)):
        lines = (figures.block_size.token_shares(dataset), figures.block_size.rates(dataset))
        for panel, values, title in zip(panels, lines, titles, strict=True):
            percents = [100 * value for value in values]
            panel.plot(BLOCK_SIZES, percents, color=color, marker="o", markersize=3, label=dataset.name)
            panel.set_title(title, fontsize=9)
    for panel in panels:
        _block_sizes(panel)
        panel.set_ylim(0, 105)
        panel.legend(fontsize=7, frameon=False, loc="lower left")
    _save(figure, path)


def draw_swap(figures: Figures, path: Path) -> None:
    """Fig. 19."""
    figure, panels = _panels(2)
    lines = (figures.swap.victim_seconds, figures.swap.run_seconds)
    titles = ("one preemption, ms", "a whole run, s")
    for panel, seconds, title, unit in zip(panels, lines, titles, (1e3, 1.0), strict=True):
        by_size = [seconds(size) for size in BLOCK_SIZES]
        for name, color in zip(by_size[0], (OURS, LIGHT, PAPER), strict=True):
            values = [unit * costs[name] for costs in by_size]
            panel.plot(BLOCK_SIZES, values, color=color, marker="o", markersize=3, label=name)
        panel.set_title(title, fontsize=9)
        panel.set_ylim(0)
        _block_sizes(panel)
    panels[0].legend(fontsize=7, frameon=False)
    _save(figure, path)


def draw_first_token(figures: Figures, path: Path) -> None:
    """Time to first token at the middle load: how many requests have theirs by then."""
    figure, (panel,) = _panels(1)
    middle = len(LOADS) // 2
    both = {
        "static": (PAPER, figures.first_token.static[middle]),
        "continuous, paged": (OURS, figures.first_token.continuous[middle].result().first_token),
    }
    for name, (color, seconds) in both.items():
        shares = np.arange(1, len(seconds) + 1) / len(seconds)
        panel.plot(np.sort(seconds), 100 * shares, color=color, label=name)
    panel.set_xscale("log")
    panel.set_xlabel(f"seconds from arrival, at {LOADS[middle]:.0%} of what static batching can serve")
    panel.set_ylabel("% of requests with a first token", fontsize=8)
    panel.legend(fontsize=8, frameon=False)
    _save(figure, path)


DRAWN = {
    "memory_share": draw_memory_share,
    "mean_batch": draw_mean_batch,
    "sharing": draw_sharing,
    "block_size": draw_block_size,
    "swap": draw_swap,
    "first_token": draw_first_token,
}


def draw(figures: Figures, folder: Path) -> None:
    """Write all PNGs into `folder`."""
    pyplot.switch_backend("agg")  # needs no display
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw_one in DRAWN.items():
        draw_one(figures, folder / f"{name}.png")
