"""BlockModel: a pool of blocks in lists and dictionaries, as plain as can be; the real one must equal it."""

from collections.abc import Iterable

HOLE = -1
ROOT = 0

Key = tuple[int, int, tuple[int, ...]]  # serial of the entry it continues, salt, tokens


class BlockModel:
    """Tables by row; a block's references are how often it stands in them."""

    def __init__(self, total: int, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.free = list(reversed(range(total)))  # a stack
        self.evictable: list[int] = []  # cached and in no table, the one longest there first
        self.entries: dict[Key, int] = {}  # the cached blocks
        self.serials: dict[int, int] = {}  # of the cached blocks
        self.last_serial = 0
        self.num_evicted = self.num_copied = 0

    def num_references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def num_available(self) -> int:
        return len(self.free) + len(self.evictable)

    def held(self, rows: list[int]) -> set[int]:
        return {block for row in rows for block in self.tables[row]} - {HOLE}

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        block = self.evictable.pop(0)
        self.forget(block)
        self.num_evicted += 1
        return block

    def forget(self, block: int) -> None:
        self.entries = {key: other for key, other in self.entries.items() if other != block}
        self.serials.pop(block, None)

    def let_go(self, blocks: Iterable[int]) -> None:
        """Give back those of the blocks, just taken out of tables, that stand in none."""
        for block in blocks:
            if block != HOLE and not self.num_references(block):
                (self.evictable if block in self.serials else self.free).append(block)

    def allocate(self, row: int, found: list[int], needed: int) -> None:
        self.evictable = [block for block in self.evictable if block not in found]
        self.tables[row] = list(found)
        self.grow(row, needed)

    def grow(self, row: int, needed: int) -> None:
        while len(self.tables[row]) < needed:
            self.tables[row].append(self.take())

    def fork(self, source: int, target: int, number: int) -> None:
        self.tables[target] = self.tables[source][:number]

    def write(self, row: int, index: int) -> tuple[int, int] | None:
        """Make a block the row's own; return (from, to) if it must be copied for that."""
        block = self.tables[row][index]
        if self.num_references(block) == 1:
            self.forget(block)
            return None
        self.tables[row][index] = self.take()
        self.num_copied += 1
        return block, self.tables[row][index]

    def free_table(self, row: int) -> None:
        table = self.tables[row]
        while table:
            self.let_go([table.pop()])

    def free_before(self, row: int, index: int) -> None:
        for i in range(min(index, len(self.tables[row]))):
            block, self.tables[row][i] = self.tables[row][i], HOLE
            self.let_go([block])

    def reorder(self, rows: list[int], parents: list[int]) -> None:
        chosen = [list(self.tables[rows[parent]]) for parent in parents]
        self.tables |= {-1 - i: table for i, table in enumerate(chosen)}  # hold them meanwhile
        for row in rows:
            self.free_table(row)
        for i in range(len(parents)):
            self.tables[rows[i]] = self.tables.pop(-1 - i)

    def register(self, row: int, tokens: list[int], salt: int) -> None:
        """Make the row's full blocks findable; what is there already stays, whoever holds it."""
        parent = ROOT
        for i in range(len(tokens) // self.block_size):
            block = self.tables[row][i]
            key = (parent, salt, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
            if block not in self.serials and key not in self.entries:
                self.last_serial += 1
                self.entries[key], self.serials[block] = block, self.last_serial
            parent = self.serials[block] if block in self.serials else self.serials[self.entries[key]]

    def lookup(self, tokens: list[int], salt: int) -> list[int]:
        parent, found = ROOT, []
        for i in range(len(tokens) // self.block_size):
            key = (parent, salt, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
            if key not in self.entries:
                break
            found.append(self.entries[key])
            parent = self.serials[found[-1]]
        return found

    def reset(self) -> None:
        self.entries, self.serials = {}, {}
        while self.evictable:
            self.free.append(self.evictable.pop(0))


def move(source: BlockModel, target: BlockModel, rows: list[int]) -> list[tuple[int, int]]:
    """Move rows from one pool to the other, what they share once; return (from, to) of each block."""
    moved: dict[int, int] = {HOLE: HOLE}
    pairs = []
    for row in rows:
        for block in source.tables[row]:
            if block not in moved:
                moved[block] = target.take()
                pairs.append((block, moved[block]))
        target.tables[row] = [moved[block] for block in source.tables[row]]
    for row in rows:
        source.free_table(row)
    return pairs
