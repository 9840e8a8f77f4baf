"""Pick the next token of each row: temperature, top-k, top-p, min-p, then one Philox number.

Tokens are ranked by logit, the lower id first among equals, and every filter keeps a prefix of that ranking:
top-k the first k; top-p the shortest prefix that holds at least top_p of the probability that top-k left;
min-p those at least min_p times as likely as the first. The random word then walks the kept tokens by id.
NaN counts as minus infinity; a row without a finite maximum takes the greedy token. What adjust_logits BANNED
is never taken while anything else is there.

Nothing is sorted and nothing is rounded in an order that matters (exact.py), so the twin and sample.cu take
the same token.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.adjust_logits import BANNED
from cupaged.kernels.exact import (
    GREEDY_TEMPERATURE,
    KEY_OF_INFINITY,
    KEY_OF_MINUS_INFINITY,
    ONE,
    goal,
    inverse,
    portion,
    rank_key,
    to_mass,
)
from cupaged.kernels.launch import Array, Device, row_stride
from cupaged.kernels.philox import random_word

BLOCK = 256  # tokens; what a block's greatest key rules out is not looked at again
SHIFTS = (21, 10, 0)  # the ranking is found by 11, 11 and 10 bits of the keys
NUM_BINS = (2048, 2048, 1024)
THREADS = 1024  # of a CUDA block, which has one row
SHARED_BYTES = 96 << 10  # three counters of each lane and step
ALL = 2**62  # more tokens and more mass than there are


@njit
def find_greedy(bits: Any, tops: Any) -> Any:
    """Return the maximum's lowest id and its key; fill tops with the greatest key of each block.

    Where nothing is above minus infinity that is the lowest id that is not banned, or 0.
    """
    best, block = np.uint32(0), 0
    for b in range(tops.shape[0]):
        part = bits[b * BLOCK : (b + 1) * BLOCK]
        top = np.uint32(0)
        for j in range(part.shape[0]):
            top = max(top, rank_key(part[j]))
        tops[b] = top
        if top > best:
            best, block = top, b
    token = block * BLOCK
    if best > KEY_OF_MINUS_INFINITY:
        while rank_key(bits[token]) != best:
            token += 1
        return token, best
    while token < bits.shape[0] and bits[token] == BANNED:
        token += 1
    return (token if token < bits.shape[0] else 0), best


@njit
def weigh(row: Any, softmax: Any, keep: Any, keys: Any, masses: Any) -> int:
    """Fill keys and masses with those of a block's tokens, mass 0 where `keep` says so; return its mass."""
    z_max, scale = softmax
    cut, end, least = keep
    bits = row.view(np.uint32)
    total = 0
    for j in range(row.shape[0]):
        key = rank_key(bits[j])
        mass = to_mass((row[j] - z_max) * scale)
        kept = mass >= least and (key > cut or (key == cut and j < end))
        keys[j] = key
        masses[j] = mass if kept else 0
        total += masses[j]
    return total


@njit
def count_bins(row: Any, tops: Any, softmax: Any, first: int, level: int) -> Any:
    """Return how many tokens have mass, and how much, by bin of 2**shift keys; the first is key of bin 0."""
    shift, num_bins = SHIFTS[level], NUM_BINS[level]
    counts, sums = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    keys, masses = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.int64)
    for b in range(tops.shape[0]):
        if tops[b] >= first:
            part = row[b * BLOCK : (b + 1) * BLOCK]
            weigh(part, softmax, (np.uint32(0), 0, 1), keys, masses)
            for j in range(part.shape[0]):
                place = (np.int64(keys[j]) - first) >> shift
                if masses[j] > 0 and 0 <= place < num_bins:
                    counts[place] += 1
                    sums[place] += masses[j]
    return counts, sums


