"""Offline placement over integers: scenarios, and what holds for any sequence."""

import numpy as np
import pytest

from mesp_np import placement
from mesp_np.freelist import ALIGNMENT, FreeList
from mesp_np.placement import Follower, OffPlan, Recorder, live_peak, place


def placed(*tensors):
    """(offsets, extent) in lines of ALIGNMENT bytes, of (lines, birth, death)."""
    sizes, births, deaths = np.array(tensors, np.int64).reshape(-1, 3).T
    offsets = place(ALIGNMENT * sizes, births, deaths) // ALIGNMENT
    return offsets.tolist(), int(np.max(offsets + sizes, initial=0))


def overlap(sizes, births, deaths, offsets):
    """Pairs of tensors that share an address at the same time, one by one."""
    count = len(sizes)
    return [(i, j) for i in range(count) for j in range(i)
            if births[i] < deaths[j] and births[j] < deaths[i]
            and offsets[i] < offsets[j] + sizes[j] and offsets[j] < offsets[i] + sizes[i]]


def test_nothing_takes_no_room():
    assert placed() == ([], 0)


def test_tensors_that_never_meet_share_a_place():
    # GIVEN a tensor freed before the next is made WHEN placed THEN both are at the bottom
    assert placed((2, 0, 1), (3, 2, 3)) == ([0, 0], 3)


def test_what_is_freed_as_another_is_made_does_not_meet_it():
    assert placed((2, 0, 1), (3, 1, 2)) == ([0, 0], 3)


def test_the_larger_of_two_that_meet_is_below():
    assert placed((2, 0, 2), (3, 1, 3)) == ([3, 0], 5)


def test_of_equals_the_longer_life_is_below():
    assert placed((2, 0, 2), (2, 1, 9)) == ([2, 0], 4)


def test_a_small_tensor_goes_into_a_gap():
    # GIVEN a tensor that rests on one freed early WHEN a small one comes then THEN it is put beneath
    assert placed((9, 0, 2), (3, 1, 5), (2, 3, 4)) == ([0, 9, 0], 12)


def test_a_hole_that_a_free_list_leaves_is_not_there():
    # GIVEN a small tensor freed below a large one WHEN another large one comes THEN a free list has a hole
    tensors = ((1, 0, 2), (2, 1, 5), (2, 3, 4))
    places = FreeList()
    small = places.alloc(ALIGNMENT)
    places.alloc(2 * ALIGNMENT)
    places.free(small)
    places.alloc(2 * ALIGNMENT)
    assert places.extent == 5 * ALIGNMENT and placed(*tensors)[1] == 4


def test_another_order_is_tried_where_the_largest_first_is_not_the_best(monkeypatch):
    # GIVEN tensors for which largest first leaves a hole WHEN placed THEN the extent is the live peak all the same
    tensors = ((3, 1, 4), (1, 3, 7), (2, 5, 9), (3, 7, 9))
    assert placed(*tensors)[1] == 5
    monkeypatch.setattr(placement, "NEAR", np.inf)           # the first order is good enough
    assert placed(*tensors)[1] == 6


def random_lives(seed):
    """(sizes, births, deaths) of up to 60 tensors: long and short, large and small."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    births = rng.integers(0, 100, count)
    return ALIGNMENT * (1 + rng.pareto(1, count).astype(np.int64)), births, births + 1 + rng.geometric(0.1, count)


@pytest.mark.parametrize("seed", range(60))
def test_no_two_live_tensors_overlap(seed):
    lives = random_lives(seed)
    offsets = place(*lives)
    assert overlap(*lives, offsets) == [] and (offsets >= 0).all() and (offsets % ALIGNMENT == 0).all()
    assert np.max(offsets + lives[0]) >= live_peak(*lives)


def test_an_overlap_would_be_seen():
    """A control: one tensor of many moved to where another is at the time."""
    sizes, births, deaths = random_lives(0)
    offsets = place(sizes, births, deaths)
    met = np.flatnonzero((births < deaths[0]) & (deaths > births[0]))
    offsets[0] = offsets[met[met > 0][0]]
    assert overlap(sizes, births, deaths, offsets)


def play(places, verbs):
    """Offsets in order of request: a size in bytes is allocated, -n frees the nth tensor, counted from 1."""
    offsets = []
    for verb in verbs:
        if verb >= 0:
            offsets.append(places.alloc(verb))
        else:
            places.free(offsets[-verb - 1])
    return offsets


VERBS = (100, 1000, -1, 0, 500, -2, -4, 1000, -3, -5)


def schedule(verbs=VERBS):
    recorder = Recorder()
    assert play(recorder, verbs) == list(range(sum(verb >= 0 for verb in verbs)))
    return recorder.schedule


def test_what_was_recorded():
    seen = schedule()
    assert seen.sizes.tolist() == [128, 1024, 64, 512, 1024]
    assert seen.births.tolist() == [0, 1, 3, 4, 7] and seen.deaths.tolist() == [2, 5, 8, 6, 9]
    assert not overlap(seen.sizes, seen.births, seen.deaths, seen.offsets)
    assert seen.extent == max(seen.offsets + seen.sizes) == live_peak(seen.sizes, seen.births, seen.deaths)


def test_the_same_sequence_gets_the_places_of_the_schedule():
    assert play(Follower(schedule(), 640), VERBS) == (640 + schedule().offsets).tolist()


@pytest.mark.parametrize("verbs, words", [
    ((200,), "200 B are asked for at event 0; the plan's next is tensor 1 of 5, 128 B at event 0"),
    ((100, 1000, 0), "0 B are asked for at event 2; the plan's next is tensor 3 of 5, 64 B at event 3"),
    ((100, 1000, -2), "is freed at event 2; the plan frees it at 5"),
    ((100, 1000, -1, 0, 500, -4), "is freed at event 5; the plan frees it at 6"),
    ((*VERBS, 64), "the plan has 5 tensors, and no other")],
    ids=["another size", "a free left out", "another freed", "freed too early", "one too many"])
def test_any_other_sequence_is_refused(verbs, words):
    with pytest.raises(OffPlan, match=words):
        play(Follower(schedule(), 0), verbs)
