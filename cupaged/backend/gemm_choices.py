"""Which algorithm is best for a matrix product: timed, and kept on disk, one file a product.

What a file holds is a measurement: one that is missing, damaged or of something else is made again. Processes
may write the same one at once: each moves a whole file into place, with what others had put there.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.backend.device import Device

logger = logging.getLogger("cupaged")

NUM_ROUNDS = 4  # of timing; the best counts, so that the first one may warm up
WORTH = 1.02  # a gain below it is noise, and the first stays


class Choice(NamedTuple):
    """The best algorithm for some number of rows."""

    algorithm: bytes  # cublasLt's own words
    gain: float  # time of cublasLt's first choice over this one's


def fastest(device: Device, works: Sequence[Callable[[], Any]]) -> tuple[int, float]:
    """Return the index of the fastest, and the first one's time over its own; the first if none is better.

    All have run before. They are captured, for a product may take less time than the host's call of it; and
    they take turns, so that no one finds the clocks higher than others do.
    """
    if len(works) == 1:
        return 0, 1.0
    graphs = [device.capture(work) for work in works]
    times = [math.inf] * len(graphs)
    for _ in range(NUM_ROUNDS):
        for i, graph in enumerate(graphs):
            times[i] = min(times[i], device.seconds(graph.launch))
    best = min(range(len(times)), key=times.__getitem__)
    return (best, times[0] / times[best]) if times[0] > times[best] * WORTH else (0, 1.0)


class ChoiceFile:
    """The choices for one product. `key` is all that decides them: GPU, version, shape, types."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self._key = dict(key)
        self._path = folder / f"{hashlib.sha256(_text(self._key).encode()).hexdigest()[:32]}.json"

    def load(self) -> dict[int, Choice]:
        """Return the choices by rows; none if there is no such file, whole and unchanged."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["key"] != self._key or kept["sha256"] != _digest(kept["choices"]):
                return {}
            return {
                int(rows): Choice(bytes.fromhex(words), float(gain))
                for rows, (words, gain) in kept["choices"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def store(self, choices: Mapping[int, Choice]) -> None:
        """Keep the choices beside those that are there for other rows; a warning if that cannot be."""
        merged = {
            str(rows): [choice.algorithm.hex(), choice.gain]
            for rows, choice in sorted({**self.load(), **choices}.items())
        }
        content = json.dumps({"key": self._key, "choices": merged, "sha256": _digest(merged)}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
                whole = Path(folder, self._path.name)
                whole.write_text(content, encoding="utf-8")
                os.replace(whole, self._path)
        except OSError as error:
            logger.warning("the choice of algorithms cannot be kept, and so is made at each start: %s", error)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(choices: Any) -> str:
    return hashlib.sha256(_text(choices).encode()).hexdigest()
