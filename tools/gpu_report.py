"""What gpu_check found, put together: bytes and shares beside each time, goals, tables for people."""

from collections.abc import Mapping

from tools.engine_report import Rates, engine_lines, engine_summary
from tools.gpu_goals import Row, goals
from tools.gpu_tasks import bench_of, cases_by_task, parts
from tools.kernel_cases.case import Case
from tools.kernel_cases.launches import record, sheet_value
from tools.kernel_tables import predictions

COLUMNS = (
    f"{'case':54}{'us':>9}{'spread':>8}{'MB':>9}{'of copy':>9}{'of matmul':>10}{'predicted':>10}{'SDPA':>9}"
)


def least_bytes(case: Case) -> int:
    """Return the bytes that a case must move, each counted once; of attention, without what splits it."""
    if case.attention:
        return case.attention.num_bytes
    return sum(sheet_value(case, launch, "unique") for launch in record(case))


def summary(results: Mapping[str, Row], *, dry_run: bool, kernels_only: bool) -> Row:
    """Return everything that was found, for JSON."""
    cases = cases_by_task(dry_run)
    done = {name: row["result"] for name, row in results.items() if "result" in row}
    versions = done.get("versions", {})
    gpu = versions.get("GPU", "").split(",")[0]
    predicted = predictions(gpu)
    copy = done.get("copy bandwidth", {}).get("bytes_per_second")
    matmul = done.get("matmul", {}).get("flops_per_second")
    times = []
    for task, case in cases.items():
        if task.startswith("time ") and task in done:
            sdpa = done.get(f"sdpa {case.name}", {}).get("seconds")
            times.append(_time_row(case, done[task], copy, matmul))
            times[-1]["sdpa_us"] = sdpa and sdpa * 1e6
            times[-1]["predicted_us"] = predicted.get(case.name, 0.0) * 1e6 or None
    failures = [f"{name}: {row['error']}" for name, row in results.items() if "error" in row]
    failures += [f"{name}: {row['difference']}" for name, row in done.items() if row.get("difference")]
    if missing := sum(len(part.tasks) for part in parts(dry_run, kernels_only=kernels_only)) - len(results):
        failures.append(f"{missing} tasks did not begin")
    engine: Row | None = None
    if not kernels_only:
        rates = Rates(copy, matmul) if copy and matmul else None
        engine = engine_summary(done, bench_of(dry_run), gpu, rates, predicted)
    return {
        "dry_run": dry_run,
        "versions": versions,
        "clocks": done.get("clocks", {}),
        "resources": done.get("resources", {}),
        "copy_bytes_per_second": copy,
        "matmul_flops_per_second": matmul,
        "num_goldens": sum(task.startswith("golden ") for task in cases),
        "num_goldens_met": sum(row.get("difference") == "" for row in done.values()),
        "times": times,
        "engine": engine,
        "goals": [] if dry_run else goals(times, engine["steps"] if engine else None),
        "launch_overhead": done.get("launch overhead"),
        "failures": failures,
        "tracebacks": {name: row["traceback"] for name, row in results.items() if "traceback" in row},
        "task_seconds": {name: row["took"] for name, row in results.items() if "took" in row},
    }


def _time_row(case: Case, found: Row, copy: float | None, matmul: float | None) -> Row:
    """Return a case's time beside the limits that were measured."""
    seconds, num_bytes, attention = found["seconds"], least_bytes(case), case.attention
    flops = attention.flops if attention else None
    return {
        "case": case.name,
        "us": seconds * 1e6,
        "spread": found["spread"],
        "kernels_us": {name: each * 1e6 for name, each in found["kernels"].items()},
        "bytes": num_bytes,
        "bandwidth_share": copy and num_bytes / seconds / copy,
        "flops": flops,
        "flops_share": flops and matmul and flops / seconds / matmul,
        "queries": attention.num_queries if attention else None,
        "num_seqs": attention.num_seqs if attention else None,
        "length": attention.length if attention else None,
    }


def tables(report: Row) -> str:
    """Return all of a report that people read."""
    lines = [f"{name}: {value}" for name, value in (report["versions"] | report["clocks"]).items()]
    lines.append(f"goldens met: {report['num_goldens_met']} of {report['num_goldens']}")
    if report["copy_bytes_per_second"]:
        lines.append(f"copy, read + write: {report['copy_bytes_per_second'] / 1e12:.3f} TB/s")
    if report["matmul_flops_per_second"]:
        lines.append(f"matmul, bf16: {report['matmul_flops_per_second'] / 1e12:.1f} TFLOP/s")
    if launch := report["launch_overhead"]:
        lines.append(
            f"launch of {launch['case']}: {launch['function_seconds'] * 1e6:.1f} us of the host, "
            f"its kernel alone {launch['kernel_seconds'] * 1e6:.2f} us"
        )
    lines += [text for name, row in report["resources"].items() if (text := _surprise(name, row))]
    lines += ["", COLUMNS] if report["times"] else []
    for row in report["times"]:
        lines.append(
            f"{row['case']:54}{row['us']:9.1f}{row['spread']:8.1%}{row['bytes'] / 1e6:9.1f}"
            f"{_share(row['bandwidth_share']):>9}{_share(row['flops_share']):>10}"
            f"{_number(row['predicted_us']):>10}{_number(row['sdpa_us']):>9}"
        )
        lines += [f"  {name:52}{each:9.1f}" for name, each in row["kernels_us"].items()]
    lines += ["", *engine_lines(report["engine"])] if report["engine"] else []
    lines += ["", *(goal["text"] for goal in report["goals"])] if report["goals"] else []
    lines += ["", *(f"FAILED {failure}" for failure in report["failures"])] if report["failures"] else []
    return "\n".join(lines)


def _surprise(name: str, row: Row) -> str:
    """Return what a kernel as loaded has otherwise than foreseen; "" if nothing."""
    held, predicted = row["blocks_per_sm"], row.get("predicted_blocks_per_sm")
    found = f"{row['local_bytes']} bytes of local memory a thread; " if row["local_bytes"] else ""
    if predicted not in (None, held):
        found += f"{held} blocks an SM, {predicted} were predicted; "
    return found and f"{name}: {found.removesuffix('; ')}"


def progress(task: str, row: Row) -> str:
    """Return a line on a task that just ended."""
    took, result = row.get("took"), row.get("result", {})
    said = row.get("error") or result.get("difference") or result.get("skipped") or "ok"
    if "error" not in row and "seconds" in result:
        seconds = result["seconds"]
        said = f"{seconds * 1e6:.1f} us" if seconds < 0.1 else f"{seconds:.2f} s"
    return f"{_number(took):>6} s  {task}: {said}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
