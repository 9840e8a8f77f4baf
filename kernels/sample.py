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

from cupaged.jit import njit
from cupaged.kernels.adjust_logits import BANNED
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.exact import (
    GREEDY_TEMPERATURE,
    KEY_OF_INFINITY,
    KEY_OF_MINUS_INFINITY,
    ONE,
    goal,
    inverse,
    portion,
    rank_key,
)
from cupaged.kernels.launch import Array, Device, row_stride
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.philox import random_word
from cupaged.kernels.ranking import (
    ALL,
    BLOCK,
    collect,
    find_cut,
    find_first,
    find_tops,
    lowest_key,
    weigh,
    weigh_blocks,
)

GRAIN = 1 << 14  # logits, of which 5 us are spent on the cheapest rows
FIRST_SHARE = 2.0**-6  # of the first token's mass, that those have which are looked at first
THREADS = 1024  # of a CUDA block, which has one row
SHARED_BYTES = 96 << 10  # three counters of each lane and step


@njit
def find_greedy(bits: Any, tops: Any) -> Any:
    """Return the maximum's lowest id and its key.

    Where nothing is above minus infinity that is the lowest id that is not banned, or 0.
    """
    token = find_first(bits, tops)
    top = rank_key(bits[token])
    if top > KEY_OF_MINUS_INFINITY:
        return token, top
    token = 0
    while token < bits.shape[0] and bits[token] == BANNED:
        token += 1
    return (token if token < bits.shape[0] else 0), top


@njit
def find_place(masses: Any, target: int) -> Any:
    """Return the first place at which the running sum passes target, and what target has left there."""
    place = 0
    while masses[place] <= target:
        target -= masses[place]
        place += 1
    return place, target


@njit
def draw(row: Any, tops: Any, softmax: Any, min_p: Any, word: Any) -> Any:
    """Return the token that the random word picks of all that min_p keeps."""
    least = max(1, np.int64(np.ceil(np.float64(min_p) * ONE)))
    sums = weigh_blocks(row, tops, softmax, lowest_key(softmax, min_p), least)
    block, target = find_place(sums, portion(sums.sum(), word))
    masses = np.empty(BLOCK, np.int64)
    weigh(row[block * BLOCK : (block + 1) * BLOCK], softmax, least, masses)
    return block * BLOCK + find_place(masses, target)[0]


@njit
def find_likeliest(row: Any, tops: Any, softmax: Any, top_k: int) -> Any:
    """Return ids, keys and masses of tokens, by id, among which are the first top_k that have mass."""
    first = lowest_key(softmax, 0.0)
    if top_k <= tops.shape[0]:  # so many blocks have a token that is as great as the top_k-th top
        first = max(first, find_cut(tops, np.ones(tops.shape[0], np.int64), top_k, ALL)[0])
    return collect(row, tops, softmax, first)


@njit
def find_nucleus(row: Any, tops: Any, softmax: Any, top_p: Any) -> Any:
    """Return ids, keys and masses of tokens, by id, among which are the first that hold top_p; all mass."""
    mass = weigh_blocks(row, tops, softmax, lowest_key(softmax, 0.0), 1).sum()
    wanted = goal(mass, top_p)
    rare = (mass - wanted) / row.shape[0] / ONE  # all tokens that are rarer hold less than what is left out
    share = FIRST_SHARE
    while share > rare:  # of the first one's mass: those with as much may already be enough
        held = weigh_blocks(row, tops, softmax, lowest_key(softmax, share), np.int64(share * ONE)).sum()
        if held >= wanted:
            break
        share *= FIRST_SHARE
    ids, keys, masses = collect(row, tops, softmax, lowest_key(softmax, max(share, rare)))
    return ids, keys, masses, mass


@njit
def draw_ranked(row: Any, tops: Any, softmax: Any, filters: Any, word: Any) -> Any:
    """Return the token that the random word picks of those that all filters keep."""
    top_k, top_p, min_p = filters
    if top_k > 0:
        ids, keys, masses = find_likeliest(row, tops, softmax, top_k)
        cut, ties, mass = find_cut(keys, masses, top_k, ALL)
    else:
        ids, keys, masses, mass = find_nucleus(row, tops, softmax, top_p)
    if top_p < 1:
        cut, ties, _ = find_cut(keys, masses, ALL, goal(mass, top_p))
    least = np.int64(np.ceil(np.float64(min_p) * ONE))
    for i in range(keys.shape[0]):
        is_tie = keys[i] == cut and ties > 0
        ties -= is_tie
        if masses[i] < least or not (keys[i] > cut or is_tie):
            masses[i] = 0
    return ids[find_place(masses, portion(masses.sum(), word))[0]]


@njit
def sample_row(row: Any, filters: Any, seed: Any, place: Any) -> Any:
    """Return the token of one row; place is the output position and the index in the group."""
    temperature, top_k, top_p, min_p = filters
    bits = row.view(np.uint32)
    tops = find_tops(bits)
    token, top = find_greedy(bits, tops)
    if temperature < GREEDY_TEMPERATURE or not KEY_OF_MINUS_INFINITY < top < KEY_OF_INFINITY:
        return token
    word = random_word(seed, place[0], place[1])
    softmax = (row[token], inverse(temperature))
    if top_k > 0 or top_p < 1:
        return draw_ranked(row, tops, softmax, (top_k, top_p, min_p), word)
    return draw(row, tops, softmax, min_p, word)


@njit
def sample_rows(
    logits: Any,
    logit_seq: Any,
    logit_target: Any,
    filters: Any,
    random: Any,
    token_ids: Any,
    rows: Any,
) -> None:
    """Set token_ids of the sequences that sample in the rows [first, last)."""
    temperature, top_k, top_p, min_p = filters
    seeds, group_index, output_position = random
    for i in range(*rows):
        if logit_target[i] < 0:
            seq = logit_seq[i]
            own = (temperature[seq], top_k[seq], top_p[seq], min_p[seq])
            place = (output_position[seq], group_index[seq])
            token_ids[seq] = sample_row(logits[i], own, seeds[seq], place)


SIGNATURE = (
    "void(f4[:,::1],i4[::1],i4[::1],f4[::1],i4[::1],f4[::1],f4[::1],i4[:,::1],i4[::1],i4[::1],i4[::1])"
)


@njit
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
    filters = (temperature, top_k, top_p, min_p)
    args = (logits, logit_seq, logit_target, filters, (seed, group_index, output_position), token_ids)
    parallel_for(sample_rows, logits.shape[0], num_chunks(logits.size, GRAIN), args)


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
