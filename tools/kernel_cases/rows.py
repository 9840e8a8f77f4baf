"""Cases of rows.cu."""

from collections.abc import Callable

import numpy as np

from cupaged.kernels.launch import Array, Device, ceil_div
from cupaged.kernels.rows import (
    copy_blocks_cuda,
    gather_rows_cuda,
    load_last_tokens_cuda,
    store_last_tokens_cuda,
)
from tools.kernel_cases.case import DTYPES, Arrays, Case, Maker

NUM_ROWS = 12  # of last_token


def gather_rows(element: str, num_rows: int, size: int, *, num_given: int) -> Case:
    """Return rows gathered from num_given, one in eight of them padding."""

    def make(maker: Maker) -> dict[str, Array]:
        index = np.arange(num_rows, dtype=np.int32) * 7919 % num_given
        index[::8] = -1
        return {
            "x": maker.normal((num_given, size), DTYPES[element]),
            "index": maker.array(index),
            "out": maker.unwritten((num_rows, size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        gather_rows_cuda(device, arrays["x"], arrays["index"], arrays["out"])

    return Case(
        name=f"gather_rows-{element}-{num_rows}x{size}",
        make=make,
        launch=launch,
        outputs=("out",),
        variables={
            "num_rows": num_rows - ceil_div(num_rows, 8),
            "row_bytes": size * np.dtype(DTYPES[element]).itemsize,
        },
    )


def copy_blocks(num_pairs: int, block_size: int) -> Case:
    """Return copies within one pool of a head of 64, from its first blocks to its last."""

    def make(maker: Maker) -> dict[str, Array]:
        pairs = np.arange(2 * num_pairs, dtype=np.int32).reshape(2, num_pairs).T
        shape = (2 * num_pairs, 1, 2, 1, block_size, 64)
        return {"pool": maker.normal(shape, DTYPES["bf16"]), "pairs": maker.array(pairs)}

    def launch(device: Device, arrays: Arrays) -> None:
        copy_blocks_cuda(device, arrays["pool"], arrays["pool"], arrays["pairs"])

    return Case(
        name=f"copy_blocks-{num_pairs}x{block_size}",
        make=make,
        launch=launch,
        outputs=("pool",),
        variables={"num_pairs": num_pairs, "block_bytes": 2 * block_size * 64 * 2},
    )


def make_last_tokens(maker: Maker) -> dict[str, Array]:
    """Return a step of five sequences: some sample, some begin with their last token, one is padding."""
    return {
        "rows": maker.array(np.array([8, 3, -1, 0, 5], np.int32)),
        "flags": maker.array(np.array([2, 1, 3, 3, 0], np.int32)),
        "query_start": maker.array(np.array([0, 1, 4, 5, 6, 8], np.int32)),
        "last_token": maker.integers(100, 999, (NUM_ROWS,)),
        "input_ids": maker.integers(0, 99, (8,)),
        "token_ids": maker.integers(1000, 9999, (5,)),
    }


def last_tokens(kernel: str, launch: Callable[[Device, Arrays], None], output: str) -> Case:
    """Return a case of load_last_tokens or store_last_tokens."""
    return Case(
        name=kernel,
        make=make_last_tokens,
        launch=launch,
        outputs=(output,),
        variables={"num_seqs": 5},
    )


def load(device: Device, arrays: Arrays) -> None:
    """Launch load_last_tokens."""
    names = ("rows", "flags", "query_start", "last_token", "input_ids")
    load_last_tokens_cuda(device, *(arrays[name] for name in names))


def store(device: Device, arrays: Arrays) -> None:
    """Launch store_last_tokens."""
    names = ("rows", "flags", "token_ids", "last_token")
    store_last_tokens_cuda(device, *(arrays[name] for name in names))


GOLDENS = [
    gather_rows("bf16", 5, 72, num_given=9),
    copy_blocks(2, 16),
    last_tokens("load_last_tokens", load, "input_ids"),
    last_tokens("store_last_tokens", store, "last_token"),
]
TRAFFIC = [gather_rows("bf16", 16, 4096, num_given=97), copy_blocks(3, 16)]
TIMED = [gather_rows("bf16", 8192, 4096, num_given=128_256)]
INSTANCES: list[Case] = []
