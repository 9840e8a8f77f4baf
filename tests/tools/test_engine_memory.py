"""How gpu_check times what is done with whole blocks. The emulator's times mean nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.emulated_machine import EmulatedMachine
from tools.engine_memory import NUM_SWAP_REPEATS, time_forks, time_swaps
from tools.engine_model import TINY, write_model
from tools.engine_timed import TimedEngine


@pytest.fixture(scope="module")
def machine() -> EmulatedMachine:
    return EmulatedMachine()


def load(machine: EmulatedMachine, directory: Path, **options: Any) -> TimedEngine:
    return TimedEngine(
        machine,
        write_model(directory, TINY.shape),
        load_format="dummy",
        max_num_seqs=TINY.max_num_seqs,
        max_num_batched_tokens=TINY.max_num_batched_tokens,
        max_model_len=TINY.max_model_len,
        **options,
    )


@pytest.fixture(scope="module")
def engine(machine: EmulatedMachine, tmp_path_factory: pytest.TempPathFactory) -> TimedEngine:
    return load(machine, tmp_path_factory.mktemp("model"), swap_space=TINY.swap_space)


def test_swaps_go_out_and_come_back_as_they_were(machine: EmulatedMachine, engine: TimedEngine) -> None:
    moved: list[tuple[str, Any]] = []
    backend = engine.executor.backend
    for name in ("swap_out", "swap_in"):
        move = getattr(backend, name)

        def noted(*args: Any, name: str = name, move: Any = move) -> None:
            moved.append((name, args[2].copy()))
            move(*args)

        setattr(backend, name, noted)

    found = time_swaps(machine, engine)

    assert found["num_blocks"] == engine.plan.num_host_blocks == 8
    assert found["to_host"] > 0
    assert found["to_device"] > 0
    assert [name for name, _ in moved] == ["swap_out", "swap_in"] * NUM_SWAP_REPEATS
    for (_, out), (_, back) in zip(moved[::2], moved[1::2], strict=True):
        assert np.array_equal(out, back[:, ::-1])
        assert len({*out[:, 0]}) == len({*out[:, 1]}) == 8


def test_forked_decode_is_the_one_that_copies_most(machine: EmulatedMachine, engine: TimedEngine) -> None:
    found = time_forks(machine, engine, TINY)

    # Of three that share a block, the last one to write has it to itself.
    assert found["num_seqs"] == 3
    assert found["num_copies"] == 1
    assert found["copied_bytes"] == engine.plan.block_bytes
    assert found["seconds"] > 0
    assert found["plain_seconds"] > 0
    assert not engine.engine.has_unfinished()


def test_without_a_host_pool_there_are_no_swaps(machine: EmulatedMachine, tmp_path: Path) -> None:
    assert time_swaps(machine, load(machine, tmp_path, swap_space=0)) == {"skipped": "there is no host pool"}
