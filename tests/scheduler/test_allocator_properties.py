"""The pools of blocks do what BlockModel does, under everything that may be done to them, in any order."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cupaged.scheduler.allocator import Blocks
from cupaged.scheduler.block_manager import BlockManager, evictable
from cupaged.scheduler.counters import Counter, create_counters
from cupaged.scheduler.prefix_cache import lookup_prefix
from cupaged.scheduler.scheduler_config import SchedulerConfig
from tests.scheduler import compiled
from tests.scheduler.block_model import HOLE, BlockModel, move

NUM_ROWS = 5
MAX_BLOCKS = 8
PREFIX = [1, 2] * 8  # whose own beginning comes again in it


def tables(blocks: Blocks) -> dict[int, list[int]]:
    ends = blocks.held.num_blocks.tolist()
    return {row: blocks.block_tables[row, :end].tolist() for row, end in enumerate(ends)}


class BlocksMachine(RuleBasedStateMachine):
    """Rows that enter, fork, grow, write, lose their window, are swapped, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, list[int]] = {}  # of the rows that have blocks, all written
        self.salts: dict[int, int] = {}
        self.swapped: set[int] = set()

    @initialize(
        block_size=st.integers(1, 3),
        total=st.integers(8, 20),
        num_host=st.sampled_from([0, 4, 12]),
        hash_bits=st.sampled_from([64, 1, 0]),
    )
    def start(self, block_size: int, total: int, num_host: int, hash_bits: int) -> None:
        config = SchedulerConfig(
            num_blocks=total,
            block_size=block_size,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=64,
            max_model_len=MAX_BLOCKS * block_size,
            num_host_blocks=num_host,
        )
        self.size = block_size
        self.counters = create_counters()
        self.manager = manager = BlockManager(config, self.counters)
        cache = manager.blocks.cache._replace(hash_mask=np.uint64((1 << hash_bits) - 1))
        manager.blocks = manager.blocks._replace(cache=cache)
        self.device, self.host = BlockModel(total, block_size), BlockModel(num_host, block_size)
        for model in (self.device, self.host):
            model.tables = {row: [] for row in range(NUM_ROWS)}

    def running(self) -> list[int]:
        return sorted(self.tokens.keys() - self.swapped)

    def empty(self) -> list[int]:
        return sorted(set(range(NUM_ROWS)) - self.tokens.keys())

    @precondition(lambda self: self.empty())
    @rule(shared=st.integers(0, 16), own=st.lists(st.integers(1, 3), max_size=5), salt=st.integers(0, 1))
    def add(self, shared: int, own: list[int], salt: int) -> None:
        row, tokens = self.empty()[0], [*PREFIX[:shared], *own, 1][: MAX_BLOCKS * self.size]
        room = np.zeros(MAX_BLOCKS, np.int32)
        blocks, ids = self.manager.blocks, np.array(tokens, np.int32)
        found = self.device.lookup(tokens, salt)
        assert room[: lookup_prefix(blocks.cache, ids, salt, room)].tolist() == found
        needed = self.manager.blocks_for(len(tokens))
        unused = sum(block in self.device.evictable for block in found)
        if needed - len(found) + unused > self.device.num_available():
            return
        self.device.allocate(row, found, needed)
        compiled.allocate(blocks, row, np.array(found, np.int32), needed)
        self.tokens[row], self.salts[row] = tokens, salt

    @precondition(lambda self: self.running() and self.empty())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.sampled_from(self.running())), self.empty()[0]
        tokens = self.tokens[source][: data.draw(st.integers(1, len(self.tokens[source])))]
        number = self.manager.blocks_for(len(tokens))
        if number < self.device.tables[source].count(HOLE):
            return
        self.device.fork(source, target, number)
        compiled.fork(self.manager.blocks, source, target, number)
        self.tokens[target], self.salts[target] = tokens, self.salts[source]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), more=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        row = data.draw(st.sampled_from(self.running()))
        first = len(self.tokens[row]) // self.size  # block that is written first
        tokens = [*self.tokens[row], *more][: MAX_BLOCKS * self.size]
        needed = self.manager.blocks_for(len(tokens))
        if needed - len(self.device.tables[row]) + 1 > self.device.num_available():
            return
        if first < len(self.device.tables[row]) and self.device.tables[row][first] != HOLE:
            pair = np.zeros(2, np.int32)
            copies = compiled.write(self.manager.blocks, row, first, pair)
            assert (tuple(pair.tolist()) if copies else None) == self.device.write(row, first)
        self.device.grow(row, needed)
        compiled.grow(self.manager.blocks, row, needed)
        self.tokens[row] = tokens

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.running()))
        if HOLE not in self.device.tables[row]:
            self.device.register(row, self.tokens[row], self.salts[row])
            ids = np.array(self.tokens[row], np.int32)
            compiled.register(self.manager.blocks, row, ids, self.salts[row])

    @precondition(lambda self: self.running())
    @rule(data=st.data(), index=st.integers(0, MAX_BLOCKS))
    def leave_window(self, data: st.DataObject, index: int) -> None:
        row = data.draw(st.sampled_from(self.running()))
        self.device.free_before(row, index)
        compiled.free_before(self.manager.blocks, row, index)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        away = row in self.swapped
        (self.host if away else self.device).free_table(row)
        compiled.free(self.manager.host_blocks if away else self.manager.blocks, row)
        self.swapped.discard(row)
        del self.tokens[row]

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.running()), min_size=1, unique=True))
        if len(self.device.held(rows)) <= self.host.num_available():
            self.swap(rows, self.manager.blocks, self.manager.host_blocks, (self.device, self.host))
            self.swapped |= set(rows)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.swapped)), min_size=1, unique=True))
        if len(self.host.held(rows)) <= self.device.num_available():
            self.swap(rows, self.manager.host_blocks, self.manager.blocks, (self.host, self.device))
            self.swapped -= set(rows)

    def swap(
        self, rows: list[int], source: Blocks, target: Blocks, models: tuple[BlockModel, BlockModel]
    ) -> None:
        pairs = np.zeros((NUM_ROWS * MAX_BLOCKS, 2), np.int32)
        count = compiled.move(source, target, np.array(rows, np.int32), pairs)
        assert list(map(tuple, pairs[:count].tolist())) == move(*models, rows)

    @precondition(lambda self: len(self.running()) > 1)
    @rule(data=st.data())
    def continue_beams(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations(self.running()))
        choices = st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=len(rows))
        parents = data.draw(choices)
        self.device.reorder(rows, parents)
        num_written = np.full(len(rows), MAX_BLOCKS * self.manager.block_size, np.int32)
        ids = (np.array(rows, np.int32), np.array(parents, np.int32))
        compiled.reorder(self.manager.blocks, *ids, num_written)
        chosen = [self.tokens[rows[parent]] for parent in parents]
        salts = [self.salts[rows[parent]] for parent in parents]
        for row in rows:
            del self.tokens[row]
        self.tokens |= dict(zip(rows, chosen, strict=False))
        self.salts |= dict(zip(rows, salts, strict=False))

    @rule()
    def reset(self) -> None:
        self.device.reset()
        self.manager.reset_prefix_cache()

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        for blocks, model in ((self.manager.blocks, self.device), (self.manager.host_blocks, self.host)):
            assert tables(blocks) == model.tables
            references = [model.num_references(block) for block in range(len(blocks.free))]
            assert blocks.at.ref_count[: len(blocks.free)].tolist() == references
            assert blocks.free[: blocks.num.free[0]].tolist() == model.free
            assert evictable(blocks) == model.evictable
        serials = self.manager.blocks.cache.at.serial
        assert {
            block: int(serials[block]) for block in np.flatnonzero(serials).tolist()
        } == self.device.serials
        assert self.counters[Counter.EVICTED_BLOCKS] == self.device.num_evicted
        assert self.counters[Counter.COPIED_BLOCKS] == self.device.num_copied
        rows = self.running()
        held = self.device.held(rows)
        alone = {
            block
            for block in held
            if sum(self.device.tables[row].count(block) for row in rows) == self.device.num_references(block)
        }
        counted = compiled.count(self.manager.blocks, np.array(rows, np.int32))
        assert tuple(map(int, counted)) == (len(held), len(alone))


BlocksMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlocksMachine = BlocksMachine.TestCase
