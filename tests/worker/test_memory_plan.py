"""plan_memory: how many blocks, how long a sequence, and what is refused with which way out."""

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from cupaged.backend.base import Limits, MemoryUse
from cupaged.backend.cpu import CpuBackend
from cupaged.config import EngineConfig, ModelConfig, RopeConfig
from cupaged.worker.kv_cache import block_bytes
from cupaged.worker.memory_plan import MemoryPlan, longest_position, plan_memory

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
BLOCK_BYTES = 3 * 2 * 2 * 16 * 8 * 4  # layers, k and v, heads, tokens, head_dim, float32
LONG_MODEL = replace(MODEL, max_position_embeddings=1 << 16)
WEIGHTS, WORKSPACE, RESERVE = 50_000, 7_000, 3_000  # bytes


class Memory(CpuBackend):
    """A backend with so much free memory, all for the KV cache; maybe a host's beside."""

    def __init__(self, available: int, host: int | None = None) -> None:
        super().__init__("float32", num_threads=1)
        self.available, self.host = available, host

    def available_memory(self) -> int:
        """Return the bytes."""
        return self.available

    def host_memory(self) -> int | None:
        """Return the host's, if it is another."""
        return self.host

    def kv_cache_share(self, free: int) -> int:
        """Return all of them."""
        return free


