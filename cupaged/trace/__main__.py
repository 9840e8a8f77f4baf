"""python -m cupaged.trace replay FILE | view FILE -o map.html: look again at what --trace FILE has recorded.

replay without settings makes the run's calls again and compares every plan, bit for bit: the exit code is 0
if all are the same, 1 if not. With settings (--num-blocks 500 --policy priority ...) it runs the recorded
requests in simulated time, under the recorded settings and under the changed ones, and prints both. view
draws the block pool over time as one HTML file. A file that cannot be read is exit code 2.
"""

import argparse
import json
import os
import sys
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cupaged.scheduler.scheduler_config import UNMEASURED, SchedulerConfig
from cupaged.trace.records import read_records
from cupaged.trace.replay import PlansDifferError, replay
from cupaged.trace.report import as_json, changed_settings, compare
from cupaged.trace.simulation import simulate
from cupaged.trace.step_model import StepModel, fit
from cupaged.trace.view import write_page
from cupaged.trace.workload import Segment, read_segments

_END_OF_INTS = 1 << 31
_COEFFICIENTS = {
    "step_ms": "milliseconds that every step takes",
    "token_us": "microseconds that every token of a step adds",
    "context_ns": "nanoseconds that every token adds whose KV a step reads",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m cupaged.trace", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("replay", help="the same plans again, or what other settings change")
    again.add_argument("file", type=Path, metavar="FILE")
    again.add_argument("--json", action="store_true", help="one line of JSON instead of the tables")
    settings = again.add_argument_group("settings that differ from the recorded ones")
    for name, hint in get_type_hints(SchedulerConfig).items():
        flag = _flag(name)
        if hint is bool:
            settings.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif get_origin(hint) is Literal:
            settings.add_argument(flag, choices=get_args(hint))
        else:
            settings.add_argument(flag, type=hint, metavar=hint.__name__.upper())
    model = again.add_argument_group("how long a step takes (all three; default: as the trace's steps)")
    for name, text in _COEFFICIENTS.items():
        model.add_argument(_flag(name), type=float, metavar="NUMBER", help=text)
    page = commands.add_parser("view", help="the block pool over time, as one HTML file")
    page.add_argument("file", type=Path, metavar="FILE")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="HTML")
    args = parser.parse_args(argv)
    if args.command == "replay":
        given = [getattr(args, name) is not None for name in _COEFFICIENTS]
        if any(given) and not all(given):
            parser.error("give --step-ms, --token-us and --context-ns together, or none of them")
        for name in _COEFFICIENTS:
            value = getattr(args, name)
            if value is not None and not 0 <= value < inf:
                parser.error(f"{_flag(name)} must be a number >= 0, got {value}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse_args(argv)
    try:
        if args.command == "view" and args.output.exists() and args.output.samefile(args.file):
            raise ValueError(f"{args.output} is the trace itself; name another file for the page")
        recording = read_records(args.file)
        if recording.num_lost_bytes:
            print(
                f"{args.file} ends within a record: its last {recording.num_lost_bytes} bytes are left out",
                file=sys.stderr,
            )
        segments = read_segments(recording)
        changes = {f.name: getattr(args, f.name, None) for f in fields(SchedulerConfig)}
        changes = {name: value for name, value in changes.items() if value is not None}
        if args.command == "replay" and not changes and args.step_ms is None:
            return _replay(segments, args)
        if len(segments) > 1:
            print(
                f"{len(segments)} schedulers followed one another, a new one whenever a call was broken off: "
                "this is the one with the most steps",
                file=sys.stderr,
            )
        longest = max(segments, key=lambda segment: len(segment.steps))
        if args.command == "view":
            size = write_page(longest, args.output, name=args.file.name)
            print(f"{args.output}: {size / 1e6:.2f} MB")
            return 0
        return _simulate(longest, changes, args)
    except PlansDifferError as error:
        print(f"the plans differ: {error} (was it another version that recorded them?)", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _replay(segments: list[Segment], args: argparse.Namespace) -> int:
    """Make all calls again; PlansDifferError if a plan is another."""
    for segment in segments:
        for _ in replay(segment):
            pass
    num_steps = sum(len(segment.steps) for segment in segments)
    num_requests = sum(len(segment.requests) for segment in segments)
    if args.json:
        print(json.dumps({"requests": num_requests, "steps": num_steps, "same": True}))
    else:
        size = args.file.stat().st_size
        print(
            f"{num_requests} requests, {num_steps} steps: every plan is the same, bit for bit\n"
            f"{size} bytes, {size / max(num_steps, 1):.0f} a step"
        )
    return 0


def _simulate(segment: Segment, changes: dict[str, Any], args: argparse.Namespace) -> int:
    """Run the requests under the recorded settings and with the changes, and print both."""
    changed = with_changes(segment, changes)
    recorded = with_rates(segment.config, changes)
    if args.step_ms is not None:
        model, origin = StepModel(args.step_ms / 1e3, args.token_us / 1e6, args.context_ns / 1e9), "given"
    else:
        model, num_steps, error = fit(segment.steps)
        origin = f"fitted to {num_steps} steps, half of which it misses by {100 * error:.0f} % or less"
    before, after = simulate(segment, recorded, model), simulate(segment, changed, model)
    if args.json:
        print(json.dumps({"recorded": as_json(before), "changed": as_json(after), "model": model._asdict()}))
        return 0
    print("changed: " + (", ".join(changed_settings(recorded, changed)) or "nothing"))
    print(f"a step takes {model} ({origin})")
    print(f"the recorded run took {segment.seconds:.3f} s, the model says {before.seconds:.3f} s")
    if before.num_unended:
        print(f"left out: {before.num_unended} requests that had not ended when the trace did")
    print(compare(before, after))
    return 0


def with_changes(segment: Segment, changes: dict[str, Any]) -> SchedulerConfig:
    """Return the segment's configuration with changes; another block size keeps the bytes of the pools."""
    config = segment.config
    for name, value in changes.items():
        least = 0 if name in ("num_host_blocks", "sliding_window") else 1
        end = _END_OF_INTS if isinstance(value, int) else inf
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not least <= value < end:
            raise ValueError(f"{_flag(name)} must be at least {least} and below {end}, got {value}")
    if changes.get("num_batches", 1) > 2:
        raise ValueError(f"--num-batches must be 1 or 2, got {changes['num_batches']}")
    block_size = changes.get("block_size", config.block_size)
    caches = changes.get("enable_prefix_caching", config.enable_prefix_caching)
    if caches and block_size % segment.piece:
        raise ValueError(
            f"--block-size is {block_size} but the trace knows prefixes by {segment.piece} tokens; give a "
            "multiple of that, or --no-enable-prefix-caching"
        )
    kept = {
        "num_blocks": config.num_blocks * config.block_size // block_size,
        "num_host_blocks": config.num_host_blocks * config.block_size // block_size,
        "block_bytes": max(1, config.block_bytes * block_size // config.block_size),
    }
    return with_rates(replace(config, **(kept | changes)), changes)


def with_rates(config: SchedulerConfig, changes: dict[str, Any]) -> SchedulerConfig:
    """Return a configuration with the rates that the run did not measure; ValueError if nobody says them."""
    if not config.num_host_blocks or config.preemption_mode == "recompute":
        return config
    needed = ["swap_bandwidth", "prefill_rate"] if config.preemption_mode == "auto" else ["swap_bandwidth"]
    needed = [name for name in needed if getattr(config, name) == UNMEASURED]
    missing = [_flag(name) for name in needed if name not in changes]
    if missing:
        raise ValueError(
            f"with {config.num_host_blocks} host blocks and preemption_mode={config.preemption_mode!r} steps "
            f"depend on rates that the run did not measure; give {' and '.join(missing)}"
        )
    return replace(config, **{name: changes[name] for name in needed})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever read our output has seen enough
    sys.exit(code)
