"""Loading ahead changes when batches are made, not which."""

from __future__ import annotations

import threading
import time

import pytest

from fedloom.training.loop import ahead


def alive() -> int:
    return sum(t.name == "fedloom-prefetch" for t in threading.enumerate())


def test_items_come_in_order_and_the_thread_ends() -> None:
    assert list(ahead(iter(range(50)))) == list(range(50))
    assert alive() == 0


def test_errors_are_raised_where_the_items_are_used() -> None:
    def items():
        yield 1
        raise ValueError("a bad file")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="a bad file"):
        next(stream)
    assert alive() == 0


def test_leaving_early_ends_the_thread_and_works_no_further_than_depth() -> None:
    """One item is in use, two are ready, and one is made and waits for its place."""
    made = []

    def items():
        for i in range(1000):
            made.append(i)
            yield i

    stream = ahead(items())
    assert next(stream) == 0
    time.sleep(0.2)
    stream.close()
    assert alive() == 0
    assert len(made) <= 4


def test_the_next_item_is_made_while_one_is_in_use() -> None:
    made = threading.Event()

    def items():
        yield 0
        made.set()
        yield 1

    for item in ahead(items()):
        if item == 0:
            assert made.wait(timeout=10)
