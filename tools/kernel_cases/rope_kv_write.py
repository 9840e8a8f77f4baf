"""Cases of rope_kv_write.cu."""

import numpy as np

from cupaged.kernels.launch import Array, Device
from cupaged.kernels.rope_kv_write import rope_kv_write_cuda
from tools.kernel_cases.case import DTYPES, ROUNDED, Arrays, Case, Maker
from tools.kernel_cases.paged import Heads, Paging

NUM_LAYERS = 2


def rope_kv_write(
    heads: Heads,
    num_new: tuple[int, ...],
    *,
    rotary_dim: int = 0,
    norms: bool = False,
    interleaved: bool = False,
    num_padding: int = 0,
) -> Case:
    """Return new tokens of some sequences, three times as long as them, with padding behind."""
    element, num_heads, num_kv_heads, head_dim = heads
    paging = Paging(tuple(3 * n for n in num_new))
    num_tokens = sum(num_new) + num_padding
    rotary_dim = rotary_dim or head_dim
    positions = np.concatenate([np.arange(2 * n, 3 * n, dtype=np.int32) for n in num_new])
    options = {f"rotary{rotary_dim}": rotary_dim < head_dim, "norms": norms, "interleaved": interleaved}

    def make(maker: Maker) -> dict[str, Array]:
        dtype = DTYPES[element]
        shape = (paging.num_blocks, NUM_LAYERS, 2, num_kv_heads, paging.block_size, head_dim)
        arrays = {
            "qkv": maker.normal((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype),
            "pool": maker.unwritten(shape, dtype),
            "positions": maker.array(np.pad(positions, (0, num_padding))),
            "slots": maker.array(np.pad(paging.slots(num_new), (0, num_padding), constant_values=-1)),
            # Any numbers do for cosines and sines, and these are the same bits everywhere.
            "cos_sin": maker.normal((3 * max(num_new), rotary_dim), spread=0.7),
        }
        names = ("q_norm", "k_norm") if norms else ()
        return arrays | {name: maker.normal((head_dim,), dtype) for name in names}

    def launch(device: Device, arrays: Arrays) -> None:
        heads_of_tokens = arrays["qkv"]
        rope_kv_write_cuda(
            device,
            heads_of_tokens[:, :num_heads],
            heads_of_tokens[:, num_heads : num_heads + num_kv_heads],
            heads_of_tokens[:, num_heads + num_kv_heads :],
            arrays["pool"],
            NUM_LAYERS - 1,
            arrays["positions"],
            arrays["slots"],
            arrays["cos_sin"],
            arrays.get("q_norm"),
            arrays.get("k_norm"),
            eps=1e-5,
            interleaved=interleaved,
        )

    marks = [name for name, value in options.items() if value]
    return Case(
        name="-".join([f"rope_kv_write-{heads}-{num_tokens}tokens", *marks]),
        make=make,
        launch=launch,
        outputs=("qkv", "pool"),
        variables={
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "num_norms": 2 if norms else 0,
            "interleaved": interleaved,
        },
        tolerance=ROUNDED[element],
    )


GOLDENS = [
    rope_kv_write(Heads("bf16", 4, 2, 64), (3, 1), num_padding=1),
    rope_kv_write(Heads("f16", 2, 2, 80), (3, 1), rotary_dim=20, interleaved=True),
    rope_kv_write(Heads("bf16", 2, 1, 128), (4,), norms=True),
]
TRAFFIC = [
    rope_kv_write(Heads("bf16", 32, 8, 128), (1,) * 8),
    rope_kv_write(Heads("bf16", 8, 2, 128), (5, 1), norms=True, interleaved=True),
]
TIMED = [
    rope_kv_write(Heads("bf16", 32, 8, 128), (1,) * 256),
    rope_kv_write(Heads("bf16", 32, 8, 128), (8192,)),
]
INSTANCES = [
    rope_kv_write(Heads(element, 4, 2, head_dim), (1,))
    for element, head_dim in (("bf16", 64), ("bf16", 256), ("f16", 128), ("float", 128))
]
