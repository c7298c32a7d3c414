"""The models that are measured and on whose data: the lines of metrics.jsonl.

Also a finished run's models as named tensors, for a file that is readable without fedloom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.errors import RecipeError
from fedloom.core.grouping import grouped
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.client import for_task, load, load_personal, tune
from fedloom.federation.rounds.evaluation import Scores
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.messages import Message, pack_tasks
from fedloom.federation.rounds.server import model_of
from fedloom.federation.rounds.worker import COUNTS, POOL, EvalJob, Executor, TrainDone
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import POOLED, WITHHELD, mean_of, number_of
from fedloom.training.flat import FlatModel

Record = dict[str, Any]
Key = tuple[str | None, str | None, int]
"""The client that has a model of its own, the task that has one, and the data."""
SPLIT = "test"
"""The split whose predictions are counted and drawn."""
CLASSES = 100
"""A task with more classes has no confusion matrix."""
MODELS = 30
"""At most so many confusion matrices of a task: those of the first clients."""
CELLS = 150_000
"""At most so many numbers in all matrices of a task."""
SEEN = "seen"
"""The key of a finished run's state with the last measurement's confusions: the key of a group -> {task: counts}."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that a client may use for some of its tasks, and what it is loaded from."""

    name: str
    """"global": one complete model for all clients, or for all that hold the task; "personal": the client's."""
    tasks: tuple[str, ...]
    message: Message
    state: State
    task: str | None = None
    """The task that the model is for, if each task has a model."""
    owner: str | None = None
    """Its client; None if all clients, or all that hold the task, have the same."""


