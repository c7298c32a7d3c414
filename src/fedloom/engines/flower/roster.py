"""Which clients' nodes are connected, and how to ask them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from fedloom.core.context import Log
from fedloom.engines.flower.nodes import NodeReport
from fedloom.engines.flower.received import open_reply
from fedloom.engines.flower.wire import RefusedError, encode
from fedloom.extras import need
from fedloom.recipes.schema import Recipe, recipe_hash
from fedloom.runs.reader import described

_POLL = 0.05, 1.0
"""Seconds between two looks for answers: at first, and at most."""


class Roster:
    """Who is there, and how to ask them."""

    def __init__(self, grid: Any, recipe: Recipe) -> None:
        self.grid, self.hash = grid, recipe_hash(recipe)
        self.ids: dict[str, int] = {}
        """Client -> the id of its node, which Flower draws anew."""
        self.reports: dict[str, NodeReport | None] = {}
        self.log: Log = lambda event, fields: print(f"{event}{described(fields)}")
        self._refused: set[int] = set()

    def there(self) -> dict[str, int]:
        """Clients whose nodes are connected, and the nodes' ids."""
        now = set(self.grid.get_node_ids())
        return {client: node for client, node in sorted(self.ids.items()) if node in now}

    def meet(self, seconds: float, known: Iterable[str] | None = None) -> None:
        """Ask nodes that are new who they are. A client counts once, and only if it is among those `known`."""
        here = set(self.grid.get_node_ids())
        new = here - set(self.ids.values()) - self._refused
        if not new:
            return
        content = encode(None, {"recipe": self.hash})
        for node, answer in self._exchange("query.hello", dict.fromkeys(sorted(new), content), seconds):
            try:
                if isinstance(answer, RefusedError):
                    raise answer
                tree, _ = open_reply(answer)
                client = str(answer["meta"]["client"])
                report = None if tree is None else NodeReport.model_validate(tree)
                if known is not None and client not in known:
                    raise RefusedError(f"client {client!r} is not one of this run")
                if self.ids.get(client) in here:
                    raise RefusedError(f"client {client!r} is there already, at node {self.ids[client]}")
                if report is not None and report.client != client:
                    raise RefusedError(f"client: expected {client!r}, found {report.client!r}")
                self.ids[client], self.reports[client] = node, report
            except (RefusedError, ValidationError) as error:
                self.log("node refused", {"node": node, "why": str(error)})
                self._refused.add(node)

    def wait(self, count: int, seconds: float, known: Iterable[str] | None = None) -> int:
        """Wait until so many clients are there, or time is over. Returns how many are."""
        end = time.monotonic() + seconds
        while True:
            self.meet(max(end - time.monotonic(), 1.0), known)
            found = len(self.there())
            if found >= count or time.monotonic() >= end:
                return found
            time.sleep(_POLL[1])

    def ask(self, kind: str, contents: Mapping[str, Any], seconds: float) -> Iterator[tuple[str, Any]]:
        """(client, answer) as answers come; a RefusedError stands for one that does not."""
        there = self.there()
        for client in contents.keys() - there.keys():
            yield client, RefusedError("its node is not connected")
        clients = {there[client]: client for client in contents if client in there}
        messages = {node: contents[client] for node, client in clients.items()}
        for node, answer in self._exchange(kind, messages, seconds):
            yield clients[node], answer

    def _exchange(self, kind: str, contents: Mapping[int, Any], seconds: float) -> Iterator[tuple[int, Any]]:
        flwr = need("flwr.app", "flower")
        messages = [flwr.Message(content, node, kind, ttl=seconds) for node, content in contents.items()]
        nodes = list(contents)
        pushed = [str(each) if each else "" for each in self.grid.push_messages(messages)]
        del messages
        waiting = {node: each for node, each in zip(nodes, pushed, strict=True) if each}
        for node in set(nodes) - waiting.keys():
            yield node, RefusedError("the message could not be sent")
        end, pause = time.monotonic() + seconds, _POLL[0]
        while waiting and time.monotonic() < end:
            came = [m for m in self.grid.pull_messages(list(waiting.values())) if m.metadata.src_node_id in waiting]
            for message in came:
                node = message.metadata.src_node_id
                del waiting[node]
                if message.has_error():
                    yield node, RefusedError(f"Flower's error {message.error.code}: {message.error.reason}")
                else:
                    yield node, message.content
            if not came:
                time.sleep(pause)
            pause = _POLL[0] if came else min(2 * pause, _POLL[1])
        for node in waiting:
            yield node, RefusedError(f"no answer within {seconds:g} s")
