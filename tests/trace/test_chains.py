"""Hashes say that prefixes are equal, and nothing else."""

import numpy as np
from numpy.typing import NDArray

from cupaged.trace.chains import append_outputs, begin, create_chains, create_key, siphash
from cupaged.trace.varint import decode_ints


def values_of(prompt: list[int], key: NDArray[np.uint64], piece: int = 4) -> list[int]:
    values = np.zeros(len(prompt) // piece, np.int64)
    begin(create_chains(1, piece, key, with_text=False), 0, np.array(prompt, np.int32), values)
    return list(map(int, values))


def test_siphash_is_the_published_one() -> None:
    key = np.frombuffer(bytes(range(16)), np.uint64)

    assert int(siphash(key, np.frombuffer(bytes(range(8)), np.uint64))) == 0x93F5F5799A932462


def test_equal_prefixes_have_equal_values_up_to_where_they_part() -> None:
    key = create_key()

    one, other = values_of([*range(12)], key), values_of([*range(8), 9, 9, 9, 9], key)

    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert len(set(one)) == 3


def test_a_piece_counts_with_all_that_is_before_it() -> None:
    key = create_key()

    assert values_of([1, 2, 3, 4, 5, 6, 7, 8], key)[1] != values_of([5, 6, 7, 8], key)[0]


def test_another_key_gives_other_values() -> None:
    assert values_of([*range(8)], create_key()) != values_of([*range(8)], create_key())


def test_a_token_at_a_time_is_the_same_as_all_at_once() -> None:
    key = create_key()
    chains = create_chains(2, 4, key, with_text=False)
    begin(chains, 1, np.arange(6, dtype=np.int32), np.empty(1, np.int64))
    chains.arrival[1], chains.seq_index[1] = 70, 2
    rows, one, out = np.array([1], np.int32), np.ones(1, np.int32), np.empty(30, np.uint8)
    written: list[int] = []

    for token_id in range(6, 12):
        size = append_outputs(chains, rows, one, np.array([[token_id]], np.int32), out)
        written += decode_ints(out[:size].tobytes())

    values = values_of([*range(12)], key)
    assert written == [70, 2, values[1], 70, 2, values[2]]
    assert chains.length[1] == 6


def test_a_row_that_had_another_prompt_begins_anew() -> None:
    key = create_key()
    chains, values = create_chains(1, 4, key, with_text=False), np.empty(2, np.int64)
    begin(chains, 0, np.array([9, 9, 9, 9, 9, 9], np.int32), values)

    begin(chains, 0, np.arange(8, dtype=np.int32), values)

    assert list(map(int, values)) == values_of([*range(8)], key)
    assert chains.num_pending[0] == 0


def test_with_text_a_value_is_the_token() -> None:
    chains = create_chains(1, 1, create_key(), with_text=True)
    values, out = np.empty(3, np.int64), np.empty(30, np.uint8)

    begin(chains, 0, np.array([5, 6, 7], np.int32), values)
    size = append_outputs(chains, np.zeros(1, np.int32), np.ones(1, np.int32), np.array([[8]], np.int32), out)

    assert values.tolist() == [5, 6, 7]
    assert decode_ints(out[:size].tobytes()) == [-1, 0, 8]
