"""Cases of sample.cu, logprobs.cu and adjust_logits.cu: what becomes of float32 logits."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cupaged.batch import Flag
from cupaged.kernels.adjust_logits import adjust_logits_cuda, count_history_cuda, count_sampled_cuda
from cupaged.kernels.launch import Array
from cupaged.kernels.logprobs import SCALED_LOGPROBS, logprobs_cuda
from cupaged.kernels.sample import sample_cuda
from tools.kernel_cases.case import Case, Maker, Tolerance

LLAMA_VOCAB = 128_256
SPREAD = 3.0  # of logits


class Filter(NamedTuple):
    """What a row is sampled by."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def num_walks(self) -> int:
        """How often sample.cu walks the row, if once is enough to find where each prefix ends."""
        num_prefixes = (self.top_k > 0) + (self.top_p < 1.0)
        return 1 if self.temperature == 0.0 else 2 + (num_prefixes > 0) + num_prefixes

    @property
    def num_weighed(self) -> int:
        """In how many of them every token is weighed."""
        return int(self.temperature > 0.0 and (self.top_k == 0 or self.top_p < 1.0))


GREEDY, PLAIN, ALL = Filter(0.0), Filter(1.0), Filter(0.9, 50, 0.95, 0.02)
EACH = (GREEDY, PLAIN, Filter(0.7, top_k=40), Filter(0.8, top_p=0.9), Filter(1.2, min_p=0.05), ALL)


def ints(values: ArrayLike) -> Array:
    """Return int32 of the host."""
    return np.array(values, np.int32)


def sample(num_rows: int, vocab_size: int, filters: tuple[Filter, ...], what: str) -> Case:
    """Return one sampled row a sequence, with these filters in turn."""
    chosen = [filters[i % len(filters)] for i in range(num_rows)]

    def make(maker: Maker) -> dict[str, Array]:
        places = np.arange(num_rows)
        temperature, top_k, top_p, min_p = zip(*chosen, strict=True)
        return {
            "logits": maker.normal((num_rows, vocab_size), spread=SPREAD),
            "logit_seq": maker.array(ints(places[::-1])),
            "logit_target": maker.array(np.full(num_rows, -1, np.int32)),
            "temperature": maker.array(np.array(temperature, np.float32)),
            "top_k": maker.array(ints(top_k)),
            "top_p": maker.array(np.array(top_p, np.float32)),
            "min_p": maker.array(np.array(min_p, np.float32)),
            "seed": maker.array(ints([7919 * places, places]).T),
            "group_index": maker.array(ints(places % 3)),
            "output_position": maker.array(ints(places)),
            "token_ids": maker.unwritten((num_rows,), np.int32),
        }

    return Case(
        name=f"sample-{num_rows}x{vocab_size}-{what}",
        make=make,
        launch=lambda device, arrays: sample_cuda(device, *arrays.values()),
        outputs=("token_ids",),
        variables={
            "num_rows": num_rows,
            "vocab_size": vocab_size,
            "walks": [each.num_walks for each in chosen],
            "num_draws": sum(each.temperature > 0.0 for each in chosen),
            "num_weighed": sum(each.num_weighed for each in chosen),
        },
    )


def logprobs(num_rows: int, vocab_size: int, num_top: int) -> Case:
    """Return log-probabilities of rows, every other one of a given token, the others of the sampled one.

    Of these, each second is of scaled logits.
    """

    def make(maker: Maker) -> dict[str, Array]:
        places = np.arange(num_rows)
        targets = np.where(places % 2, places * 7919 % vocab_size, -1)
        return {
            "logits": maker.normal((num_rows, vocab_size), spread=SPREAD),
            "logit_seq": maker.array(ints(places)),
            "logit_target": maker.array(ints(targets)),
            "sampled": maker.integers(0, vocab_size, (num_rows,)),
            "flags": maker.array(np.where(places % 4, Flag.SAMPLES, SCALED_LOGPROBS).astype(np.int32)),
            "temperature": maker.array(np.full(num_rows, 1.7, np.float32)),
            "token_ids": maker.unwritten((num_rows, 1 + num_top), np.int32),
            "logprobs": maker.unwritten((num_rows, 1 + num_top)),
            "ranks": maker.unwritten((num_rows,), np.int32),
        }

    return Case(
        name=f"logprobs-{num_rows}x{vocab_size}-top{num_top}",
        make=make,
        launch=lambda device, arrays: logprobs_cuda(device, *arrays.values()),
        outputs=("token_ids", "logprobs", "ranks"),
        variables={
            "num_rows": num_rows,
            "vocab_size": vocab_size,
            "walks": [4 if num_top else 2] * num_rows,  # mostly
        },
        tolerance=Tolerance(2**-20, 2**-20),
    )


