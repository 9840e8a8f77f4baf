"""What must hold between two calls of the scheduler, beside what BlockManager asserts of its pools."""

import numpy as np

from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.group_queue import GroupQueue
from cupaged.scheduler.row_table import RowTable
from cupaged.scheduler.state import NO_SERIAL
from cupaged.sequence import SequenceGroup, SequenceStatus


def check_rows(table: RowTable, manager: BlockManager, num_in_flight: int) -> None:
    """Assert that rows, tables and counts agree."""
    rows, device, host = table.rows, manager.blocks, manager.host_blocks
    running = rows.running[: rows.num_running[0]]
    free = np.array(table.free, np.int64)
    swapped = np.flatnonzero(rows.at.serial != NO_SERIAL)
    swapped = swapped[~np.isin(swapped, running)]
    everything = np.sort(np.concatenate([running, swapped, free]))
    assert np.array_equal(everything, np.arange(rows.at.serial.size)), "a row is lost or in two places"
    assert (rows.at.serial[free] == NO_SERIAL).all(), "a free row has a serial"
    assert not (device.held.num_blocks + host.held.num_blocks)[free].any(), "a free row holds blocks"
    assert not device.held.num_blocks[swapped].any(), "a swapped row holds blocks of the device"
    assert not host.held.num_blocks[running].any(), "a running row holds blocks of the host"
    assert all(table.by_row[row] is None for row in free.tolist()), "a free row has a sequence"
    key = np.stack([rows.at.priority[running], rows.at.arrival[running]])
    after = (np.diff(key[0]) > 0) | ((np.diff(key[0]) == 0) & (np.diff(key[1]) >= 0))
    assert after.all(), "running rows are not by priority and arrival"
    for blocks, among in ((device, running), (host, swapped)):
        slots = blocks.held.num_blocks[among] * manager.block_size
        assert (rows.at.num_computed_tokens[among] <= slots).all(), "a row has computed past its blocks"
    used = np.concatenate([running, swapped])
    total = rows.at.num_tokens[used] + rows.at.num_in_flight[used]
    assert (total <= rows.at.max_total_tokens[used]).all(), "a row samples past max_total_tokens"
    assert (rows.at.num_computed_tokens[used] <= total).all(), "a row has computed what nobody knows"
    assert (rows.at.num_in_flight[used] <= num_in_flight).all(), "more tokens in flight than steps"
    pending = used[rows.at.is_pending[used]]
    assert not device.held.num_blocks[pending].any(), "a row that waits for its fork holds blocks"


def check_groups(table: RowTable, queue: GroupQueue) -> None:
    """Assert that the rows of a group stand side by side and that waiting groups are as their status says."""
    rows = table.rows
    seen: list[SequenceGroup] = []
    for row in rows.running[: rows.num_running[0]].tolist():
        seq = table.by_row[row]
        assert seq.row == row, f"row {row} belongs to a sequence that does not know"
        assert seq.group.status is SequenceStatus.RUNNING, f"{seq.group.request_id} runs in secret"
        if not seen or seen[-1] is not seq.group:
            seen.append(seq.group)
            members = table.of_group(seq.group)
            place = int(np.flatnonzero(rows.running == row)[0])
            assert np.array_equal(rows.running[place : place + members.size], members), "a group is apart"
            assert np.unique(rows.at.serial[members]).size == 1, "a group has two serials"
    assert len(set(seen)) == len(seen), "a group is in two places"
    for group in queue:
        has_rows = [seq.row >= 0 for seq in group.unfinished]
        assert group.unfinished, f"{group.request_id} has finished and still waits"
        assert group.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)
        assert all(has_rows) if group.status is SequenceStatus.SWAPPED else not any(has_rows), (
            f"{group.request_id} is {group.status.name} with rows {[seq.row for seq in group.unfinished]}"
        )
