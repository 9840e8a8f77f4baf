"""How long `python -m cupaged.generate` takes to its first token, and what memory a model takes as it loads.

    python -m tools.bench_start MODEL [flags of generate, such as --quantization int8]

Seconds run from the start of the process to the first character on its stdout, where it streams the answer.
Cold is a start with an empty cache folder, so everything is compiled; warm is the median of several after it.
What of a warm start is import, load and first step is measured in one more, inside. Its peak of resident
memory while it loads is to be compared with what is resident when it has: a copy of the weights would show.
The last line is JSON. Linux only, for /proc.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT = "The capital of France is"
INSIDE = """
import json, sys, time
begin = time.perf_counter()
from cupaged import LLM
from cupaged.flags import engine_config
from cupaged.generate import parse_args
from dataclasses import asdict
from tools.bench_start import PROMPT, memory
config = engine_config(parse_args(sys.argv[1:]))
imported, resident = time.perf_counter(), memory()["VmRSS"]
llm = LLM(**asdict(config))
loaded, after = time.perf_counter(), memory()
llm.engine.add_request("0", PROMPT, llm.get_default_sampling_params())
llm.engine.step()
print(json.dumps({
    "import_s": imported - begin,
    "load_s": loaded - imported,
    "first_step_s": time.perf_counter() - loaded,
    "weights": llm.engine.executor.plan.use.weights,
    "resident_imported": resident,
    "resident_loaded": after["VmRSS"],
    "peak_loading": after["VmHWM"],
}))
"""


def memory() -> dict[str, int]:
    """Return the bytes of this process's memory by their names: VmRSS resident, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in sizes}


def seconds_to_output(command: Sequence[str], environment: dict[str, str]) -> float:
    """Return the seconds from the start of a command to the first byte of its output; let it end."""
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode} and {first!r}")
    return seconds


def look_inside(argv: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Return seconds and bytes of a start with generate's arguments, as INSIDE prints them."""
    command = [sys.executable, "-c", INSIDE, *argv]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def report(cold: float, warm: Sequence[float], inside: dict[str, float]) -> None:
    """Print a table, then JSON."""
    median = statistics.median(warm)
    print(f"{'seconds to the first token':<48} {'s':>8}")
    print(f"{'cold: with an empty cache of compiled kernels':<48} {cold:8.2f}")
    print(f"{f'warm: median of {len(warm)}':<48} {median:8.2f}")
    for name, text in (("import_s", "import"), ("load_s", "load"), ("first_step_s", "first step")):
        print(f"{f'  of one more, {text}':<48} {inside[name]:8.2f}")
    print(f"\n{'memory':<48} {'MiB':>8}")
    rows = {
        "weights": "weights, as they are packed",
        "resident_imported": "resident, before the model is loaded",
        "resident_loaded": "resident, when it has been loaded",
        "peak_loading": "resident at most until then",
    }
    for name, text in rows.items():
        print(f"{text:<48} {inside[name] / 2**20:8.0f}")
    print(json.dumps({"cold_s": round(cold, 3), "warm_s": round(median, 3), "runs": len(warm), **inside}))


def main(argv: Sequence[str] | None = None) -> None:
    """Start cold, then warm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5, help="warm starts (default: 5)")
    args, flags = parser.parse_known_args(argv)
    arguments = [args.model, PROMPT, *flags, "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    command = [sys.executable, "-m", "cupaged.generate", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        cold = seconds_to_output(command, environment)
        warm = [seconds_to_output(command, environment) for _ in range(args.runs)]
        report(cold, warm, look_inside(arguments, environment))


if __name__ == "__main__":
    main()
