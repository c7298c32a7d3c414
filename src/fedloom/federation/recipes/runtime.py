"""Recipe sections of running, evaluating, early stopping and the privacy budget. Free of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.core.machine import cores
from fedloom.core.settings.section import ClientId, Count, NonNegative, Positive, Problems, Section, carry


class FlowerSettings(Section):
    """The conduct of a run whose clients are nodes of Flower, which come, go and fail."""

    nodes: Count | None = None
    """Begin when this many clients have reported; null: all clients of the partition."""
    wait: Positive = 600.0
    """Seconds to wait for them. Then the run begins with those that are there, if these are `min_clients`."""
    min_clients: Count = 1
    """Fewer do not begin. A round in which fewer clients answer ends the run, which can be resumed."""
    enough: Count | None = None
    """A round of training waits for no more answers once so many have come; null: for all, until the deadline."""
    deadline: Positive = 3600.0
    """Seconds for the answers to one round of training, or of measuring; later ones are not used."""
    retries: Annotated[int, Field(ge=0, le=100)] = 1
    """The number of times that a node is asked again within the deadline after a temporary failure."""
    keys: dict[ClientId, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    """Client -> the public key of its node, as `fedloom flower check --home` prints it. The name of a client that is
    not listed belongs to the node that says it first."""

    def _problems(self) -> Problems:
        if self.enough is not None and self.enough < self.min_clients:
            yield "enough", f"{self.enough} found, expected at least min_clients ({self.min_clients})"


class Runtime(Section):
    """Where the work is done. Results do not depend on `engine` and `workers`; they may on `threads` and `device`."""

    engine: Literal["process", "cluster", "flower"] = "process"
    """process: on this machine. cluster: torch.distributed under torchrun. flower: messages to Flower's nodes."""
    flower: FlowerSettings = FlowerSettings()
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1
    """Worker processes; 1 trains in this process. auto: as many as there are cores for them, and on GPUs memory and at
    most 4 on each, from the round on after which they are expected to end the run sooner; cells of a grid that run
    beside others have one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process. Keep workers x threads within the cores."""
    device: str | tuple[str, ...] = "cpu"
    """cpu, or cuda devices by name (cuda:0); several are given to the workers in turn."""
    deterministic: bool = False
    """true: torch and cuDNN use only algorithms that give the same bits each time, so a run on CUDA repeats on a GPU of
    the same kind. It costs time, of convolutions most, and memory; an operation that has no such algorithm ends the run
    with its name. On a CPU runs repeat without it."""
    checkpoint_every: Count | Literal["auto"] = "auto"
    """Save the state after every so many rounds, and after the last. auto: as often as saving takes at most 5 % of the
    time; with the engine flower after each round, because nodes keep no older states."""
    mirror: str | None = None
    """A folder, better on another disk, for a copy of the checkpoints and of all else that resuming needs, under the
    name of the run's folder. What is damaged comes back from it; where the run's folder is lost, resume the copy."""
    diagnostics: bool = True
    """Note, in diagnostics.jsonl, how the updates of a round agree and how they were weighted. Changes no result."""
    track: Literal["tensorboard", "mlflow", "wandb"] | None = None
    """Tell each round's means, bytes and seconds to a tracker too. tensorboard: the folder `tensorboard` of the run.
    mlflow: MLFLOW_TRACKING_URI, else `mlflow.db` in the run. wandb: as WANDB_MODE says; its files are in the run."""
    exact: bool = True
    """Of the engine cluster. true: all updates go to one process, which adds them up as `process` does, bit for bit.
    false: processes share the work, and where a method lets them only sums travel; results differ by rounding."""

    @field_validator("device")
    @classmethod
    def _some(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("no device found, expected one such as cpu or cuda:0")
        return value

    @property
    def processes(self) -> int:
        """`workers` as a number; for auto the most there may be."""
        if self.workers != "auto":
            return self.workers
        most = cores() // self.threads
        if set(self.devices) == {"cpu"}:
            return max(1, most)
        return len(self.devices) * max(1, min(4, most // len(self.devices)))

    @property
    def loaders(self) -> int:
        """Threads of each process that load batches, from the cores that training leaves: 1 to 8."""
        return max(1, min(8, cores() // self.processes - self.threads))

    @property
    def saved_every(self) -> int | None:
        """`checkpoint_every` as a number; None where the time decides."""
        if self.checkpoint_every != "auto":
            return self.checkpoint_every
        return 1 if self.engine == "flower" else None

    @property
    def devices(self) -> tuple[str, ...]:
        """`device` as names; the first does what is not shared among workers."""
        return (self.device,) if isinstance(self.device, str) else self.device


class Evaluation(Section):
    """Recipe section `evaluation`: the measurements after a round."""

    every: Count = 1
    """Evaluate after every `every` rounds, and after the last; default 5 for peers without early_stopping and
    costly_every."""
    costly_every: Count | None = None
    """Measure what takes long, such as odsF of edges, after every so many rounds, a multiple of `every`. It is always
    measured after the last round and of the model that is kept; null: only then."""
    splits: Annotated[tuple[Literal["val", "test"], ...], Field(min_length=1)] = ("val", "test")
    """A split without examples, and a task without labels in it, are said; if nothing is left, the run is refused."""
    models: Annotated[tuple[Literal["global", "personal", "trained"], ...], Field(min_length=1)] = (
        "global",
        "personal",
    )
    """global: the server's model, where all clients have one. personal: what a client would use after the round, where
    that differs. trained: the client's model straight after local training, before aggregation. One of the first two
    must be there, for final numbers are theirs."""
    batch_size: Count = 512
    """Examples that are measured together, fewer where what a model computes of them may take more than 4 GB."""
    predictions: bool = True
    """Keep, in the folder `predictions`, what the final models say of test data: confusion matrices, and the answers
    to a few images, also those after evaluations 1, 2, 4, 8 and so on. What is counted comes from the last
    measurement, so it costs next to nothing; changes no result."""

    def _problems(self) -> Problems:
        if self.costly_every and self.costly_every % self.every:
            yield "costly_every", f"{self.costly_every} found, expected a multiple of every ({self.every})"

    def in_full(self, round: int, rounds: int) -> bool:
        """Return whether an evaluation after this round of so many also measures costly metrics."""
        return round == rounds or bool(round and self.costly_every and round % self.costly_every == 0)

    def pictured(self, round: int) -> bool:
        """Return whether pictures of this round's predictions are kept: after evaluations 1, 2, 4, 8 and so on."""
        count, rest = divmod(round, self.every)
        return self.predictions and rest == 0 and count.bit_count() == 1


class EarlyStopping(Section):
    """Stop when the clients' mean task-weighted validation loss has not improved for `patience` evaluations.

    An improvement is score < best - min_delta; nan never improves (DFMTL thesis, section 6.1.3).
    """

    patience: Count
    min_delta: NonNegative = 0.0
    relative: bool = False
    """True if min_delta is a share of the best score, as in the thesis' Table 6.3. Its release has it absolute."""
    restore_best: bool = True


class Privacy(Section):
    """(epsilon, delta) differential privacy of clients: updates are clipped, noise is added, every round is charged.

    Protected is whether, and with which data, a client took part; not its number of examples, nor what is measured on
    its data (docs/privacy.md).
    """

    unit: Literal["client"] = "client"
    """The unit whose presence is hidden: a client with all its examples."""
    clip: Positive
    """Largest Euclidean norm of what a client sends in a round."""
    noise: Positive | None = None
    """Standard deviation of the noise in units of `clip`; null: the least that keeps all rounds within `epsilon`."""
    epsilon: Positive | None = None
    """Epsilon of all rounds together, to which `noise` is calibrated; null: `noise` is given."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of all rounds together; less than one over the number of clients."""
    trust: Literal["central", "local"] = "central"
    """central: clients trust the server, which adds noise to the sum. local: each client adds it to what it sends."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """poisson: each client takes part by itself, with probability training.participation. fixed: always as many."""
    accountant: Literal["pld", "rdp"] = "rdp"
    """pld is tighter by about a tenth and takes about a second a round; rdp knows both kinds of sampling."""
    budget: Positive | None = None
    """The run stops before the round with which epsilon would be more; null: `epsilon`, and without it no bound."""

    @model_validator(mode="before")
    @classmethod
    def _offered(cls, value: Any) -> Any:
        if value == "secure-aggregation":
            why = "the server sees every update; trust: local hides them from it (docs/threat-model.md)"
            raise carry([("", f"secure-aggregation found, which is not offered: {why}")])
        return value

    def _problems(self) -> Problems:
        if (self.noise is None) == (self.epsilon is None):
            which = "neither" if self.noise is None else "both"
            yield "noise", f"{which} found, expected either noise or epsilon"
        if self.sampling == "fixed" and self.accountant == "pld":
            yield "accountant", "pld found, but it knows no sampling of a fixed number of clients, expected rdp"

    @property
    def bound(self) -> float | None:
        """Epsilon at which the run stops."""
        return self.epsilon if self.budget is None else self.budget
