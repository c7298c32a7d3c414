"""Loading the next batches while the current one trains."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_END: Any = object()


def ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """The same items, made by a thread that works up to `depth` items ahead.

    Decoding, resizing and tensor operations release the interpreter lock, so they run beside training. An error in the
    thread is raised here; leaving the iteration early ends the thread.
    """
    ready: queue.Queue[tuple[T, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: tuple[Any, BaseException | None]) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.05)
                return

    def work() -> None:
        try:
            for item in items:
                put((item, None))
                if stop.is_set():
                    return
            put((_END, None))
        except BaseException as error:
            put((_END, error))

    thread = threading.Thread(target=work, name="fedloom-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stop.set()
        thread.join()


class Clocked(Generic[T]):
    """An iterator that adds up how long its consumer waited for items."""

    def __init__(self, items: Iterator[T]) -> None:
        self.items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        while True:
            start = time.perf_counter()
            item = next(self.items, _END)
            self.seconds += time.perf_counter() - start
            if item is _END:
                return
            yield item
