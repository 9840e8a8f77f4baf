"""Pick the next token of each row: bans, temperature, top-k, top-p, min-p, then one Philox number.

Tokens are ranked by logit, the lower id first among equals, and every filter keeps a prefix of that ranking:
top-k the first k; top-p the shortest prefix that holds at least top_p of the probability that top-k left;
min-p those at least min_p times as likely as the first. The uniform number then walks the kept tokens by id.
NaN counts as minus infinity; a row without a finite maximum takes the greedy token.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.bits import exp
from cupaged.kernels.philox import uniform
from cupaged.kernels.tree import BLOCK, tree_sum

GREEDY_TEMPERATURE = 1e-5  # below it a row takes the most likely token, as in vLLM
RADIX_SHIFTS = (21, 10, 0)  # the ranking is found by 11, 11 and 10 bits of the logits
NUM_BINS = 2048


@njit
def clean(row: Any, banned: Any, z: Any) -> None:
    """Copy a row to z, padded; what must not be sampled becomes minus infinity."""
    for j in range(row.shape[0]):
        z[j] = row[j] if row[j] == row[j] else np.float32(-np.inf)
    z[row.shape[0] :] = np.float32(-np.inf)
    for j in range(banned.shape[0]):
        z[banned[j]] = np.float32(-np.inf)


@njit
def find_greedy(z: Any, banned: Any) -> int:
    """Return the lowest id of the maximum; where nothing is finite, the lowest that is not banned."""
    best, token = np.float32(-np.inf), -1
    for j in range(z.shape[0]):
        if z[j] > best:
            best, token = z[j], j
    if token < 0:
        token = 0
        while (banned == token).any():
            token += 1
    return token


@njit
def rank_key(bits: Any) -> Any:
    """Return a uint32 that orders like the float32 of these bits."""
    if bits >> np.uint32(31):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))


@njit
def find_cut(z: Any, weights: Any, max_count: int, max_mass: float) -> Any:
    """Find the shortest prefix of the ranking of what has weight with max_count tokens or max_mass of it.

    Return the key of its last token and how many tokens of that key belong to it.
    """
    bits = z.view(np.uint32)
    counts, masses = np.empty(NUM_BINS, np.int64), np.empty(NUM_BINS, np.float64)
    count, mass, prefix, last = 0, 0.0, np.uint32(0), 0
    for level in range(3):
        shift = np.uint32(RADIX_SHIFTS[level])
        above = np.uint32(32 if level == 0 else RADIX_SHIFTS[level - 1])
        mask = np.uint32((np.uint64(1) << np.uint64(above - shift)) - np.uint64(1))
        counts[:], masses[:] = 0, 0.0
        for j in range(z.shape[0]):
            key = rank_key(bits[j])
            if weights[j] > 0 and (level == 0 or (key >> above) == prefix):
                place = np.int64((key >> shift) & mask)
                counts[place] += 1
                masses[place] += weights[j]
        last = np.int64(mask)
        while last > 0 and count + counts[last] < max_count and mass + masses[last] < max_mass:
            count += counts[last]
            mass += masses[last]
            last -= 1
        prefix = np.uint32((prefix << np.uint32(above - shift)) | np.uint32(last))
    ties = min(counts[last], max_count - count)
    if ties > 0 and masses[last] > 0.0:
        weight = masses[last] / counts[last]
        ties = np.int64(min(np.float64(ties), max(1.0, np.ceil((max_mass - mass) / weight))))
    return prefix, ties


@njit
def keep_prefix(z: Any, weights: Any, cut: Any) -> None:
    """Take the weight of all tokens that rank after the cut."""
    bits = z.view(np.uint32)
    key_last, ties = cut
    for j in range(z.shape[0]):
        key = rank_key(bits[j])
        if key == key_last and ties > 0:
            ties -= 1
        elif key <= key_last:
            weights[j] = np.float32(0.0)


@njit
def total_weight(weights: Any) -> float:
    """Return the sum of the weights in float64."""
    scratch = np.empty(BLOCK // 2, np.float32)
    total = 0.0
    for start in range(0, weights.shape[0], BLOCK):
        total += np.float64(tree_sum(weights[start : start + BLOCK], scratch))
    return total


@njit
def pick(weights: Any, u: float) -> int:
    """Return the id at which the running sum of the weights passes u times their total."""
    scratch = np.empty(BLOCK // 2, np.float32)
    target, mass, token = u * total_weight(weights), 0.0, 0
    for start in range(0, weights.shape[0], BLOCK):
        block = np.float64(tree_sum(weights[start : start + BLOCK], scratch))
        if block > 0.0 and mass + block > target:
            for j in range(start, start + BLOCK):
                if weights[j] > 0:
                    token = j  # the last one if rounding lets the target slip through
                    mass += np.float64(weights[j])
                    if mass > target:
                        break
            return token
        mass += block
    return token


@njit
def draw(z: Any, weights: Any, best: int, filters: Any, u: float) -> int:
    """Return the token that u picks from the softmax of z / temperature under the filters."""
    temperature, top_k, top_p, min_p = filters
    for j in range(z.shape[0]):
        weights[j] = exp((z[j] - z[best]) / temperature)
    if top_k > 0:
        keep_prefix(z, weights, find_cut(z, weights, top_k, np.inf))
    if top_p < 1:
        mass = np.float64(top_p) * total_weight(weights)
        keep_prefix(z, weights, find_cut(z, weights, z.shape[0], mass))
    if min_p > 0:
        for j in range(z.shape[0]):
            weights[j] = weights[j] if weights[j] >= min_p else np.float32(0.0)
    return pick(weights, u)


_SIGNATURE = (
    "void(f4[:,::1],i4[::1],i4[::1],f4[::1],i4[::1],f4[::1],f4[::1],i4[:,::1],i4[::1],i4[::1],"
    "i4[::1],i4[::1],f4[:,:,::1],i4[::1])"
)


@njit(signatures=[_SIGNATURE], parallel=True)
def sample_cpu(
    logits: Any,  # float32[n, vocab_size], left as they are
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], -1 = sample here
    temperature: Any,  # float32[num_seqs], and so the following
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,  # int32[num_seqs, 2]
    group_index: Any,
    output_position: Any,
    banned_start: Any,  # int32[num_seqs + 1]
    banned: Any,
    workspace: Any,  # float32[lanes, 2, vocab_size padded to BLOCK]
    token_ids: Any,  # int32[num_seqs]
) -> None:
    """Set token_ids of the sequences that sample in these rows."""
    for lane in prange(workspace.shape[0]):
        z, weights = workspace[lane, 0], workspace[lane, 1]
        for i in range(lane, logits.shape[0], workspace.shape[0]):
            if logit_target[i] < 0:
                seq = logit_seq[i]
                bans = banned[banned_start[seq] : banned_start[seq + 1]]
                clean(logits[i], bans, z)
                token = find_greedy(z, bans)
                if temperature[seq] >= GREEDY_TEMPERATURE and abs(z[token]) < np.inf:
                    u = uniform(seed[seq], output_position[seq], group_index[seq])
                    filters = (temperature[seq], top_k[seq], top_p[seq], min_p[seq])
                    token = draw(z, weights, token, filters, u)
                token_ids[seq] = token
