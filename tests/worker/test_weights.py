"""Checkpoint: files in, checked and sharded tensors out."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cupaged.models import Shard, Weight, load_model_class, load_model_config
from cupaged.worker import weights
from cupaged.worker.weights import Checkpoint, DummyWeights, WatchedWeights
from tools.make_tiny_model import CASES, LLAMA, make_weights, write_tiny_model

TABLE = [
    Weight("a.weight", "first.weight", (4, 6), Shard.COLUMN),
    Weight("a.bias", "first.bias", (4,), Shard.COLUMN),
    Weight("b.weight", "second.weight", (6, 4), Shard.ROW),
    Weight("norm.weight", "norm.weight", (6,), Shard.REPLICATED),
]


def make_tensors(dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    rng = np.random.Generator(np.random.PCG64(0))
    return {weight.name: rng.standard_normal(weight.shape).astype(dtype) for weight in TABLE}


def write(directory: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_by_attribute_in_their_own_dtype(tmp_path: Path, dtype: Any) -> None:
    tensors = make_tensors(dtype)

    checkpoint = Checkpoint(write(tmp_path, tensors), TABLE)

    assert list(checkpoint) == [weight.attribute for weight in TABLE]
    for weight in TABLE:
        assert checkpoint[weight.attribute].dtype == dtype
        np.testing.assert_array_equal(checkpoint[weight.attribute], tensors[weight.name])


def test_index_spreads_tensors_over_files(tmp_path: Path) -> None:
    tensors = make_tensors()
    weight_map = {}
    for i, name in enumerate(tensors):
        weight_map[name] = f"model-{i % 2}.safetensors"
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    checkpoint = Checkpoint(tmp_path, TABLE)

    for weight in TABLE:
        np.testing.assert_array_equal(checkpoint[weight.attribute], tensors[weight.name])


def test_ranks_shares_make_up_the_whole(tmp_path: Path) -> None:
    tensors = make_tensors()
    write(tmp_path, tensors)

    ranks = [Checkpoint(tmp_path, TABLE, rank=rank, size=2) for rank in range(2)]

    for attribute, axis in (("first.weight", 0), ("first.bias", 0), ("second.weight", 1)):
        shares = [rank[attribute] for rank in ranks]
        assert shares[0].shape == shares[1].shape
        whole = {weight.attribute: tensors[weight.name] for weight in TABLE}[attribute]
        np.testing.assert_array_equal(np.concatenate(shares, axis), whole)
    np.testing.assert_array_equal(ranks[1]["norm.weight"], tensors["norm.weight"])


def test_tensor_that_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    write(tmp_path, make_tensors())

    with pytest.raises(ValueError, match=r"a\.weight of shape \(4, 6\) cannot be divided over 3 ranks"):
        Checkpoint(tmp_path, TABLE, rank=0, size=3)


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["a.bias"]
    tensors["a.weight"] = np.zeros((4, 5), np.float32)
    tensors["b.weight"] = tensors["b.weight"].astype(np.float64)
    tensors["c.weight"] = np.zeros(1, np.float32)
    write(tmp_path, tensors)

    with pytest.raises(ValueError, match=r"do not fit config\.json") as error:
        Checkpoint(tmp_path, TABLE)

    for part in (
        "a.bias is missing",
        "a.weight has shape (4, 5), expected (4, 6)",
        "b.weight is F64, expected one of F32, F16, BF16",
        "c.weight is not a tensor of this model",
    ):
        assert part in str(error.value)


def test_long_lists_of_errors_are_cut(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    config = load_model_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, {"model.norm.weight": np.ones(config.hidden_size, np.float32)})

    with pytest.raises(ValueError, match="and 9 more"):
        Checkpoint(tmp_path, load_model_class("llama").weights(config))


@pytest.mark.parametrize("case", CASES)
def test_table_of_each_family_covers_its_checkpoint(tmp_path: Path, case: str) -> None:
    write_tiny_model(tmp_path, CASES[case])
    config = load_model_config(tmp_path)

    checkpoint = Checkpoint(tmp_path, load_model_class(config.model_type).weights(config))

    names = {weight.name for weight in load_model_class(config.model_type).weights(config)}
    assert names == set(make_weights(CASES[case], 0))
    assert checkpoint["layers.2.mlp.down.weight"].shape == (config.hidden_size, config.intermediate_size)


def test_leftovers_of_checkpoints_are_tolerated(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CASES["llama_tied"])
    config = load_model_config(tmp_path)
    tensors: dict[str, NDArray[Any]] = dict(make_weights(CASES["llama_tied"], 0))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)

    checkpoint = Checkpoint(write(tmp_path, tensors), load_model_class("llama").weights(config))

    np.testing.assert_array_equal(checkpoint["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    tensors = make_weights(LLAMA, 0)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)

    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        Checkpoint(tmp_path, load_model_class("llama").weights(load_model_config(tmp_path)))


def test_bias_that_the_config_does_not_announce_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    write(tmp_path, make_weights(CASES["llama_bias"] | {"num_key_value_heads": 2}, 0))

    with pytest.raises(ValueError, match=r"self_attn\.q_proj\.bias is not a tensor of this model"):
        Checkpoint(tmp_path, load_model_class("llama").weights(load_model_config(tmp_path)))


def test_header_that_is_not_padded_gives_aligned_tensors(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (3 - len(header) % 4 + 4)
    data = np.arange(3, dtype=np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)

    tensor = Checkpoint(tmp_path, [Weight("a", "a", (3,), Shard.REPLICATED)])["a"]

    assert tensor.flags.aligned
    assert tensor.tolist() == [0, 1, 2]


def test_tensors_are_mapped_not_read(tmp_path: Path) -> None:
    table = [Weight(f"{i}.weight", str(i), (256, 1024), Shard.COLUMN) for i in range(8)]
    write(tmp_path, {weight.name: np.ones(weight.shape, np.float32) for weight in table})
    tracemalloc.start()

    checkpoint = Checkpoint(tmp_path, table, rank=1, size=2)
    kept = [checkpoint[str(i)] for i in range(8)]

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept) == 8
    assert peak < 1 << 20  # bytes, one tensor's size


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04\x14\x00\x00\x00\x00\x00", b"\x02\0\0\0\0\0\0\0[]", b"\x03\0\0\0\0\0\0\0{,}"]
)
def test_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or no safetensors file"):
        Checkpoint(tmp_path, TABLE)


def test_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, make_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])

    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        Checkpoint(tmp_path, TABLE)


def test_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(tmp_path, TABLE)


def test_file_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {weight.name: "model-1.safetensors" for weight in TABLE}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ValueError, match=r"model-1\.safetensors is missing, though the index names it"):
        Checkpoint(tmp_path, TABLE)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'])
def test_index_without_a_map_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ValueError, match="has no weight_map"):
        Checkpoint(tmp_path, TABLE)


def test_dummy_weights_have_their_shapes_and_take_next_to_no_memory() -> None:
    table = [*TABLE, Weight("head.weight", "head.weight", (1 << 16, 1 << 14), Shard.REPLICATED)]
    tracemalloc.start()

    weights = DummyWeights(table, "bfloat16", size=2)
    tensors = {attribute: weights[attribute] for attribute in weights}

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {attribute: tensor.shape for attribute, tensor in tensors.items()} == {
        "first.weight": (2, 6),
        "first.bias": (2,),
        "second.weight": (6, 2),
        "norm.weight": (6,),
        "head.weight": (1 << 16, 1 << 14),
    }
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert peak < 1 << 24  # bytes; the head alone would take 2 GB


def test_no_two_rows_of_dummy_weights_are_equal_and_norms_are_one() -> None:
    table = [Weight(name, name, (3000, 8), Shard.REPLICATED) for name in ("up.weight", "gate.weight")]
    weights = DummyWeights([*table, TABLE[-1]], "float32")

    rows = np.concatenate([weights["up.weight"], weights["gate.weight"]])

    assert len(np.unique(rows, axis=0)) == 6000
    assert 0.019 < rows.std() < 0.021
    assert (weights["norm.weight"] == 1).all()


TIED = [*TABLE, Weight("a.weight", "head.weight", (4, 6), Shard.COLUMN)]


@pytest.mark.parametrize("size", [1, 2])
def test_bytes_are_a_ranks_share_and_count_what_is_tied_once(tmp_path: Path, size: int) -> None:
    tensors = make_tensors(np.float16)
    checkpoint = Checkpoint(write(tmp_path, tensors), TIED, size=size)

    assert checkpoint.num_bytes == sum(checkpoint[weight.attribute].nbytes for weight in TABLE)
    assert DummyWeights(TIED, "float16", size=size).num_bytes == checkpoint.num_bytes


def test_bar_is_full_when_all_weights_have_been_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            self.total, self.disable, self.n, self.is_closed = total, options["disable"], 0, False
            seen.append(self)

        def update(self, n: int) -> None:
            self.n += n

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(weights, "tqdm", Bar)
    checkpoint = Checkpoint(write(tmp_path, make_tensors()), TIED)

    with WatchedWeights(checkpoint) as watched:
        for weight in TABLE:
            np.testing.assert_array_equal(watched[weight.attribute], checkpoint[weight.attribute])
            assert "none" not in watched

    (bar,) = seen
    assert bar.n == bar.total > 0
    assert bar.disable is None  # as the terminal says
    assert bar.is_closed
    assert list(watched) == list(checkpoint)
    assert len(watched) == len(checkpoint)