def measure(limits: Limits) -> MemoryUse:
    """Need more for longer sequences and for larger steps, as a model does."""
    splits = limits.num_seqs * -(-limits.seq_len // 256)
    return MemoryUse(WEIGHTS + 32 * limits.seq_len, WORKSPACE, 40 * limits.num_tokens + 300 * splits, RESERVE)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.create("model", **{"max_num_seqs": 4, "max_num_batched_tokens": 64, **options})


def plan(
    available: int = 1 << 30, model: ModelConfig = MODEL, host: int | None = None, **options: Any
) -> MemoryPlan:
    return plan_memory(config(**options), model, Memory(available, host), measure)


def fits(available: int, max_model_len: int, **options: Any) -> bool:
    try:
        plan(available, LONG_MODEL, max_model_len=max_model_len, **options)
    except ValueError:
        return False
    return True


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert block_bytes(MODEL, 16, 4) == BLOCK_BYTES


def test_kv_cache_memory_is_cut_into_whole_blocks() -> None:
    made = plan(kv_cache_memory=200 * BLOCK_BYTES - 1)

    assert (made.num_blocks, made.block_bytes, made.num_tokens) == (199, BLOCK_BYTES, 199 * 16)


def test_unset_memory_is_no_more_than_all_sequences_can_use() -> None:
    made = plan(max_num_seqs=3, max_model_len=100)

    assert made.num_blocks == 3 * 7


def test_unset_memory_is_what_gpu_memory_utilization_leaves() -> None:
    made = plan(10_000_000, LONG_MODEL, gpu_memory_utilization=0.5, max_model_len=4096)

    assert 5_000_000 - BLOCK_BYTES < made.total <= 5_000_000
    assert made.total == sum(measure(made.limits)) + made.num_blocks * BLOCK_BYTES


def test_limits_are_the_largest_step_and_cache_that_there_can_be() -> None:
    made = plan(max_num_seqs=2, max_model_len=20, max_num_batched_tokens=10**9)

    assert made.limits == Limits(num_tokens=64, num_seqs=2, seq_len=20, block_size=16, num_slots=64)
    assert made.use == measure(made.limits)


def test_limits_know_how_far_every_layer_looks_back_at_most() -> None:
    assert plan(model=replace(MODEL, sliding_windows=(40, 64, 40))).limits.sliding_window == 64
    assert plan(model=replace(MODEL, sliding_windows=(40, 0, 40))).limits.sliding_window == 0


def test_the_plan_is_one_line_of_all_its_parts() -> None:
    made = MemoryPlan(
        limits=Limits(num_tokens=64, num_seqs=2, seq_len=20, block_size=16, num_slots=64),
        use=MemoryUse(weights=3 << 30, workspace=1 << 29, activations=1 << 28, reserve=1 << 27),
        num_blocks=64,
        block_bytes=1 << 24,
        available=8 << 30,
    )

    assert str(made) == (
        "memory in GiB: weights 3.000 + workspace 0.500 + activations 0.250 + driver's modules and graphs "
        "0.125 + KV cache 1.000 = 4.875 of 8.000 free; 64 KV blocks hold 1024 tokens, a sequence at most 20"
    )


def test_the_plan_of_a_small_model_is_in_smaller_units_without_parts_that_are_nothing() -> None:
    made = MemoryPlan(
        limits=Limits(num_tokens=64, num_seqs=2, seq_len=20, block_size=16, num_slots=64),
        use=MemoryUse(weights=3 << 20, workspace=0, activations=1 << 18, reserve=0),
        num_blocks=64,
        block_bytes=1 << 14,
        available=8 << 30,
    )

    assert str(made) == (
        "memory in MiB: weights 3.000 + activations 0.250 + KV cache 1.000 = 4.250 of 8192.000 free; 64 KV "
        "blocks hold 1024 tokens, a sequence at most 20"
    )


def test_unset_length_is_the_models() -> None:
    assert plan().max_model_len == 256


def test_dynamic_rope_stretches_only_when_asked() -> None:
    model = replace(MODEL, rope=RopeConfig(rope_type="dynamic", factor=2.0))

    assert plan(model=model).max_model_len == 256
    assert plan(model=model, max_model_len=400).max_model_len == 400


LIMITED: list[tuple[int, dict[str, Any]]] = [
    (1 << 30, {"kv_cache_memory": 20 * BLOCK_BYTES}),  # by the cache
    (190_000, {"kv_cache_memory": 20 * BLOCK_BYTES}),  # by what is needed beside it
    (1_000_000, {"gpu_memory_utilization": 0.9}),
    (1_000_000, {"gpu_memory_utilization": 0.37, "block_size": 32}),
    (1_000_000, {"max_num_seqs": 1}),
    (123_456, {}),  # three blocks
    (1_000_000, {"max_num_seqs": 200, "max_num_batched_tokens": 4096}),
    (1_000_000, {"swap_space": 60 * BLOCK_BYTES / 2**30}),
    (1_000_000, {"swap_space": 60 * BLOCK_BYTES / 2**30, "kv_cache_memory": 80 * BLOCK_BYTES}),
]


@pytest.mark.parametrize(("available", "options"), LIMITED)
def test_refused_length_names_the_largest_that_fits_and_one_block_more_is_refused(
    available: int, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="largest that fits") as error:
        plan(available, LONG_MODEL, max_model_len=1 << 16, **options)

    (named,) = re.findall(r"lower max_model_len to (\d+), the largest that fits", str(error.value))
    largest, size = int(named), options.get("block_size", 16)
    assert largest % size == 0
    made = plan(available, LONG_MODEL, max_model_len=largest, **options)
    assert made.num_tokens >= made.max_model_len == largest
    assert made.total <= available
    assert not fits(available, largest + size, **options)
    assert all(fits(available, length, **options) for length in (2, size, largest - 1))


@pytest.mark.parametrize(("available", "options"), LIMITED)
def test_unset_length_is_lowered_to_that_same_length_with_one_warning(
    available: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(available, LONG_MODEL, **options)

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"from 65536 to {made.max_model_len} tokens" in record.message
    assert fits(available, made.max_model_len, **options)
    assert not fits(available, made.max_model_len + made.limits.block_size, **options)


def test_length_that_needs_more_than_all_memory_beside_the_cache_still_names_one_that_fits() -> None:
    available = WEIGHTS + 32 * 4096

    with pytest.raises(ValueError, match=r"the weights take 2147152 bytes but only 181072 .* to 224, "):
        plan(available, LONG_MODEL, max_model_len=1 << 16)


def test_few_lengths_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def counted(limits: Limits) -> MemoryUse:
        tried.append(limits.seq_len)
        return measure(limits)

    plan_memory(config(), LONG_MODEL, Memory(10_000_000), counted)

    assert "lowered" in caplog.text
    assert len(tried) < 14, tried


def test_memory_for_no_block_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=f"needs {16 * BLOCK_BYTES} bytes .* are 1, which hold 0"):
        plan(kv_cache_memory=1)


def test_cache_larger_than_the_free_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory is 999999 bytes but .* only \d+ are free; lower"):
        plan(1_000_000, kv_cache_memory=999_999)


def test_weights_larger_than_the_free_memory_are_named_as_such() -> None:
    with pytest.raises(ValueError, match=r"the weights take 58192 bytes but only 10000 are free; close"):
        plan(10_000)


def test_steps_that_leave_no_room_for_a_cache_are_refused() -> None:
    steps = r"for steps of max_num_batched_tokens=9999 no block .* 90000 bytes"
    with pytest.raises(ValueError, match=rf"{RESERVE} for the driver and \d+ {steps}"):
        plan(100_000, max_num_batched_tokens=9999, max_num_seqs=100)


def test_set_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 257 but the model's positions end at 256"):
        plan(max_model_len=257)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (RopeConfig(), 256),
        (RopeConfig(rope_type="linear", factor=4.0), 1024),
        (RopeConfig(rope_type="dynamic", factor=2.0), 512),
        (RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
        (RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 512),
        (RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=64), 256),
    ],
)
def test_stretched_positions_go_further(rope: RopeConfig, longest: int) -> None:
    assert longest_position(replace(MODEL, rope=rope)) == longest


