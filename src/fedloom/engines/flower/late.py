"""Answers that nobody waited for: dropped when they come, and counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Prompt:
    """A Grid that remembers which of its messages were never answered."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self._open: dict[str, int] = {}
        """Number of a message -> the node that it went to."""

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the nodes."""
        ids: Iterable[int] = self.grid.get_node_ids()
        return ids

    def push_messages(self, messages: Iterable[Any]) -> list[Any]:
        """Send messages; returns their numbers."""
        messages = list(messages)
        numbers = list(self.grid.push_messages(messages))
        self._open |= {str(n): m.metadata.dst_node_id for n, m in zip(numbers, messages, strict=False) if n}
        return numbers

    def pull_messages(self, message_ids: Sequence[str]) -> list[Any]:
        """The answers that have come to some messages."""
        came = list(self.grid.pull_messages(message_ids))
        nodes = {self._open[number]: number for number in message_ids if number in self._open}
        for message in came:
            self._open.pop(nodes.get(message.metadata.src_node_id, ""), None)
            self._open.pop(str(message.metadata.reply_to_message_id), None)
        return came

    def late(self) -> list[int]:
        """The nodes whose answers to earlier messages have come by now, after anybody waited for them."""
        nodes: list[int] = []
        here = set(self.get_node_ids())
        while asked := [number for number, node in self._open.items() if node in here]:
            try:
                came = self.pull_messages(asked)
            except Exception:  # a link that fails is said where answers are awaited
                break
            if not came:
                break
            nodes += [message.metadata.src_node_id for message in came if not message.has_error()]
        return nodes
