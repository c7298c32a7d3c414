"""What a run promises of how much its models tell about any one client, as a recipe states it. Free of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedloom.core.settings.problems import carry
from fedloom.core.settings.section import Positive, Section


class Privacy(Section):
    """(epsilon, delta) differential privacy of clients: updates are clipped, noise is added, every round is charged.

    Protected is whether, and with which data, a client took part; not its number of examples, nor what is measured on
    its data (docs/privacy.md).
    """

    unit: Literal["client"] = "client"
    """Whose presence is hidden: a client with all its examples."""
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

    @model_validator(mode="after")
    def _fits(self) -> Privacy:
        if (self.noise is None) == (self.epsilon is None):
            found = "neither" if self.noise is None else "both"
            raise carry([("noise", f"{found} found, expected either noise or epsilon")])
        if self.sampling == "fixed" and self.accountant == "pld":
            raise carry(
                [("accountant", "pld found, but it knows no sampling of a fixed number of clients, expected rdp")]
            )
        return self

    @property
    def bound(self) -> float | None:
        """Epsilon at which the run stops."""
        return self.epsilon if self.budget is None else self.budget
