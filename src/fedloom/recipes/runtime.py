"""Settings of running and evaluating, as a recipe states them. Free of torch."""

from __future__ import annotations

from typing import Literal

from fedloom.settings.section import Count, NonNegative, Positive, Section


class FlowerSettings(Section):
    """How a run goes on where clients are nodes of Flower, which come, go and fail."""

    nodes: Count | None = None
    """Begin when this many clients have reported; null: all clients of the partition."""
    wait: Positive = 600.0
    """Seconds to wait for them."""
    min_clients: Count = 1
    """A round in which fewer clients answer ends the run, which can be resumed."""
    deadline: Positive = 3600.0
    """Seconds for the answers to one round of training, or of measuring; later ones are not used."""


class Runtime(Section):
    """Where the work is done. Results do not depend on `engine` and `workers`; they may on `threads` and `device`."""

    engine: Literal["process", "cluster", "flower"] = "process"
    """process: on this machine. cluster: torch.distributed under torchrun. flower: messages to Flower's nodes."""
    flower: FlowerSettings = FlowerSettings()
    workers: Count = 1
    """Worker processes; 1 trains in this process."""
    threads: Count = 1
    """Threads of each process. Keep workers x threads within the cores."""
    device: str | tuple[str, ...] = "cpu"
    """cpu, or cuda devices by name (cuda:0); several are given to the workers in turn."""
    checkpoint_every: Count = 1
    diagnostics: bool = True
    """Note, in diagnostics.jsonl, how the updates of a round agree and how they were weighted. Changes no result."""
    track: Literal["tensorboard", "mlflow", "wandb"] | None = None
    """Tell each round's means, bytes and seconds to a tracker too. tensorboard: the folder `tensorboard` of the run.
    mlflow: MLFLOW_TRACKING_URI, else `mlflow.db` in the run. wandb: as WANDB_MODE says; its files are in the run."""
    exact: bool = True
    """Of the engine cluster. true: all updates go to one process, which adds them up as `process` does, bit for bit.
    false: processes share the work, and where a method lets them only sums travel; results differ by rounding."""

    @property
    def devices(self) -> tuple[str, ...]:
        """`device` as names; the first does what is not shared among workers."""
        return (self.device,) if isinstance(self.device, str) else self.device


class Evaluation(Section):
    """What is measured after a round."""

    every: Count = 1
    """Evaluate after every `every` rounds, and after the last."""
    splits: tuple[Literal["val", "test"], ...] = ("val", "test")
    models: tuple[Literal["global", "personal", "trained"], ...] = ("global", "personal")
    """global: the server's model. personal: what a client would use after the round, where that differs.
    trained: the client's model straight after local training, before aggregation."""
    batch_size: Count = 512
    predictions: bool = True
    """Keep, in the folder `predictions`, what the final models say of test data: confusion matrices, and the answers
    to a few images. Costs about as much as measuring once more; changes no result."""


class EarlyStopping(Section):
    """Stop when the clients' mean task-weighted validation loss has not improved for `patience` evaluations.

    An improvement is score < best - min_delta; nan never improves (DFMTL thesis, section 6.1.3).
    """

    patience: Count
    min_delta: NonNegative = 0.0
    relative: bool = False
    """Whether min_delta is a share of the best score, as in the thesis' Table 6.3. Its release has it absolute."""
    restore_best: bool = True