@dataclass
class MeasuredGroup:
    """Clients with the same model and the same data: one measurement serves all."""

    key: Key
    """The model and the data."""
    model: Model
    client: str
    split: str
    members: list[tuple[BuiltClient, Model]] = field(default_factory=list)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks for which some member uses the model."""
        return tuple(dict.fromkeys(name for _, model in self.members for name in model.tasks))

    def job(self, key: int, round: int, costly: bool = False, counted: tuple[str, ...] = ()) -> EvalJob:
        """Return the job that measures it, with the metrics that take long if `costly`, and confusions of tasks."""
        m = self.model
        about = m.message, m.state, self.client, self.split, self.tasks, round, m.name == "personal", m.task
        return EvalJob(key, *about, costly, pool=True, counted=counted)


def models_to_measure(built: Built) -> None:
    """Refuse evaluation.models that names only models which the method does not produce."""
    named, there = built.recipe.evaluation.models, built.models
    if set(named).isdisjoint(there):
        listed = ", ".join(named)
        raise RecipeError(
            f"evaluation.models: {listed} found, but {built.method.name} produces only the {there[0]} model of "
            f"{'all clients' if there[0] == 'global' else 'each client'}, so the run would have no final numbers; "
            f"add {there[0]}"
        )


def unmeasured(built: Built) -> list[str]:
    """Return what no client can measure and the recipe wants measured, in sentences: a split, or a task in one.

    Raises RecipeError where nothing is left, or no score for early stopping. Labels that are elsewhere count as there.
    """
    recipe, clients = built.recipe, built.federation.clients.values()
    tasks = [task.name for task in built.federation.tasks]

    def labelled(split: str, task: str) -> bool:
        return any(len(client.part(split).of(task)) for client in clients if task in client.tasks)

    here = any(labelled("train", task) for task in tasks)
    gaps: dict[str, list[str]] = {}
    possible = []
    for split in ("test", "val"):
        without = [task for task in tasks if here and not labelled(split, task)]
        if not any(len(client.part(split)) for client in clients):
            single = [name for name, client in built.federation.clients.items() if len(client.part("train")) == 1]
            few = ""
            if split == "val" and single:
                few = f" (1 example, too few to set one apart: {', '.join(single[:8])})"
            elif split == "val" and built.dataset.group is not None:
                few = " (each has the examples of one group, which stay together: see `group` of the data set)"
            gaps[split] = [f"no client has {split} examples{few}"]
        elif without == tasks:
            gaps[split] = [f"no {split} example has a label of a task of its client"]
        else:
            possible.append(split)
            gaps[split] = [f"no {split} example has a label of task {task!r}" for task in without]
    splits = recipe.evaluation.splits
    sentences = [gap for split in splits for gap in gaps[split]]
    if not set(splits) & set(possible):
        could = f"possible: {', '.join(possible)}" if possible else "no other split can be measured either"
        raise RecipeError(f"evaluation.splits: {', '.join(splits)} found, but {'; '.join(sentences)}; {could}")
    if recipe.early_stopping is not None and "val" not in possible:
        raise RecipeError(
            f"early_stopping: {gaps['val'][0]}, so there is no score to watch; set partition.val_fraction, or val of "
            "fl.Client"
        )
    return sentences


def models_for(built: Built, state: State, client: str, shared: dict[str | None, Message] | None = None) -> list[Model]:
    """Return the models that a client may use; among those for one task the last is the one to use.

    `shared` remembers what those are loaded from that several have: the model of all (None), and of each task.
    """
    method, shared = built.method, {} if shared is None else shared
    if "peers" in state:
        server, mine = state["peers"][client]["server"], state["peers"][client]["client"]
    else:
        server, mine = state["server"], state["clients"].get(client, {})
    tasks = tuple(built.federation.clients[client].tasks)
    if method.turn.pool == "task":
        of = {task: who.id for who in built.federation.trainers.values() for task in who.tasks}
        message = Message(server["model"], server["buffers"], server["integers"])
        return [Model("global", (task,), message, state["clients"].get(of[task], {}), task) for task in tasks]
    models: list[Model] = []
    if method.task_vectors or (method.turn.by_task and "global" not in built.models):
        received = Message(model_of(server, client), server["buffers"], server["integers"])
        if method.task_vectors:
            received = pack_tasks(built, server, client, tasks)
        for task in tasks:
            own = mine.get("tasks", {}).get(task, {})
            if "global" in built.models:  # alone in its message, a task's vector is exactly the server's
                if task not in shared:
                    shared[task] = pack_tasks(built, server, client, (task,))
                models.append(Model("global", (task,), shared[task], {}, task))
            same = "global" in built.models and len(tasks) == 1 and own.keys() <= {"optimizer", "rules"}
            models.append(Model("personal", (task,), received, own, task, None if same else client))
        return models
    if "global" in built.models:
        everyone = shared.setdefault(None, Message(server["model"], server["buffers"], server["integers"]))
        models.append(Model("global", tasks, everyone, {}))
    if "personal" in built.models:
        message = Message(model_of(server, client), server["buffers"], server["integers"])
        models.append(Model("personal", tasks, message, mine, owner=client))
    return models


def measure(
    built: Built,
    executor: Executor,
    state: State,
    costly: bool = False,
    record: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    seen: dict[Key, Any] | None = None,
) -> list[Record]:
    """Return records of all clients' global and personal models on all wanted splits; `costly`: with what takes long.

    A model that several clients share is measured once on data that they share. `record` hears which clients withhold
    their scores. `seen` receives the confusions that are kept of the final models.
    """
    entries = groups(built, state, built.recipe.evaluation.splits)
    counted = {} if seen is None else to_count(built, state)
    jobs = [g.job(number, state["round"], costly, counted.get(g.key, ())) for number, g in enumerate(entries)]
    if costly and (lengthy := _lengthy(built)):  # these first, so that no worker is left alone with one at the end
        jobs.sort(key=lambda job: lengthy.isdisjoint(job.tasks))
    results: dict[int, Scores] = dict(executor.run(jobs))
    if seen is not None:
        counts = [(g.key, results[number].get(COUNTS)) for number, g in enumerate(entries) if number in results]
        seen |= {key: each for key, each in counts if each}
    records: list[Record] = []
    if silent := sorted({g.client for number, g in enumerate(entries) if results.get(number) == {}}):
        record(WITHHELD, {"what": "scores", "clients": silent})
    for number, g in enumerate(entries):
        for client, model in g.members if results.get(number) else ():  # a remote client may not have answered
            records += records_of(client, model.name, g.split, results[number], model.tasks)
    records.sort(key=lambda r: (r["client"], r["model"], r["split"], r["task"], r["metric"]))
    return records + pooled(built, [(g, results.get(number, {})) for number, g in enumerate(entries)])


def to_count(built: Built, state: State) -> dict[Key, tuple[str, ...]]:
    """Return the key of a group -> the tasks whose confusions are kept of its model, if it is a final one."""
    evaluation = built.recipe.evaluation
    if not evaluation.predictions or SPLIT not in evaluation.splits or built.deployed:
        return {}
    used = groups(built, state, (SPLIT,), used=True)
    return {group.key: tasks for group, tasks in zip(used, counted_tasks(built, used), strict=True) if tasks}


def counted_tasks(built: Built, used: Sequence[MeasuredGroup]) -> list[tuple[str, ...]]:
    """Return, for each group, the tasks whose confusions are counted."""
    room = {
        task.name: min(MODELS, CELLS // task.channels**2)
        for task in built.federation.tasks
        if task.channels <= CLASSES and task.metric().confusion is not None
    }
    tasks_of = []
    for group in used:
        tasks = tuple(task for task in group.tasks if room.get(task, 0))
        for task in tasks:
            room[task] -= 1
        tasks_of.append(tasks)
    return tasks_of


def pooled(built: Built, measured: Sequence[tuple[MeasuredGroup, Mapping[str, Any]]]) -> list[Record]:
    """Return records, of no client, of the chosen metrics over the examples of all clients of a task together.

    None where clients share their examples, or where one withholds its outputs, as nodes do.
    """
    outputs = ((g, scores.get(POOL, {})) for g, scores in measured)
    groups = grouped(((g.model.name, g.split, task), (g, kept)) for g, kept in outputs for task in g.tasks)
    records: list[Record] = []
    for (model, split, task), parts in sorted(groups.items(), key=lambda item: item[0]):
        known = next(t for t in built.federation.tasks if t.name == task)
        places = {id(g.members[0][0].part(split)) for g, _ in parts}
        kept = [kept[task] for _, kept in parts if task in kept]
        whole = all(task in kept or not len(g.members[0][0].part(split).of(task)) for g, kept in parts)
        if len(places) < len(parts) or len(kept) < 2 or not whole:
            continue
        metric = known.metric()
        for output, target in kept:
            metric.update(output, target)
        about = {"client": None, "task": task, "model": model, "split": split, "data": f"all clients' {split}"}
        records += [{**about, "metric": POOLED + name, "value": metric.compute()[name]} for name in known.known.judge]
    return records


def complete(built: Built, executor: Executor, folder: RunFolder, kept: State) -> None:
    """Add what takes long to the numbers of the state that a run keeps, if its round was measured without that.

    So it is where a run stopped early, for nobody knows before that a round's state will be kept.
    """
    recipe, round = built.recipe, kept["round"]
    if _lengthy(built) and not recipe.evaluation.in_full(round, recipe.training.rounds):
        folder.add_metrics(round, measure(built, executor, kept, costly=True))


def _lengthy(built: Built) -> frozenset[str]:
    """Return the tasks with a metric that takes long."""
    metrics = {task.name: task.metric() for task in built.federation.tasks}
    return frozenset(name for name, metric in metrics.items() if metric.cheap() is not metric)


def groups(built: Built, state: State, splits: Sequence[str], used: bool = False) -> list[MeasuredGroup]:
    """Return the wanted models of all clients on these splits; `used`: for each task only the one to use."""
    by_model: dict[Key, MeasuredGroup] = {}
    shared: dict[str | None, Message] = {}
    for client in built.honest:
        models = [m for m in models_for(built, state, client.id, shared) if m.name in built.recipe.evaluation.models]
        if used:
            models = list(dict.fromkeys({task: m for m in models for task in m.tasks}.values()))
        for model in models:
            for split in splits:
                if not len(part := client.part(split)):
                    continue
                if (key := (model.owner, model.task, id(part))) not in by_model:
                    by_model[key] = MeasuredGroup(key, model, client.id, split)
                by_model[key].members.append((client, model))
    return list(by_model.values())


def trained_records(built: Built, done: Iterable[TrainDone]) -> list[Record]:
    """Return records of the models right after local training, if they were measured."""
    clients = built.federation.trainers
    return [
        record
        for d in sorted(done, key=lambda d: d.client)
        if d.client not in built.attacks
        for split, scores in d.trained.items()
        for record in records_of(clients[d.client], "trained", split, scores, tuple(clients[d.client].tasks))
    ]


def train_records(done: Iterable[TrainDone]) -> list[Record]:
    """Mean training loss of each client and task in a round; nan, and no numbers of examples, where it is withheld."""
    return [
        {
            "client": d.client,
            "task": task,
            "loss": loss,
            **({"examples": result.examples, "steps": result.steps} if result.examples else {}),
        }
        for d in sorted(done, key=lambda d: d.client)
        for task, loss in d.result.losses.items()
        for result in [d.result.by_task.get(task, d.result)]
    ]


def train_seconds(done: Iterable[TrainDone]) -> dict[str, float]:
    """Return client -> seconds of its local training in a round."""
    by_client = grouped((d.client, d.seconds) for d in sorted(done, key=lambda d: d.client))
    return {client: sum(seconds) for client, seconds in by_client.items()}


def records_of(client: BuiltClient, model: str, split: str, scores: Scores, tasks: Sequence[str]) -> list[Record]:
    """Return the lines of a client's scores; none of a task of which its examples have no label."""
    about = {"model": model, "split": split, "data": f"{client.part(split).name} {split}"}
    return [
        {"client": client.id, "task": task, "metric": metric, "value": value, **about}
        for task in tasks
        if len(client.part(split).of(task)) or any(value == value for value in scores[task].values())
        for metric, value in scores[task].items()
    ]


