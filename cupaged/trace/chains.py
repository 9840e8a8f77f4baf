"""Chains: what a trace keeps of tokens, a keyed hash of the prefix at the end of every piece.

SipHash-2-4 with a random key that nobody stores: equal prefixes have equal hashes within a trace, and a hash
says nothing else of what it was made from. With text, a piece is one token and its value is the token.
"""

import secrets
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.trace.varint import put

_SHOWN_BITS = 55  # of a hash in a trace: eight bytes as a number; a million prefixes collide once in 70,000


class Chains(NamedTuple):
    """Where the prefixes of the live sequences stand, by row."""

    key: NDArray[np.uint64]  # [2]
    with_text: bool
    chain: NDArray[np.uint64]  # [num_rows], hash of all whole pieces
    pending: NDArray[np.int32]  # [num_rows, piece], tokens behind them
    num_pending: NDArray[np.int32]  # [num_rows]
    length: NDArray[np.int32]  # [num_rows], tokens of output
    arrival: NDArray[np.int64]  # [num_rows], of the group
    index: NDArray[np.int32]  # [num_rows], of the sequence in its group
    serial: NDArray[np.int64]  # [num_rows], the scheduler's, when the row was last seen


def create_key() -> NDArray[np.uint64]:
    """Return a random key, [2]."""
    return np.frombuffer(secrets.token_bytes(16), np.uint64)


def create_chains(num_rows: int, piece: int, key: NDArray[np.uint64], *, with_text: bool) -> Chains:
    """Return empty chains; rows belong to no group."""
    return Chains(
        key=key,
        with_text=with_text,
        chain=np.zeros(num_rows, np.uint64),
        pending=np.zeros((num_rows, piece), np.int32),
        num_pending=np.zeros(num_rows, np.int32),
        length=np.zeros(num_rows, np.int32),
        arrival=np.full(num_rows, -1, np.int64),
        index=np.zeros(num_rows, np.int32),
        serial=np.full(num_rows, -1, np.int64),
    )


@njit_inner
def _rotate(word: np.uint64, bits: int) -> np.uint64:
    return np.uint64((word << np.uint64(bits)) | (word >> np.uint64(64 - bits)))


@njit_inner
def _rounds(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, count: int
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    for _ in range(count):
        v0 += v1
        v2 += v3
        v1 = _rotate(v1, 13) ^ v0
        v3 = _rotate(v3, 16) ^ v2
        v0 = _rotate(v0, 32) + v3
        v2 += v1
        v1 = _rotate(v1, 17) ^ v2
        v3 = _rotate(v3, 21) ^ v0
        v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@njit
def siphash(key: NDArray[np.uint64], words: NDArray[np.uint64]) -> np.uint64:
    """Return SipHash-2-4 of whole 64-bit words."""
    v0 = key[0] ^ np.uint64(0x736F6D6570736575)
    v1 = key[1] ^ np.uint64(0x646F72616E646F6D)
    v2 = key[0] ^ np.uint64(0x6C7967656E657261)
    v3 = key[1] ^ np.uint64(0x7465646279746573)
    for word in words:
        v3 ^= word
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 2)
        v0 ^= word
    last = np.uint64((8 * words.size) & 255) << np.uint64(56)
    v3 ^= last
    v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 2)
    v0 ^= last
    v2 ^= np.uint64(255)
    v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 4)
    return np.uint64(v0 ^ v1 ^ v2 ^ v3)


@njit_inner
def push(chains: Chains, row: int, token_id: int) -> int:
    """Append a token; return the value of the piece that it completes, else -1."""
    pending = chains.pending[row]
    if chains.with_text:
        return token_id
    n = chains.num_pending[row]
    pending[n] = token_id
    chains.num_pending[row] = n + 1
    if n + 1 < pending.size:
        return -1
    words = np.empty(1 + pending.size, np.uint64)
    words[0] = chains.chain[row]
    for i in range(pending.size):
        words[1 + i] = np.uint64(pending[i])
    chains.chain[row] = siphash(chains.key, words)
    chains.num_pending[row] = 0
    return np.int64(chains.chain[row] >> np.uint64(64 - _SHOWN_BITS))


@njit
def begin(chains: Chains, row: int, prompt: NDArray[np.int32], values: NDArray[np.int64]) -> int:
    """Set a row to the end of a prompt; write the values of its pieces, return how many."""
    chains.chain[row] = np.uint64(0)
    chains.num_pending[row] = chains.length[row] = 0
    count = 0
    for token_id in prompt:
        value = push(chains, row, token_id)
        if value >= 0:
            values[count] = value
            count += 1
    return count


@njit
def append_outputs(
    chains: Chains,
    rows: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> int:
    """Append a step's tokens; write (arrival, index, value) of each piece that is whole, return the bytes.

    num_tokens[i] of token_ids[i] belong to rows[i]; an arrival is written as the difference to the last one.
    """
    length, arrival, index = chains.length, chains.arrival, chains.index
    at = 0
    before = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        for j in range(num_tokens[i]):
            value = push(chains, row, token_ids[i, j])
            length[row] += 1
            if value >= 0:
                at = put(out, at, arrival[row] - before)
                before = arrival[row]
                at = put(out, at, index[row])
                at = put(out, at, value)
    return at
