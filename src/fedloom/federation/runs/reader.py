"""Read run folders: the recipe, what was measured in each round, and how many bytes went where."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.errors import StateError, choices, first_of
from fedloom.core.grouping import nested
from fedloom.core.settings.section import value_at
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.runs import recorded
from fedloom.federation.runs.recorded import lines_of

PREDICTIONS, CONFUSION, INDEX = "predictions", "confusion.json", "index.json"
"""A run's folder of its models' predictions on test data, its file of counts, its index of pictures."""


FEW = 5
"""Fewer test rows of a client than these are noted, because a number over them says little."""


def index_of(round: int | str) -> str:
    """Return the file beside INDEX with the pictures of an earlier round; '*' matches those of all rounds."""
    return f"round-{round}.json"


DIAGNOSTICS = "diagnostics"
"""Diagnostics of the updates' agreement: the kind of these records, and the name of their file."""
POOLED = "pooled "
"""Before a metric's name: it is over the examples of all clients together, and not a mean over clients."""
WITHHELD = "withheld"
"""The kind of a round's records that say which clients' nodes keep which numbers (`what`) to themselves."""
CONSTANT = "constant prediction"
"""The kind of the record before the first round: task -> [metric, score of the constant prediction on test data]."""
NOTHING, GAVE_UP = "nothing learned", "gave up"
IN_VAIN = {
    NOTHING: "every update of every round was dropped, or every round was lost",
    GAVE_UP: "three rounds in a row were lost; the model is that of the last good one, and resume tries again",
}
"""The status of a run that ended in vain -> why."""
UNITS = {("depth", "rmse"): "metres", ("normals", "merr"): "degrees"}
"""(kind of task, metric) -> unit."""
ARROWS = {"max": "↑", "min": "↓"}
"""The direction in which a metric is better."""


def number_of(value: float | None) -> float:
    """Return a number from a run's files: null becomes nan."""
    return math.nan if value is None else float(value)


def total(values: Iterable[float]) -> float:
    """Return the sum; nan where none is known, as of infinities of both signs, or beyond all floats."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def seconds_of(line: Mapping[str, Any]) -> float:
    """Return the seconds of a round: the sum of its phases, without sums over clients and parts of phases."""
    phases = (line.get("seconds") or {}).items()
    return total(number_of(s) for phase, s in phases if "sum over" not in phase and phase != DIAGNOSTICS)


def mean_of(values: Collection[float]) -> float:
    """Return the mean of one number or more, by `total`."""
    return total(values) / len(values)


@dataclass(frozen=True)
class Final:
    """The numbers of a run's kept model, with the model, the data and the round that they belong to."""

    values: Mapping[str, Mapping[str, float]]
    """Task -> metric -> mean over the clients that have a value; nan where none has."""
    split: str
    round: int
    model: str
    """'personal', 'global', or 'personal and global' if only some clients have a personal model."""
    data: tuple[str, ...]
    """The data that was used, as the run recorded it."""
    without: Mapping[tuple[str, str], tuple[tuple[str, ...], int]] = field(default_factory=dict)
    """(task, metric) -> (the clients without a value, because their labels do not determine it; of how many)."""
    notes: tuple[str, ...] = ()
    """Remarks on clients that count in the means like all others."""

    @property
    def caption(self) -> str:
        """Return the model, the data, the round, and what is averaged, as text."""
        text = f"{self.model} model, {', '.join(self.data)} data, round {self.round}, mean over a task's clients"
        if any(metric.startswith(POOLED) for values in self.values.values() for metric in values):
            text += "; pooled: over the examples of all of them"
        return "; ".join([text, *self.gaps()])

    def gaps(self, metrics: Collection[str] | None = None) -> list[str]:
        """Return a phrase for each number, of some metrics or all, that some clients lack, and the notes."""
        lacking = [
            f"{metric} of {task}: no value at {len(who)} of {every} clients ({', '.join(who)})"
            for (task, metric), (who, every) in self.without.items()
            if metrics is None or metric in metrics
        ]
        return [*lacking, *self.notes]


class Sent(NamedTuple):
    """The bytes of a round in one direction."""

    round: int
    way: str
    """'up' from clients, 'down' to them."""
    parts: Mapping[tuple[str, str | None], int]
    """By role and task."""
    clients: Mapping[str, int]


