"""What a simulation with other settings changes, as a table."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.trace.simulation import Outcome


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0


# (what, unit, how it is read, decimals)
_ROWS: tuple[tuple[str, str, Callable[[Outcome], float], int], ...] = (
    ("requests finished", "", lambda o: o.num_finished, 0),
    ("requests refused", "", lambda o: o.num_refused, 0),
    ("time until all have finished", "s", lambda o: o.seconds, 3),
    ("throughput, output", "tokens/s", lambda o: _share(o.num_output_tokens, o.seconds), 1),
    ("throughput, prompt + output", "tokens/s",
     lambda o: _share(o.num_prompt_tokens + o.num_output_tokens, o.seconds), 1),
    ("steps", "", lambda o: o.num_steps, 0),
    ("sequences in a step, mean", "", lambda o: o.mean_running, 1),
    ("queue time, median", "ms", lambda o: 1e3 * _quantile(o.queue_seconds, 0.5), 2),
    ("queue time, 99 %", "ms", lambda o: 1e3 * _quantile(o.queue_seconds, 0.99), 2),
    ("time to first token, median", "ms", lambda o: 1e3 * _quantile(o.first_token_seconds, 0.5), 2),
    ("time to first token, 99 %", "ms", lambda o: 1e3 * _quantile(o.first_token_seconds, 0.99), 2),
    ("request time, median", "ms", lambda o: 1e3 * _quantile(o.request_seconds, 0.5), 2),
    ("request time, 99 %", "ms", lambda o: 1e3 * _quantile(o.request_seconds, 0.99), 2),
    ("blocks in use, mean", "%", lambda o: 100 * o.mean_used, 1),
    ("pool's slots that hold tokens", "%", lambda o: 100 * o.mean_stored, 1),
    ("preemptions", "", lambda o: o.counters[Counter.PREEMPTIONS], 0),
    ("blocks swapped out", "", lambda o: o.counters[Counter.SWAPPED_OUT_BLOCKS], 0),
    ("blocks swapped in", "", lambda o: o.counters[Counter.SWAPPED_IN_BLOCKS], 0),
    ("tokens recomputed", "", lambda o: o.counters[Counter.RECOMPUTED_TOKENS], 0),
    ("recompute tax, of all tokens computed", "%",
     lambda o: 100 * _share(o.counters[Counter.RECOMPUTED_TOKENS], o.num_computed_tokens), 2),
    ("prompt tokens found in the cache", "%",
     lambda o: 100 * _share(o.counters[Counter.PREFIX_HIT_TOKENS],
                            o.counters[Counter.PREFIX_QUERIED_TOKENS]), 1),
    ("cached blocks evicted", "", lambda o: o.counters[Counter.EVICTED_BLOCKS], 0),
    ("blocks copied on write", "", lambda o: o.counters[Counter.COPIED_BLOCKS], 0),
)  # fmt: skip


def _name(what: str, unit: str) -> str:
    return f"{what}, {unit}" if unit else what


def changed_settings(recorded: SchedulerConfig, changed: SchedulerConfig) -> list[str]:
    """Return a line for each setting that is another."""
    pairs = [(f.name, getattr(recorded, f.name), getattr(changed, f.name)) for f in fields(recorded)]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def compare(recorded: Outcome, changed: Outcome) -> str:
    """Return a table of both outcomes and the ratio of the second to the first."""
    lines = [f"{'in the model':42}{'recorded':>12}{'changed':>12}{'ratio':>9}"]
    for what, unit, read, decimals in _ROWS:
        old, new = read(recorded), read(changed)
        ratio = f"{new / old:.2f}x" if old else "-" if not new else "new"
        lines.append(f"{_name(what, unit):42}{old:12,.{decimals}f}{new:12,.{decimals}f}{ratio:>9}")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, float]:
    """Return the rows of one outcome by what they are called."""
    return {_name(what, unit): round(float(read(outcome)), 6) for what, unit, read, _ in _ROWS}
