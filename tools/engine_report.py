"""What gpu_check found of the engine, put together: times beside rooflines and predictions, and tables."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools.engine_model import Bench, Workload
from tools.gpu_specs import GPUS
from tools.steps import Gemm, Step, gemm_seconds

Row = dict[str, Any]


class Rates(NamedTuple):
    """What a roofline is made of, as measured in the same run."""

    bytes_per_second: float  # of a copy
    flops_per_second: float  # of a large matrix product


def engine_summary(
    done: Mapping[str, Row], bench: Bench, gpu: str, rates: Rates | None, predicted: Mapping[str, float]
) -> Row:
    """Return the engine's part of the report; `predicted` are seconds by the steps' names."""
    return {
        "agreements": {name: row["agreement"] for name, row in done.items() if "agreement" in row},
        "graphs": done.get("graphs"),
        "emulator": done.get("emulator"),
        "load": done.get("load engine"),
        "memory": done.get("memory"),
        "link": done.get("link bandwidth"),
        "swap": _swap_row(done),
        "fork": _fork_row(done, rates),
        "steps": [
            _step_row(step, row, rates, predicted.get(step.name))
            for step in bench.steps
            if (row := done.get(f"step {step.name}"))
        ],
        "workloads": [_workload_row(work, done) for work in bench.workloads if f"generate {work}" in done],
        "gemms": [
            _gemm_row(product, row, rates, gpu)
            for product in bench.products
            if (row := done.get(f"gemm {product}"))
        ],
    }


def _step_row(step: Step, found: Row, rates: Rates | None, predicted: float | None) -> Row:
    row: Row = {"step": step.name, "is_decode": step.num_new == 1, "num_seqs": step.num_seqs}
    if "skipped" in found:
        return row | {"skipped": found["skipped"]}
    graphs, eager = found.get("graphs", {}), found.get("eager", {})
    if graphs:  # as long as the sequences were
        step = step._replace(length=round(graphs["num_cached"] / step.num_seqs))
    roofline = step.roofline(*rates) if rates else None
    return row | {
        "us": found["seconds"] * 1e6,
        "spread": graphs.get("spread", found.get("spread")),
        "length": step.length,
        "bytes": step.least_bytes,
        "flops": step.least_flops,
        "roofline_us": roofline and roofline * 1e6,
        "roofline_share": roofline and roofline / found["seconds"],
        "predicted_us": predicted and predicted * 1e6,
        "tokens_per_second": step.num_tokens / found["seconds"],
        "gap_us": _us(graphs.get("gap_seconds")),
        "gap_90_us": _us(graphs.get("gap_90_seconds")),
        "host_us": _us(graphs.get("host_seconds")),
        "eager_us": _us(eager.get("seconds")),
        "eager_gap_us": _us(eager.get("gap_seconds")),
        "eager_host_us": _us(eager.get("host_seconds")),
    }


def _workload_row(work: Workload, done: Mapping[str, Row]) -> Row:
    tokens = work.num_seqs * work.output_length
    seconds = done[f"generate {work}"]["seconds"]
    peer = done.get(f"transformers {work}", {}).get("seconds")
    return {
        "workload": str(work),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "transformers_seconds": peer,
        "transformers_tokens_per_second": peer and tokens / peer,
        "times_as_fast": peer and peer / seconds,
    }


def _swap_row(done: Mapping[str, Row]) -> Row | None:
    """Return the rate of swaps each way, and its share of what one large copy attains in the same run."""
    found, link = done.get("swap blocks"), done.get("link bandwidth", {})
    if found is None or "skipped" in found:
        return found
    shares = {f"{way}_share": found[way] / link[way] for way in ("to_host", "to_device") if way in link}
    return found | shares


def _fork_row(done: Mapping[str, Row], rates: Rates | None) -> Row | None:
    """Return what copy-on-write adds to a step, beside the least that the copies take."""
    found = done.get("fork step")
    if found is None:
        return None
    least = 2 * found["copied_bytes"] / rates.bytes_per_second if rates else None
    return {
        "num_seqs": found["num_seqs"],
        "num_copies": found["num_copies"],
        "us": found["seconds"] * 1e6,
        "plain_us": found["plain_seconds"] * 1e6,
        "least_us": _us(least),
    }


def _gemm_row(product: Gemm, found: Row, rates: Rates | None, gpu: str) -> Row:
    roofline = None
    if rates:
        roofline = max(product.num_bytes / rates.bytes_per_second, product.flops / rates.flops_per_second)
    known = next((each for each in GPUS if each.name in re.split(r"\W+", gpu)), None)
    return {
        "gemm": str(product),
        "us": found["seconds"] * 1e6,
        "spread": found["spread"],
        "roofline_us": _us(roofline),
        "roofline_share": roofline and roofline / found["seconds"],
        "predicted_us": known and gemm_seconds(product, known) * 1e6,
    }


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def engine_lines(engine: Row) -> list[str]:
    """Return the lines that people read of the engine's part."""
    lines = [f"{task}: {said}" for task, said in engine["agreements"].items()]
    if engine["graphs"]:
        lines.append(f"CUDA graphs on = off: every bit of {engine['graphs']['num_tokens']} tokens")
    if load := engine["load"]:
        lines.append(f"loaded in {load['seconds']:.1f} s:")
        lines += [f"  {line}" for line in load["log"]]
    if memory := engine["memory"]:
        lines.append(
            f"allocated as planned, to the byte; the driver keeps {memory['driver_bytes'] >> 20} MiB of a "
            f"reserve of {memory['reserve_bytes'] >> 20}, of them "
            f"{memory['driver_bytes_without_graphs'] >> 20} before it had {memory['num_graphs']} graphs"
        )
    lines += _block_lines(engine)
    lines += _table(engine["steps"], "step", STEP_COLUMNS)
    lines += _table(engine["gemms"], "gemm", GEMM_COLUMNS)
    lines += _table(engine["workloads"], "workload", WORKLOAD_COLUMNS)
    return lines


