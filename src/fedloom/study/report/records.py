"""The records of each round beside metrics: bytes, seconds, matrices of similarity and weights, events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.federation.runs.reader import Run, described, number_of

Series = Mapping[int, float]
"""Round -> value."""


@dataclass(frozen=True)
class Matrices:
    """One matrix per round, stored by its known entries, because there may be many clients."""

    name: str
    title: str
    rows: str
    """The meaning of a row."""
    columns: str
    names: tuple[str, ...]
    rounds: Mapping[int, Mapping[str, Mapping[str, float | None]]]
    """Round -> row -> column -> number."""
    marked: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Round -> (row, column) of the pairs that were chosen."""
    legend: str = ""
    """The meaning of a mark."""
    graph: bool = False
    """Whether rows are peers that choose whose model they take."""


@dataclass(frozen=True)
class Happening:
    """Equal events of a run, counted."""

    what: str
    who: str
    times: int
    first: int
    last: int


def traffic(run: Run) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Return ('up' or 'down', 'role', 'task' or 'client') -> name -> bytes of each round."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {
        (way, by): defaultdict(lambda: defaultdict(int)) for way in ("up", "down") for by in ("role", "task", "client")
    }
    for sent in run.sent:
        for (role, task), count in sent.parts.items():
            found[sent.way, "role"][role][sent.round] += count
            found[sent.way, "task"]["no task" if task is None else task][sent.round] += count
        for client, count in sent.clients.items():
            found[sent.way, "client"][client][sent.round] += count
    return {key: {name: dict(series) for name, series in names.items()} for key, names in found.items() if names}


def totals(run: Run) -> tuple[tuple[str, str, int, int], ...]:
    """Return (role, task, bytes from clients, bytes to clients) over all rounds."""
    total: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"up": 0, "down": 0})
    for sent in run.sent:
        for (role, task), count in sent.parts.items():
            total[role, task or ""][sent.way] += count
    return tuple((role, task, counts["up"], counts["down"]) for (role, task), counts in sorted(total.items()))


def timed(run: Run, key: str = "seconds") -> dict[str, dict[int, float]]:
    """Return phase (or client, where the key is seconds_of) -> seconds of each round."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in run.rounds:
        for name, seconds in (line.get(key) or {}).items():
            found[name][int(line["round"])] = number_of(seconds)
    return dict(found)


def clock(run: Run) -> dict[str, dict[int, float]]:
    """Return a simulated time -> its seconds in each round; empty where time was not simulated."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for round, record in run.records("clock"):
        found["per round"][round] = float(record["end"]) - float(record["start"])
        found["since the start"][round] = float(record["end"])
    for round, record in run.records("staleness"):
        found["age of mixed models, mean"][round] = float(record["seconds"]["mean"])
    return dict(found)


def matrices(run: Run) -> tuple[Matrices, ...]:
    """Return the similarity of tasks, the weights of senders at receivers, and the similarity that peers computed."""
    made = []
    similar = dict(run.records("task-vectors"))
    if similar:
        tasks = tuple(t for t in run.info["tasks"] if any(t in record["tasks"] for record in similar.values()))
        rounds, chosen = {}, {}
        for round, record in similar.items():
            rounds[round] = {
                a: dict(zip(record["tasks"], row, strict=True))
                for a, row in zip(record["tasks"], record["similarity"], strict=True)
            }
            partners = zip(record["tasks"], record.get("partners", ()), strict=False)
            chosen[round] = [(a, b) for a, several in partners for b in several]
        legend = "A dot: the column's task is a partner of the row's."
        title = "Similarity of task vectors"
        made.append(Matrices("task-similarity", title, "task", "task", tasks, rounds, chosen, legend))
    weights: dict[int, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for round, record in run.records("mixing"):
        weights[round].update(record["weights"])
    by_peer: dict[str, dict[int, dict[str, Mapping[str, float]]]] = {"peer": {}, "similarity": {}, "conflict": {}}
    for key, kind, part in (
        ("peer", "peer", "weights"),
        ("similarity", "peer", "similarity"),
        ("conflict", "conflict-averse", "weights"),
    ):
        for round, record in run.records(kind):
            by_peer[key].setdefault(round, {})[record["peer"]] = record.get(part) or {}
    for name, title, found in (
        ("mixing", "Mixing weights", weights),
        ("neighbours", "Neighbours and their weights", by_peer["peer"]),
        ("conflict-weights", "Conflict-averse weights", by_peer["conflict"]),
        ("peer-similarity", "Similarity as peers found it", by_peer["similarity"]),
    ):
        if any(row for rows in found.values() for row in rows.values()):
            made.append(
                Matrices(
                    name, title, "receiver", "sender", tuple(run.info["clients"]), found, graph=name == "neighbours"
                )
            )
    return tuple(made)


def happened(run: Run) -> tuple[Happening, ...]:
    """Return events, and safeguards that acted, counted by text and client; in the order in which they began."""
    rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in run.rounds:
        at = int(line["round"])
        for event in line.get("events", ()):
            about = described({k: event.get(k) for k in ("why", "what", "kind", "task")})
            who = event.get("client", event.get("peer", event.get("cluster", "")))
            sender = f" from {event['sender']}" if "sender" in event else ""
            rounds[f"{event['event']}{about}", f"{who}{sender}"].append(at)
    for at, record in run.records("conflict-averse"):
        for safeguard in record.get("acted") or ():
            rounds[f"safeguard: {safeguard}", str(record["peer"])].append(at)
    found = [Happening(what, who, len(at), min(at), max(at)) for (what, who), at in rounds.items()]
    return tuple(sorted(found, key=lambda h: (h.first, h.what, h.who)))
