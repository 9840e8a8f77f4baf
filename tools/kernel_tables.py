"""The tables of kernel_report in kernels/README.md: how they are written, and how they are read again."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cupaged.kernels.launch import SOURCES
from tools.gpu_specs import GPUS

README = SOURCES / "README.md"
BEGIN, END = "<!-- kernel_report: begin -->", "<!-- kernel_report: end -->"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, columns aligned."""
    table = [list(columns), ["---"] * len(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def kernel_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of resources."""
    archs = list(rows[0]["registers"])
    names = ", ".join(archs)
    columns = ("kernel", "-D", "threads", "shared KB", f"registers {names}", "spills", f"occupancy {names} %")
    return markdown(
        columns,
        (
            (
                row["kernel"],
                ", ".join(f"{name}={value}" for name, value in row["constants"].items()),
                str(row["threads"]),
                f"{row['shared_bytes'] / 1024:.1f}",
                ", ".join(str(row["registers"][arch]) for arch in archs),
                str(row["spill_bytes"]),
                ", ".join(f"{100 * row['occupancy'][arch]:.0f}" for arch in archs),
            )
            for row in rows
        ),
    )


def shape_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of roofline and predicted times, which `predictions` reads."""
    columns = ["case", "MB", "once", "GFLOP", *(f"{gpu.name} us" for gpu in GPUS)]
    return markdown(
        columns,
        (
            (
                row["case"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['unique_bytes'] / 1e6:.1f}",
                f"{row['flops'] / 1e9:.2f}",
                *(
                    f"{time['roofline_us']:.1f} -> {time['predicted_us']:.1f} {time['limit']}"
                    for time in row["gpus"].values()
                ),
            )
            for row in rows
        ),
    )


def step_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of whole steps, which `predictions` reads too."""
    columns = ["case", "GB", "GFLOP", *(f"{gpu.name} us" for gpu in GPUS)]
    return markdown(
        columns,
        (
            (
                row["case"],
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['flops'] / 1e9:.1f}",
                *(
                    f"{time['roofline_us']:.0f} -> {time['predicted_us']:.0f}, "
                    f"{time['gemm_share']:.0%} in products"
                    for time in row["gpus"].values()
                ),
            )
            for row in rows
        ),
    )


def write_readme(text: str) -> None:
    """Put the tables between their two marks in kernels/README.md."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def read_readme() -> str:
    """Return the tables in kernels/README.md."""
    return README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def predictions(gpu: str) -> dict[str, float]:
    """Return the predicted seconds of cases on a GPU, named as its driver does; {} where it has no column."""
    found: dict[str, float] = {}
    column = -1
    for line in read_readme().split("\n"):
        cells = [cell.strip() for cell in line.split("|")]
        if "case" in cells:
            names = [cell.removesuffix(" us") for cell in cells]
            column = next((i for i, name in enumerate(names) if name and name in re.split(r"\W+", gpu)), -1)
        elif column >= 0 and column < len(cells) and "->" in cells[column]:
            found[cells[1]] = float(cells[column].split("->")[1].split()[0].rstrip(",")) / 1e6
    return found
