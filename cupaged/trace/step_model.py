"""StepModel: how long a step takes, by a linear model whose coefficients come from a trace's own steps."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.trace.workload import Step


class StepModel(NamedTuple):
    """Seconds of a step: per_step + per_token * tokens + per_context * tokens whose KV it reads + swaps."""

    per_step: float
    per_token: float
    per_context: float

    def seconds(self, batch: Batch, config: SchedulerConfig) -> float:
        """Return how long a step takes; a block is swapped at the configuration's bandwidth."""
        context = int(batch.seq_lens.sum())
        compute = self.per_step + self.per_token * batch.num_tokens + self.per_context * context
        num_swapped = len(batch.swap_out) + len(batch.swap_in)
        return compute + num_swapped * config.block_bytes / config.swap_bandwidth

    def __str__(self) -> str:
        """Show the coefficients."""
        return (
            f"{self.per_step * 1e3:.4g} ms + {self.per_token * 1e6:.4g} us a token + "
            f"{self.per_context * 1e9:.4g} ns a token of context"
        )


class Fit(NamedTuple):
    """A model and how well it explains the steps that it was made from."""

    model: StepModel
    num_steps: int
    median_error: float  # of a step's time, as a share of it


def fit(steps: list[Step]) -> Fit:
    """Return the model with the least squared relative errors, no coefficient below 0.

    Steps that swapped are left out; ValueError if fewer than two others are left.
    """
    used = [step for step in steps if step.num_swapped == 0 and step.seconds > 0]
    if len(used) < 2:
        raise ValueError(
            f"the trace has {len(used)} steps to fit a step's time to, at least 2 are needed; "
            "give --step-ms, --token-us and --context-ns"
        )
    terms = np.array([(1, step.num_tokens, step.context) for step in used], np.float64)
    seconds = np.array([step.seconds for step in used])
    # A step's weight is its time's inverse: long pauses and long prefills do not outvote the decodes.
    coefficients = least_squares(terms / seconds[:, None], np.ones(len(used)))
    errors = np.abs(terms @ coefficients - seconds) / seconds
    return Fit(StepModel(*coefficients.tolist()), len(used), float(np.median(errors)))


def least_squares(terms: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients >= 0 whose sum of terms is nearest to `wanted`, over all sets of terms."""
    best, best_error = np.zeros(terms.shape[1]), float(wanted @ wanted)
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1
    for count in range(1, terms.shape[1] + 1):
        for places in map(list, combinations(range(terms.shape[1]), count)):
            found = np.linalg.lstsq(terms[:, places] / scale[places], wanted, rcond=None)[0]
            error = float(np.sum((terms[:, places] / scale[places] @ found - wanted) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(terms.shape[1]), error
                best[places] = found / scale[places]
    return best
