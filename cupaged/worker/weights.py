"""Checkpoint: a model's tensors out of safetensors files, checked against the family's weight table.

Tensors are mapped from disk one by one, when a layer asks, and let go when it has made its own form
of them, so the model is never in memory twice.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from cupaged.models import Shard, Weight

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
BAR_DELAY = 0.5  # seconds of loading that are worth a bar
MAX_NAMED = 20  # tensors that an error names
ROW_STEP = 7  # numbers from row to row of a dummy matrix
MAX_FIRST = 1 << 16  # numbers before a dummy tensor's first


class Tensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: str  # in safetensors' words
    shape: tuple[int, ...]


class Checkpoint(Mapping[str, NDArray[Any]]):
    """The tensors of a weight table by attribute, each cut to this rank's share, mapped at each access."""

    def __init__(self, directory: Path, table: Sequence[Weight], *, rank: int = 0, size: int = 1) -> None:
        """Read the headers in `directory`; ValueError names every tensor that does not fit the table."""
        self._tensors = read_headers(directory)
        self._weights = {weight.attribute: weight for weight in table}
        self._rank, self._size = rank, size
        _check(directory, self._tensors, table, size)

    def __getitem__(self, attribute: str) -> NDArray[Any]:
        weight = self._weights[attribute]
        tensor = self._tensors[weight.name]
        mapped = np.memmap(
            tensor.path, DTYPES[tensor.dtype], mode="r", offset=tensor.offset, shape=tensor.shape
        )
        whole: NDArray[Any] = np.asarray(mapped)
        if not whole.flags.aligned:  # old writers did not pad the header
            whole = whole.copy()
        if weight.shard is Shard.REPLICATED:
            return whole
        axis = _axis(weight)
        share = tensor.shape[axis] // self._size
        mine = slice(self._rank * share, (self._rank + 1) * share)
        return whole[mine] if axis == 0 else whole[:, mine]

    def __contains__(self, attribute: object) -> bool:
        """Return whether the table has it, without a look at the file."""
        return attribute in self._weights

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all, counting once what several attributes name."""
        sizes = {}
        for weight in self._weights.values():
            tensor = self._tensors[weight.name]
            parts = 1 if weight.shard is Shard.REPLICATED else self._size
            sizes[weight.name] = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize // parts
        return sum(sizes.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class DummyWeights(Mapping[str, NDArray[Any]]):
    """Random tensors in place of a checkpoint's: for measuring, where only shapes count.

    All are views of one short run of numbers: a matrix's rows begin ROW_STEP numbers apart and overlap. So
    they take no time and no memory, and yet no two rows are equal, which would give equal logits.
    """

    def __init__(self, table: Sequence[Weight], dtype: str, *, size: int = 1) -> None:
        """Prepare weights of `dtype`, a rank's share of each."""
        self._weights = {weight.attribute: weight for weight in table}
        self._size = size
        length = MAX_FIRST + max(ROW_STEP * weight.shape[0] + weight.shape[-1] for weight in table)
        noise = np.random.default_rng(0).standard_normal(length, np.float32) * np.float32(0.02)
        self._noise = noise.astype(dtype)

    def __getitem__(self, attribute: str) -> NDArray[Any]:
        weight = self._weights[attribute]
        shape = list(weight.shape)
        if weight.shard is not Shard.REPLICATED:
            shape[_axis(weight)] //= self._size
        if attribute.endswith("norm.weight"):
            return np.ones(shape, self._noise.dtype)
        first = zlib.crc32(attribute.encode()) % MAX_FIRST
        itemsize = self._noise.itemsize
        strides = (ROW_STEP * itemsize, itemsize)[-len(shape) :]
        return as_strided(self._noise[first:], shape, strides, writeable=False)

    def __contains__(self, attribute: object) -> bool:
        """Return whether the table has it."""
        return attribute in self._weights

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the tensors of a checkpoint would have, each counted once."""
        sizes = {weight.name: self[weight.attribute].nbytes for weight in self._weights.values()}
        return sum(sizes.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class WatchedWeights(Mapping[str, NDArray[Any]]):
    """Weights, and a bar of the bytes asked for so far, where that takes a while; leaving closes it."""

    def __init__(self, weights: "Checkpoint | DummyWeights") -> None:
        self._weights = weights
        self._bar = tqdm(
            total=weights.num_bytes,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            delay=BAR_DELAY,
            disable=None,  # where nobody watches
            dynamic_ncols=True,
        )

    def __enter__(self) -> "WatchedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __getitem__(self, attribute: str) -> NDArray[Any]:
        tensor = self._weights[attribute]
        self._bar.update(tensor.nbytes)
        return tensor

    def __contains__(self, attribute: object) -> bool:
        return attribute in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def read_headers(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of model.safetensors, or of the files in model.safetensors.index.json, by name."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        raise ValueError(f"{directory} has neither {single.name} nor {index.name}; convert it to safetensors")
    weight_map = _parse(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
    files = {name: _read_header(directory / name) for name in sorted(set(weight_map.values()))}
    return {name: files[file][name] for name, file in weight_map.items() if name in files[file]}


def _read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file: 8 bytes of header length, the header in JSON, the data."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, though the index names it; fetch it again")
    try:
        with safe_open(path, framework="numpy"):  # checks lengths, types, and that the data has no holes
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); fetch it again") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _parse(file.read(length), path)
    header.pop("__metadata__", None)
    return {
        name: Tensor(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it does not hold the JSON object it should; fetch it again")
    return values


def _check(directory: Path, tensors: dict[str, Tensor], table: Sequence[Weight], size: int) -> None:
    wrong = []
    for weight in table:
        tensor = tensors.get(weight.name)
        if tensor is None:
            wrong.append(f"{weight.name} is missing")
        elif tensor.shape != weight.shape:
            wrong.append(f"{weight.name} has shape {tensor.shape}, expected {weight.shape}")
        elif tensor.dtype not in DTYPES:
            wrong.append(f"{weight.name} is {tensor.dtype}, expected one of {', '.join(DTYPES)}")
        elif weight.shard is not Shard.REPLICATED and weight.shape[_axis(weight)] % size:
            wrong.append(f"{weight.name} of shape {weight.shape} cannot be divided over {size} ranks")
    known = {weight.name for weight in table}
    wrong += [f"{name} is not a tensor of this model" for name in tensors if not _may_be_there(name, known)]
    wrong = list(dict.fromkeys(wrong))  # a tied embedding is in the table twice
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ValueError(
            f"{directory}: the weights do not fit config.json: {'; '.join(wrong[:MAX_NAMED])}{more}"
        )


def _may_be_there(name: str, known: set[str]) -> bool:
    """Return whether the table has `name` or it is one of the leftovers that checkpoints carry."""
    is_tied_head = name == "lm_head.weight"  # a table without it ties the head to the embedding
    return name in known or is_tied_head or name.endswith("rotary_emb.inv_freq")


def _axis(weight: Weight) -> int:
    return 0 if weight.shard is Shard.COLUMN else 1
