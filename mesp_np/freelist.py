"""Best-fit placement over integer offsets: where in the arena a block of bytes goes.

It serves what is not known beforehand, and what an engine holds from step to step; the
tensors of a step are one block to it, within which `placement.py` has placed them.
It knows nothing of arrays or memory, so it can be tested with numbers alone.  The
space is [0, top): blocks in use and holes between them.  A request takes the
smallest hole that fits (the lowest of equals) and leaves the rest of it as a hole;
when none fits it goes on top.  A hole that touches the top is given back by
lowering the top, so an emptied list is exactly as it was when new, and a second
step places its tensors where the first did.
"""

ALIGNMENT = 64


def aligned(size):
    """Round a size in bytes up to the alignment; an empty block still takes one line."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


class FreeList:
    """Offsets for blocks of bytes.

    top     end of the highest block in use
    extent  the highest top so far: the bytes this sequence of requests needs
    """

    def __init__(self):
        self.top = 0
        self.extent = 0
        self._holes = {}                # offset -> size
        self._used = {}                 # offset -> size

    def alloc(self, size):
        """Offset of a new block of `size` bytes, rounded up to the alignment."""
        size = aligned(size)
        fitting = [(room, offset) for offset, room in self._holes.items() if room >= size]
        if fitting:
            room, offset = min(fitting)
            del self._holes[offset]
            if room > size:
                self._holes[offset + size] = room - size
        else:
            offset = self.top
            self.top += size
            self.extent = max(self.extent, self.top)
        self._used[offset] = size
        return offset

    def free(self, offset):
        """Give a block back and merge it with the holes it touches.

        Raises KeyError when no block in use starts at `offset`.
        """
        size = self._used.pop(offset)
        if offset + size in self._holes:
            size += self._holes.pop(offset + size)
        for hole, room in self._holes.items():
            if hole + room == offset:
                del self._holes[hole]
                offset, size = hole, room + size
                break
        if offset + size == self.top:
            self.top = offset
        else:
            self._holes[offset] = size
