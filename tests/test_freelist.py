"""Placement over integers: scenarios, and the properties that hold for any of them."""

import numpy as np
import pytest

from mesp_np.freelist import ALIGNMENT, FreeList, aligned


def filled(*lines):
    """(free list, offsets) after requests of so many lines of ALIGNMENT bytes."""
    places = FreeList()
    return places, [places.alloc(ALIGNMENT * count) for count in lines]


@pytest.mark.parametrize("size, rounded", [(0, 64), (1, 64), (64, 64), (65, 128), (10 ** 12 + 1, 10 ** 12 + 64)])
def test_sizes_are_rounded_up(size, rounded):
    assert aligned(size) == rounded


def test_blocks_follow_one_another():
    # GIVEN an empty list WHEN three blocks are requested THEN each starts where the one before ends
    places, offsets = filled(1, 2, 3)
    assert offsets == [0, 64, 192] and places.top == places.extent == 384


def test_an_empty_block_has_a_place_of_its_own():
    # GIVEN an empty block WHEN another follows THEN their offsets differ
    places = FreeList()
    assert places.alloc(0) != places.alloc(0)


def test_a_hole_is_used_again():
    # GIVEN a hole in the middle WHEN a block of its size is requested THEN it goes there, and the extent stays
    places, (_, middle, _) = filled(1, 2, 1)
    places.free(middle)
    assert places.alloc(128) == middle and places.extent == 256


def test_the_smallest_hole_that_fits():
    # GIVEN holes of 3 and 2 lines WHEN 2 lines are requested THEN the second hole is taken
    places, (wide, _, narrow, _) = filled(3, 1, 2, 1)
    places.free(wide)
    places.free(narrow)
    assert places.alloc(128) == narrow


def test_the_lowest_of_equal_holes():
    # GIVEN two equal holes, the higher freed first WHEN one is requested THEN the lower is taken
    places, (low, _, high, _) = filled(2, 1, 2, 1)
    places.free(high)
    places.free(low)
    assert places.alloc(128) == low


def test_the_rest_of_a_hole_stays_a_hole():
    # GIVEN a hole of 3 lines WHEN 1 and then 2 are requested THEN both fit in it
    places, (hole, _) = filled(3, 1)
    places.free(hole)
    assert (places.alloc(64), places.alloc(128)) == (hole, hole + 64) and places.extent == 256


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbouring_holes_merge(order):
    # GIVEN three neighbours below a block in use WHEN freed in any order THEN one request takes them all
    places, (*three, _) = filled(1, 1, 1, 1)
    for index in order:
        places.free(three[index])
    assert places.alloc(192) == 0 and places.extent == 256


def test_too_small_a_hole_is_passed_over():
    # GIVEN a hole of 1 line WHEN 2 are requested THEN they go on top
    places, (hole, _) = filled(1, 1)
    places.free(hole)
    assert places.alloc(128) == 128 and places.extent == 256


def test_the_top_comes_down_and_the_extent_does_not():
    # GIVEN a hole under the last block WHEN that block is freed THEN the top falls to the hole's start
    places, (_, hole, last) = filled(1, 2, 3)
    places.free(hole)
    places.free(last)
    assert places.top == 64 and places.extent == 384


@pytest.mark.parametrize("offset", [0, 64, 1])
def test_freeing_what_is_not_in_use(offset):
    # GIVEN a block freed before, or an offset inside or beyond WHEN it is freed THEN KeyError
    places, (block,) = filled(1)
    places.free(block)
    with pytest.raises(KeyError):
        places.free(offset)


def random_requests(seed):
    """A sequence of sizes to allocate and, as None, of blocks to free: (size, which of the live blocks)."""
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(0, 2000)) if rng.random() < 0.55 else None, int(rng.integers(1 << 30)))
            for _ in range(400)]


def play(places, requests):
    """Offsets in order of request; checks that no two live blocks overlap, and frees all in the end."""
    live, offsets = {}, []
    for size, which in requests:
        if size is None:
            if live:
                offset = sorted(live)[which % len(live)]
                del live[offset]
                places.free(offset)
            continue
        offset = places.alloc(size)
        offsets.append(offset)
        assert offset % ALIGNMENT == 0 and offset + size <= places.top <= places.extent
        assert all(offset + aligned(size) <= other or other + aligned(room) <= offset for other, room in live.items())
        live[offset] = size
    for offset in live:
        places.free(offset)
    return offsets


@pytest.mark.parametrize("seed", range(30))
def test_any_sequence(seed):
    """No overlap; freeing all leaves an empty list; the same requests then get the same places."""
    places, requests = FreeList(), random_requests(seed)
    first = play(places, requests)
    extent = places.extent
    assert places.top == 0
    assert play(places, requests) == first and places.extent == extent
    assert play(FreeList(), requests) == first
