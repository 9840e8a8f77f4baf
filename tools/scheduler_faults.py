"""Faults for tools/mutate_block_manager.py: a line or a few of cupaged/scheduler, and what they become."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One planted fault."""

    file: str  # of cupaged/scheduler
    what: str
    before: str  # stands there exactly once
    after: str


FAULTS = (
    Fault(
        "allocator.py",
        "a block that is evicted can still be found",
        "        remove_entry(blocks.cache, block)\n        blocks.counters",
        "        blocks.counters",
    ),
    Fault(
        "allocator.py",
        "the newest cached block is evicted first",
        "        block = at[blocks.free.size].newer\n",
        "        block = at[blocks.free.size].older\n",
    ),
    Fault(
        "allocator.py",
        "a found block stays evictable",
        "    if blocks.at[block].ref_count == 0:\n        leave_ring(blocks, block)\n",
        "",
    ),
    Fault(
        "allocator.py",
        "a block is given back while one still holds it",
        "    if at[block].ref_count > 0:\n        return\n",
        "    if at[block].ref_count > 1:\n        return\n",
    ),
    Fault(
        "allocator.py",
        "a block of two holders is written without a copy",
        "blocks.at[blocks.block_tables[row, index]].ref_count > 1)",
        "blocks.at[blocks.block_tables[row, index]].ref_count > 2)",
    ),
    Fault(
        "allocator.py",
        "a copied block keeps the reference of who has left it",
        "    blocks.at[shared].ref_count -= 1\n",
        "",
    ),
    Fault(
        "allocator.py",
        "copy-on-write copies the wrong way",
        "pair[0], pair[1] = shared, own",
        "pair[0], pair[1] = own, shared",
    ),
    Fault(
        "allocator.py",
        "a cached block is written and still found",
        "            remove_entry(blocks.cache, block)\n\n\n@njit_inner\ndef share_table",
        "            pass\n\n\n@njit_inner\ndef share_table",
    ),
    Fault(
        "allocator.py",
        "a fork does not count its references",
        "        at[tables[source, i]].ref_count += 1\n",
        "",
    ),
    Fault(
        "allocator.py",
        "a prefix is evicted before what continues it",
        "for i in range(blocks.held[row].num_blocks - 1, blocks.held[row].first_block - 1, -1):",
        "for i in range(blocks.held[row].first_block, blocks.held[row].num_blocks):",
    ),
    Fault(
        "allocator.py",
        "one block too many leaves the window",
        "min(index, blocks.held[row].num_blocks)):",
        "min(index + 1, blocks.held[row].num_blocks)):",
    ),
    Fault(
        "allocator.py",
        "a block that two rows share moves twice",
        "            if at[block].moved < 0:\n",
        "            if True:\n",
    ),
    Fault(
        "allocator.py",
        "a swapped table forgets its holes",
        "target.held[row].first_block, target.held[row].num_blocks = first, end",
        "target.held[row].first_block, target.held[row].num_blocks = 0, end",
    ),
    Fault(
        "allocator.py",
        "beams behind the parents keep their blocks",
        "    for i in range(rows.size):\n        free_table(blocks, rows[i])\n",
        "    for i in range(parents.size):\n        free_table(blocks, rows[i])\n",
    ),
    Fault(
        "prefix_cache.py",
        "an entry is believed whatever it continues",
        "entry.hash == value and entry.parent == parent and",
        "entry.hash == value and",
    ),
    Fault(
        "prefix_cache.py",
        "an entry is believed whatever its salt",
        " and entry.salt == salt:",
        ":",
    ),
    Fault(
        "prefix_cache.py",
        "an entry is believed by its hash alone",
        "                same &= held[block, i] == tokens[i]\n",
        "                pass\n",
    ),
    Fault(
        "prefix_cache.py",
        "removing an entry hides those probed past it",
        "        if (place - home) & last >= (place - gap) & last:\n",
        "        if False:\n",
    ),
    Fault(
        "prefix_cache.py",
        "a serial is used twice",
        "    cache.last_serial[0] += 1\n",
        "    cache.last_serial[0] = 1\n",
    ),
    Fault(
        "prefix_cache.py",
        "the same content is registered again",
        "    if found != EMPTY:\n        return int(cache.at[found].serial)\n    return int(",
        "    return int(",
    ),
    Fault(
        "enter.py",
        "found blocks that nobody holds count as free too",
        "        taken += blocks.at[found[i]].ref_count == 0\n",
        "        pass\n",
    ),
    Fault(
        "enter.py",
        "a prompt of which all is cached writes its last token",
        "    rows.at[row].num_shared_tokens = num_found * size\n",
        "    rows.at[row].num_shared_tokens = 0\n",
    ),
    Fault(
        "enter.py",
        "a group that returns runs behind all others",
        "        if (priority[other], arrival[other]) < (priority[row], arrival[row]):\n            break\n",
        "        break\n",
    ),
    Fault(
        "progress.py",
        "a fork has the prompt's last token sampled for it",
        "    rows.at[target].num_computed_tokens = min(prompt, rows.at[target].num_tokens - 1)\n",
        "    rows.at[target].num_computed_tokens = prompt\n",
    ),
    Fault(
        "progress.py",
        "a fork writes the prompt's last token into a shared block",
        "    rows.at[target].num_shared_tokens = prompt\n",
        "    rows.at[target].num_shared_tokens = 0\n",
    ),
    Fault(
        "progress.py",
        "a block is found before its keys are written",
        "            register(rows, blocks, row, written)\n",
        "            register(rows, blocks, row, num_tokens[row])\n",
    ),
    Fault(
        "progress.py",
        "a result goes to whoever has the row now",
        "        if at.serial != serials[i]:\n",
        "        if at.serial == NO_SERIAL:\n",
    ),
    Fault(
        "progress.py",
        "the window ends one token early",
        "(written - sliding_window + 1) // size)",
        "(written - sliding_window + 2) // size)",
    ),
    Fault(
        "progress.py",
        "a beam stays what it was beside its parent's blocks",
        "        rows.at[row] = old[parents[i]]\n",
        "        rows.at[row] = old[i]\n",
    ),
    Fault(
        "progress.py",
        "who ends while swapped leaves its blocks in host memory",
        "    free_table(pools.host, row)\n",
        "",
    ),
    Fault(
        "plan.py",
        "the last holder of a shared block asks for a copy",
        "wanted += block.moved < block.ref_count",
        "wanted += block.ref_count > 1",
    ),
    Fault(
        "plan.py",
        "the host pool is taken for endless",
        "    if num_blocks == 0 or num_blocks > num_available(pools.host):\n",
        "    if num_blocks == 0:\n",
    ),
    Fault(
        "plan.py",
        "the dearer way to preempt is taken",
        "num_blocks * costs.swap < num_tokens * costs.recompute",
        "num_blocks * costs.swap > num_tokens * costs.recompute",
    ),
    Fault(
        "plan.py",
        "a shared prompt is recomputed once for each",
        "        shared = rows.at[row].num_prompt_tokens if i > 0 else 0  # is recomputed once\n",
        "        shared = 0\n",
    ),
    Fault(
        "plan.py",
        "only the last row of a group is preempted",
        "    while first > 0 and serial[running[first - 1]] == serial[running[first]]:\n        first -= 1\n",
        "",
    ),
    Fault(
        "plan.py",
        "decodes take all of the budget, always",
        "    if num_decodes > budget or (num_decodes == budget and others):\n",
        "    if num_decodes > budget:\n",
    ),
    Fault(
        "scheduler.py",
        "blocks in use are found after a reset",
        "        at.num_registered[at.serial != NO_SERIAL] = NEVER\n",
        "",
    ),
    Fault(
        "admission.py",
        "a prompt whose log-probabilities are wanted is looked up",
        "        if group.params.prompt_logprobs is None:\n            salt",
        "        if True:\n            salt",
    ),
    Fault(
        "scheduler.py",
        "who was preempted enters in the same step",
        "            if group is None or group in self._preemption.preempted:\n",
        "            if group is None:\n",
    ),
    Fault(
        "scheduler.py",
        "a step that computes nothing swaps all the same",
        "        self._preemption.cancel_swaps()\n        return None\n",
        "        return None\n",
    ),
    Fault(
        "admission.py",
        "a fork's window begins where its leader has found the prompt",
        "        first_fork = num_prompt - 1 if others else num_known\n",
        "        first_fork = num_known\n",
    ),
    Fault(
        "preemption.py",
        "who must give up its row for a more important group is swapped out with it",
        "costs = _RECOMPUTE if lacks_rows else self.costs",
        "costs = self.costs",
    ),
    Fault(
        "preemption.py",
        "blocks that a victim shares with the newcomer count as free with the victim",
        "            lower, fit = self._lower_rows(head), measure(head)",
        "            lower = self._lower_rows(head)",
    ),
    Fault(
        "scheduler.py",
        "a turn goes to a group that gave up its own in the same step",
        "            if group in self._preemption.preempted:",
        "            if group is None:",
    ),
    Fault(
        "progress.py",
        "a sibling registers its prompt anew, though it has left the window",
        "    if registered == NEVER or registered * blocks.block_size <= prompt:",
        "    if registered == NEVER:",
    ),
    Fault(
        "allocator.py",
        "beams share blocks that nobody has written yet",
        "        held[i] = min(blocks.held[rows[i]].num_blocks, blocks_for(blocks, num_written[i]))\n",
        "        held[i] = blocks.held[rows[i]].num_blocks\n",
    ),
    Fault(
        "preemption.py",
        "equals give way to one another",
        'head.priority, side="right")',
        'head.priority, side="left")',
    ),
    Fault(
        "group_queue.py",
        "priorities are forgotten in the queue",
        "(group.priority, group.arrival, group)",
        "(0, group.arrival, group)",
    ),
)
