"""A worker, which trains clients and measures models: a model and the federation's data, but no memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core.context import Ctx, State, new_secret, seeded
from fedloom.core.errors import UserError, line_of
from fedloom.core.machine import keep_memory, out_of_memory
from fedloom.federation.recipes.runtime import Evaluation, Runtime
from fedloom.federation.rounds.client import ClientRound, begin, finish, for_task, load, load_personal, part_of, tune
from fedloom.federation.rounds.evaluation import Scores, answers, at_once, evaluate
from fedloom.federation.rounds.federation import BuiltClient, Common, Part
from fedloom.federation.rounds.messages import Message, Payload
from fedloom.models.tasks.task import Metric
from fedloom.training import loop
from fedloom.training.attack import Attack
from fedloom.training.config import Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult
from fedloom.training.stacked import Stackable, group, train_stacked


@dataclass(frozen=True, eq=False)
class Setup(Common):
    """Everything that a worker needs and that stays the same during a run."""

    module: nn.Module
    training: Training
    evaluation: Evaluation
    seed: int
    runtime: Runtime = Runtime()
    deployed: bool = False
    """True if noise must not come from the seed, nor be the same where a round is asked for again."""
    attacks: Mapping[str, Attack] = field(default_factory=dict)
    """Client -> its attack, of the hostile ones."""
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """Client -> its own model, of those that do not have `module`."""

    def ctx(self, round: int) -> Ctx:
        """Return the context of a client's part of a round."""
        return Ctx(round, self.seed, secret=new_secret() if self.deployed else None)

    def turn(self, name: str, model: FlatModel, ctx: Ctx) -> ClientRound:
        """Return a client's part of a round, with the examples that it trains on."""
        client, attack, kind = self.federation.trainers[name], self.attacks.get(name), part_of(self.method)
        if attack is not None:
            examples = attack.examples(client.train.examples, {task: each for task, (each, _) in client.tasks.items()})
            client = replace(client, train=replace(client.train, examples=examples))
        training = client.settings(self.training)
        return kind(self.method, model.layout, self.federation, model, client, ctx, training, attack)


POOL, COUNTS = "", "counts:"
"""Keys, beside the tasks' names, of outputs and labels, and of confusions, among the scores of a job."""


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Train one client."""

    client: str
    round: int
    message: Message
    state: State

    def on(self, worker: Worker, **options: Any) -> TrainDone:
        """Return its result on a worker."""
        return worker.train(self, **options)


@dataclass(frozen=True, eq=False)
class EvalJob:
    """Measure one model on one client's split. `tasks` may be more than the client's, because splits may be shared.

    `personal` asks for the client's own model, tuned as the method says; `task` for the model of that task, if each
    task has one; `costly` for the metrics that take long too; `pool` for outputs and labels, under the key POOL of
    the scores, of the tasks whose metrics are also computed over the examples of several clients together; `counted`
    for the confusions of these tasks, under the key COUNTS. With `some` the split is cut to that many examples, evenly
    spaced.
    """

    key: int
    message: Message
    state: State
    client: str
    split: str
    tasks: tuple[str, ...]
    round: int
    personal: bool = False
    task: str | None = None
    costly: bool = False
    pool: bool = False
    counted: tuple[str, ...] = ()
    some: int = 0

    def same_model(self, other: EvalJob) -> bool:
        """Return whether both measure one model, as far as one can see without a look at it."""
        alike = self.state is other.state or not (self.state or other.state)
        return self.message is other.message and self.task == other.task and alike

    def on(self, worker: Worker) -> tuple[int, Any]:
        """Return its result on a worker, with its key."""
        return worker.evaluate(self)


@dataclass(frozen=True, eq=False)
class LookJob(EvalJob):
    """Predictions of one model for `shown` dense tasks, on `some` examples of one client's split."""

    shown: tuple[str, ...] = ()

    def on(self, worker: Worker) -> tuple[int, Any]:
        return worker.look(self)


@dataclass(frozen=True, eq=False)
class TrainDone:
    """The outcome of a TrainJob; `trained` has the scores of the model before aggregation, by split, if asked for."""

    client: str
    payload: Payload
    result: LocalResult
    state: State
    seconds: float
    trained: Mapping[str, Scores] = field(default_factory=dict)


