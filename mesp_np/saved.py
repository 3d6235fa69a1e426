"""What a block keeps between forward and backward, and how the rest comes back.

Every intermediate has a name and one recipe: its shape, the names it is made from, and
the kernel calls that make it.  The forward follows the recipes in order; the backward
asks for names.  A name that was kept is there; another is rebuilt by its recipe, which
is the forward's own call on the same shapes, so the bits are the same.

Tiles     A block works on a tile of rows at a time, whatever the method: the forward from the
          first to the last, the backward from the last to the first.  What is kept is an array of
          all rows, filled tile by tile, and so are keys and values, of which a tile reads all
          that stand before its end; everything else exists for the tile at hand only.  So the
          methods make the same calls on the same rows, and differ in which arrays are whole.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows that are worked on together: some whole sequences of a batch, or some positions of one sequence.

    rows       slice of the B*T rows
    keys       slice of the rows that attention sees from there: from the sequences' beginning on
    sequences  slice of the B sequences
    queries    slice of their T positions
    """

    rows: slice
    keys: slice
    sequences: slice
    queries: slice

    def of(self, array):
        """The tile's part of an array (N, ...), or of scores (B, H, T, T)."""
        if array.ndim == 4:
            return array[self.sequences, :, self.queries, :self.queries.stop]
        return array[self.rows]


def tiles(B, T, most):
    """The tiles of a batch, of at most `most` rows each."""
    if T <= most:
        count = most // T
        runs = [slice(b, min(b + count, B)) for b in range(0, B, count)]
        spans = [slice(run.start * T, run.stop * T) for run in runs]
        return [Tile(rows, rows, run, slice(0, T)) for run, rows in zip(runs, spans, strict=True)]
    parts = [slice(t, min(t + most, T)) for t in range(0, T, most)]
    return [Tile(slice(b * T + part.start, b * T + part.stop), slice(b * T, b * T + part.stop), slice(b, b + 1), part)
            for b in range(B) for part in parts]


@dataclass(frozen=True)
class Recipe:
    """How one tensor is made: make(tile, out, *inputs) writes its rows of a tile.

    seen  inputs of which it gets all keys of the tile
    """

    shape: tuple
    inputs: tuple
    make: Callable
    seen: tuple = ()


def closure(recipes, goal, live=()):
    """The names that must be made, in order, to have those in `goal`, when those in `live` are there."""
    wanted = set(goal)
    for name in reversed(list(recipes)):
        if name in wanted and name not in live:
            wanted.update(recipes[name].inputs)
    return [name for name in recipes if name in wanted and name not in live]


def last_readers(recipes, order):
    """name -> the names that nothing in `order` reads after it was made (itself, if nothing ever does)."""
    last = {name: name for name in order}
    for reader in order:
        for name in recipes[reader].inputs:
            if name in last:
                last[name] = reader
    return {reader: [name for name in order if last[name] == reader] for reader in order}


class Saved:
    """The intermediates of one block in one pass.

    compute    make tensors of all rows, and keep what the method keeps on the way
    whole      tensors of all rows, for the length of a `with` block: kept ones, or rebuilt ones
    use        a tile of a tensor, likewise
    hand_over  a tensor that is its taker's from now on
    release    the backward needs what is kept no more

    over  name -> the live tensor that it is written over, where no later tile reads those rows
    """

    def __init__(self, arena, team, recipes, keep, x, tiles, over=()):
        self._arena, self._team, self._recipes, self._tiles = arena, team, recipes, tiles
        self._keep, self._over = keep & set(recipes), dict(over)
        self._whole = {"x": x}                   # arrays of all rows; x belongs to the driver
        self._parts = {}                         # arrays of the tile at hand

    def compute(self, goal):
        """Make the tensors named in `goal`, all rows of them, from what is live."""
        order = closure(self._recipes, goal, self._whole)
        last = last_readers(self._recipes, order)
        whole = goal.union(*[self._recipes[name].seen for name in order])
        for tile in self._tiles:
            for name in order:
                self._make(name, tile, name in whole)
                self._drop(self._parts, last[name])
                if tile is self._tiles[-1]:
                    self._drop(self._whole, [old for old in last[name] if old not in goal])

    def has(self, name):
        """Is the tensor live, all rows or those of the tile at hand?"""
        return name in self._whole or name in self._parts

    def will_read(self, name, source):
        """Is a tensor not live, and made from `source`?"""
        return not self.has(name) and source in self._recipes[name].inputs

    def get(self, name):
        """The live tensor of all rows, or None."""
        return self._whole.get(name)

    @contextmanager
    def whole(self, *names):
        """The tensors, all rows; those that are not live are rebuilt, and freed afterwards."""
        missing = [name for name in names if name not in self._whole]
        with self._team.counting("recompute"):
            self.compute(set(missing))
        yield [self._whole[name] for name in names]
        self._drop(self._whole, missing)

    @contextmanager
    def use(self, name, tile):
        """The tile of a tensor; rebuilt by its recipe, and freed afterwards, if it is not live."""
        if self.has(name):
            yield self._tile(name, tile)
            return
        with ExitStack() as inputs, self._team.counting("recompute"):
            for source in self._recipes[name].inputs:
                inputs.enter_context(self.use(source, tile))
            self._make(name, tile)
        yield self._parts[name]
        self._drop(self._parts, [name])

    def hand_over(self, name):
        """A live tensor of all rows, from now on its taker's to free."""
        return self._whole.pop(name)

    def release(self):
        """Free what is kept."""
        self._drop(self._whole, [name for name in self._whole if name in self._keep])

    def close(self):
        """Check that nothing is left.  Raises ArenaLeak."""
        for name, array in self._whole.items():
            if name != "x":
                raise self._arena.leak(array, "was kept and never released")

    def _make(self, name, tile, whole=False):
        """Make a tile of a tensor from live inputs: on its own, or in its place among all rows."""
        recipe = self._recipes[name]
        if not whole:
            rows = tile.rows.stop - tile.rows.start
            self._parts[name] = self._arena.alloc(name, (rows, *recipe.shape[1:]))
        elif name in self._over:
            self._whole[name] = self._arena.rename(self._whole[self._over.pop(name)], name)
        elif name not in self._whole:
            kept = name in self._keep
            self._whole[name] = self._arena.alloc(name, recipe.shape, category="kept" if kept else "temp")
            if kept:
                self._arena.detach(self._whole[name])
        inputs = [self._whole[source][tile.keys] if source in recipe.seen else self._tile(source, tile)
                  for source in recipe.inputs]
        recipe.make(tile, self._tile(name, tile), *inputs)

    def _tile(self, name, tile):
        return self._parts[name] if name in self._parts else tile.of(self._whole[name])

    def _drop(self, arrays, names):
        for name in names:
            if name in arrays:
                self._arena.free(arrays.pop(name))