def headline(built: Built, line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round for a progress bar: 'training loss', and 'val accuracy' or the like -> the mean.

    Of each task's primary metric, the mean over clients and the tasks that it judges, on validation, else on test data.
    """
    primary = {t.name: t.primary for t in built.federation.tasks}
    judged = [r for r in line["metrics"] if r["metric"] == primary[r["task"]] and not math.isnan(number_of(r["value"]))]
    split = "val" if any(r["split"] == "val" for r in judged) else "test"
    numbers = [("training loss", number_of(r["loss"])) for r in line["train"]]
    numbers += [(f"{split} {r['metric']}", number_of(r["value"])) for r in judged if r["split"] == split]
    known = grouped((name, number) for name, number in numbers if not math.isnan(number))
    return {name: mean_of(each) for name, each in known.items()}


def export(built: Built, state: State) -> dict[str, Tensor]:
    """Return named tensors. The global model keeps its own names; a task's is under task/NAME/, a personal one under
    client/NAME/, and a client's own model of a task under client/NAME/task/NAME/."""
    common, tensors, written = FlatModel.copy_of(built.module), dict[str, Tensor](), set[str]()
    for client in built.federation.clients:
        model = FlatModel.copy_of(built.modules[client]) if client in built.modules else common
        for prefix, one in used(built, state, client).items():
            if prefix not in written:  # several clients may use it
                written.add(prefix)
                tensors |= named(built, model, client, one, state["round"], prefix)
    return tensors


def used(built: Built, state: State, client: str) -> dict[str, Model]:
    """Return prefix -> model: each model that a client uses once."""
    models = models_for(built, state, client)
    shared = {m.task for m in models if m.name == "global"} if built.method.turn.by_task else set()
    return {
        ("" if one.name == "global" else f"client/{client}/") + (f"task/{one.task}/" if one.task else ""): one
        for one in models
        if one.name == "global" or one.task not in shared  # else it is the task's model after the codec
    }


def named(built: Built, model: FlatModel, client: str, one: Model, round: int, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one model; `model` is scratch space."""
    load(built.method, model, for_task(built, model, client, one.message, one.task), one.state)
    if one.name == "personal":
        load_personal(model, one.state.get("personal", {}))
        ctx = Ctx(round, built.recipe.seed)
        tune(built.method, model, built.federation.clients[client], built.recipe.training, ctx)
    return {prefix + key: value.clone() for key, value in model.module.state_dict().items()}


def labels(built: Built, state: State) -> dict[str, str]:
    """Return the labels of the file."""
    return {
        "method": built.method.name,
        "recipe": built.recipe.name,
        "round": str(state["round"]),
        "tasks": ", ".join(f"{t.name} ({t.kind}, {t.channels})" for t in built.federation.tasks),
    }
