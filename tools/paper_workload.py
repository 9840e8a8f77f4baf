"""The requests of the PagedAttention paper's experiments, drawn anew: lengths and arrivals.

The paper (SOSP 2023, section 6.1) states the mean lengths of its two data sets, ShareGPT and Alpaca, and
Poisson arrivals; the texts are not here, so lengths are log-normal with those means.

SIGMA, the standard deviation of a length's logarithm, was set to 1 before anything was run. Why 1: the paper
gives no spread; 172 rows of another public record of conversations, Azure's of November 2023, have 1.1
(prompts) and 0.9 (outputs); and it is a round number between them, which nobody can have fitted. What depends
on it is shown at SIGMA +- 25 % too. Lengths end where that group's benchmarks cut them: prompts at 1024
tokens, and outputs at the other half of OPT's 2048; the log-normal's median is such that the mean of what is
left is the stated one.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIGMA = 1.0
SIGMAS = (0.75 * SIGMA, SIGMA, 1.25 * SIGMA)
MAX_TOKENS = 2048  # prompt and output of one sequence: OPT's limit
MAX_LENGTH = MAX_TOKENS // 2  # of either
SEED = 2023


@dataclass(frozen=True, slots=True)
class Dataset:
    """What the paper states of a data set."""

    name: str
    prompt_mean: float  # tokens
    output_mean: float  # tokens
    rate: float  # requests per second of Fig. 13


SHAREGPT = Dataset("ShareGPT", 161.31, 337.99, 2.0)
ALPACA = Dataset("Alpaca", 19.31, 58.45, 30.0)


class Workload(NamedTuple):
    """Requests in the order of their arrival."""

    arrivals: NDArray[np.float64]  # [num_requests], seconds
    prompts: NDArray[np.int64]  # [num_requests], tokens
    outputs: NDArray[np.int64]  # [num_requests], tokens


def truncated_mean(mu: float, sigma: float, limit: float) -> float:
    """Return the mean of a log-normal of which nothing above `limit` is kept."""
    normal = NormalDist()
    z = (np.log(limit) - mu) / sigma
    return float(np.exp(mu + sigma**2 / 2)) * normal.cdf(z - sigma) / normal.cdf(z)


def log_median(mean: float, sigma: float, limit: float) -> float:
    """Return mu, such that what is kept of the log-normal has this mean."""
    low, high = np.log(mean) - sigma**2, np.log(limit)
    for _ in range(60):
        middle = (low + high) / 2
        if truncated_mean(middle, sigma, limit) < mean:
            low = middle
        else:
            high = middle
    return float(low)


def draw_lengths(rng: np.random.Generator, count: int, mean: float, sigma: float) -> NDArray[np.int64]:
    """Return `count` lengths in random order, one from each count-th of the distribution.

    So a few hundred of them have the mean that they should.
    """
    normal = NormalDist()
    mu = log_median(mean, sigma, MAX_LENGTH)
    kept = normal.cdf((np.log(MAX_LENGTH) - mu) / sigma)
    quantiles = kept * (rng.permutation(count) + 0.5) / count
    lengths = np.exp(mu + sigma * np.array([normal.inv_cdf(q) for q in quantiles]))
    return np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int64)


def draw_workload(dataset: Dataset, *, sigma: float, rate: float | None, num_requests: int) -> Workload:
    """Return requests that come at `rate` per second, or have all come at the start (None)."""
    rng = np.random.default_rng(SEED)
    prompts = draw_lengths(rng, num_requests, dataset.prompt_mean, sigma)
    outputs = draw_lengths(rng, num_requests, dataset.output_mean, sigma)
    gaps = np.zeros(num_requests) if rate is None else rng.exponential(1 / rate, num_requests)
    return Workload(np.cumsum(gaps), prompts, outputs)
