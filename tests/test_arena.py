"""The arena: its verbs, what it refuses, and that a phantom one tells the same story as a real one."""

import inspect

import numpy as np
import pytest

from mesp_np.arena import Arena, ArenaError, ArenaFull, ArenaLeak, phantom
from mesp_np.ledger import first_difference

both = pytest.mark.parametrize("capacity", [None, 1 << 16], ids=["phantom", "real"])


def events(arena):
    """(verb, name) of each event."""
    return [(event.verb, event.name) for event in arena.ledger.events]


def line_here(back=1):
    """file:line of the caller's line, `back` lines up."""
    frame = inspect.currentframe().f_back
    return f"test_arena.py:{frame.f_lineno - back}"


@both
def test_alloc_and_free(capacity):
    arena = Arena(capacity)
    x = arena.alloc("x", (3, 5), category="kept")
    assert (x.shape, x.dtype, x.nbytes, arena.ledger.live, arena.extent) == ((3, 5), np.float32, 60, 60, 64)
    arena.free(x)
    source = line_here()
    alloc, free = arena.ledger.events
    assert free.source.endswith(source) and alloc.source != free.source
    assert (alloc.verb, alloc.name, alloc.shape, alloc.dtype, alloc.bytes, alloc.category, alloc.live) == (
        "alloc", "x", (3, 5), "float32", 60, "kept", 60)
    assert (free.verb, free.name, free.live, arena.ledger.tensors()) == ("free", "x", 0, [])


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.int32, np.uint8])
def test_dtypes(capacity, dtype):
    assert Arena(capacity, dtype).alloc("x", (3,)).dtype == dtype
    assert Arena(capacity).alloc("x", (3,), dtype).nbytes == 3 * np.dtype(dtype).itemsize


@both
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), [2, 3]])
def test_shapes(capacity, shape):
    arena = Arena(capacity)
    x, y = arena.alloc("x", shape), arena.alloc("y", shape)
    assert x.shape == tuple(shape) and [event.offset for event in arena.ledger.events] == [0, 64]
    arena.free(y)
    arena.free(x)


def test_arrays_are_aligned_and_separate(rng):
    """Every array starts on 64 bytes and is C-contiguous; writing to one leaves the others alone."""
    arena, shapes = Arena(1 << 20), [(int(rng.integers(1, 40)), int(rng.integers(1, 40))) for _ in range(50)]
    arrays = [arena.alloc(f"a{index}", shape) for index, shape in enumerate(shapes)]
    for index, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.flags.writeable
        array[:] = index
    assert all((array == index).all() for index, array in enumerate(arrays))


def test_freed_memory_is_used_again():
    arena = Arena(64)
    for value in range(3):
        with arena.temp("x", (16,)) as x:
            x[:] = value
    assert arena.extent == 64


@both
def test_temp(capacity):
    arena = Arena(capacity)
    with arena.temp("x", (3,), np.int32, "input") as x:
        assert x.dtype == np.int32 and arena.ledger.live_by_category["input"] == 12
    assert events(arena) == [("alloc", "x"), ("free", "x")]


@both
def test_scopes_prefix_names(capacity):
    arena = Arena(capacity)
    with arena.scope("layer.3"):
        with arena.scope("mlp"), arena.temp("gate", (3,)):
            pass
        with arena.temp("gate", (3,)):
            pass
    assert [name for verb, name in events(arena) if verb == "alloc"] == ["layer.3.mlp.gate", "layer.3.gate"]


@both
def test_a_leak_is_named_with_bytes_and_source_line(capacity):
    arena = Arena(capacity)
    with pytest.raises(ArenaLeak) as caught:
        with arena.scope("mlp"):
            arena.free(arena.alloc("act", (5,)))
            arena.alloc("gate", (3, 5))
            source = line_here()
    assert all(part in str(caught.value) for part in ("mlp.gate", "60 B", source, "scope mlp"))


@both
def test_a_scope_only_answers_for_its_own(capacity):
    """What came before it may live on, be freed inside it, or be there under the same scope name."""
    arena = Arena(capacity)
    x, y = arena.alloc("x", (3,)), arena.alloc("y", (3,))
    with arena.scope("mlp"):
        arena.free(x)
        out = arena.result(arena.alloc("out", (3,)))
    with arena.scope("mlp"):
        pass
    arena.free(out)
    arena.free(y)


@both
def test_a_result_belongs_to_the_scope_around(capacity):
    arena = Arena(capacity)
    with pytest.raises(ArenaLeak, match="outer.inner.out: 12 B .* scope outer"):
        with arena.scope("outer"):
            with arena.scope("inner"):
                arena.result(arena.alloc("out", (3,)))


