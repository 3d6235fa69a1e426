"""What is read off an event list, from event lists written by hand."""

import numpy as np
import pytest

from mesp_np.arena import phantom
from mesp_np.ledger import (
    STAGES,
    Ledger,
    first_difference,
    peak_difference,
    show_bytes,
    spans,
)


def play(story, ledger=None):
    """A ledger after a story such as `+a:100 +b:50/grad -a b>c loss! +d:1`.

    +name:bytes/category  alloc     -name  free
    old>new/category      rename    name!  begin a stage
    """
    ledger = ledger or Ledger()
    sizes, categories = {}, {}
    for line in story.split():
        if line.endswith("!"):
            ledger.enter(line[:-1])
            continue
        text, _, category = line.partition("/")
        was, _, name = text.rpartition(">")
        if line[0] == "+":
            name, _, size = text[1:].partition(":")
            sizes[name], categories[name] = int(size), category or "temp"
        elif was:
            sizes[name], categories[name] = sizes[was], category or categories[was]
        else:
            name = text[1:]
        verb = {"+": "alloc", "-": "free"}.get(line[0], "rename")
        ledger.record(verb, name, phantom((sizes[name],), np.uint8), 0, categories[name], "story.py:1", was)
    return ledger


def at_peak(ledger):
    return {tensor.name: tensor.bytes for tensor in ledger.at_peak()}


def test_an_empty_ledger():
    ledger = Ledger()
    assert (ledger.live, ledger.live_peak, ledger.at_peak(), ledger.tensors()) == (0, 0, [], [])
    assert ledger.stage_peak_bytes() == dict.fromkeys(STAGES, 0)


@pytest.mark.parametrize("story, live, peak, composition", [
    ("+a:100", 100, 100, {"a": 100}),
    ("+a:100 -a", 0, 100, {"a": 100}),                                  # one allocated and freed
    ("+a:100 +b:50 -a", 50, 150, {"a": 100, "b": 50}),                  # one of two freed
    ("+a:100 -a +b:50", 50, 100, {"a": 100}),                           # the peak before
    ("+a:50 -a +b:100", 100, 100, {"b": 100}),                          # freed before the high-water mark
    ("+a:90 -a +b:10 +c:90 -c", 10, 100, {"b": 10, "c": 90}),           # a second, higher peak
    ("+a:100 -a +b:40 -b +c:100", 100, 100, {"a": 100}),                # made and freed between two equal peaks
    ("+a:100 -a +b:40 -b +c:101", 101, 101, {"c": 101}),                # made and freed between two peaks
    ("+a:0 +b:0", 0, 0, {}),                                            # bytes that never rise
    ("+a:100 +b:0 -a", 0, 100, {"a": 100}),                             # nothing after the peak counts
    ("+a:100 a>b +c:1", 101, 101, {"b": 100, "c": 1}),                  # renamed on the way
    ("+a:100 a>b -b +a:100", 100, 100, {"a": 100}),                     # renamed after the peak; the name again
])
def test_peaks(story, live, peak, composition):
    ledger = play(story)
    assert (ledger.live, ledger.live_peak, at_peak(ledger)) == (live, peak, composition)
    assert sum(composition.values()) == peak == sum(ledger.category_bytes_at_peak().values())


def test_a_name_that_comes_again():
    """Freed and allocated with another size: only the live one is at the peak."""
    assert at_peak(play("+a:10 -a +a:100 -a +a:20")) == {"a": 100}


def test_listings_are_largest_first_and_ties_by_name():
    ledger = play("+b:10 +c:30 +a:10")
    assert [tensor.name for tensor in ledger.tensors()] == ["c", "a", "b"] == list(at_peak(ledger))


def test_categories():
    ledger = play("+a:100/kept +b:50/grad +c:7/kept -c -a +d:1/grad")
    assert ledger.category_bytes_at_peak() == {"kept": 107, "grad": 50}
    assert ledger.live_by_category == {"kept": 0, "grad": 51}


def test_a_rename_may_move_bytes_to_another_category():
    ledger = play("+a:100/temp a>b/kept")
    assert ledger.live_by_category == {"temp": 0, "kept": 100}
    assert (ledger.live, len(ledger.events), ledger.events[-1].was) == (100, 2, "a")


def test_stage_peaks():
    """A stage opens with what is live, even if it allocates nothing; going back to one goes on with it."""
    ledger = play("forward! +a:10 +b:5 -b loss! backward! -a +c:3 forward! +d:20 -d update!")
    assert ledger.stage_peak_bytes() == {"forward": 23, "loss": 10, "backward": 10, "update": 3}
    assert [event.stage for event in ledger.events] == [
        "forward", "forward", "forward", "backward", "backward", "forward", "forward"]
    assert ledger.live_peak == max(ledger.stage_peak_bytes().values())


def test_restart_keeps_what_is_live():
    """GIVEN a step with a high peak WHEN the next begins THEN its peak counts from what is live now."""
    ledger = play("+weights:40/adapter +x:100 -x")
    ledger.restart()
    assert (ledger.events, ledger.live, ledger.live_peak, at_peak(ledger)) == ([], 40, 40, {"weights": 40})
    play("+y:5 -y", ledger)
    assert (ledger.live_peak, at_peak(ledger)) == (45, {"weights": 40, "y": 5})


def test_events_carry_the_running_total():
    assert [event.live for event in play("+a:100 +b:50 -a b>c -c").events] == [100, 150, 50, 50, 0]


@pytest.mark.parametrize("points, pieces", [(1, [[1, 2, 3, 4, 5]]), (2, [[1, 2], [3, 4, 5]]),
                                            (5, [[1], [2], [3], [4], [5]]), (100, [[1], [2], [3], [4], [5]])])
def test_spans(points, pieces):
    """Everything once and in order, in pieces of near equal length; none is empty."""
    assert spans(range(1, 6), points) == pieces
    assert spans([], points) == []


def test_first_difference():
    one, same, other, longer = map(play, ("+a:1 +b:2", "+a:1 +b:2", "+a:1 +b:3", "+a:1 +b:2 -a"))
    assert first_difference(one.events, same.events) is None
    assert first_difference(one.events, other.events) == (1, one.events[1], other.events[1])
    assert first_difference(one.events, longer.events) == (2, None, longer.events[2])
    assert first_difference(longer.events, one.events) == (2, longer.events[2], None)


def test_peak_difference():
    """By name; what is equal on both sides is left out."""
    ours, theirs = play("+x:10 +gate:5 +p:7 -p"), play("+x:10 +gate:6 +h:1 -gate")
    assert peak_difference(ours, theirs) == {"gate": (5, 6), "h": (0, 1), "p": (7, 0)}
    assert sum(a - b for a, b in peak_difference(ours, theirs).values()) == ours.live_peak - theirs.live_peak
    assert peak_difference(ours, ours) == {}


@pytest.mark.parametrize("count, shown", [
    (0, "0 B (0.0 MiB)"), (135_921_664, "135,921,664 B (129.6 MiB)"), (1 << 40, "1,099,511,627,776 B (1048576.0 MiB)")])
def test_show_bytes(count, shown):
    assert show_bytes(count) == shown
