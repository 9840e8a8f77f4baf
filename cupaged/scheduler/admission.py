"""Admission: what a group that waits needs in order to run, and how it enters."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.enter import enter, measure_prompt, measure_swapped, start_prompt, swap_in
from cupaged.scheduler.prefix_cache import SaltIds, lookup_prefix
from cupaged.scheduler.row_table import RowTable
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import SequenceGroup, SequenceStatus

_NOT_CACHED = np.empty(0, np.int32)


class Fit(NamedTuple):
    """What a group that waits needs."""

    num_rows: int
    num_blocks: int
    num_tokens: int  # that it would compute
    found: NDArray[np.int32]  # cached blocks of its first sequence's prefix
    first: int  # of these, the first that its window still needs


class Admission:
    """Measures groups against rows and blocks, and lets them in."""

    def __init__(
        self, config: SchedulerConfig, table: RowTable, manager: BlockManager, counters: NDArray[np.int64]
    ) -> None:
        """Work on the scheduler's rows and blocks."""
        self._config, self._table, self._manager, self._counters = config, table, manager, counters
        self._salts = SaltIds()
        self._found = np.empty(manager.blocks_for(config.max_model_len), np.int32)

    def fit(self, group: SequenceGroup) -> Fit:
        """Return what a waiting group needs."""
        manager, window = self._manager, self._config.sliding_window
        if group.status is SequenceStatus.SWAPPED:
            rows = self._table.of_group(group)
            num_tokens, num_blocks = measure_swapped(self._table.rows, manager.pools, rows)
            return Fit(0, num_blocks, num_tokens, _NOT_CACHED, 0)
        first, *others = group.unfinished
        found = _NOT_CACHED
        if group.params.prompt_logprobs is None:
            salt = self._salts.number(group.cache_salts)
            num_found = lookup_prefix(manager.blocks.cache, first.token_ids, salt, self._found)
            found = self._found[:num_found]
        num_known, num_prompt = len(first.token_ids), len(group.prompt_token_ids)
        first_fork = num_prompt - 1 if others else num_known
        blocks = manager.blocks
        num_tokens, num_blocks, first_held = measure_prompt(blocks, num_known, first_fork, found, window)
        shared = num_prompt // manager.block_size
        for seq in others:
            num_blocks += max(0, manager.blocks_for(len(seq.token_ids)) - shared)
        return Fit(len(others) + 1, num_blocks, num_tokens, found, first_held)

    def can_enter(self, fit: Fit) -> bool:
        """Return whether a group that needs this can enter now."""
        # Alone a group may have the whole pool, which `check` has seen to hold it.
        kept = self._manager.watermark if self._table.num_running > 0 else 0
        has_blocks = fit.num_blocks + kept <= self._manager.num_free
        return has_blocks and fit.num_rows <= len(self._table.free) and fit.num_tokens > 0

    def admissible_tokens(self, group: SequenceGroup) -> int:
        """Return how many tokens a waiting group would compute, 0 if it cannot enter now."""
        fit = self.fit(group)
        return fit.num_tokens if self.can_enter(fit) else 0

    def enter(self, group: SequenceGroup, fit: Fit, budget: int) -> int:
        """Let a group run that can; return the tokens planned for it."""
        table, pools = self._table, self._manager.pools
        if group.status is SequenceStatus.SWAPPED:
            rows = table.of_group(group)
            swap_in(pools, rows)
        else:
            rows = table.load(group, self._salts.number(group.cache_salts))
            start_prompt(table.rows, pools.device, int(rows[0]), fit.found, fit.first)
            looks_up = self._config.enable_prefix_caching and group.params.prompt_logprobs is None
            if group.status is SequenceStatus.WAITING and looks_up:
                group.num_cached_tokens = len(group.prompt_token_ids) - fit.num_tokens
                self._counters[Counter.PREFIX_QUERIED_TOKENS] += len(group.prompt_token_ids)
                self._counters[Counter.PREFIX_HIT_TOKENS] += group.num_cached_tokens
        group.status = SequenceStatus.RUNNING
        return enter(table.rows, pools, rows, budget)