@njit
def find_cut(row: Any, tops: Any, softmax: Any, bins: Any, goals: Any) -> Any:
    """Find the shortest prefix of the ranking that has goals[0] tokens or goals[1] mass.

    Return the key of its last token, how many tokens of that key belong to it, and its mass. All tokens with
    a greater key do. Those without mass do not count. `bins` are those of all keys.
    """
    max_count, max_mass = goals
    count, mass, first = 0, 0, 0
    for level in range(len(SHIFTS)):
        counts, sums = bins if level == 0 else count_bins(row, tops, softmax, first, level)
        last = NUM_BINS[level] - 1
        while last > 0 and count + counts[last] < max_count and mass + sums[last] < max_mass:
            count += counts[last]
            mass += sums[last]
            last -= 1
        first += last << SHIFTS[level]
        if counts[last] <= 1:
            break
    if counts[last] <= 1:
        return np.uint32(max(first - 1, 0)), 0, mass + sums[last]
    weight = sums[last] // counts[last]
    ties = min(counts[last], max_count - count, (max_mass - mass + weight - 1) // weight)
    return np.uint32(first), ties, mass + ties * weight


@njit
def find_tie(bits: Any, tops: Any, key: Any, number: int) -> int:
    """Return where in the row the first `number` tokens of this key end."""
    end = 0
    for b in range(tops.shape[0]):
        if tops[b] >= key:
            for j in range(b * BLOCK, min((b + 1) * BLOCK, bits.shape[0])):
                if number > 0 and rank_key(bits[j]) == key:
                    number -= 1
                    end = j + 1
    return end


@njit
def find_place(sums: Any, target: int) -> Any:
    """Return the first place at which the running sum passes target, and what target has left there."""
    place = 0
    while sums[place] <= target:
        target -= sums[place]
        place += 1
    return place, target


@njit
def draw(row: Any, tops: Any, token: int, filters: Any, word: Any) -> Any:
    """Return the token that the random word picks from the softmax of row / temperature under the filters."""
    temperature, top_k, top_p, min_p = filters
    softmax = (row[token], inverse(temperature))
    cut, end = np.uint32(0), 0  # kept are the greater keys, and of this one those in [0, end)
    if top_k > 0 or top_p < 1:
        bins = count_bins(row, tops, softmax, 0, 0)
        cut, ties, mass = find_cut(row, tops, softmax, bins, (top_k if top_k > 0 else ALL, ALL))
        if top_p < 1:
            cut, ties, mass = find_cut(row, tops, softmax, bins, (ALL, goal(mass, top_p)))
        end = find_tie(row.view(np.uint32), tops, cut, ties)
    least = max(1, np.int64(np.ceil(np.float64(min_p) * ONE)))
    sums = np.zeros(tops.shape[0], np.int64)
    keys, masses = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.int64)
    for b in range(tops.shape[0]):
        if tops[b] >= cut:
            start = b * BLOCK
            sums[b] = weigh(row[start : start + BLOCK], softmax, (cut, end - start, least), keys, masses)
    block, target = find_place(sums, portion(sums.sum(), word))
    start = block * BLOCK
    weigh(row[start : start + BLOCK], softmax, (cut, end - start, least), keys, masses)
    return start + find_place(masses, target)[0]


_SIGNATURE = (
    "void(f4[:,::1],i4[::1],i4[::1],f4[::1],i4[::1],f4[::1],f4[::1],i4[:,::1],i4[::1],i4[::1],i4[::1])"
)


@njit(signatures=[_SIGNATURE], parallel=True)
def sample_cpu(
    logits: Any,  # float32[n, vocab_size]
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], -1 = sample here
    temperature: Any,  # float32[num_seqs], and so the following
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,  # int32[num_seqs, 2]
    group_index: Any,
    output_position: Any,
    token_ids: Any,  # int32[num_seqs]
) -> None:
    """Set token_ids of the sequences that sample in these rows."""
    for i in prange(logits.shape[0]):
        if logit_target[i] < 0:
            seq, row = logit_seq[i], logits[i]
            tops = np.empty((row.shape[0] + BLOCK - 1) // BLOCK, np.uint32)
            token, top = find_greedy(row.view(np.uint32), tops)
            if temperature[seq] >= GREEDY_TEMPERATURE and KEY_OF_MINUS_INFINITY < top < KEY_OF_INFINITY:
                word = random_word(seed[seq], output_position[seq], group_index[seq])
                filters = (temperature[seq], top_k[seq], top_p[seq], min_p[seq])
                token = draw(row, tops, token, filters, word)
            token_ids[seq] = token


def sample_cuda(
    device: Device,
    logits: Array,
    logit_seq: Array,
    logit_target: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    group_index: Array,
    output_position: Array,
    token_ids: Array,
) -> None:
    """Set token_ids of the sequences that sample in these rows; arguments as sample_cpu has them."""
    kernel = device.kernel("sample", "sample", THREADS=THREADS)
    filters = (temperature, top_k, top_p, min_p)
    random = (seed, group_index, output_position)
    shape = (logits.shape[1], row_stride(logits))
    args = (token_ids, logits, logit_seq, logit_target, *filters, *random, *shape)
    kernel((logits.shape[0], 1, 1), THREADS, args, shared_bytes=SHARED_BYTES)
