"""Cases of paged_prefill.cu."""

import numpy as np

from cupaged.kernels.launch import Array, Device
from cupaged.kernels.paged_prefill import paged_prefill_cuda
from tools.kernel_cases.case import ATTENTION, DTYPES, Arrays, Attention, Case, Maker
from tools.kernel_cases.paged import Heads, Paging


def paged_prefill(
    heads: Heads, paging: Paging, num_new: tuple[int, ...], *, softcap: float = 0.0, sinks: bool = False
) -> Case:
    """Return so many new tokens of each sequence, the last of its length in `paging`; 0 = padding."""
    element, num_heads, num_kv_heads, head_dim = heads
    num_seqs, num_tokens = len(num_new), sum(num_new)
    query_start = np.cumsum((0, *num_new), dtype=np.int32)
    options = {"window": paging.window, "softcap": softcap, "sinks": sinks}
    same = len(set(num_new)) == 1
    lengths = f"{num_seqs}x{num_new[0]}" if same else f"{num_tokens}tokens"
    if paging.seq_lens[0] > num_new[0]:
        lengths += f"_of_{paging.seq_lens[0]}"

    def make(maker: Maker) -> dict[str, Array]:
        arrays = {
            "qkv": maker.normal((num_tokens, num_heads + 2 * num_kv_heads, head_dim), DTYPES[element]),
            "pool": paging.cache(maker, heads, 1, num_new),
            "block_tables": maker.array(paging.tables(num_new)),
            "query_start": maker.array(query_start),
            "seq_lens": maker.array(np.array(paging.seq_lens, np.int32)),
            "out": maker.unwritten((num_tokens, num_heads * head_dim), DTYPES[element]),
        }
        return arrays | ({"sinks": maker.normal((num_heads,))} if sinks else {})

    def launch(device: Device, arrays: Arrays) -> None:
        paged_prefill_cuda(
            device,
            arrays["qkv"][:, :num_heads],
            arrays["pool"],
            0,
            arrays["block_tables"],
            query_start=arrays["query_start"],
            seq_lens=arrays["seq_lens"],
            first_seq=0,
            scale=head_dim**-0.5,
            sliding_window=paging.window,
            softcap=softcap,
            sinks=arrays.get("sinks"),
            out=arrays["out"],
        )

    return Case(
        name="-".join(
            [f"paged_prefill-{heads}-{lengths}", *(name for name, value in options.items() if value)]
        ),
        make=make,
        launch=launch,
        outputs=("out",),
        variables={
            "seq_lens": paging.seq_lens,
            "query_lens": num_new,
            "num_seqs": num_seqs,
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "group": num_heads // num_kv_heads,
            "window": paging.window or 2**31 - 1,
        },
        tolerance=ATTENTION[element],
        attention=Attention(
            element, num_seqs, num_new[0], paging.seq_lens[0], num_heads, num_kv_heads, head_dim
        ),
    )


GOLDENS = [
    paged_prefill(Heads("bf16", 4, 2, 64), Paging((17, 0, 65)), (17, 0, 33)),
    paged_prefill(Heads("f16", 3, 1, 80), Paging((40,), block_size=32), (40,), sinks=True),
    paged_prefill(Heads("bf16", 2, 1, 128), Paging((97,), window=24), (49,), softcap=20.0),
    paged_prefill(Heads("bf16", 1, 1, 256), Paging((35,)), (19,)),
]
TRAFFIC = [
    paged_prefill(Heads("bf16", 8, 2, 128), Paging((128, 128)), (128, 128)),
    paged_prefill(Heads("bf16", 4, 1, 128), Paging((1024,)), (64,)),
    paged_prefill(Heads("bf16", 2, 1, 80), Paging((97,)), (33,)),
    paged_prefill(Heads("bf16", 4, 1, 128), Paging((2000,), window=150), (90,)),
]
# Prompts of Llama-3.1-8B's heads.
TIMED = [
    paged_prefill(Heads("bf16", 32, 8, 128), Paging((length,) * num_seqs), (length,) * num_seqs)
    for num_seqs, length in ((1, 8192), (8, 2048))
]
INSTANCES = [
    paged_prefill(Heads(element, 32, 8, head_dim), Paging((1024,)), (1024,))
    for element in ("bf16", "f16")
    for head_dim in (64, 80, 96, 128, 192, 256)
]
