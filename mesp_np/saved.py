"""What a block keeps between forward and backward, and how the rest comes back.

Every intermediate has a name and one recipe: its shape, the names it is made from, and
the kernel calls that make it.  The forward follows the recipes in order; the backward
asks for names.  A name that was kept is there; another is rebuilt by its recipe, which
is the forward's own call on the same shapes, so the bits are the same.

Rows      A block works on a tile of rows at a time, forward and backward, whatever the method.
          What is kept, and what attention reads or makes, is an array of all rows, filled tile
          by tile; everything else exists for the tile at hand only.  So the methods make the
          same calls on the same rows, and differ in which arrays are whole.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Recipe:
    """How one tensor is made: make(rows, out, *inputs) writes the rows of a slice.

    across  made for all rows at once, from all rows of its inputs
    """

    shape: tuple
    inputs: tuple
    make: Callable
    across: bool = False


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
    use        some rows of a tensor, likewise
    claim      the memory of a tensor of all rows, whether it is live or not
    hand_over  a tensor that is its taker's from now on
    release    the backward needs kept tensors no more

    tiles  the slices of rows that the block works on
    """

    def __init__(self, arena, team, recipes, keep, x, tiles):
        self._arena, self._team, self._recipes, self.tiles = arena, team, recipes, tiles
        self._keep = keep & set(recipes)
        self._whole = {"x": x}                   # arrays of all rows; x belongs to the driver
        self._tile = {}                          # arrays of the rows at hand

    def compute(self, goal):
        """Make the tensors named in `goal`, all rows of them, from what is live."""
        recipes, order = self._recipes, closure(self._recipes, goal, self._whole)
        last = last_readers(recipes, order)
        across = [name for name in order if recipes[name].across]
        whole = goal.union(across, *[recipes[name].inputs for name in across])
        for together, names in groupby(order, lambda name: recipes[name].across):
            names, tiles = list(names), [slice(None)] if together else self.tiles
            for rows in tiles:
                for name in names:
                    self._make(name, rows, name in whole)
                    self._drop_tiles(last[name])
                    if rows is tiles[-1]:
                        self._drop_whole(set(last[name]) - goal)

    def get(self, name):
        """The live tensor of all rows, or None."""
        return self._whole.get(name)

    def across(self, *names):
        """What must be there of all rows before any rows of these can be rebuilt."""
        return [name for name in closure(self._recipes, names, self._whole) if self._recipes[name].across]

    @contextmanager
    def whole(self, *names):
        """The tensors, all rows; those that are not live are rebuilt, and freed afterwards."""
        missing = {name for name in names if name not in self._whole}
        with self._team.counting("recompute"):
            self.compute(missing)
        yield [self._whole[name] for name in names]
        self._drop_whole(name for name in names if name in missing)

    @contextmanager
    def use(self, name, rows):
        """Rows of the tensor; rebuilt by their recipe, and freed afterwards, if they are not live."""
        if name in self._whole or name in self._tile:
            yield self._rows(name, rows)
            return
        with ExitStack() as inputs, self._team.counting("recompute"):
            for source in self._recipes[name].inputs:
                inputs.enter_context(self.use(source, rows))
            self._make(name, rows)
        yield self._tile[name]
        self._drop_tiles([name])

    def claim(self, name):
        """The tensor of all rows if it is live, else fresh memory in its place: room for its gradient."""
        if name not in self._whole:
            self._whole[name] = self._arena.alloc(name, self._recipes[name].shape)
        return self._whole[name]

    def hand_over(self, name):
        """A live tensor of all rows, from now on its taker's to free."""
        return self._whole.pop(name)

    def release(self, *names):
        """Free those of the names that are kept and not handed over."""
        self._drop_whole(name for name in names if name in self._keep)

    def close(self):
        """Check that the backward released everything.  Raises ArenaLeak."""
        for name, array in self._whole.items():
            if name != "x":
                raise self._arena.leak(array, "was kept and never released")

    def _make(self, name, rows, whole=False):
        """Make rows of a tensor from live inputs: in a tile of their own, or in their place among all rows."""
        recipe = self._recipes[name]
        if not whole:
            tile = len(self._whole["x"][rows])
            self._tile[name] = self._arena.alloc(name, (tile, *recipe.shape[1:]))
        elif name not in self._whole:
            kept = name in self._keep
            self._whole[name] = self._arena.alloc(name, recipe.shape, category="kept" if kept else "temp")
            if kept:
                self._arena.detach(self._whole[name])
        recipe.make(rows, self._rows(name, rows), *[self._rows(source, rows) for source in recipe.inputs])

    def _rows(self, name, rows):
        return self._tile[name] if name in self._tile else self._whole[name][rows]

    def _drop_tiles(self, names):
        for name in names:
            if name in self._tile:
                self._arena.free(self._tile.pop(name))

    def _drop_whole(self, names):
        for name in names:
            if name in self._whole:
                self._arena.free(self._whole.pop(name))