class Worker:
    """Runs jobs one at a time. Results depend on the job only, never on earlier jobs."""

    def __init__(self, setup: Setup, device: str = "cpu") -> None:
        keep_memory()
        self.setup = setup
        self.model = self._common = FlatModel.copy_of(setup.module, device)
        self._own = {client: FlatModel.copy_of(module, device) for client, module in setup.modules.items()}
        self.tasks = {task.name: task for task in setup.federation.tasks}
        self._last: EvalJob | None = None  # the job whose model is still loaded, if that of any is

    def train(self, job: TrainJob, evaluate_trained: bool = False) -> TrainDone:
        """Return the client's part of a round, and the scores of the trained model if they are wanted."""
        s, self._last, self.model = self.setup, None, self._own.get(job.client, self._common)
        start, client = time.perf_counter(), s.federation.trainers[job.client]
        try:
            turn = s.turn(job.client, self.model, s.ctx(job.round))
            with fitting(f"client {job.client!r}, round {job.round}", "training.batch_size", turn.training.batch_size):
                payload, result, state = turn.step(job.message, job.state)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            tasks = ", ".join(client.tasks)
            line = line_of(error)
            why = f"{error}" if line is None else f"{error} ({type(error).__name__} in {line})"
            if "more than 1 value per channel" in why:
                why = (
                    f"batch norm cannot train on a batch of one example (the client has {len(client.train)} train "
                    "examples): give the client more, choose a batch_size that leaves no single example, or use a "
                    "model without batch norm"
                )
            raise UserError(f"client {job.client!r} (tasks {tasks}), round {job.round}: {why}") from error
        trained = self._scores(client, job.round) if evaluate_trained else {}
        return TrainDone(job.client, payload, result, state, time.perf_counter() - start, trained)

    def train_stacked(self, jobs: Sequence[TrainJob], evaluate_trained: bool = False) -> Iterator[TrainDone]:
        """Train and finish clients together that can share a stack."""
        s, model, self._last = self.setup, self.model, None
        ctx = s.ctx(jobs[0].round)
        turns = {job.client: (s.turn(job.client, model, ctx), job.state) for job in jobs}
        begun: dict[int, Tensor] = {}  # models of those that bring nothing of their own, by what they were sent
        stack = []
        for job in jobs:
            base = None if job.state else begun.get(id(job.message.vector))
            if base is None:
                base = begin(s.method, model, job.message, job.state)
                if not job.state:
                    begun[id(job.message.vector)] = base
            stack.append(Stackable(turns[job.client][0].client.work(job.client), base))
        shared = model.layout.parameters.spans(s.shared)
        for members in group(stack, s.training):
            start = time.perf_counter()
            who, more = f"{len(members)} stacked clients, round {ctx.round}", " or training.stacked=false"
            with fitting(who, "training.batch_size", s.training.batch_size, more):
                params, results = train_stacked(model, members, s.training, ctx, shared, s.method.rules)
            mine, states = zip(*(turns[member.work.who] for member in members), strict=True)
            done = finish(mine, torch.stack([member.base for member in members]), params, states, results)
            seconds = (time.perf_counter() - start) / len(members)
            for turn, trained, (payload, result, state) in zip(mine, params, done, strict=True):
                scores = {}
                if evaluate_trained:
                    model.params.copy_(trained)
                    scores = self._scores(turn.client, ctx.round)
                yield TrainDone(turn.client.id, payload, result, state, seconds, scores)

    def _scores(self, client: BuiltClient, round: int) -> dict[str, Scores]:
        """Return scores of the current model on a client's splits."""
        s = self.setup
        mine = {name: self.tasks[name] for name in client.tasks}
        how = s.evaluation.batch_size, s.training.channels_last, s.evaluation.in_full(round, s.training.rounds)
        return {split: evaluate(self.model, client.part(split), mine, *how) for split in s.evaluation.splits}

    def evaluate(self, job: EvalJob) -> tuple[int, Scores]:
        """Return scores of one model, with the job's key."""
        s = self.setup
        with self._loaded(job) as part:
            tasks = {name: self.tasks[name] for name in job.tasks}
            how = s.evaluation.batch_size, s.training.channels_last, job.costly
            seen: dict[str, Metric] = {}
            scores: dict[str, Any] = {**evaluate(self.model, part, tasks, *how, seen)}
            judged = {name: list(kept) for name in seen if tasks[name].known.judge and (kept := seen[name].kept)}
            if job.pool and judged:
                scores[POOL] = judged
            if job.counted:
                scores[COUNTS] = {name: seen[name].confusion for name in job.counted}
            return job.key, scores

    def look(self, job: LookJob) -> tuple[int, dict[str, Tensor]]:
        """Return task -> output of its head (examples x channels x H x W) of one model, with the job's key."""
        how = self.setup.evaluation.batch_size, self.setup.training.channels_last
        with self._loaded(job) as part, torch.inference_mode():
            each = [outputs for _, outputs, _ in answers(self.model, part, job.shown, *how)]
            return job.key, {name: torch.cat([outputs[name].float().cpu() for outputs in each]) for name in job.shown}

    @contextmanager
    def _loaded(self, job: EvalJob) -> Iterator[Part]:
        """Load the job's model and use the job's own randomness; gives the examples to measure it on."""
        s = self.setup
        client = s.federation.clients[job.client]
        last, self._last = self._last, None if job.personal else job
        if (model := self._own.get(job.client, self._common)) is not self.model:
            self.model, last = model, None
        if last is None or job.personal or not job.same_model(last):
            load(s.method, self.model, for_task(s, self.model, job.client, job.message, job.task), job.state)
        if job.personal:
            load_personal(self.model, job.state.get("personal", {}))
            tune(s.method, self.model, client, s.training, Ctx(job.round, s.seed))
        who, part = f"measuring client {job.client!r}, round {job.round}", client.part(job.split)
        with (
            seeded(s.seed, job.round, "evaluate", job.key),  # for models that draw random numbers even here
            fitting(who, "evaluation.batch_size", at_once(s.evaluation.batch_size, part.examples.input_shape)),
        ):
            yield part.spread(job.some) if job.some else part


