"""scheduler_config: each setting of a scheduler's plans is the user's, the worker's or the model's."""

from dataclasses import replace

from cupaged import EngineConfig
from cupaged.engine.llm_engine import scheduler_config
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.worker.swap_rates import SwapRates
from tests.engine.scripted import ScriptedExecutor


def test_scheduler_plans_with_what_user_worker_and_model_say() -> None:
    config = EngineConfig(
        model="unread",
        block_size=32,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        max_model_len=96,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        preemption_mode="swap",
    )
    executor = ScriptedExecutor(config, num_blocks=7, num_host_blocks=3, late=True)
    executor.plan = replace(executor.plan, block_bytes=4096)
    executor.swap_rates = SwapRates(bandwidth=2e9, prefill_rate=300.0)
    num_layers = executor.model_config.num_layers
    executor.model_config = replace(executor.model_config, sliding_windows=(40,) * num_layers)

    assert scheduler_config(config, executor) == SchedulerConfig(
        num_blocks=7,
        block_size=32,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        max_model_len=96,
        num_batches=2,
        num_host_blocks=3,
        sliding_window=40,
        enable_prefix_caching=False,
        policy="priority",
        preemption_mode="swap",
        block_bytes=4096,
        swap_bandwidth=2e9,
        prefill_rate=300.0,
    )
