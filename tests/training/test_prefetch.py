"""Loading ahead changes when batches are made, not which."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from fedloom.training import loop
from fedloom.training.loop import ahead


def alive() -> int:
    return sum(t.name.startswith("fedloom-load") for t in threading.enumerate())


@pytest.mark.parametrize("threads", [1, 4])
def test_items_come_in_order_and_the_threads_end(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "loaders", threads)

    def made(i: int) -> int:
        time.sleep(0.001 * (i % 3))
        return i

    assert list(ahead(partial(made, i) for i in range(50))) == list(range(50))
    assert alive() == 0


def test_errors_are_raised_where_the_items_are_used() -> None:
    def bad() -> int:
        raise ValueError("a bad file")

    stream = ahead([lambda: 1, bad, lambda: 3])
    assert next(stream) == 1
    with pytest.raises(ValueError, match="a bad file"):
        next(stream)
    assert alive() == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_leaving_early_ends_the_threads_and_works_one_item_further_ahead_than_there_are(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "loaders", threads)
    made = list[int]()
    stream = ahead(partial(made.append, i) for i in range(1000))
    next(stream)
    time.sleep(0.1)
    stream.close()
    assert alive() == 0
    assert len(made) == threads + 2  # with the one that is in use


def test_the_next_items_are_made_while_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "loaders", 3)
    all_at_work = threading.Barrier(3, timeout=10)  # broken, an error, unless three are made at the same time
    for _ in ahead(all_at_work.wait for _ in range(3)):
        pass
