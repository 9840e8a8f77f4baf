"""Worker: one rank. Loads the model, plans its memory, executes batches.

Knows nothing of requests or queues: a Batch comes in, a StepOutput goes out.
"""

import logging
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from cupaged.backend.base import Backend, Communicator, create_backend
from cupaged.backend.comm import SingleRank
from cupaged.batch import Batch, Bucket, Count, StepOutput, buffer_size, view
from cupaged.config import EngineConfig, ModelConfig
from cupaged.models import load_model_class, load_model_config
from cupaged.sampling_params import MAX_LOGPROBS
from cupaged.worker.kv_cache import KVCache, block_bytes
from cupaged.worker.sampler import Sampler
from cupaged.worker.weights import Checkpoint

logger = logging.getLogger("cupaged")

DEFAULT_KV_CACHE_MEMORY = 4 << 30  # bytes, where the user says nothing and twice that is free


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """How many KV blocks there are and how long a sequence may be; found out at start."""

    num_blocks: int
    block_bytes: int
    max_model_len: int


class Worker:
    """Model, KV cache and sampler of one rank."""

    def __init__(
        self, config: EngineConfig, model_dir: Path, communicator: Communicator | None = None
    ) -> None:
        """Load everything; ValueError names what does not fit or is not supported."""
        communicator = communicator or SingleRank()
        self.model_config: ModelConfig = load_model_config(model_dir)
        family = load_model_class(self.model_config.model_type)
        dtype = self.model_config.dtype if config.dtype == "auto" else config.dtype
        self._backend = backend = create_backend(config.device, dtype, config.num_threads)
        table = family.weights(self.model_config)
        shapes = {weight.name: weight.shape for weight in table}  # a tied embedding has two rows
        num_weights = sum(prod(shape) for shape in shapes.values())
        self.plan = plan_cache(config, self.model_config, backend, num_weights * backend.dtype.itemsize)
        weights = Checkpoint(model_dir, table, rank=communicator.rank, size=communicator.size)
        self._model = family.Model(
            self.model_config, backend, communicator, weights, max_model_len=self.plan.max_model_len
        )
        self._kv_cache = KVCache(backend, self.model_config, self.plan.num_blocks, config.block_size)
        self._sampler = Sampler(backend, self._model, config.max_num_seqs)
        batches = largest_batches(config, self.plan.num_blocks * config.block_size)
        arena_bytes = max(backend.measure(partial(self.execute, batch)) for batch in batches)
        check_arena(arena_bytes, config, self.plan, backend.available_memory())
        backend.create_arena(arena_bytes)

    def execute(self, batch: Batch) -> StepOutput:
        """Run one step."""
        backend = self._backend
        backend.begin_forward()
        host, batch = batch, backend.upload(batch)
        self._kv_cache.apply(batch)
        backend.load_last_tokens(batch, self._sampler.last_token)
        hidden = self._model.forward(batch, self._kv_cache)
        return self._sampler.sample(hidden, batch, host)


def plan_cache(config: EngineConfig, model: ModelConfig, backend: Backend, weight_bytes: int) -> CachePlan:
    """Return the number of KV blocks and the longest sequence that they and the model allow.

    Unset, kv_cache_memory is half of what gpu_memory_utilization leaves beside the weights, at most
    DEFAULT_KV_CACHE_MEMORY, and never more than max_num_seqs sequences of max_model_len can use.
    """
    longest = longest_position(model)
    # Dynamic rope changes every position's rotation once max_model_len passes the original length, so unasked
    # it stays within.
    unset = model.max_position_embeddings if model.rope.rope_type == "dynamic" else longest
    wanted = config.max_model_len or unset
    if wanted > longest:
        raise ValueError(
            f"max_model_len is {wanted} but the model's positions end at {longest}; lower max_model_len"
        )
    per_block = block_bytes(model, config.block_size, backend.kv_dtype.itemsize)
    useful = config.max_num_seqs * -(-wanted // config.block_size) * per_block
    memory = kv_cache_bytes(config, backend.available_memory(), weight_bytes, useful)
    num_blocks = memory // per_block
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and capacity < config.max_model_len:
        needed = -(-config.max_model_len // config.block_size) * per_block
        raise ValueError(
            f"a KV cache of {memory} bytes holds {capacity} tokens but max_model_len is "
            f"{config.max_model_len}; lower max_model_len or raise kv_cache_memory to {needed}"
        )
    if num_blocks == 0:
        raise ValueError(
            f"a KV cache of {memory} bytes holds 0 tokens: a block takes {per_block}; raise kv_cache_memory"
        )
    if capacity < wanted:
        logger.warning(
            "max_model_len lowered from %d to %d tokens, which is what the KV cache of %d blocks holds; "
            "raise kv_cache_memory for more",
            wanted,
            capacity,
            num_blocks,
        )
    return CachePlan(num_blocks=num_blocks, block_bytes=per_block, max_model_len=min(wanted, capacity))


def kv_cache_bytes(config: EngineConfig, available: int, weight_bytes: int, useful: int) -> int:
    """Return the bytes of the KV cache: the user's, else a share of what is free, at most `useful`."""
    if weight_bytes > available:
        raise ValueError(
            f"the weights take {weight_bytes} bytes but only {available} are free; "
            "close other programs or choose a smaller model"
        )
    if config.kv_cache_memory is None:
        free = config.gpu_memory_utilization * available - weight_bytes
        return min(DEFAULT_KV_CACHE_MEMORY, max(0, int(free / 2)), useful)
    if config.kv_cache_memory + weight_bytes > available:
        raise ValueError(
            f"kv_cache_memory is {config.kv_cache_memory} bytes but beside {weight_bytes} of weights only "
            f"{available - weight_bytes} are free; lower kv_cache_memory"
        )
    return config.kv_cache_memory


def check_arena(num_bytes: int, config: EngineConfig, plan: CachePlan, available: int) -> None:
    """Raise ValueError if the largest step's arrays do not fit beside the KV cache, not in use yet."""
    free = available - plan.num_blocks * plan.block_bytes
    if num_bytes > free:
        raise ValueError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} tokens takes {num_bytes} "
            f"bytes but beside weights and KV cache {max(0, free)} are free; "
            "lower max_num_batched_tokens or kv_cache_memory"
        )


def longest_position(model: ModelConfig) -> int:
    """Return how long a sequence the model's rotary embedding allows."""
    rope = model.rope
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        return max(model.max_position_embeddings, int(original * rope.factor))
    return model.max_position_embeddings


def largest_batches(config: EngineConfig, num_slots: int) -> list[Batch]:
    """Return batches that need the most arena of any: all decodes, and all prefill, every token's logits."""
    num_tokens = min(config.max_num_batched_tokens, num_slots)  # every token of a step has a slot of its own
    num_seqs = min(config.max_num_seqs, num_tokens)
    bucket = Bucket(num_tokens, num_seqs, 1)
    batches = []
    for num_decodes, tokens in ((num_seqs, num_seqs), (0, num_tokens)):
        buffer = np.zeros(buffer_size(bucket, 0), np.int32)
        arrays = view(buffer, bucket)
        counts = arrays.counts
        counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_DECODES]] = tokens, num_seqs, num_decodes
        counts[[Count.NUM_LOGITS, Count.TABLE_WIDTH]] = tokens, 1
        arrays.num_logprobs[:] = arrays.num_prompt_logprobs[:] = MAX_LOGPROBS
        batches.append(Batch(buffer, bucket, np.zeros(num_seqs, np.int64), arrays=arrays))
    return batches