@both
def test_detached_arrays_outlive_every_scope(capacity):
    arena = Arena(capacity)
    with arena.scope("outer"), arena.scope("inner"):
        kept = arena.detach(arena.alloc("kept", (3,)))
    assert arena.ledger.live == 12
    arena.free(kept)


@both
def test_rename(capacity):
    arena = Arena(capacity)
    with arena.scope("mlp"):
        gate = arena.alloc("gate", (3,))
        assert arena.rename(gate, "dgate", "grad") is gate
        source = line_here()
        again = arena.alloc("gate", (3,))
        arena.free(gate)
        arena.free(again)
    event = arena.ledger.events[1]
    assert (event.verb, event.was, event.name, event.category) == ("rename", "mlp.gate", "mlp.dgate", "grad")
    assert event.source.endswith(source) and arena.ledger.events[0].live == event.live


@both
def test_a_rename_is_still_answered_for(capacity):
    arena = Arena(capacity)
    with pytest.raises(ArenaLeak, match="mlp.dgate"):
        with arena.scope("mlp"):
            arena.rename(arena.alloc("gate", (3,)), "dgate")


@both
def test_two_live_tensors_never_share_a_name(capacity):
    arena = Arena(capacity)
    arena.alloc("x", (3,))
    y = arena.alloc("y", (3,))
    with pytest.raises(ArenaError, match="x is allocated twice"):
        arena.alloc("x", (3,))
    with pytest.raises(ArenaError, match="y cannot be renamed x: that name is taken"):
        arena.rename(y, "x")


@both
@pytest.mark.parametrize("other", [
    lambda x: x[:], lambda x: x[1:], lambda x: x.reshape(-1), lambda x: x.T, lambda x: np.zeros(3)],
    ids=["all of it", "a slice", "a reshape", "transposed", "a stranger"])
def test_only_what_alloc_returned_can_be_freed(capacity, other):
    arena = Arena(capacity)
    x = arena.alloc("x", (2, 3))
    for verb in (arena.free, arena.result, arena.detach, lambda array: arena.rename(array, "y")):
        with pytest.raises(ArenaError, match="not live here: freed before, or a view"):
            verb(other(x))
    arena.free(x)


@both
def test_nothing_is_freed_twice(capacity):
    arena = Arena(capacity)
    x = arena.alloc("x", (3,))
    arena.free(x)
    with pytest.raises(ArenaError, match="freed before"):
        arena.free(x)


def test_full_lists_the_live_tensors_largest_first():
    arena = Arena(1024)
    arena.alloc("small", (16,))
    arena.alloc("large", (128,))
    arena.alloc("middle", (32,))
    with pytest.raises(ArenaFull) as caught:
        arena.alloc("next", (100,))
    message = str(caught.value)
    assert message.startswith("next needs 400 B") and "1,024 B" in message
    assert message.index("large 512 B") < message.index("middle 128 B") < message.index("small 64 B")


def test_full_cuts_a_long_list():
    arena = Arena(64 * 20)
    for index in range(20):
        arena.alloc(f"a{index}", (16,))
    with pytest.raises(ArenaFull, match="and 8 more$"):
        arena.alloc("next", (1,))


def test_exactly_the_capacity_fits():
    arena = Arena(128)
    arena.alloc("x", (16,))
    arena.alloc("y", (16,))
    assert arena.extent == 128


def test_more_than_the_machine_has():
    with pytest.raises(ArenaFull, match="the machine does not give"):
        Arena(1 << 62)


@pytest.mark.parametrize("dtype, poisoned", [
    (np.float32, np.isnan), (np.float64, np.isnan), (np.int32, lambda x: x == -1)])
def test_poison(dtype, poisoned):
    """On alloc and after free, and not in the neighbours."""
    arena = Arena(1 << 12, dtype, poison=True)
    before, x, after = (arena.alloc(name, (7,)) for name in ("before", "x", "after"))
    assert poisoned(x).all()
    for array in (before, x, after):
        array[:] = 5
    arena.free(x)
    assert poisoned(x).all() and (before == 5).all() and (after == 5).all()
    assert poisoned(arena.alloc("again", (7,))).all()


def test_a_phantom_has_a_size_and_no_memory():
    """A terabyte that cannot be written, and is NaN where it is read."""
    x = Arena().alloc("x", (1 << 20, 1 << 18))
    assert x.nbytes == 1 << 40 and x.strides == (0, 0)
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0] = 1
    assert np.isnan(x[5, 7]) and phantom((3,), np.int32)[1] == -1
    assert not x.reshape(1 << 19, 2, -1, copy=False)[:100].flags.writeable


