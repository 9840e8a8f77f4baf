"""Thread schedules: a kernel without races gives the same bits under all of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cuda_on_cpu.device import EmulatedDevice

SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "forward"},
    {"schedule": "reverse"},
    *({"schedule": "random", "seed": seed, "early_copies": bool(seed % 2)} for seed in range(4)),
)


def identical_under_all_schedules(
    launch: Callable[[EmulatedDevice], None], *outputs: np.ndarray[Any, Any]
) -> bool:
    """Return whether `launch` writes the same bits to `outputs` (0xA5 before) in any order of threads."""
    found = set()
    for schedule in SCHEDULES:
        for output in outputs:
            output.view(np.uint8)[...] = 0xA5
        launch(EmulatedDevice("fast", **schedule))
        found.add(b"".join(output.tobytes() for output in outputs))
    return len(found) == 1
