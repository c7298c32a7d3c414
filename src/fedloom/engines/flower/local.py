"""Nodes in this process, without a SuperLink, for `fedloom run runtime.engine=flower` and for tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedloom.core.lazy import need


class LocalGrid:
    """A Grid whose nodes are calls of a ClientApp, made one at a time when an answer is pulled.

    `node_configs` are the nodes' configs by node id. A node in `silent` never answers.
    """

    def __init__(
        self, app: Any, node_configs: Mapping[int, Mapping[str, Any]], run_config: Mapping[str, Any] | None = None
    ) -> None:
        _identify()
        flwr = need("flwr.app", "flower")
        self.app = app
        self.contexts = {
            node: flwr.Context(1, node, dict(config), flwr.RecordDict(), dict(run_config or {}))
            for node, config in node_configs.items()
        }
        self.silent: set[int] = set()
        self._waiting: dict[str, Any] = {}
        self._number = 0

    def get_node_ids(self) -> list[int]:
        """The ids of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Take messages; nodes work on them when answers are pulled."""
        ids = []
        for message in messages:
            self._number += 1
            ids.append(str(self._number))
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Sequence[str]) -> list[Any]:
        """The next answer, so that no more than one is held."""
        for each in message_ids:
            message = self._waiting.get(each)
            if message is not None and message.metadata.dst_node_id not in self.silent:
                del self._waiting[each]
                return [self.app(message, self.contexts[message.metadata.dst_node_id])]
        return []


def _identify() -> None:
    """From 1.41 on, Flower makes messages outside its own processes only if the id of a task is set."""
    try:
        identity: Any = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except ImportError:  # an older version
        return
    try:
        _ = identity.task_id
    except RuntimeError:
        identity.task_id = identity.run_id = identity.node_id = 1
