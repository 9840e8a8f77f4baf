"""What the kernels need and how long they should take, without a GPU: resources, roofline, prediction.

    sh tools/kernel_report               the kernels and shapes in kernels/README.md
    sh tools/kernel_report --all         every kernel, compiled for every case of tools/kernel_cases
    sh tools/kernel_report --arch sm_89  resources for this architecture only; may be repeated
    sh tools/kernel_report --decode 64x4096 --prefill 1x8192 --heads bf16-32_8x128
                                         attention of your own shapes, sequences by tokens
    sh tools/kernel_report --markdown    write the tables into kernels/README.md

Registers, spills and static shared memory are the compiler's; grid, block and dynamic shared memory what the
launch functions ask for; bytes and FLOPs what the data sheets say, which tests hold to the emulator's counts.
Times are tools/predict.py's: predictions for a GPU to test, not measurements. Needs NVRTC and g++.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.kernels.compile import Resources, compile_kernels
from cupaged.kernels.launch import SOURCES
from cupaged.kernels.nvrtc import nvrtc
from tools.gpu_specs import ARCHITECTURES, GPUS, Gpu, occupancy
from tools.kernel_cases import GOLDENS, INSTANCES, TIMED, TRAFFIC
from tools.kernel_cases.case import Case
from tools.kernel_cases.launches import Launch, record, sheet_value
from tools.kernel_cases.paged import Heads, Paging
from tools.kernel_cases.paged_decode import paged_decode
from tools.kernel_cases.paged_prefill import paged_prefill
from tools.kernel_counts import Counted, count
from tools.kernel_tables import kernel_table, shape_table, step_table, write_readme
from tools.predict import Work, predict, roofline
from tools.steps import STEPS, Step, step_row

# The files of this folder that make the tables.
TOOLS = ("kernel_report", "kernel_tables", "kernel_counts", "data_sheet", "predict", "gpu_specs", "steps")
REPORTED = (*TIMED, *TRAFFIC)  # the cases that the tables come from
COMMAND = "sh tools/kernel_report --markdown"


class Profile(NamedTuple):
    """What the emulator counted at a small shape, relative to the data sheet, to scale to larger shapes."""

    mma_flops: float  # for each FLOP of the sheet; 0 = it has no mma.sync
    wavefronts: float  # for each FLOP of the sheet if it has mma.sync, else for each byte
    copy_bytes: int  # most bytes of cp.async that a block has in flight


def key_of(launch: Launch) -> tuple[Any, ...]:
    """Return what tells one kernel, compiled with its constants, from all others."""
    return (launch.file, launch.kernel, tuple(sorted(launch.constants.items())))


def kernels(cases: Iterable[Case]) -> list[tuple[Case, Launch]]:
    """Return a launch of each kernel, with its constants, that the cases launch."""
    found: dict[Any, tuple[Case, Launch]] = {}
    for case in cases:
        for launch in record(case):
            found.setdefault(key_of(launch), (case, launch))
    return [found[key] for key in sorted(found, key=repr)]


def resources(case: Case, launch: Launch, arch: str) -> Resources:
    """Return what the compiler says of a kernel, its shared memory with the launch's dynamic part."""
    path = case.sources / f"{launch.file}.cu"
    found = compile_kernels(path, arch, launch.constants).resources[launch.kernel]
    return found._replace(shared_bytes=found.shared_bytes + launch.shared_bytes)


def profiles(cases: Iterable[Case]) -> dict[Any, Profile]:
    """Count the cases in the emulator; return a profile of each kernel in them, by its largest launch."""
    largest: dict[Any, Counted] = {}
    for case in cases:
        for counted in count(case):
            key = key_of(counted.launch)
            if key not in largest or size_of(counted) > size_of(largest[key]):
                largest[key] = counted
    return {key: profile_of(counted) for key, counted in largest.items()}


def size_of(counted: Counted) -> tuple[int, int]:
    """Return what makes one launch of a kernel larger than another."""
    return counted.says("flops"), counted.says("bytes")