@dataclass(frozen=True)
class Run:
    """One run folder: the resolved recipe, run.json (`info`), metrics.jsonl (`rounds`), bytes.jsonl (`traffic`)."""

    folder: Path
    recipe: Mapping[str, Any]
    info: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    """The measurements, one entry per round."""
    traffic: tuple[Mapping[str, Any], ...]
    """The bytes that were sent, one entry per round."""

    @staticmethod
    def read(folder: str | Path) -> Run:
        """Read a folder that a run wrote, finished or not. A torn last line, as a crash leaves it, is ignored."""
        folder = Path(folder)
        for name in ("run.json", "recipe.yaml"):
            if not (folder / name).is_file():
                raise recorded.no_run(folder, name)
        info = recorded.read_info(folder)
        recorded.check("run.json", info, str(folder / "run.json"))
        recorded.verify(folder, info)
        recipe = recorded.recipe_of(folder)
        rounds, traffic = (lines_of(folder / name) for name in ("metrics.jsonl", "bytes.jsonl"))
        tasks, clients = info["tasks"], {None, *info["clients"]}
        for line in rounds:
            for entry in line["metrics"]:
                if entry["task"] not in tasks or entry["client"] not in clients:
                    raise StateError(
                        f"{folder / 'metrics.jsonl'}, round {line['round']}: task {entry['task']!r} of client "
                        f"{entry['client']!r} found, which run.json does not list"
                    )
            for record in line.get("records", ()):
                if record.get("peer") not in clients:
                    raise StateError(
                        f"{folder / 'metrics.jsonl'}, round {line['round']}: a record of peer {record['peer']!r} "
                        "found, which run.json does not list"
                    )
        return Run(folder, recipe, info, rounds, traffic)

    def log(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return another file of the folder, by its name, with one line per round; empty if there is no such file."""
        return lines_of(self.folder / name)

    def records(self, kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield (round, record) of what stages or peers recorded of a kind, in order."""
        for line in self.rounds:
            yield from ((int(line["round"]), r) for r in line.get("records", ()) if r["kind"] == kind)

    @property
    def judged(self) -> tuple[TaskMetric, ...]:
        """Each task with its primary metric."""
        return tuple(TaskMetric(t, i["primary"], i["metrics"][i["primary"]]) for t, i in self.info["tasks"].items())

    def judged_by(self, metric: str | None) -> Run:
        """Return the run with only the tasks that have a metric, or 'loss'; without a name the run itself.

        Raises StateError, with the metrics that there are, if no task has it.
        """
        if metric is None:
            return self
        # every task has a loss, which run.json does not list
        known = {task: {"loss": "min", **about["metrics"]} for task, about in self.info["tasks"].items()}
        mine = {
            task: {**self.info["tasks"][task], "primary": metric, "metrics": metrics}
            for task, metrics in known.items()
            if metric in metrics
        }
        if not mine:
            names = sorted(set().union(*known.values()))
            raise StateError(f"no task has the metric {metric!r}.{choices('Recorded', metric, names)}")
        return replace(self, info={**self.info, "tasks": mine})

    def direction(self, task: str, metric: str) -> str:
        """Return 'max' where more of a metric is better, else 'min', also for losses, which run.json does not list."""
        return str(self.info["tasks"][task]["metrics"].get(metric.removeprefix(POOLED), "min"))

    def unit(self, task: str, metric: str) -> str:
        """Return 'metres' or 'degrees' for the errors of tasks that have such a unit; otherwise ''."""
        return UNITS.get((self.info["tasks"][task].get("kind"), metric), "")

    @property
    def constant(self) -> dict[str, float]:
        """Return task -> the score of the constant prediction by the task's own metric, where the run recorded it."""
        scores: Mapping[str, Any] = next((record["tasks"] for _, record in self.records(CONSTANT)), {})
        primary = {task: about["primary"] for task, about in self.info["tasks"].items()}
        return {task: number_of(value) for task, (metric, value) in scores.items() if primary.get(task) == metric}

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.recipe["seed"])

    @property
    def label(self) -> str:
        """The method with its add-ons: 'fedavg + feddea'."""
        return str(self.info["method"])

    @property
    def group(self) -> str:
        """Equal for runs of the same code that differ only in the seed. A method made in Python is identified by its
        text."""
        if not self.recipe.get("method"):
            raise StateError(f"{self.folder / 'recipe.yaml'}, method: field required")
        return f"{recipe_hash({**self.recipe, 'seed': 0})} {self.info.get('recipe_text', '')}{self.code}"

    @cached_property
    def code(self) -> str:
        """The sources of the user's own code in the run, and those that it had before a resume; '' for none."""
        events = (event for line in self.rounds for event in line.get("events", ()))
        own = [f" {name} {origin.get('source')}" for name, origin in sorted(self.info.get("origins", {}).items())]
        own += [f" {event['of']} {event['was']}" for event in events if event["event"] == "source changed"]
        return "".join(dict.fromkeys(own))

    @cached_property
    def last_round(self) -> int:
        """The last finished round."""
        return max((int(line["round"]) for line in self.rounds), default=0)

    @property
    def is_finished(self) -> bool:
        """Return whether the run is over."""
        return self.info["status"] != "running"

    @property
    def trouble(self) -> str:
        """Return how the run ended, unless as meant, and how many updates and rounds were lost; '' if none was."""
        events = [event for line in self.rounds for event in line.get("events", ())]
        status = self.info["status"]
        dropped = [event for event in events if event["event"] == "update dropped"]
        lost = sum(event["event"] == "round lost" for event in events)
        ended = "nothing learned in the run" if status == NOTHING else f"the run {status}"
        parts = [f"{ended}: {IN_VAIN[status]}"] if status in IN_VAIN else []
        if dropped:
            clients = Counter(str(event.get("client", "a client")) for event in dropped)
            names = ", ".join(f"{client} {count}" for client, count in clients.most_common(5))
            why = dropped[0].get("why", "no reason recorded")
            parts.append(f"{len(dropped)} update{'s' * (len(dropped) > 1)} dropped ({names}; {why})")
        parts += [f"{lost} round{'s' * (lost > 1)} lost"] if lost else []
        return "; ".join(parts)

    def final(self, split: str = "test", at: int | None = None) -> Final:
        """Return the kept model's metrics on a split: a client's personal model where it was measured, else the global.

        The round is that of the kept model, or `at`; if it was not evaluated, the last evaluated round before it.
        """
        # run.json has the kept round only after the run is over.
        kept = at if at is not None else int(self.info["final_round"]) if self.is_finished else self.last_round
        for number in sorted(self._measured, reverse=True):
            if number <= kept and (values := self.entries(number, split)):
                return self._final(values, split, number)
        splits = sorted({name for of_split in self._measured.values() for name in of_split})
        quiet = f"; {', '.join(self.withheld)} withhold their scores" if self.withheld else ""
        raise StateError(
            f"{self.folder}: no {split} metrics up to round {kept} (recorded: {', '.join(splits) or 'none yet'}){quiet}"
        )

    @property
    def withheld(self) -> tuple[str, ...]:
        """The clients whose nodes kept their scores to themselves."""
        scores = (record for _, record in self.records(WITHHELD) if record.get("what") == "scores")
        return tuple(sorted({client for record in scores for client in record["clients"]}))

    def history(self, split: str = "test", client: str | None = None) -> tuple[Final, ...]:
        """Return `final` at each measured round, in order, of all clients or of this `client` and its tasks alone."""
        lines = [(v, number) for number in self._measured if (v := self.entries(number, split, client))]
        return tuple(self._final(values, split, round) for values, round in lines)

    def curves(self, split: str = "test", client: str | None = None) -> dict[str, dict[int, float]]:
        """Return task -> round -> the task's own metric, where measured, from `history`."""
        by_task: dict[str, dict[int, float]] = {row.task: {} for row in self.judged}
        for final in self.history(split, client):
            for row in self.judged:
                if row.metric in final.values.get(row.task, {}):
                    by_task[row.task][final.round] = final.values[row.task][row.metric]
        return by_task

    def personal(self, split: str = "test", at: int | None = None) -> dict[str, Final]:
        """Return `final` of each client that has a personal model, by its name; empty where there are none."""
        return self.by_client(split, at, ("personal",))

    def by_client(
        self, split: str = "test", at: int | None = None, models: Sequence[str] = ("personal", "global")
    ) -> dict[str, Final]:
        """Return `final` of each client, by its name: its personal model if it has one, else the global one."""
        at = self.final(split, at).round
        entries = self.entries(at, split).items()
        by_client = nested((key[0], key, entry) for key, entry in entries if entry["model"] in models)
        return {c: self._final(by_client[c], split, at) for c in self.info["clients"] if c in by_client}

    def scores(self, task: str, metric: str, split: str = "test") -> dict[int, dict[str, float]]:
        """Return round -> client -> a metric of a task, of the personal model where measured, else the global one."""
        each = itertools.product(self._measured, self.info["clients"])
        entries = ((at, client, self.entries(at, split, client).get((client, task, metric))) for at, client in each)
        return nested((at, client, number_of(entry["value"])) for at, client, entry in entries if entry is not None)

    def validation_losses(self) -> dict[int, float]:
        """Round (from 1) -> `validation_loss`, by which early stopping judges; empty without validation data."""
        weights = {client: about["tasks"] for client, about in self.info["clients"].items()}
        losses = {int(line["round"]): validation_loss(line["metrics"], weights) for line in self.rounds}
        return {number: loss for number, loss in losses.items() if number and loss is not None}

    def rows(self) -> list[dict[str, Any]]:
        """Return every number that was measured: seed, round, client (None: all), task, metric, split, model, value."""
        keys = ("client", "task", "metric", "split", "model")
        return [
            {"seed": self.seed, "round": int(line["round"]), **{k: m[k] for k in keys}, "value": number_of(m["value"])}
            for line in self.rounds
            for m in line["metrics"]
        ]

    def bytes_total(self) -> dict[str, int]:
        """Return {'up': bytes from clients, 'down': bytes to clients} over all rounds."""
        return {way: sum(sum(sent.parts.values()) for sent in self.sent if sent.way == way) for way in ("up", "down")}

    def seconds_total(self) -> float:
        """Return the seconds of all rounds."""
        return total(map(seconds_of, self.rounds))

    def bits_per_task(self) -> float:
        """Return mean bits per client, round and task; nan before the first round, 0 where all data are pooled."""
        sent = 8 * self.bytes_total()["up"]
        tasks = {client: len(info["tasks"]) for client, info in self.info["clients"].items()}
        times = sum(tasks.get(client, 1) for line in self.rounds for client in line.get("cohort", ()))
        return sent / times if times else math.nan

    def _final(self, values: Mapping[tuple[Any, str, str], Mapping[str, Any]], split: str, round: int) -> Final:
        """Return the means over clients of one round's entries."""
        each: dict[tuple[str, str], list[float]] = defaultdict(list)
        gaps: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (client, task, metric), entry in values.items():
            loss = values.get((client, task, "loss"))
            if entry["value"] is None and loss is not None and loss["value"] is not None:
                gaps[task, metric].append(str(client))
            else:
                each[task, metric].append(number_of(entry["value"]))
        known = {key: each[key] for key in sorted(each.keys() | gaps.keys())}
        means = nested((*key, sum(of) / len(of) if of else math.nan) for key, of in known.items())
        without = {key: (tuple(who), len(who) + len(each[key])) for key, who in sorted(gaps.items())}
        used = {v["model"] for v in values.values()}
        return Final(
            {task: means[task] for task in self.info["tasks"] if task in means},
            split,
            round,
            " and ".join(sorted(used, reverse=True)),
            tuple(sorted({str(v["data"]) for v in values.values() if v.get("data") and v["client"] is not None})),
            without,
            (*self._notes({str(client) for client, *_ in values}, split, round),),
        )

    def _notes(self, clients: Collection[str], split: str, round: int) -> Iterator[str]:
        """Yield phrases on these clients: which are away in a round, and which have few test rows of a table."""
        churn = value_at(self.recipe, "peers.scenario.churn") or {}
        if away := [name for name, about in churn.items() if name in clients and _is_away(about, round)]:
            yield f"away in round {round}, with models that they use and that count in the means: {first_of(away)}"
        rows = {name: about.get("test", FEW) for name, about in self.info["clients"].items()}
        if small := [name for name in rows if split == "test" and name in clients and rows[name] < FEW]:
            yield f"fewer than {FEW} test rows, which count in the means like those of all others: {first_of(small)}"

    @cached_property
    def sent(self) -> tuple[Sent, ...]:
        """Bytes of each round, from clients and to them: with many clients all that reads them shares one pass."""
        entries = []
        for line in self.traffic:
            for way in ("up", "down"):
                parts: dict[tuple[str, str | None], int] = defaultdict(int)
                clients: dict[str, int] = defaultdict(int)
                for entry in line[way]:
                    parts[entry["role"], entry["task"]] += entry["bytes"]
                    clients[entry["client"]] += entry["bytes"]
                entries.append(Sent(line["round"], way, parts, clients))
        return tuple(entries)

    @cached_property
    def _measured(self) -> dict[int, dict[str, dict[str | None, list[Mapping[str, Any]]]]]:
        """Round -> split -> client (or None for all) -> the entries of models that a user may keep."""
        rounds: dict[int, dict[str, dict[str | None, list[Mapping[str, Any]]]]] = {}
        for line in self.rounds:
            by_split = rounds.setdefault(int(line["round"]), defaultdict(lambda: defaultdict(list)))
            for entry in line["metrics"]:
                if entry["model"] in ("personal", "global"):
                    by_split[entry["split"]][entry["client"]].append(entry)
        return rounds

    def entries(
        self, number: int, split: str, only: str | None = None
    ) -> dict[tuple[Any, str, str], Mapping[str, Any]]:
        """Return (client, task, metric) -> the entry of a round that counts, for all holders of the task or one."""
        best: dict[tuple[Any, str, str], Mapping[str, Any]] = {}
        clients, by_client = self.info["clients"], self._measured[number].get(split, {})
        owners = [*by_client] if only is None else [None, only]
        for entry in itertools.chain.from_iterable(by_client.get(owner, ()) for owner in owners):
            client, task = only or entry["client"], entry["task"]
            if client is not None and task not in clients[client]["tasks"]:
                continue
            key = (client, task, entry["metric"])
            if key not in best or entry["model"] == "personal":
                best[key] = entry
        return best


