"""Worker: one rank. Loads the model, plans its memory, executes batches.

Knows nothing of requests or queues: a Batch comes in, a StepOutput goes out.
"""

import logging
from dataclasses import dataclass

logger = logging.getLogger("cupaged")

DEFAULT_KV_CACHE_MEMORY = 4 << 30  # bytes, where the user says nothing and that much is free


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """How long a sequence may be and how many KV blocks there are; found out at start."""

    num_blocks: int
    max_model_len: int