def profile_of(counted: Counted) -> Profile:
    """Return the profile of one counted launch."""
    counts = counted.counts
    said = counted.says("flops" if counts.flops else "bytes")
    mma_flops = counts.flops / said if counts.flops else 0.0
    return Profile(mma_flops, counts.wavefronts / said, counts.copy_bytes)


def work_of(case: Case, launch: Launch, arch: str, profile: Profile) -> Work:
    """Return what a launch does, for tools/predict.py."""
    needs = resources(case, launch, arch)
    num_bytes, unique_bytes, flops = (
        sheet_value(case, launch, name) for name in ("bytes", "unique", "flops")
    )
    x, y, z = launch.grid
    return Work(
        blocks=x * y * z,
        threads=launch.block,
        registers=needs.registers,
        shared_bytes=needs.shared_bytes,
        num_bytes=num_bytes,
        unique_bytes=unique_bytes,
        flops=flops,
        mma_flops=profile.mma_flops * flops,
        wavefronts=profile.wavefronts * (flops if profile.mma_flops else num_bytes),
        copy_bytes=profile.copy_bytes,
    )


def kernel_row(case: Case, launch: Launch, archs: Sequence[str]) -> dict[str, Any]:
    """Return what a kernel needs on each architecture."""
    needs = {arch: resources(case, launch, arch) for arch in archs}
    return {
        "kernel": launch.kernel,
        "constants": dict(sorted(launch.constants.items())),
        "threads": launch.block,
        "shared_bytes": max(each.shared_bytes for each in needs.values()),
        "registers": {arch: each.registers for arch, each in needs.items()},
        "spill_bytes": max(each.spill_bytes for each in needs.values()),
        "occupancy": {
            arch: round(occupancy(arch, launch.block, each.registers, each.shared_bytes), 3)
            for arch, each in needs.items()
        },
    }


def shape_row(case: Case, counted: Mapping[Any, Profile]) -> dict[str, Any]:
    """Return a case's row: its launches' bytes and FLOPs, and microseconds on each GPU."""
    launches = record(case)
    row: dict[str, Any] = {"case": case.name, "kernels": [launch.kernel for launch in launches], "gpus": {}}
    for gpu in GPUS:
        works = [work_of(case, launch, gpu.arch, counted[key_of(launch)]) for launch in launches]
        predictions = [predict(work, gpu) for work in works]
        row["bytes"] = sum(work.num_bytes for work in works)
        row["unique_bytes"] = sum(work.unique_bytes for work in works)
        row["flops"] = sum(work.flops for work in works)
        row["gpus"][gpu.name] = {
            "roofline_us": round(1e6 * sum(roofline(work, gpu) for work in works), 1),
            "predicted_us": round(1e6 * sum(each.seconds for each in predictions), 1),
            "limit": max(predictions).limit,
        }
    return row


def whole_step_row(step: Step, counted: Mapping[Any, Profile]) -> dict[str, Any]:
    """Return a step's row, its kernels predicted one by one."""

    def seconds(case: Case, gpu: Gpu) -> float:
        works = [work_of(case, launch, gpu.arch, counted[key_of(launch)]) for launch in record(case)]
        return sum(predict(work, gpu).seconds for work in works)

    return step_row(step, seconds)


def decode_case(heads: Heads, num_seqs: int, length: int) -> Case:
    """Return a decode of sequences that have `length` tokens each."""
    return paged_decode(heads, Paging((length,) * num_seqs))


def prefill_case(heads: Heads, num_seqs: int, length: int) -> Case:
    """Return prefills of prompts of `length` tokens."""
    return paged_prefill(heads, Paging((length,) * num_seqs), (length,) * num_seqs)


def heads_of(text: str) -> Heads:
    """Return the heads that a name such as bf16-32_8x128 stands for."""
    match = re.fullmatch(r"(bf16|f16)-([1-9]\d*)_([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[2]) % int(match[3]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ELEMENT-HEADS_KVHEADSxHEADDIM with HEADS a multiple of KVHEADS; for example "
            "bf16-32_8x128"
        )
    return Heads(match[1], *map(int, match.groups()[1:]))


