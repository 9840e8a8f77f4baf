"""The weight table: what a family file says about each tensor of its checkpoint.

A row names a tensor as the checkpoint does, gives it the name by which the layers ask for it, its whole
shape, and how the ranks divide it. The loader (worker/weights.py) reads, checks and slices by it.
"""

from enum import Enum
from typing import NamedTuple


class Shard(Enum):
    """How ranks divide a tensor, in Megatron's words."""

    COLUMN = "column"  # by output features, the first dimension
    ROW = "row"  # by input features, the last dimension
    REPLICATED = "replicated"


class Weight(NamedTuple):
    """One tensor."""

    name: str  # in the checkpoint
    attribute: str  # in the model, below which layers find it
    shape: tuple[int, ...]  # of the whole tensor, all ranks together
    shard: Shard


def linear(
    name: str, attribute: str, shape: tuple[int, int], shard: Shard, *, bias: bool = False
) -> list[Weight]:
    """Return the rows of one linear layer, [out, in]; all ranks have a row-parallel bias, one adds it."""
    rows = [Weight(f"{name}.weight", f"{attribute}.weight", shape, shard)]
    if bias:
        bias_shard = Shard.COLUMN if shard is Shard.COLUMN else Shard.REPLICATED
        rows.append(Weight(f"{name}.bias", f"{attribute}.bias", shape[:1], bias_shard))
    return rows