def _block_lines(engine: Row) -> list[str]:
    """Return the lines on what moves whole blocks."""
    lines = []
    if link := engine["link"]:
        rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in link.items())
        lines.append(f"link to the host, GB/s: {rates}")
    if (swap := engine["swap"]) and "skipped" not in swap:
        ways = (
            f"{way} {swap[way] / 1e9:.1f} ({_cell('_share', swap.get(f'{way}_share'))} of the link)"
            for way in ("to_host", "to_device")
        )
        lines.append(f"swap of {swap['num_blocks']} blocks, GB/s: {', '.join(ways)}")
    if fork := engine["fork"]:
        lines.append(
            f"decode of {fork['num_seqs']} sequences that copies {fork['num_copies']} blocks on write: "
            f"{fork['us']:.1f} us, without copies {fork['plain_us']:.1f}; the copies need "
            f"{_cell('', fork['least_us'])} at least"
        )
    return lines


STEP_COLUMNS = {
    "us": "us",
    "spread": "spread",
    "roofline_us": "roofline",
    "roofline_share": "of it",
    "predicted_us": "predicted",
    "tokens_per_second": "tokens/s",
    "gap_us": "gap",
    "gap_90_us": "gap 90 %",
    "eager_us": "eager us",
    "eager_gap_us": "its gap",
}
GEMM_COLUMNS = {
    "us": "us",
    "spread": "spread",
    "roofline_us": "roofline",
    "roofline_share": "of it",
    "predicted_us": "predicted",
}
WORKLOAD_COLUMNS = {
    "seconds": "s",
    "tokens_per_second": "tokens/s",
    "transformers_tokens_per_second": "HF tokens",
    "times_as_fast": "as fast",
}


def _table(rows: Sequence[Row], name: str, columns: Mapping[str, str]) -> list[str]:
    """Return rows under a heading; shares, which end with _share or are a spread, as percentages."""
    if not rows:
        return []
    lines = ["", f"{name:26}" + "".join(f"{title:>11}" for title in columns.values())]
    for row in rows:
        cells = (_cell(field, row.get(field)) for field in columns)
        said = f"  {row['skipped']}" if "skipped" in row else "".join(f"{cell:>11}" for cell in cells)
        lines.append(f"{row[name]:26}{said}")
    return lines


def _cell(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    if field == "spread" or field.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if field in ("seconds", "times_as_fast") else f"{value:.1f}"
