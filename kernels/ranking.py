"""A row's ranking without a sort: where a prefix of it ends, and which tokens need not be looked at for that.

Tokens are ranked by key (exact.rank_key), the lower id first among equals. The greatest key of each block of
tokens, found in one pass, rules out most blocks at once. What is left is put into bins by the upper bits of
its keys, then those of one bin by the next ones. Counts and masses are integers, so no order matters.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.exact import SMALLEST_EXPONENT, rank_key, to_mass

BLOCK = 256  # tokens
GROUP = 16  # tokens of a block that are looked at together
SHIFTS = (21, 10, 0)  # a prefix is found by 11, 11 and 10 bits of the keys
NUM_BINS = (2048, 2048, 1024)
LEAST_FLOAT = -float(np.finfo(np.float32).max)
ALL = 2**62  # more tokens and more mass than there are


@njit
def find_tops(bits: Any) -> Any:
    """Return the greatest key of each block of a row, given as the bits of its logits."""
    tops = np.empty((bits.shape[0] + BLOCK - 1) // BLOCK, np.uint32)
    for b in range(tops.shape[0]):
        part = bits[b * BLOCK : (b + 1) * BLOCK]
        top = np.uint32(0)
        for j in range(part.shape[0]):
            top = max(top, rank_key(part[j]))
        tops[b] = top
    return tops


@njit
def find_first(bits: Any, tops: Any) -> Any:
    """Return the id that is first in the ranking."""
    block = tops.argmax()
    token = block * BLOCK
    while rank_key(bits[token]) != tops[block]:
        token += 1
    return token


@njit
def lowest_key(softmax: Any, share: Any) -> Any:
    """Return a key below which no token has any mass, nor `share` of the first one's.

    softmax is the greatest logit, and what the logits' distance from it is multiplied with.
    """
    z_max, scale = np.float64(softmax[0]), np.float64(softmax[1])
    x = max(SMALLEST_EXPONENT, np.log(share)) if share > 0 else SMALLEST_EXPONENT
    z = z_max + (x - 0.01) / scale  # more than all that is rounded on the way to a mass
    lowest = np.empty(1, np.float32)
    lowest[0] = max(z - abs(z) * 2.0**-22, LEAST_FLOAT)
    return rank_key(lowest.view(np.uint32)[0])


@njit
def weigh(part: Any, softmax: Any, least: int, masses: Any) -> int:
    """Fill masses with those of a block's logits, 0 for less than `least`; return their sum."""
    z_max, scale = softmax
    total = 0
    for j in range(part.shape[0]):
        mass = to_mass((part[j] - z_max) * scale)
        masses[j] = mass if mass >= least else 0
        total += masses[j]
    return total


@njit
def weigh_blocks(row: Any, tops: Any, softmax: Any, first: Any, least: int) -> Any:
    """Return the mass of each block, of tokens with `least` or more; below the key `first` none has that."""
    sums, masses = np.zeros(tops.shape[0], np.int64), np.empty(BLOCK, np.int64)
    for b in range(tops.shape[0]):
        if tops[b] >= first:
            sums[b] = weigh(row[b * BLOCK : (b + 1) * BLOCK], softmax, least, masses)
    return sums


@njit
def rank_block(part: Any, softmax: Any, first: Any, keys: Any, masses: Any) -> None:
    """Fill keys and masses with those of a block's logits, mass 0 below the key `first` and past the end."""
    size = part.shape[0]
    weigh(part, softmax, 1, masses)
    bits = part.view(np.uint32)
    for j in range(size):
        keys[j] = rank_key(bits[j])
        masses[j] = masses[j] if keys[j] >= first else 0
    masses[size:] = 0


@njit
def collect(row: Any, tops: Any, softmax: Any, first: Any) -> Any:
    """Return ids, keys and masses of the tokens that have mass and at least the key `first`, by id."""
    bits = row.view(np.uint32)
    room = GROUP  # what is written before it is known to count
    for b in range(tops.shape[0]):
        if tops[b] >= first:
            part = bits[b * BLOCK : (b + 1) * BLOCK]
            for j in range(part.shape[0]):
                room += rank_key(part[j]) >= first
    ids, keys, masses = np.empty(room, np.int32), np.empty(room, np.uint32), np.empty(room, np.int64)
    block_keys, block_masses = np.zeros(BLOCK, np.uint32), np.empty(BLOCK, np.int64)
    count = 0
    for b in range(tops.shape[0]):
        if tops[b] >= first:
            rank_block(row[b * BLOCK : (b + 1) * BLOCK], softmax, first, block_keys, block_masses)
            for start in range(0, BLOCK, GROUP):
                if block_masses[start : start + GROUP].any():
                    for j in range(start, start + GROUP):  # without branches, which nobody could foresee
                        ids[count], keys[count], masses[count] = b * BLOCK + j, block_keys[j], block_masses[j]
                        count += block_masses[j] > 0
    return ids[:count], keys[:count], masses[:count]


@njit
def count_bins(keys: Any, masses: Any, first: int, level: int) -> Any:
    """Return how many tokens there are, and how much mass, by bin of 2**shift keys; `first` begins bin 0."""
    shift, num_bins = SHIFTS[level], NUM_BINS[level]
    counts, sums = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    for i in range(keys.shape[0]):
        place = (np.int64(keys[i]) - first) >> shift
        if 0 <= place < num_bins:
            counts[place] += 1
            sums[place] += masses[i]
    return counts, sums


@njit
def find_cut(keys: Any, masses: Any, max_count: int, max_mass: int) -> Any:
    """Find the shortest prefix of the ranking that has max_count tokens or max_mass.

    Return the key of its last token, how many tokens of that key belong to it, and its mass. All tokens with
    a greater key do.
    """
    count, mass, first = 0, 0, 0
    for level in range(len(SHIFTS)):
        counts, sums = count_bins(keys, masses, first, level)
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
