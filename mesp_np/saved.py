"""What a block keeps between forward and backward, and how the rest comes back.

Every intermediate has a name and one recipe: its shape, the names it is made from, and
the kernel calls that make it.  The forward follows the recipes in order; the backward
asks for names.  A name that was kept is there; another is rebuilt by its recipe, which
is the forward's own call on the same shapes, so the bits are the same.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How one tensor is made: make(out, *inputs) writes it."""

    shape: tuple
    inputs: tuple
    make: Callable


def closure(recipes, goal):
    """The names that must be made, in order, to have those in `goal`."""
    wanted = set(goal)
    for name in reversed(list(recipes)):
        if name in wanted:
            wanted.update(recipes[name].inputs)
    return [name for name in recipes if name in wanted]


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

    retire   the forward needs a tensor no more: keep it if the method does, else free it
    use      a tensor for the length of a `with` block: the kept one, or a rebuilt one
    release  the backward needs kept tensors no more
    """

    def __init__(self, arena, team, recipes, keep, x):
        self._arena, self._team, self._recipes = arena, team, recipes
        self.keep = keep
        self._live = {"x": x}                    # what can be read now; x belongs to the driver

    def make(self, name):
        """Allocate a tensor and make it from live inputs."""
        recipe = self._recipes[name]
        kept = name in self.keep
        out = self._arena.alloc(name, recipe.shape, category="kept" if kept else "temp")
        if kept:
            self._arena.detach(out)
        recipe.make(out, *[self._live[source] for source in recipe.inputs])
        self._live[name] = out
        return out

    def retire(self, *names):
        """Keep or free, as the method decides."""
        for name in names:
            if name not in self.keep:
                self._arena.free(self._live.pop(name))

    def hand_over(self, name):
        """A live tensor, from now on its taker's to free."""
        return self._live.pop(name)

    def get(self, name):
        """The live tensor of this name, or None."""
        return self._live.get(name)

    @contextmanager
    def use(self, name):
        """The tensor; rebuilt from its recipe, and freed afterwards, if it is not live."""
        if name in self._live:
            yield self._live[name]
            return
        with ExitStack() as inputs, self._team.counting("recompute"):
            for source in self._recipes[name].inputs:
                inputs.enter_context(self.use(source))
            array = self.make(name)
        yield array
        self._arena.free(self._live.pop(name))

    def release(self, *names):
        """Free those of the names that are kept."""
        for name in names:
            if name in self.keep:
                self._arena.free(self._live.pop(name))

    def close(self):
        """Check that the backward released everything.  Raises ArenaLeak."""
        for name, array in self._live.items():
            if name != "x":
                raise self._arena.leak(array, "was kept and never released")
