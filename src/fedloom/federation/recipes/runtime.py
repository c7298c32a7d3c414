"""Recipe sections of running, evaluating, early stopping and the privacy budget. Free of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.core.machine import cores
from fedloom.core.settings.section import ClientId, Count, NonNegative, Positive, Problems, Section, carry


class FlowerSettings(Section):
    """Settings of a run whose clients are nodes of Flower: they may join, leave and fail."""

    nodes: Count | None = None
    """Start once this many clients have registered; null: all clients of the partition."""
    wait: Positive = 600.0
    """Seconds to wait for them. Then the run starts with those that have registered, if at least `min_clients`."""
    min_clients: Count = 1
    """The run does not start with fewer clients. If fewer answer in a round, it ends, and can be resumed."""
    enough: Count | None = None
    """End a round of training once this many answers have arrived; null: wait for all, until the deadline."""
    deadline: Positive = 3600.0
    """Seconds to wait for the answers of one round of training or measuring. The server drops later ones."""
    retries: Annotated[int, Field(ge=0, le=100)] = 1
    """The number of times to ask a node again, within the deadline, after a temporary failure."""
    keys: dict[ClientId, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    """Client -> the public key of its node, as `fedloom flower check --home` prints it. A client that is not listed
    belongs to the first node that claims its name."""

    def _problems(self) -> Problems:
        if self.enough is not None and self.enough < self.min_clients:
            yield "enough", f"{self.enough} found, expected at least min_clients ({self.min_clients})"


class Runtime(Section):
    """Processes and devices. Results do not depend on `engine` or `workers`; they may on `threads` and `device`."""

    engine: Literal["process", "cluster", "flower"] = "process"
    """process: on this machine. cluster: torch.distributed under torchrun. flower: messages to Flower's nodes."""
    flower: FlowerSettings = FlowerSettings()
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1
    """Worker processes; 1 trains in this process. auto: starts workers once they are expected to end the run sooner, as
    many as cores allow (on GPUs also memory, at most 4 per GPU). Cells of a grid that run at the same time have one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process. Keep workers x threads within the cores."""
    device: str | tuple[str, ...] = "cpu"
    """cpu, or cuda devices by name (cuda:0). Several devices are assigned to the workers in turn."""
    deterministic: bool = False
    """true: torch and cuDNN use only deterministic algorithms, so a run on CUDA repeats bit for bit on a GPU of the
    same kind. This costs memory and time, most for convolutions. An operation without such an algorithm ends the run
    with an error that names it. On a CPU runs repeat without it."""
    checkpoint_every: Count | Literal["auto"] = "auto"
    """Save the state every this many rounds, and after the last. auto: as often as saving takes at most 5 % of the
    time; with the engine flower after each round, because nodes keep no older states."""
    mirror: str | None = None
    """A folder, preferably on another disk, for a copy of the checkpoints and the other files that resuming needs,
    under the name of the run's folder. Damaged files are restored from it. If the run's folder is lost, resume the
    copy."""
    diagnostics: bool = True
    """Write to diagnostics.jsonl how far the updates of a round agree and how they were weighted. Changes no result."""
    track: Literal["tensorboard", "mlflow", "wandb"] | None = None
    """Also log each round's means, bytes and seconds to a tracker. tensorboard: in the folder `tensorboard` of the run.
    mlflow: at MLFLOW_TRACKING_URI, else in `mlflow.db` in the run. wandb: as WANDB_MODE says, with files in the run."""
    exact: bool = True
    """Only for the engine cluster. true: one process adds up all updates as the engine process does, bit for bit.
    false: processes share the work and, if the method allows it, send only sums; results differ by rounding."""

    @field_validator("device")
    @classmethod
    def _some(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("no device found, expected one such as cpu or cuda:0")
        return value

    @property
    def processes(self) -> int:
        """`workers` as a number; for auto the maximum."""
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
        """`checkpoint_every` as a number; None if the time decides."""
        if self.checkpoint_every != "auto":
            return self.checkpoint_every
        return 1 if self.engine == "flower" else None

    @property
    def devices(self) -> tuple[str, ...]:
        """`device` as names; the first one does the work that workers do not share."""
        return (self.device,) if isinstance(self.device, str) else self.device


class Evaluation(Section):
    """Recipe section `evaluation`: the measurements after a round."""

    every: Count = 1
    """Evaluate every `every` rounds, and after the last. The default is 5 for peers without early_stopping and
    costly_every."""
    costly_every: Count | None = None
    """Measure slow metrics, such as odsF of edges, every this many rounds, a multiple of `every`. They are always
    measured after the last round and for the model that is kept; null: only then."""
    splits: Annotated[tuple[Literal["val", "test"], ...], Field(min_length=1)] = ("val", "test")
    """A note names a split without examples and a task without labels in it. If nothing is left, the run is refused."""
    models: Annotated[tuple[Literal["global", "personal", "trained"], ...], Field(min_length=1)] = (
        "global",
        "personal",
    )
    """global: the server's model, if all clients share one. personal: the model that a client would use after the
    round, if that differs. trained: the client's model after local training, before aggregation. One of the first two
    is required, because the final numbers come from it."""
    batch_size: Count = 512
    """Examples per batch of the evaluation; fewer if a model might need more than 4 GB for them."""
    predictions: bool = True
    """Keep the final models' predictions on test data in the folder `predictions`: confusion matrices, and predictions
    for a few images, also after evaluations 1, 2, 4, 8 and so on. The counts come from the last measurement, so they
    cost next to nothing. Changes no result."""

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

    A loss improves if it is below best - min_delta; nan never improves (DFMTL thesis, section 6.1.3).
    """

    patience: Count
    min_delta: NonNegative = 0.0
    relative: bool = False
    """true: min_delta is a share of the best loss, as in the thesis' Table 6.3. In its release it is absolute."""
    restore_best: bool = True


class Privacy(Section):
    """Client-level (epsilon, delta) differential privacy: clip updates, add noise, account for every round.

    This hides whether a client took part, and with which data. It does not hide the client's number of examples, nor
    metrics on its data (docs/privacy.md).
    """

    unit: Literal["client"] = "client"
    """The unit whose presence is hidden: a client with all its examples."""
    clip: Positive
    """Largest Euclidean norm of the update that a client sends in a round."""
    noise: Positive | None = None
    """Standard deviation of the noise in units of `clip`; null: the smallest that keeps all rounds within `epsilon`."""
    epsilon: Positive | None = None
    """Epsilon of all rounds together, to which `noise` is calibrated; null: `noise` is set."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of all rounds together; choose less than one over the number of clients."""
    trust: Literal["central", "local"] = "central"
    """central: clients trust the server, which adds noise to the sum. local: each client adds it to what it sends."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """poisson: each client joins a round with probability training.participation. fixed: always as many."""
    accountant: Literal["pld", "rdp"] = "rdp"
    """pld is tighter by about a tenth and takes about a second per round; rdp supports both kinds of sampling."""
    budget: Positive | None = None
    """Stop before the round that would exceed this epsilon; null: `epsilon`, or no bound if that is null."""

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
