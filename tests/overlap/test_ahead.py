"""Reading ahead: how far, in which order, and where an error comes out."""

from __future__ import annotations

import pytest

from trainpath.overlap.ahead import read_ahead


def numbers(taken, bad=None):
    """Yield 0 to 5, noting each; fail at `bad`."""
    for number in range(6):
        taken.append(number)
        if number == bad:
            raise LookupError(f"item {number}")
        yield number


def test_all_items_come_in_order():
    """Every item is made once and delivered in order, whatever the depth."""
    for depth in (1, 2, 9):
        assert list(read_ahead(numbers([]), depth, str)) == ["0", "1", "2", "3", "4", "5"]


def test_depth_is_how_far_it_reads():
    """Before the first item is delivered `depth` are made, then one for each delivered."""
    taken = []
    items = read_ahead(numbers(taken), 2, int)
    next(items)
    assert taken == [0, 1]
    next(items)
    assert taken == [0, 1, 2]


def test_error_comes_after_what_was_before_it():
    """An error met while reading ahead waits until the items before it are delivered."""
    items = read_ahead(numbers([], bad=2), 3, int)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(LookupError, match="item 2"):
        next(items)
