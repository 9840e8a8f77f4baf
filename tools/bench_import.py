"""What `import cupaged` costs: seconds in a fresh Python, beyond those of `import numpy`.

    python tools/bench_import.py

Median of several runs each, files in the page cache. `from cupaged import LLM` loads Numba and the
engine as well and is shown for comparison. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys

STATEMENTS = {
    "numpy": "import numpy",
    "numpy_and_cupaged": "import numpy, cupaged",
    "llm": "from cupaged import LLM",
}


def seconds(statement: str) -> float:
    """Return the time that `statement` takes in a fresh Python, its own start not counted."""
    code = f"from time import perf_counter as t; b = t()\n{statement}\nprint(t() - b)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(result.stdout)


def main() -> None:
    """Print a table, then JSON."""
    parser = argparse.ArgumentParser(description="What `import cupaged` costs beyond numpy.")
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    medians = {}
    for name, statement in STATEMENTS.items():
        seconds(statement)  # fills the page cache and writes .pyc files
        medians[name] = statistics.median(seconds(statement) for _ in range(runs))
        print(f"{statement:<26} {medians[name]:.3f} s")
    beyond = medians["numpy_and_cupaged"] - medians["numpy"]
    print(f"cupaged beyond numpy       {beyond:.3f} s")
    print(json.dumps({"runs": runs, "cupaged_beyond_numpy_s": round(beyond, 4), **medians}))


if __name__ == "__main__":
    main()
