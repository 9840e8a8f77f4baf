"""plan_cache: how many blocks, how long a sequence, and what is refused with both numbers."""

from dataclasses import replace
from typing import Any

import pytest

from cupaged.backend.cpu import CpuBackend
from cupaged.config import EngineConfig, ModelConfig, RopeConfig
from cupaged.worker.kv_cache import block_bytes
from cupaged.worker.worker import (
    DEFAULT_KV_CACHE_MEMORY,
    CachePlan,
    check_arena,
    largest_batches,
    longest_position,
    plan_cache,
)

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


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend("float32", num_threads=1)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.create("model", **options)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert block_bytes(MODEL, 16, 4) == BLOCK_BYTES


def test_kv_cache_memory_is_cut_into_whole_blocks(backend: CpuBackend) -> None:
    plan = plan_cache(config(kv_cache_memory=20 * BLOCK_BYTES - 1), MODEL, backend, 0)

    assert plan.num_blocks == 19
    assert plan.block_bytes == BLOCK_BYTES


def test_unset_memory_is_no_more_than_all_sequences_can_use(backend: CpuBackend) -> None:
    plan = plan_cache(config(max_num_seqs=3, max_model_len=100), MODEL, backend, 0)

    assert plan.num_blocks == 3 * 7
    assert plan.num_blocks * BLOCK_BYTES < DEFAULT_KV_CACHE_MEMORY


def test_unset_length_is_the_models(backend: CpuBackend) -> None:
    assert plan_cache(config(), MODEL, backend, 0).max_model_len == 256


def test_dynamic_rope_stretches_only_when_asked(backend: CpuBackend) -> None:
    model = replace(MODEL, rope=RopeConfig(rope_type="dynamic", factor=2.0))

    assert plan_cache(config(), model, backend, 0).max_model_len == 256
    assert plan_cache(config(max_model_len=400), model, backend, 0).max_model_len == 400


def test_unset_length_is_lowered_to_the_pool_with_one_log_line(
    backend: CpuBackend, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_cache(config(kv_cache_memory=2 * BLOCK_BYTES), MODEL, backend, 0)

    assert plan.max_model_len == 32
    assert [record.message for record in caplog.records if "from 256 to 32 tokens" in record.message]


def test_set_length_that_the_pool_cannot_hold_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match=rf"holds 32 tokens but max_model_len is 33.*{3 * BLOCK_BYTES}"):
        plan_cache(config(kv_cache_memory=2 * BLOCK_BYTES, max_model_len=33), MODEL, backend, 0)


def test_memory_for_no_block_at_all_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match=f"of 1 bytes holds 0 tokens: a block takes {BLOCK_BYTES}"):
        plan_cache(config(kv_cache_memory=1), MODEL, backend, 0)


def test_cache_larger_than_the_free_memory_is_refused_with_both_numbers(backend: CpuBackend) -> None:
    memory = backend.available_memory() * 2

    with pytest.raises(ValueError, match=rf"kv_cache_memory is {memory} bytes .* 7 of weights only \d+ are"):
        plan_cache(config(kv_cache_memory=memory), MODEL, backend, 7)


def test_weights_larger_than_the_free_memory_are_named_as_such(backend: CpuBackend) -> None:
    num_bytes = backend.available_memory() * 2

    with pytest.raises(ValueError, match=rf"the weights take {num_bytes} bytes but only \d+ are free"):
        plan_cache(config(), MODEL, backend, num_bytes)


def test_step_larger_than_what_the_cache_leaves_is_refused() -> None:
    plan = CachePlan(num_blocks=3, block_bytes=100, max_model_len=48)

    check_arena(700, config(), plan, available=1000)
    with pytest.raises(
        ValueError, match=r"max_num_batched_tokens=2048 tokens takes 701 bytes .* 700 are free"
    ):
        check_arena(701, config(), plan, available=1000)


def test_no_step_has_more_tokens_than_the_cache_has_slots() -> None:
    decodes, prefill = largest_batches(config(max_num_batched_tokens=10**9, max_num_seqs=8), num_slots=48)

    assert (decodes.num_tokens, decodes.num_seqs) == (8, 8)
    assert (prefill.num_tokens, prefill.num_seqs) == (48, 8)


def test_set_length_beyond_the_models_positions_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match="max_model_len is 257 but the model's positions end at 256"):
        plan_cache(config(max_model_len=257), MODEL, backend, 0)


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