def test_a_phantom_arena_tells_the_same_story():
    """Event for event: verb, name, shape, dtype, bytes, offset, category, stage, source line and live total."""
    def work(arena):
        arena.stage("forward")
        with arena.scope("layer.0"):
            x = arena.detach(arena.alloc("x", (7, 33), category="checkpoint"))
            with arena.temp("rstd", (7,), np.float64), arena.scope("mlp"):
                gate = arena.alloc("gate", (7, 70))
                up = arena.alloc("up", (7, 70))
                arena.free(gate)
                out = arena.result(arena.rename(up, "act"))
            arena.stage("backward")
            dx = arena.result(arena.alloc("dx", x.shape))
            arena.free(out)
        for array in (x, dx):
            arena.free(array)
        return arena

    planned, real = work(Arena()), work(Arena(1 << 13))
    assert first_difference(planned.ledger.events, real.ledger.events) is None
    assert len(planned.ledger.events) == 11 and planned.extent == real.extent
    assert planned.ledger.at_peak() == real.ledger.at_peak()


def part(arena):
    """Work that a free list leaves a hole in, its tensors known by name afterwards."""
    with arena.scope("part"):
        small, large = arena.alloc("small", (16,)), arena.alloc("large", (32,))
        arena.free(small)
        with arena.temp("other", (32,)) as other:
            arena.rename(other, "renamed")
        arena.free(large)


@both
def test_a_rehearsed_part_leaves_no_hole_and_is_followed_to_the_byte(capacity):
    """The ledger of a rehearsal has the events of the run, offsets too; what was there before stays where it is."""
    arenas, before = (Arena(), Arena(capacity)), []
    for arena in arenas:
        before.append(arena.alloc("before", (16,)))
    with arenas[0].rehearse("a part") as recorder:
        part(arenas[0])
    for _ in range(2):
        arenas[1].ledger.restart()
        with arenas[1].follow("a part", recorder.schedule):
            part(arenas[1])
        assert first_difference(arenas[0].ledger.events[1:], arenas[1].ledger.events) is None
    assert {event.name: event.offset for event in arenas[1].ledger.events} == {
        "part.small": 192, "part.large": 64, "part.other": 192, "part.renamed": 192}
    assert arenas[0].extent == arenas[1].extent == 320
    for arena in arenas:
        assert arena.alloc("after", (16,)).nbytes and arena.ledger.events[-1].offset == 64


def test_the_free_list_alone_leaves_a_hole():
    arena = Arena()
    part(arena)
    assert arena.extent == 320


@both
def test_a_part_other_than_rehearsed_is_refused_by_name(capacity):
    with Arena().rehearse("a part") as recorder:
        pass
    arena = Arena(capacity)
    with pytest.raises(ArenaError, match="mlp.gate: 60 B are asked for; the plan has 0 tensors, and no other"):
        with arena.follow("a part", recorder.schedule), arena.scope("mlp"):
            arena.alloc("gate", (3, 5))


def test_what_a_part_leaves_is_named():
    with pytest.raises(ArenaLeak, match="gate: 60 B .* is still live at the end of a part"):
        arena = Arena()
        with arena.rehearse("a part"):
            arena.detach(arena.alloc("gate", (3, 5)))


@both
def test_a_part_may_not_free_what_was_there_before(capacity):
    """Nor does a rehearsal pass, from which a schedule would be made."""
    rehearsal, arena = Arena(), Arena(capacity)
    before = [each.alloc("before", (16,)) for each in (rehearsal, arena)]
    with pytest.raises(ArenaError, match="before was there before a part and is gone"):
        with rehearsal.rehearse("a part"):
            rehearsal.free(rehearsal.alloc("one", (16,)))
            rehearsal.free(before[0])
    with Arena().rehearse("a part") as recorder:
        pass
    with pytest.raises(ArenaError, match="before: is not one of the plan's tensors"):
        with arena.follow("a part", recorder.schedule):
            arena.free(before[1])


def test_a_part_that_does_not_fit_does_not_begin():
    with (phantom_arena := Arena()).rehearse("a part") as recorder:
        part(phantom_arena)
    arena = Arena(recorder.schedule.extent - 64)
    with pytest.raises(ArenaFull, match="a part needs .* at offset 0"):
        with arena.follow("a part", recorder.schedule):
            raise AssertionError
    assert not arena.ledger.events


def test_a_second_step_places_its_tensors_where_the_first_did():
    arena, steps = Arena(), []
    for _ in range(2):
        arena.ledger.restart()
        with arena.scope("step"):
            for size in (100, 30, 70):
                with arena.temp("a", (size,)), arena.temp("b", (2 * size,)):
                    arena.free(arena.alloc("c", (size + 1,)))
        steps.append(arena.ledger.events)
    assert first_difference(*steps) is None
