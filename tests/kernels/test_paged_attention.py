"""The attention twin against dense float64, and the sameness of a query's bits wherever it is computed."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.kernels.attention_plan import Heads, Mask, plan_units
from cupaged.kernels.tile import SPLIT
from tests.kernels.paging import PagedCase

ODD_LENS = (1, 15, 16, 17, 97, SPLIT - 1, SPLIT, SPLIT + 1, 1000)
LONG = 3 * SPLIT + 9  # alone it is divided, among others it is not
KV_DTYPES = [np.float32, ml_dtypes.bfloat16]
HEADS = [(4, 4, 64), (9, 3, 64), (8, 2, 80), (8, 1, 96), (2, 1, 128), (3, 1, 8), (4, 2, 10), (2, 1, 256)]


def assert_close(out: Any, expected: Any) -> None:
    error = np.abs(out - expected)
    assert error.max() < 3e-6, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_equals_dense_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
) -> None:
    case = PagedCase((17, 97, 200), num_heads, num_kv_heads, head_dim, kv_dtype=kv_dtype)

    outs = case.attend((0, 0, 17), (1, 0, 97), (2, 0, 200))

    for seq, out in enumerate(outs):
        assert_close(out, case.dense(seq))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_of_odd_lengths_equals_dense_attention(block_size: int) -> None:
    case = PagedCase(ODD_LENS, 9, 3, 64, block_size)

    outs = case.attend(*((seq, n - 1, n) for seq, n in enumerate(ODD_LENS)))

    for seq, out in enumerate(outs):
        assert_close(out[0], case.dense(seq)[-1])


@pytest.mark.parametrize("sliding_window", [1, 15, 16, 17, 128, 129, 300])
def test_sliding_window_cuts_as_dense_attention_does(sliding_window: int) -> None:
    case = PagedCase((333,), 4, 2, 16, sliding_window=sliding_window)

    assert_close(case.prefill(), case.dense())


@pytest.mark.parametrize("sliding_window", [1, 2, 3, 4])
def test_queries_of_a_tile_may_see_no_token_in_common(sliding_window: int) -> None:
    case = PagedCase((SPLIT + 20,), 2, 2, 20, sliding_window=sliding_window)

    assert_close(case.prefill(), case.dense())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("sliding_window", [1, 17, 50, 127, 130, 300])
def test_tables_without_what_left_the_window_give_dense_attention(
    sliding_window: int, block_size: int, kv_dtype: Any
) -> None:
    case = PagedCase((700,), 4, 2, 16, block_size, kv_dtype, sliding_window=sliding_window)
    chunks = [(0, 699, 700), (0, 384, 385), (0, 383, 384), (0, 301, 700), (0, 130, 141)]
    expected = case.dense()

    for chunk in chunks:
        assert_close(case.attend(chunk)[0], expected[chunk[1] : chunk[2]])


@pytest.mark.parametrize("chunk", [(0, 144, 150), (0, 149, 150), (0, 30, 33)])
def test_tables_are_read_at_the_window_alone(chunk: tuple[int, int, int]) -> None:
    case = PagedCase((150,), 2, 1, 4, sliding_window=20)

    case.attend(chunk)  # its tables notice, in the interpreter


def test_softcap_and_sinks_equal_dense_attention() -> None:
    sinks = np.array([-1.0, 0.5, 3.0, 20.0], np.float32)
    case = PagedCase((150,), 4, 2, 32, softcap=2.5, sinks=sinks, sliding_window=40)

    assert_close(case.prefill(), case.dense())


def test_large_scores_do_not_overflow() -> None:
    case = PagedCase((40,), 2, 2, 16)
    case.q[0] *= 1000

    error = np.abs(case.prefill() - case.dense()).max()

    assert error < 1e-3


@pytest.mark.parametrize("token", [39, 33, 17])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (1, 1), (3, 1), (5, 1), (8, 2)])
@pytest.mark.parametrize("sliding_window", [0, 8])
def test_value_that_a_query_does_not_see_cannot_spoil_it(
    token: int, num_heads: int, num_kv_heads: int, sliding_window: int
) -> None:
    case = PagedCase((40,), num_heads, num_kv_heads, 20, sliding_window=sliding_window)
    unseen = np.arange(40) < token
    if sliding_window:
        unseen |= np.arange(40) >= token + sliding_window
    expected = case.dense()
    case.v[0][token] = np.inf
    case.place(np.random.default_rng(1))

    out = case.prefill()

    assert_close(out[unseen], expected[unseen])
    assert not np.isfinite(out[~unseen]).any()


def test_broken_key_shows_in_every_query_that_sees_it_and_in_no_other() -> None:
    case = PagedCase((40,), 2, 1, 16, sliding_window=8)
    case.k[0][20] = np.nan
    case.place(np.random.default_rng(1))

    broken = np.isnan(case.prefill()).all((1, 2))

    assert np.flatnonzero(broken).tolist() == list(range(20, 28))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (9, 3, 80), (4, 1, 96), (8, 1, 128), (3, 1, 10)]
)
def test_query_has_the_same_bits_in_decode_and_prefill(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
) -> None:
    case = PagedCase((300,), num_heads, num_kv_heads, head_dim, kv_dtype=kv_dtype)

    prefill = case.prefill()

    for position in (0, 1, 15, 16, 17, 97, SPLIT - 1, SPLIT, SPLIT + 1, 299):
        (decode,) = case.attend((0, position, position + 1))
        assert np.array_equal(decode[0], prefill[position]), position


SINKS = np.array([-1.0, 0.5, 3.0, 20.0, 0.0, -9.0], np.float32)


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 50}, {"softcap": 3.0, "sliding_window": 300}, {"sinks": SINKS}]
)
def test_query_has_the_same_bits_for_every_chunk_size(options: dict[str, Any]) -> None:
    case = PagedCase((1000,), 6, 2, 16, **options)
    whole = case.prefill()

    for size in (7, 97, 128, 500):
        starts = range(0, 1000, size)
        parts = [case.attend((0, start, min(start + size, 1000)))[0] for start in starts]
        assert np.array_equal(np.concatenate(parts), whole), size


def test_query_has_the_same_bits_among_neighbours() -> None:
    case = PagedCase((97, 300, 17, 1, 260), 6, 2, 64)

    together = case.attend((3, 0, 1), (1, 299, 300), (0, 0, 97), (4, 100, 260), (2, 3, 17))

    assert np.array_equal(together[0], case.prefill(3))
    assert np.array_equal(together[1], case.prefill(1)[299:])
    assert np.array_equal(together[2], case.prefill(0))
    assert np.array_equal(together[3], case.prefill(4)[100:])
    assert np.array_equal(together[4], case.prefill(2)[3:])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_query_has_the_same_bits_for_every_block_size_and_placement(block_size: int) -> None:
    reference = PagedCase((277,), 6, 2, 64).prefill()
    case = PagedCase((277,), 6, 2, 64, block_size)

    for seed in range(2):
        case.place(np.random.default_rng(seed))
        assert np.array_equal(case.prefill(), reference)


def is_divided(case: PagedCase, *chunks: tuple[int, int, int]) -> bool:
    """Return whether a step's units are divided into the splits of their tokens."""
    starts = np.cumsum([0, *(stop - start for _, start, stop in chunks)], dtype=np.int32)
    lens = np.array([stop for *_, stop in chunks], np.int32)
    heads = Heads(case.num_kv_heads, case.num_heads // case.num_kv_heads, case.head_dim)
    plan = plan_units(starts, lens, Mask(case.scale, case.sliding_window, case.softcap), heads)
    return bool(plan.slots > 0)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 700, "sinks": SINKS}, {"softcap": 3.0}])