@contextmanager
def fitting(who: str, key: str, batch: int, more: str = "") -> Iterator[None]:
    """Raise UserError with the batch size to try where memory runs out inside, for `who` at the recipe's `key`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        try_ = f"try {key}={batch // 2}{more}" if batch > 1 else "try smaller inputs or a smaller model"
        why = str(error).splitlines()[0] if str(error) else "torch says no more"
        raise UserError(f"{who}: memory ran out with {key}={batch} ({why}); {try_}") from error


def set_torch(runtime: Runtime, training: Training) -> None:
    """Set what results may depend on, so that the recipe states it: torch's threads, its choice of algorithms, and how
    a GPU rounds products. Set the threads that load batches too."""
    torch.set_num_threads(runtime.threads)
    loop.loaders = runtime.loaders
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    set_algorithms(runtime.deterministic)
    torch.backends.cudnn.deterministic = runtime.deterministic
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = training.precision != "fp32"


def set_algorithms(deterministic: bool) -> None:
    """Set torch's choice of algorithms, where it is another: torch loads its compiler for this, which takes 2 s."""
    if torch.get_deterministic_debug_mode() != (2 if deterministic else 0):
        torch.use_deterministic_algorithms(deterministic)


def with_index(name: str) -> str:
    """Return the name of a device with its number, without which CUDA cannot make it the current one."""
    return "cuda:0" if name == "cuda" else name


def check_device(name: str) -> str:
    """Return the device's name with its number. Raises UserError where it is not there: nothing falls back."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"runtime.device: {name!r} found, expected a device such as cpu, cuda or cuda:0") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"runtime.device: {name!r} found, but this machine has {count} CUDA devices; set cpu")
    elif device.type != "cpu":
        raise UserError(f"runtime.device: {name!r} found, expected cpu or cuda")
    return with_index(name)


Job = TrainJob | EvalJob


class Executor:
    """Runs jobs and yields their results in any order."""

    repeats: ClassVar[bool] = False
    """True if the same jobs, run again in a round, have the same results."""

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results as they arrive."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all resources, if there are any."""


class InProcess(Executor):
    """One worker, here."""

    repeats = True

    def __init__(self, setup: Setup, devices: Sequence[str]) -> None:
        self.worker = Worker(setup, check_device(devices[0]))

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results in the order of the jobs."""
        for job in jobs:
            yield job.on(self.worker, **options)
