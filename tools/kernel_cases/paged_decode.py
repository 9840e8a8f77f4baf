"""Cases of paged_decode.cu."""

import numpy as np

from cupaged.kernels.launch import Array, Device
from cupaged.kernels.paged_decode import (
    blocks_at_once,
    num_splits,
    paged_decode_cuda,
    paged_decode_workspace,
)
from tools.kernel_cases.case import ATTENTION, DTYPES, Arrays, Attention, Case, Maker
from tools.kernel_cases.paged import Heads, Paging


def paged_decode(
    heads: Heads,
    paging: Paging,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
    num_layers: int = 1,
    max_blocks: int | None = None,
) -> Case:
    """Return one new token a sequence, each of which has a length of `paging`.

    With max_blocks as in a CUDA graph: room for twice the splits, and for sequences of twice the length.
    """
    element, num_heads, num_kv_heads, head_dim = heads
    seq_lens = np.array(paging.seq_lens, np.int32)
    num_seqs, new = len(seq_lens), (1,) * len(seq_lens)
    room = 1 if max_blocks is None else 2
    max_splits = room * num_splits(seq_lens, paging.window)
    max_seq_len = room * int(seq_lens.max())
    num_floats = paged_decode_workspace(max_splits, num_seqs, num_heads, head_dim)
    options = {"window": paging.window, "softcap": softcap, "sinks": sinks, "graph": max_blocks}
    lengths = f"{num_seqs}x{paging.seq_lens[0]}" if len(set(paging.seq_lens)) == 1 else f"{num_seqs}seqs"

    def make(maker: Maker) -> dict[str, Array]:
        arrays = {
            "qkv": maker.normal((num_seqs, num_heads + 2 * num_kv_heads, head_dim), DTYPES[element]),
            "pool": paging.cache(maker, heads, num_layers, new),
            "block_tables": maker.array(paging.tables(new)),
            "seq_lens": maker.array(seq_lens),
            "out": maker.unwritten((num_seqs, num_heads * head_dim), DTYPES[element]),
            "workspace": maker.unwritten((num_floats,)),
        }
        return arrays | ({"sinks": maker.normal((num_heads,))} if sinks else {})

    def launch(device: Device, arrays: Arrays) -> None:
        paged_decode_cuda(
            device,
            arrays["qkv"][:, :num_heads],
            arrays["pool"],
            num_layers - 1,
            arrays["block_tables"],
            seq_lens=arrays["seq_lens"],
            scale=head_dim**-0.5,
            sliding_window=paging.window,
            softcap=softcap,
            sinks=arrays.get("sinks"),
            out=arrays["out"],
            workspace=arrays["workspace"],
            max_splits=max_splits,
            max_seq_len=max_seq_len,
            max_blocks=max_blocks,
        )

    return Case(
        name="-".join(
            [f"paged_decode-{heads}-{lengths}", *(name for name, value in options.items() if value)]
        ),
        make=make,
        launch=launch,
        outputs=("out",),
        variables={
            "seq_lens": paging.seq_lens,
            "num_seqs": num_seqs,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "max_seq_len": max_seq_len,
            "window": paging.window or 2**31 - 1,
        },
        tolerance=ATTENTION[element],
        attention=Attention(element, num_seqs, 1, paging.seq_lens[0], num_heads, num_kv_heads, head_dim),
    )


LENGTHS = (1, 17, 700, 0, 513)  # one split and several, padding between
GOLDENS = [
    paged_decode(Heads("bf16", 8, 2, 64), Paging(LENGTHS)),
    paged_decode(Heads("f16", 4, 4, 80), Paging(LENGTHS, block_size=32), sinks=True),
    paged_decode(Heads("bf16", 16, 1, 128), Paging(LENGTHS, window=300), softcap=20.0, num_layers=2),
    paged_decode(Heads("bf16", 8, 2, 64), Paging(LENGTHS), max_blocks=3),
]
TRAFFIC = [
    paged_decode(Heads("bf16", 8, 2, 128), Paging((1024, 1024))),
    paged_decode(Heads("bf16", 4, 2, 80), Paging((97, 640))),
    paged_decode(Heads("bf16", 8, 2, 128), Paging((1024, 1024)), max_blocks=3),
    paged_decode(Heads("bf16", 8, 2, 128), Paging((4000, 3000), window=650)),
]
LLAMA_8B = Heads("bf16", 32, 8, 128)
NUM_SMS = 132  # of an H200
TIMED = [  # by batch x context
    *(
        paged_decode(LLAMA_8B, Paging((length,) * num_seqs))
        for num_seqs, length in ((1, 8192), (8, 8192), (64, 4096), (256, 1024))
    ),
    paged_decode(LLAMA_8B, Paging((1024,) * 256), max_blocks=blocks_at_once(NUM_SMS, LLAMA_8B.head_dim)),
]
INSTANCES = [
    paged_decode(Heads(element, 32, 8, head_dim), Paging((1024,)))
    for element in ("bf16", "f16")
    for head_dim in (64, 80, 96, 128, 192, 256)
]
