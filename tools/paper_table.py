"""What every figure of reproduce_paper is made of: how much is run, and the table that it prints."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from textwrap import fill
from typing import NamedTuple

from tools.paper_paged import Case, PagedRun
from tools.paper_workload import SHAREGPT, Dataset

Submit = Callable[[Case], "Future[PagedRun]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Requests of each run, several times as many as run at once."""

    sharegpt: int = 800
    alpaca: int = 2400
    sharegpt_shared: int = 160  # of several sequences each
    alpaca_shared: int = 1200
    large_card: int = 1600

    def of(self, dataset: Dataset) -> int:
        """Return the requests of a run of one sequence a request."""
        return self.sharegpt if dataset is SHAREGPT else self.alpaca

    def shared(self, dataset: Dataset) -> int:
        """Return the requests of a run of several sequences a request."""
        return self.sharegpt_shared if dataset is SHAREGPT else self.alpaca_shared


class Table(NamedTuple):
    """What is printed of a figure."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]  # why ours differs, and how it is meant

    def __str__(self) -> str:
        """Return title, aligned columns and notes."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title, ""]
        for first, *others in lines:
            cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
            text.append("  ".join([f"  {first:<{widths[0]}}", *cells]))
        text += [fill(note, 108, initial_indent="  - ", subsequent_indent="    ") for note in self.notes]
        return "\n".join([*text, ""])


def percent(share: float) -> str:
    """Return a share as it is printed."""
    return f"{100 * share:.1f} %"


def times(factor: float) -> str:
    """Return a factor as it is printed."""
    return f"{factor:.1f}x"