def sequences(text: str) -> tuple[int, int]:
    """Return the number of sequences and the tokens of each that a text such as 64x4096 stands for."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQUENCESxTOKENS; for example 64x4096")
    return int(match[1]), int(match[2])


def fingerprint(cases: Sequence[Case], sources: Path = SOURCES) -> str:
    """Return a hash of all that the tables of these cases come from, but the compiler and the emulator."""
    launches = [
        [case.name, case.variables, [launch._replace(args=()) for launch in record(case)]] for case in cases
    ]
    # NumPy's integers as int, for their repr is not the same in every version.
    parts = [json.dumps(launches, default=int, sort_keys=True)]
    tools = (Path(__file__).with_name(f"{name}.py") for name in TOOLS)
    for path in (*sorted(sources.glob("*.cu")), *sorted(sources.glob("*.cuh")), *tools):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def readme_text(
    kernel_rows: Sequence[Mapping[str, Any]],
    shape_rows: Sequence[Mapping[str, Any]],
    step_rows: Sequence[Mapping[str, Any]],
) -> str:
    """Return what stands in the README."""
    version = ".".join(map(str, nvrtc().version))
    return (
        f"Sources {fingerprint(REPORTED)}, NVRTC {version}; written by `{COMMAND}`.\n\n"
        f"{kernel_table(kernel_rows)}\n"
        "**Predictions, not measurements**: roofline -> predicted microseconds, and what limits them. No\n"
        "GPU has run these kernels; tools/predict.py says how times are computed and what is assumed.\n"
        "MB is what warps request; `once` counts each byte once, however often it is read.\n\n"
        f"{shape_table(shape_rows)}\n"
        "**Whole steps** of a Llama-3.1-8B, sequences x tokens of context (or prompt), predicted as well:\n"
        "roofline at the rates that a copy and a large matrix product attain -> sum over all kernels and\n"
        "products; tools/steps.py says of what. GB and GFLOP are the least that any engine needs.\n\n"
        f"{step_table(step_rows)}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="the kernels of all cases, not only of timed ones")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all four")
    parser.add_argument("--markdown", action="store_true", help="write the tables into kernels/README.md")
    for name in ("decode", "prefill"):
        parser.add_argument(f"--{name}", action="append", default=[], type=sequences, metavar="SEQSxTOKENS")
    parser.add_argument("--heads", type=heads_of, default="bf16-32_8x128", help="of --decode and --prefill")
    args = parser.parse_args()
    given = [decode_case(args.heads, *shape) for shape in args.decode]
    given += [prefill_case(args.heads, *shape) for shape in args.prefill]
    if given and (args.all or args.markdown):
        parser.error("--decode and --prefill are shapes of your own; leave out --all and --markdown")
    try:
        for case in given:
            record(case)
    except ValueError as error:  # of the launch functions
        parser.error(str(error))
    small = [decode_case(args.heads, 1, 640), prefill_case(args.heads, 1, 97)] if given else []
    counted = profiles([*TRAFFIC, *small])
    archs = args.arch or list(ARCHITECTURES)
    shapes = given or TIMED
    cases = [*GOLDENS, *TIMED, *TRAFFIC, *INSTANCES] if args.all else shapes
    kernel_rows = [kernel_row(case, launch, archs) for case, launch in kernels(cases)]
    shape_rows = [shape_row(case, counted) for case in shapes]
    step_rows = [] if given else [whole_step_row(step, counted) for step in STEPS]
    if args.markdown:
        write_readme(readme_text(kernel_rows, shape_rows, step_rows))
    print(kernel_table(kernel_rows))
    print("Roofline -> predicted microseconds, and what limits them; no GPU has run these kernels.")
    print(shape_table(shape_rows))
    if step_rows:
        print(step_table(step_rows))
    rows = {"kernels": kernel_rows, "shapes": shape_rows, "steps": step_rows}
    print(json.dumps({"sources": fingerprint(REPORTED), **rows}))


if __name__ == "__main__":
    main()