class TestSwapPool:
    """Blocks that are swapped out: `host` is the memory of a host beside the device, None = they are one."""

    @pytest.mark.parametrize("host", [None, 1 << 30])
    def test_swap_space_is_cut_into_whole_blocks(self, host: int | None) -> None:
        made = plan(host=host, swap_space=(40 * BLOCK_BYTES - 1) / 2**30)

        assert made.num_host_blocks == made.limits.num_host_blocks == 39
        assert made.swap_bytes == 39 * BLOCK_BYTES

    @pytest.mark.parametrize("host", [None, 1 << 40])
    def test_is_no_more_than_all_sequences_can_use(self, host: int | None) -> None:
        made = plan(1 << 40, host=host, swap_space=50, max_num_seqs=3, max_model_len=100)

        assert made.num_host_blocks == 3 * 7

    def test_of_the_same_memory_is_in_the_total_and_takes_from_the_cache(self) -> None:
        options: dict[str, Any] = {"gpu_memory_utilization": 0.5, "max_model_len": 4096}
        without = plan(10_000_000, LONG_MODEL, **options)

        made = plan(10_000_000, LONG_MODEL, swap_space=30 * BLOCK_BYTES / 2**30, **options)

        assert (made.num_host_blocks, made.num_blocks) == (30, without.num_blocks - 30)
        assert made.total == sum(made.use) + (30 + made.num_blocks) * BLOCK_BYTES == without.total

    def test_of_another_memory_takes_nothing_from_the_device(self) -> None:
        options: dict[str, Any] = {"gpu_memory_utilization": 0.5, "max_model_len": 4096}

        made = plan(10_000_000, LONG_MODEL, host=1 << 30, swap_space=30 * BLOCK_BYTES / 2**30, **options)

        assert made.num_host_blocks == 30
        assert made.total == plan(10_000_000, LONG_MODEL, **options).total
        assert made.host_available == 1 << 30

    def test_unset_is_4_gib_of_another_memory_but_a_quarter_of_what_is_free_at_most(self) -> None:
        many: dict[str, Any] = {"max_num_seqs": 200_000, "max_num_batched_tokens": 64}

        assert plan(1 << 40, host=1 << 40, **many).num_host_blocks == (4 << 30) // BLOCK_BYTES
        assert plan(1 << 40, host=1 << 30, **many).num_host_blocks == (1 << 28) // BLOCK_BYTES
        assert plan(1 << 40, host=0, **many).num_host_blocks == 0

    def test_unset_is_none_of_the_same_memory(self) -> None:
        assert plan().num_host_blocks == 0

    def test_none_is_taken_where_nothing_is_ever_swapped(self) -> None:
        assert plan(host=1 << 30, swap_space=1, preemption_mode="recompute").num_host_blocks == 0

    @pytest.mark.parametrize("host", [None, 150_000])
    def test_larger_than_the_free_memory_is_refused_with_both_numbers(self, host: int | None) -> None:
        needed = 50 * BLOCK_BYTES
        message = rf"swap_space=\S+ GiB takes {needed} bytes of host memory but only 150000 are free; lower"

        with pytest.raises(ValueError, match=message):
            plan(150_000 if host is None else 1 << 30, host=host, swap_space=needed / 2**30)

    def test_one_that_leaves_no_room_for_a_cache_is_named(self) -> None:
        space = 30 * BLOCK_BYTES
        for cache, memory in ((None, "no block"), (BLOCK_BYTES * 16, "only")):
            message = rf", {space} for swap_space and .* {memory} .*, or lower swap_space,"
            with pytest.raises(ValueError, match=message):
                plan(200_000, max_model_len=256, swap_space=space / 2**30, kv_cache_memory=cache)

    @pytest.mark.parametrize("host", [None, 0, 1 << 30])
    def test_no_room_for_a_wanted_swap_is_said(
        self, host: int | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        swap_space = None if host == 0 else (BLOCK_BYTES - 1) / 2**30

        plan(host=host, preemption_mode="swap", swap_space=swap_space)

        assert f"no room for a block of {BLOCK_BYTES} bytes" in caplog.text

    def test_is_a_part_of_the_line_that_is_said(self) -> None:
        made = MemoryPlan(
            limits=Limits(64, 2, 20, block_size=16, num_slots=64, num_host_blocks=128),
            use=MemoryUse(weights=3 << 30, workspace=0, activations=1 << 28, reserve=0),
            num_blocks=64,
            block_bytes=1 << 24,
            available=8 << 30,
        )

        assert "activations 0.250 + swap pool 2.000 + KV cache 1.000 = 6.250 of 8.000 free; 64 KV" in str(
            made
        )
        beside = str(replace(made, host_available=16 << 30))
        assert "activations 0.250 + KV cache 1.000 = 4.250 of 8.000 free; 64 KV" in beside
        assert beside.endswith("at most 20; 128 blocks of swap pool are 2.000 of 16.000 on the host")