def adjust_logits(num_rows: int, vocab_size: int) -> Case:
    """Return rows with penalties (two of three), a bias and a ban."""
    penalised = np.arange(num_rows) % 3 > 0

    def make(maker: Maker) -> dict[str, Array]:
        each = np.arange(num_rows + 1)
        return {
            "logits": maker.normal((num_rows, vocab_size), spread=SPREAD),
            "logit_seq": maker.array(ints(each[:-1])),
            "logit_target": maker.array(np.full(num_rows, -1, np.int32)),
            "rows": maker.array(ints(each[:-1][::-1])),
            "counts": maker.integers(0, 3, (num_rows, vocab_size)),
            "repetition_penalty": maker.array(np.where(penalised, 1.3, 1.0).astype(np.float32)),
            "frequency_penalty": maker.array(np.where(penalised, 0.2, 0.0).astype(np.float32)),
            "presence_penalty": maker.array(np.where(penalised, 0.5, 0.0).astype(np.float32)),
            "bias_start": maker.array(ints(each)),
            "bias_ids": maker.integers(0, vocab_size, (num_rows,)),
            "bias": maker.normal((num_rows,)),
            "banned_start": maker.array(ints(each)),
            "banned": maker.integers(0, vocab_size, (num_rows,)),
            "adjusted": maker.unwritten((num_rows, vocab_size)),
        }

    return Case(
        name=f"adjust_logits-{num_rows}x{vocab_size}",
        make=make,
        launch=lambda device, arrays: adjust_logits_cuda(device, *arrays.values()),
        outputs=("adjusted",),
        variables={
            "num_rows": num_rows,
            "vocab_size": vocab_size,
            "num_penalised": int(penalised.sum()),
        },
    )


def count_history(num_seqs: int, vocab_size: int, length: int) -> Case:
    """Return sequences that enter with a history, the last one without."""

    def make(maker: Maker) -> dict[str, Array]:
        starts = np.minimum(np.arange(num_seqs + 1), num_seqs - 1) * length
        return {
            "rows": maker.array(ints(np.arange(num_seqs)[::-1])),
            "flags": maker.array(np.full(num_seqs, Flag.SAMPLES | Flag.RESET, np.int32)),
            "output_position": maker.array(np.full(num_seqs, length // 3, np.int32)),
            "history_start": maker.array(ints(starts)),
            "history": maker.integers(0, vocab_size, ((num_seqs - 1) * length,)),
            "counts": maker.integers(0, 3, (num_seqs, vocab_size)),
        }

    return Case(
        name=f"count_history-{num_seqs}x{vocab_size}",
        make=make,
        launch=lambda device, arrays: count_history_cuda(device, *arrays.values()),
        outputs=("counts",),
        variables={"num_seqs": num_seqs, "vocab_size": vocab_size, "histories": (length,) * (num_seqs - 1)},
    )


def count_sampled(num_seqs: int, vocab_size: int) -> Case:
    """Return sequences of which every other one sampled."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "rows": maker.array(ints(np.arange(num_seqs)[::-1])),
            "flags": maker.array(ints(np.arange(num_seqs) % 2 * Flag.SAMPLES)),
            "token_ids": maker.integers(0, vocab_size, (num_seqs,)),
            "counts": maker.integers(0, 3, (num_seqs, vocab_size)),
        }

    return Case(
        name=f"count_sampled-{num_seqs}x{vocab_size}",
        make=make,
        launch=lambda device, arrays: count_sampled_cuda(device, *arrays.values()),
        outputs=("counts",),
        variables={"num_seqs": num_seqs, "num_sampled": num_seqs // 2},
    )


GOLDENS = [
    sample(6, 1500, EACH, "each"),
    logprobs(4, 1500, 5),
    adjust_logits(3, 500),
    count_history(3, 500, 60),
    count_sampled(5, 500),
]
TRAFFIC = [
    sample(2, 32_000, (PLAIN,), "plain"),
    sample(2, 32_000, (ALL,), "filtered"),
    logprobs(2, 32_000, 5),
    adjust_logits(3, 32_000),
    count_history(2, 32_000, 300),
    count_sampled(40, 500),
]
TIMED = [
    sample(64, LLAMA_VOCAB, (PLAIN,), "plain"),
    sample(64, LLAMA_VOCAB, (ALL,), "filtered"),
    logprobs(64, LLAMA_VOCAB, 5),
    adjust_logits(64, LLAMA_VOCAB),
]
INSTANCES: list[Case] = []
