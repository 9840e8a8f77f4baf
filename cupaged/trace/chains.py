"""Chains: what a trace keeps of tokens, a keyed hash of the prefix at the end of every piece.

SipHash-2-4 with a random key that nobody stores: equal prefixes have equal hashes within a trace, and a hash
says nothing else of what it was made from. With text, a piece is one token and its value is the token.
"""

import secrets
from typing import Any, NamedTuple

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
    seq_index: NDArray[np.int32]  # [num_rows], in the group
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
        seq_index=np.zeros(num_rows, np.int32),
        serial=np.full(num_rows, -1, np.int64),
    )


@njit_inner
def _rotate(word: Any, bits: int) -> Any:
    return np.uint64((word << np.uint64(bits)) | (word >> np.uint64(64 - bits)))


@njit_inner
def _rounds(v0: Any, v1: Any, v2: Any, v3: Any, count: int) -> tuple[Any, Any, Any, Any]:
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
def siphash(key: NDArray[np.uint64], words: NDArray[np.uint64]) -> Any:
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


@njit
def hash_piece(key: NDArray[np.uint64], chain: NDArray[np.uint64], row: int, piece: NDArray[np.int32]) -> int:
    """Move a row's chain on by a whole piece; return its value."""
    words = np.empty(1 + piece.size, np.uint64)
    words[0] = chain[row]
    for i in range(piece.size):
        words[1 + i] = np.uint64(piece[i])
    chain[row] = siphash(key, words)
    value: int = np.int64(chain[row] >> np.uint64(64 - _SHOWN_BITS))
    return value


@njit
def begin(chains: Chains, row: int, prompt: NDArray[np.int32], values: NDArray[np.int64]) -> None:
    """Set a row to the end of a prompt; write the values of its whole pieces."""
    key, chain, pending = chains.key, chains.chain, chains.pending
    piece = pending.shape[1]
    chain[row] = np.uint64(0)
    chains.length[row] = 0
    end = prompt.size // piece * piece
    for i in range(0, end, piece):
        if chains.with_text:
            values[i] = prompt[i]
        else:
            values[i // piece] = hash_piece(key, chain, row, prompt[i : i + piece])
    chains.num_pending[row] = prompt.size - end
    pending[row, : prompt.size - end] = prompt[end:]


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
    key, chain, pending, num_pending = chains.key, chains.chain, chains.pending, chains.num_pending
    length, arrival, seq_index, with_text = chains.length, chains.arrival, chains.seq_index, chains.with_text
    piece = pending.shape[1]
    at = 0
    before = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        length[row] += num_tokens[i]
        for j in range(num_tokens[i]):
            pending[row, num_pending[row]] = token_ids[i, j]
            num_pending[row] += 1
            if num_pending[row] == piece:
                num_pending[row] = 0
                at = put(out, at, arrival[row] - before)
                before = arrival[row]
                at = put(out, at, seq_index[row])
                value = np.int64(token_ids[i, j]) if with_text else hash_piece(key, chain, row, pending[row])
                at = put(out, at, value)
    return at
