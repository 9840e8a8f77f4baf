"""Batch: one step as named views into one flat host buffer; StepOutput: what comes back.

Scheduler and worker meet only here. Where a view begins depends on the bucket (capacities of tokens,
sequences and table width), never on the step's counts, so one copy moves a step to a device and a
CUDA graph can bind the places. Ragged parts whose length no bucket bounds share the `tail`.
"""

from enum import IntEnum, IntFlag
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = Any  # int32 or float32, NumPy on the host, the backend's own on a device


class Count(IntEnum):
    """Places in BatchArrays.counts."""

    NUM_TOKENS = 0
    NUM_SEQS = 1
    NUM_DECODES = 2  # the first num_decodes sequences have exactly one new token
    NUM_LOGITS = 3
    TABLE_WIDTH = 4  # blocks of the longest sequence of the step
    NUM_COPY = 5
    NUM_SWAP_OUT = 6
    NUM_SWAP_IN = 7
    NUM_BANNED = 8
    NUM_HISTORY = 9


NUM_COUNTS = 16  # room to grow without moving what follows


class Flag(IntFlag):
    """Bits of BatchArrays.flags."""

    SAMPLES = 1  # the sequence's last position yields a token
    INPUT_FROM_LAST_TOKEN = 2  # its last input id is last_token[row] on the device, not input_ids
    RESET = 4  # first step of this row's sequence since it was admitted or resumed
    SCALED_LOGPROBS = 8  # its sampled token's log-probabilities are of logits / temperature (0 = of the raw)


class Bucket(NamedTuple):
    """Capacities of one buffer layout."""

    num_tokens: int
    num_seqs: int
    table_width: int


SMALLEST = Bucket(num_tokens=16, num_seqs=8, table_width=16)


def bucket_for(num_tokens: int, num_seqs: int, table_width: int) -> Bucket:
    """Return the smallest bucket that holds the counts: powers of two, not below SMALLEST."""
    wanted = (num_tokens, num_seqs, table_width)
    return Bucket(*(max(least, 1 << (n - 1).bit_length()) for n, least in zip(wanted, SMALLEST, strict=True)))


class BatchArrays(NamedTuple):
    """One step at full capacity; T, S, W are the bucket's capacities. int32 unless noted.

    Sequences are ordered decodes first. Padding: input_ids and positions 0, slot_mapping -1, query_start the
    token count, rows -1, seq_lens 0, block_tables -1, logit_index -1, logit_seq 0, logit_target 0.
    """

    counts: Array  # [NUM_COUNTS], by Count
    input_ids: Array  # [T]
    positions: Array  # [T]
    slot_mapping: Array  # [T], block_id * block_size + offset
    query_start: Array  # [S + 1], the step's tokens of sequence i are [query_start[i], query_start[i + 1])
    rows: Array  # [S]
    seq_lens: Array  # [S], tokens in the KV cache once this step is done
    flags: Array  # [S], by Flag
    temperature: Array  # float32[S], 0 = greedy
    top_p: Array  # float32[S], 1 = all
    min_p: Array  # float32[S], 0 = all
    top_k: Array  # [S], 0 = all
    seed: Array  # [S, 2], low and high word of the Philox key
    group_index: Array  # [S], part of the Philox counter
    output_position: Array  # [S], index of the token to be sampled in the sequence's output, ditto
    num_logprobs: Array  # [S], top n wanted with a sampled token, -1 = none
    num_prompt_logprobs: Array  # [S], top n wanted with a prompt token, -1 = none
    logit_index: Array  # [T], positions in the step whose logits are needed, ascending
    logit_seq: Array  # [T], the sequence of each
    logit_target: Array  # [T], -1 = sample here; else the prompt token whose log-probability is wanted
    sampled_ids: Array  # [S], what the step samples, where it does; the worker writes them
    block_tables: Array  # [S, W]
    copy: Array  # [S, 2], block ids (from, to), for copy-on-write
    banned_start: Array  # [S + 1], sequence i must not sample banned[start[i] : start[i + 1]]
    history_start: Array  # [S + 1], likewise into history
    tail: Array  # swap_out pairs, swap_in pairs, banned, history, one after the other


_FLOATS = frozenset({"temperature", "top_p", "min_p"})


