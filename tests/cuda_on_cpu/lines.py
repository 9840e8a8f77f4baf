"""Offsets in a library as lines of the source, by addr2line, which comes with g++."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent


def lines(library: Path, offsets: Iterable[int]) -> dict[int, str]:
    """Return for each offset its line, as "gpu.cuh:190, called at x.cu:24" where a function was inlined."""
    wanted = sorted(set(offsets))
    command = ["addr2line", "-a", "-i", "-e", str(library), *map(hex, wanted)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for chunk in re.split(r"^0x", output, flags=re.MULTILINE)[1:]:
        offset, *frames = chunk.splitlines()
        own = [frame.split(" (")[0] for frame in frames if Path(frame).parent != HERE] or frames
        found[int(offset, 16)] = ", called at ".join(Path(frame).name for frame in own)
    return found