def _is_away(presence: Mapping[str, Any], round: int) -> bool:
    """Return whether a peer with this entry of a scenario's churn is away in a round."""
    gaps = [(1, presence.get("joins", 1)), *presence.get("away", ())]
    return any((first or 0) <= round and (back is None or round < back) for first, back in gaps)


def frame(runs: Iterable[tuple[Mapping[str, str], Run]]) -> Any:
    """Return the rows of several runs as a pandas.DataFrame, each after the labels of its run."""
    import pandas  # it takes half a second to import

    return pandas.DataFrame([{**labels, **row} for labels, run in runs for row in run.rows()])


def validation_loss(entries: Iterable[Mapping[str, Any]], weights: Mapping[str, Mapping[str, float]]) -> float | None:
    """Mean over clients of the task-weighted validation loss, personal model before global; None if not measured.

    `weights` is client -> task -> weight. Clients without validation data do not count.
    """
    losses = [r for r in entries if r["split"] == "val" and r["metric"] == "loss" and r["model"] != "trained"]
    by_client = nested((r["client"], r["model"], r["task"], number_of(r["value"])) for r in losses)
    scores = []
    for client, by_model in by_client.items():
        chosen, own = by_model.get("personal") or by_model["global"], weights[client]
        scores.append(sum(own[t] * v for t, v in chosen.items()) / sum(own.values()))
    return mean_of(scores) if scores else None


def human_bytes(count: float) -> str:
    """Return a number of bytes for people: 1234567 becomes '1.23 MB' (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


@dataclass(frozen=True)
class TaskMetric:
    """A line of the comparison: a task and the metric it is judged by; direction is 'max' or 'min'."""

    task: str
    metric: str
    direction: str

    def __str__(self) -> str:
        return f"{self.task} ({self.metric}) {ARROWS[self.direction]}"


def best_round(means: Mapping[int, float], direction: str) -> int | None:
    """Return the round with the best mean ('max' or 'min'), of equally good ones the first; None where all are nan."""
    known = {number: mean for number, mean in means.items() if not math.isnan(mean)}
    sign = 1 if direction == "max" else -1
    return max(known, key=lambda r: (sign * known[r], -r)) if known else None


def described(about: Mapping[str, Any]) -> str:
    """Return an event's fields as text: ': client c, local training gave nan'; '' if it has none."""
    known = {key: value for key, value in about.items() if value is not None}
    texts = [f"{value}" if key == "why" else f"{key} {value}" for key, value in known.items()]
    return f": {', '.join(texts)}" if texts else ""


def clock(seconds: float) -> str:
    """Return seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