def _aligned(num_words: int) -> int:
    """Return where what follows `num_words` begins: at 64-byte steps."""
    return -(-num_words // 16) * 16


def layout(bucket: Bucket) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return offset in words and shape of each view but the tail, which follows the last of them."""
    T, S, W = bucket
    by_token = ("input_ids", "positions", "slot_mapping", "logit_index", "logit_seq", "logit_target")
    shapes: dict[str, tuple[int, ...]] = {name: (S,) for name in BatchArrays._fields if name != "tail"}
    shapes |= dict.fromkeys(by_token, (T,))
    shapes |= dict.fromkeys(("query_start", "banned_start", "history_start"), (S + 1,))
    shapes |= dict.fromkeys(("seed", "copy"), (S, 2))
    shapes |= {"counts": (NUM_COUNTS,), "block_tables": (S, W)}
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = 0
    for name, shape in shapes.items():
        places[name] = (offset, shape)
        offset += _aligned(int(np.prod(shape)))
    return places


def view(buffer: Array, bucket: Bucket) -> BatchArrays:
    """Cut the flat int32 buffer (of the host or a device) into the views of `bucket`."""
    cut = {}
    end = 0
    for name, (offset, shape) in layout(bucket).items():
        end = offset + int(np.prod(shape))
        words = buffer[offset:end]
        cut[name] = (words.view(np.float32) if name in _FLOATS else words).reshape(shape)
    return BatchArrays(**cut, tail=buffer[_aligned(end) :])


def buffer_size(bucket: Bucket, tail: int) -> int:
    """Return the words that a buffer needs for `bucket` and `tail` words behind it."""
    offset, shape = list(layout(bucket).values())[-1]
    return _aligned(offset + int(np.prod(shape))) + tail


class Batch:
    """One step: the arrays cut to its counts. `arrays` has them at full capacity, for fixed shapes.

    On a device: copy `words` of the host's batch into a buffer there and cut it by the host's counts.
    """

    def __init__(
        self,
        buffer: Array,
        bucket: Bucket,
        serials: NDArray[np.int64],
        *,
        arrays: BatchArrays | None = None,
        counts: NDArray[np.int32] | None = None,
    ) -> None:
        """Cut `buffer`; `arrays` are its views if the caller has them, `counts` its counts on the host."""
        a = self.arrays = view(buffer, bucket) if arrays is None else arrays
        self.buffer, self.bucket = buffer, bucket
        self.serials = serials  # [num_seqs], the scheduler's proof that a row still holds the same sequence
        c = (a.counts if counts is None else counts).tolist()
        tokens, seqs, logits = c[Count.NUM_TOKENS], c[Count.NUM_SEQS], c[Count.NUM_LOGITS]
        self.num_tokens: int = tokens
        self.num_seqs: int = seqs
        self.num_decodes: int = c[Count.NUM_DECODES]
        self.num_logits: int = logits
        self.input_ids, self.positions = a.input_ids[:tokens], a.positions[:tokens]
        self.slot_mapping = a.slot_mapping[:tokens]
        self.query_start = a.query_start[: seqs + 1]
        self.rows, self.seq_lens, self.flags = a.rows[:seqs], a.seq_lens[:seqs], a.flags[:seqs]
        self.temperature, self.top_p, self.min_p = a.temperature[:seqs], a.top_p[:seqs], a.min_p[:seqs]
        self.top_k, self.seed = a.top_k[:seqs], a.seed[:seqs]
        self.group_index, self.output_position = a.group_index[:seqs], a.output_position[:seqs]
        self.sampled_ids = a.sampled_ids[:seqs]
        self.num_logprobs, self.num_prompt_logprobs = a.num_logprobs[:seqs], a.num_prompt_logprobs[:seqs]
        self.logit_index, self.logit_seq = a.logit_index[:logits], a.logit_seq[:logits]
        self.logit_target = a.logit_target[:logits]
        self.block_tables = a.block_tables[:seqs, : c[Count.TABLE_WIDTH]]
        self.copy = a.copy[: c[Count.NUM_COPY]]
        self.banned_start, self.history_start = a.banned_start[: seqs + 1], a.history_start[: seqs + 1]
        swap_in = 2 * c[Count.NUM_SWAP_OUT]
        banned = swap_in + 2 * c[Count.NUM_SWAP_IN]
        history = banned + c[Count.NUM_BANNED]
        self.swap_out, self.swap_in = a.tail[:swap_in].reshape(-1, 2), a.tail[swap_in:banned].reshape(-1, 2)
        end = history + c[Count.NUM_HISTORY]
        self.banned, self.history = a.tail[banned:history], a.tail[history:end]
        self._num_words = len(buffer) - len(a.tail) + end

    @cached_property
    def is_plain_decode(self) -> bool:
        """Return whether each sequence computes one token and samples one, any, and nothing else is asked."""
        is_decode = self.num_tokens == self.num_decodes == self.num_seqs == self.num_logits
        wanted = (self.num_logprobs, self.num_prompt_logprobs)
        return is_decode and not len(self.banned) and all(each.max(initial=-1) < 0 for each in wanted)

    @property
    def words(self) -> Array:
        """Return the part of the buffer that the step uses: int32, one piece."""
        return self.buffer[: self._num_words]


def padding_batch(
    num_tokens: int, num_seqs: int, *, num_decodes: int, num_logits: int, table_width: int
) -> Batch:
    """Return a step of these counts that is all padding: it computes what nobody sees."""
    bucket = bucket_for(num_tokens, num_seqs, table_width)
    buffer = np.zeros(buffer_size(bucket, 0), np.int32)
    arrays = view(buffer, bucket)
    for name in ("slot_mapping", "rows", "block_tables", "logit_index"):
        getattr(arrays, name)[:] = -1
    for name in ("num_logprobs", "num_prompt_logprobs"):
        getattr(arrays, name)[:] = -1
    counts = {
        Count.NUM_TOKENS: num_tokens,
        Count.NUM_SEQS: num_seqs,
        Count.NUM_DECODES: num_decodes,
        Count.NUM_LOGITS: num_logits,
        Count.TABLE_WIDTH: table_width,
    }
    for place, count in counts.items():
        arrays.counts[place] = count
    return Batch(buffer, bucket, np.zeros(num_seqs, np.int64), arrays=arrays)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the tokens that asked for them; column 0 is the token itself, then the top n.

    n is the largest that any of them asked for; who asked for fewer ignores the rest.
    """

    seq: NDArray[np.int32]  # [m], index of the sequence in the batch
    is_prompt: NDArray[np.bool_]  # [m], a prompt token (in order) or the sampled one
    token_ids: NDArray[np.int32]  # [m, 1 + n]
    logprobs: NDArray[np.float32]  # [m, 1 + n], of the raw logits, before bans; see SCALED_LOGPROBS
    ranks: NDArray[np.int32]  # [m], rank of column 0 among all tokens, 1 = most likely


class StepOutput(NamedTuple):
    """What one step gives back, by the batch's sequences."""

    token_ids: NDArray[np.int32]  # [num_seqs, k], k = 1 until speculation
    num_tokens: NDArray[np.int32]  # [num_seqs], how many of the k count; 0 where the sequence did not sample
    logprobs: TokenLogprobs | None = None