def test_query_has_the_same_bits_whether_its_splits_are_divided(options: dict[str, Any]) -> None:
    lens = (LONG, *(200,) * 30)
    case = PagedCase(lens, 6, 2, 128, **options)
    chunks = [(seq, n - 1, n) for seq, n in enumerate(lens)]
    assert is_divided(case, chunks[0])
    assert not is_divided(case, *chunks)

    (alone,) = case.attend(chunks[0])
    among = case.attend(*chunks)

    assert np.array_equal(alone, among[0])
    assert_close(alone[0], case.dense(0, LONG - 1)[0])


def test_chunk_that_is_divided_equals_dense_attention() -> None:
    case = PagedCase((2000,), 6, 2, 128)
    assert is_divided(case, (0, 1990, 2000))

    assert_close(case.attend((0, 1990, 2000))[0], case.dense(0, 1990))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_threads_change_no_bits(kv_dtype: Any) -> None:
    case = PagedCase((LONG, 300, 97, 1), 6, 2, 64, kv_dtype=kv_dtype)
    chunks = [(0, LONG - 1, LONG), (1, 100, 300), (2, 0, 97), (3, 0, 1)]

    one = case.attend(*chunks)
    two = case.attend(*chunks, num_threads=2)

    assert all(map(np.array_equal, one, two))


@pytest.mark.parametrize("head_dim", [20, 64])
def test_bfloat16_result_is_the_float32_one_rounded(head_dim: int) -> None:
    case = PagedCase((97, LONG), 6, 2, head_dim, kv_dtype=ml_dtypes.bfloat16)
    chunks = [(0, 30, 97), (1, LONG - 1, LONG)]

    exact = case.attend(*chunks)
    rounded = case.attend(*chunks, out_dtype=ml_dtypes.bfloat16)

    for out, expected in zip(rounded, exact, strict=True):
        assert np.array_equal(out, expected.astype(ml_dtypes.bfloat16))
