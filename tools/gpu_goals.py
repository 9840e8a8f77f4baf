"""The goals that a GPU's times are held to: each met, not met or not measured; its worst shape counts."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

DECODE_TOKENS = 256 << 10  # batch x context, from which paged_decode shall be near the copy bandwidth
PREFILL_TOKENS = 8 << 10  # of a sequence, from which paged_prefill shall be fast
LARGE_BATCH = 256  # sequences


def goals(times: Sequence[Row], steps: Sequence[Row] | None) -> list[Row]:
    """Return the goals of the kernels' times, and of the engine's steps if those were to be measured."""
    decodes = [
        row for row in times if row["queries"] == 1 and row["num_seqs"] * row["length"] >= DECODE_TOKENS
    ]
    prefills = [row for row in times if (row["queries"] or 0) > 1 and row["length"] >= PREFILL_TOKENS]
    of_kernels = [
        _at_least(
            "paged_decode, batch x context >= 256k: share of copy bandwidth",
            0.85,
            decodes,
            "bandwidth_share",
        ),
        _at_least("paged_prefill at 8k: share of matmul FLOP/s", 0.40, prefills, "flops_share"),
    ]
    if steps is None:
        return of_kernels
    decoding = [row for row in steps if row["is_decode"]]
    alone, many = ([row for row in decoding if row["num_seqs"] == n] for n in (1, LARGE_BATCH))
    return [
        *of_kernels,
        _at_least("decode of one sequence: share of its roofline", 0.75, alone, "roofline_share"),
        _at_least("decode of 256 sequences: share of its roofline", 1 / 1.25, many, "roofline_share"),
        _at_most("host gap between steps with CUDA graphs, us", 100.0, decoding, "gap_us"),
    ]


def _at_least(what: str, limit: float, rows: Sequence[Row], field: str) -> Row:
    worst = min(_values(rows, field), default=None)
    status = "not measured" if worst is None else "met" if worst >= limit else "not met"
    shown = "-" if worst is None else f"{worst:.1%}"
    return _goal(what, limit, worst, status, f"{shown}, goal {limit:.1%} or more")


def _at_most(what: str, limit: float, rows: Sequence[Row], field: str) -> Row:
    worst = max(_values(rows, field), default=None)
    status = "not measured" if worst is None else "met" if worst <= limit else "not met"
    shown = "-" if worst is None else f"{worst:.1f}"
    return _goal(what, limit, worst, status, f"{shown}, goal {limit:.1f} or less")


def _values(rows: Sequence[Row], field: str) -> list[float]:
    return [row[field] for row in rows if row.get(field) is not None]


def _goal(what: str, limit: float, measured: float | None, status: str, shown: str) -> Row:
    return {
        "goal": what,
        "limit": limit,
        "measured": measured,
        "status": status,
        "text": f"{status}: {what} {shown}",
    }
