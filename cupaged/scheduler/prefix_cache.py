"""The prefix cache: which full blocks hold the keys and values of which tokens; njit over arrays.

An entry is a block, the tokens it holds, and the entry that it continues. It is found by a hash chained from
block to block, and believed by comparison: token ids, salt, and the parent's serial, which no other entry
ever has. So equal hashes cost time, never a wrong block. Entries outlive the sequences that made them, until
their block is evicted (allocator.py).
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner

ROOT = 0  # serial of the empty prefix
NO_ENTRY = 0  # serial of a block that is no entry
EMPTY = -1  # in slots
MAX_SALTS = 1 << 13  # known at a time; whose id is forgotten gets a new one, and finds nothing

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, odd
_SHIFT = np.uint64(32)


ENTRY = np.dtype(
    [
        ("serial", np.int64),  # NO_ENTRY where the block is none
        ("parent", np.int64),  # serial of the entry it continues, or ROOT
        ("salt", np.int64),  # whose prefixes it is among
        ("hash", np.uint64),
    ]
)


class PrefixCache(NamedTuple):
    """Entries by block, and an open-addressing hash table of them."""

    slots: NDArray[np.int32]  # [capacity], a block or EMPTY; linear probing; [0] if caching is off
    at: Any  # ENTRY[total], records
    tokens: NDArray[np.int32]  # [total, block_size]
    last_serial: NDArray[np.int64]  # [1], the serials up to it have been used
    hash_mask: np.uint64  # bits of the hash that count; 0 makes all hashes equal


def create_prefix_cache(total: int, block_size: int, *, enabled: bool) -> PrefixCache:
    """Return a cache without entries for `total` blocks."""
    if not enabled:
        total = 0
    return PrefixCache(
        slots=np.full(2 << max(total - 1, 0).bit_length() if total else 0, EMPTY, np.int32),
        at=np.zeros(total, ENTRY).view(np.recarray),
        tokens=np.zeros((total, block_size), np.int32),
        last_serial=np.zeros(1, np.int64),
        hash_mask=np.uint64(2**64 - 1),
    )


@njit_inner
def mix(value: Any, word: Any) -> Any:
    """Return the hash `value` with one more word in it."""
    value = (value ^ word) * _MULTIPLIER
    return value ^ (value >> _SHIFT)


@njit_inner
def root_hash(salt: int) -> Any:
    """Return the hash of a salt's empty prefix."""
    return mix(np.uint64(0), np.uint64(salt))


@njit_inner
def chain_hash(cache: PrefixCache, parent: Any, tokens: NDArray[np.int32]) -> Any:
    """Return the hash of a block that continues one of hash `parent`."""
    value = parent
    for i in range(tokens.size):
        value = mix(value, np.uint64(tokens[i]))
    return value & cache.hash_mask


@njit_inner
def find_entry(cache: PrefixCache, value: Any, parent: int, salt: int, tokens: NDArray[np.int32]) -> int:
    """Return the block of exactly this content, or EMPTY."""
    slots, held = cache.slots, cache.tokens
    place = np.int64(value & np.uint64(slots.size - 1))
    while slots[place] != EMPTY:
        block = slots[place]
        entry = cache.at[block]
        if entry.hash == value and entry.parent == parent and entry.salt == salt:
            same = True
            for i in range(tokens.size):
                same &= held[block, i] == tokens[i]
            if same:
                return int(block)
        place = (place + 1) & (slots.size - 1)
    return EMPTY


@njit_inner
def insert_entry(
    cache: PrefixCache, block: int, value: Any, parent: int, salt: int, tokens: NDArray[np.int32]
) -> int:
    """Make the block an entry and return its serial."""
    slots = cache.slots
    place = np.int64(value & np.uint64(slots.size - 1))
    while slots[place] != EMPTY:
        place = (place + 1) & (slots.size - 1)
    slots[place] = block
    cache.last_serial[0] += 1
    entry = cache.at[block]
    entry.serial = cache.last_serial[0]
    entry.parent, entry.salt, entry.hash = parent, salt, value
    for i in range(tokens.size):
        cache.tokens[block, i] = tokens[i]
    return int(entry.serial)


@njit_inner
def remove_entry(cache: PrefixCache, block: int) -> None:
    """Forget the block's entry; those probed past it move up, so that no search ends too early."""
    slots, at = cache.slots, cache.at
    last = slots.size - 1
    gap = np.int64(at[block].hash & np.uint64(last))
    while slots[gap] != block:
        gap = (gap + 1) & last
    slots[gap] = EMPTY
    place = (gap + 1) & last
    while slots[place] != EMPTY:
        home = np.int64(at[slots[place]].hash & np.uint64(last))
        # It may fill the gap unless its home lies in (gap, place], cyclically.
        if (place - home) & last >= (place - gap) & last:
            slots[gap] = slots[place]
            slots[place] = EMPTY
            gap = place
        place = (place + 1) & last
    at[block].serial = NO_ENTRY


@njit_inner
def register_block(
    cache: PrefixCache, block: int, value: Any, parent: int, salt: int, tokens: NDArray[np.int32]
) -> int:
    """Make a written block findable by its hash `value`; return the serial that continuations name as parent.

    That is another block's where the same content is there already: the first one stays the entry.
    """
    if cache.at[block].serial != NO_ENTRY:
        return int(cache.at[block].serial)
    found = find_entry(cache, value, parent, salt, tokens)
    if found != EMPTY:
        return int(cache.at[found].serial)
    return int(insert_entry(cache, block, value, parent, salt, tokens))


@njit
def lookup_prefix(cache: PrefixCache, tokens: NDArray[np.int32], salt: int, found: NDArray[np.int32]) -> int:
    """Write the blocks of the longest cached prefix of `tokens` to `found`; return how many."""
    if cache.slots.size == 0:
        return 0
    block_size = cache.tokens.shape[1]
    parent, value = ROOT, root_hash(salt)
    for i in range(tokens.size // block_size):
        part = tokens[i * block_size : (i + 1) * block_size]
        value = chain_hash(cache, value, part)
        block = find_entry(cache, value, parent, salt, part)
        if block == EMPTY:
            return i
        found[i] = block
        parent = cache.at[block].serial
    return int(tokens.size // block_size)


class SaltIds:
    """Numbers for salts: equal ones have equal numbers, and no number ever stands for another salt."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[tuple[str, str], ...], int] = OrderedDict()
        self._num_given = 0

    def number(self, salts: tuple[tuple[str, str], ...]) -> int:
        """Return the salts' number; 0 for none."""
        if not salts:
            return 0
        number = self._ids.pop(salts, 0)
        if number == 0:
            self._num_given += 1
            number = self._num_given
            if len(self._ids) == MAX_SALTS:
                self._ids.popitem(last=False)
        self._ids[salts] = number
        return number
