"""Recipe section `peers`, without the graph. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import BelowOne, Count, Natural, NonNegative, Positive, Problems, Section, Share
from fedloom.methods.peers.scenario import Scenario

Scale = Literal["unit", "cosine"]
LossRule = Literal["exp", "negative", "inverse"]
Normalise = Literal["none", "min-max", "z-score"]
Signal = Literal["gradient", "overlap", "cross-loss", "disparity", "parameters", "features"]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class SketchSection(Section):
    """Sketches of m numbers, 2 bytes each, in place of gradients and parameters of more than m numbers.

    The default finds 90 % of the three best of 99 candidates on real updates (docs/results/peers-growth.md).
    """

    m: Count = 2048
    kind: Literal["count", "rademacher", "gaussian"] = "count"


class Similarity(Section):
    """The similarity between a peer and its candidates: a convex combination of signals, each a function of
    `fedloom.peers`.
    """

    signals: dict[Signal, Positive] = Field(default={"gradient": 1.0}, min_length=1)
    """Signal -> weight (eq. 4.7): gradient, overlap, parameters, features, cross-loss or disparity."""
    gradient: Literal["update", "loss"] = "update"
    """The vector of the signal `gradient`: the update of the round (no extra cost), or the gradient of the client's
    loss over its training data (eq. 4.2; one more pass)."""
    parameters: Literal["change", "model"] = "change"
    """The vector of the signal `parameters`: the model minus the initial one, or the model itself (section 6.2.2).
    Models with the same start are almost parallel whatever they learned."""
    scale: Scale = "unit"
    """For gradients and parameters. unit: (cosine + 1) / 2. cosine: the cosine itself (eq. 4.3), so a conflicting peer
    gets the soft weight 0 (4.9)."""
    cross_loss: LossRule = "exp"
    """exp: exp(-loss), of losses in units of the median candidate's. negative: -loss (eq. 4.6); soft weights then need
    `normalise`. inverse: 1 / (loss + 0.01), as the release has it. The last two use the client's loss as it is."""
    normalise: Normalise | dict[Signal, Normalise] = "none"
    """The scale of each signal over a peer's candidates, before signals are combined; or signal -> scale for some of
    them."""
    model: Literal["trained", "received"] = "trained"
    """The model that signals describe: after local training (trained), or before it (received)."""
    every: Count | dict[Signal, Count] = 1
    """Peers send signals every this many rounds. A peer without a similarity yet is not chosen. Signal -> rounds sets
    this per signal; other signals are sent in each round, and the signals of a round are combined."""
    samples: Count | None = None
    """The number of validation examples for cross-loss and disparity; null: all."""
    sketch: SketchSection | None = None
    release: bool = False
    """true: use the values of the thesis' release, whatever this section sets: gradient update, scale unit, cross_loss
    inverse, and min-max for cross-loss only."""

    @model_validator(mode="before")
    @classmethod
    def _as_released(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("release") is not True:
            return given
        signals = given.get("signals")
        normalise = {"cross-loss": "min-max"} if isinstance(signals, Mapping) and "cross-loss" in signals else "none"
        return {**given, "gradient": "update", "scale": "unit", "cross_loss": "inverse", "normalise": normalise}

    def _problems(self) -> Problems:
        if isinstance(self.every, dict) and (unknown := sorted(self.every.keys() - self.signals.keys())):
            yield f"every names {unknown[0]!r}, which is not among signals"
        if isinstance(self.normalise, dict) and (unknown := sorted(self.normalise.keys() - self.signals.keys())):
            yield f"normalise names {unknown[0]!r}, which is not among signals"
        if self.samples is not None and not self.measured:
            yield "samples is about cross-loss and disparity, but signals has neither"
        if self.model == "received" and self.gradient == "update" and "gradient" in self.signals:
            yield (
                "signals.gradient is the update of local training, so it does not exist for model 'received'; "
                "set gradient: loss"
            )

    def due(self, rounds: int) -> dict[str, float]:
        """Return the signals, with their weights, that peers send this many rounds after the first."""
        every = self.every if isinstance(self.every, dict) else dict.fromkeys(self.signals, self.every)
        return {signal: weight for signal, weight in self.signals.items() if rounds % every.get(signal, 1) == 0}

    @property
    def scales(self) -> dict[str, Normalise]:
        """Signal -> the scale to which it is brought over a peer's candidates."""
        how = self.normalise
        return {each: how.get(each, "none") if isinstance(how, dict) else how for each in self.signals}

    @property
    def measured(self) -> list[str]:
        """The signals for which peers measure each other's models on their own validation data."""
        return [signal for signal in self.signals if signal in ("cross-loss", "disparity")]


class GroupsSection(Section):
    """Groups of similar peers, computed by each peer from the signals it received (DFMTL thesis, C2: hierarchical).

    Spectral clustering makes `low` to `high` groups: the number with the best silhouette. A peer mixes with its own
    group. With `fine` it mixes the encoder with the whole group, and other parts only with members whose outputs on its
    validation data resemble its own: average linkage, up to a mean distance 1 - (cos + 1) / 2 of `fine`. With null it
    mixes everything with the whole group.
    """

    low: Annotated[int, Field(ge=2)] = 2
    high: Annotated[int, Field(ge=2)] = 4
    fine: Annotated[float, Field(ge=0, le=1)] | None = 0.4

    def _problems(self) -> Problems:
        if self.low > self.high:
            yield f"low must not exceed high, found {self.low} and {self.high}"


class Choose(Section):
    """A peer's choice of neighbours: its group, those at least `threshold` similar, the `top` most similar, or all."""

    top: Natural | None = None
    threshold: float | None = None
    groups: GroupsSection | None = None
    recency: Positive | None = None
    """lambda of the factor 1 - exp(-lambda t) on similarities in `top` and `threshold`, with t the rounds since the
    peer last chose the candidate. The factor is 1 if it never did (PFedDST: Fan et al., 2025). null: no factor."""

    def _problems(self) -> Problems:
        if self.recency is not None and self.top is None and self.threshold is None:
            yield "recency applies to the peers that top or threshold choose; set one of them"


class Weights(Section):
    """The weights of the mixed models.

    size: by examples; uniform: equal; soft: by similarity (eqs. 4.9-4.12, with eta = `step`); metropolis: by the
    degrees in the graph, which preserves the mean of all models (D-PSGD). Without `include_self` the peer's own model
    has no weight, as in the thesis' release.
    """

    kind: Literal["size", "uniform", "soft", "metropolis"] = "soft"
    step: Share = 1.0
    include_self: bool = True

    def _problems(self) -> Problems:
        if self.kind != "soft" and self.step != 1:
            yield f"step is only for soft weights, found kind {self.kind}"
        if self.kind == "metropolis" and not self.include_self:
            yield "metropolis weights always include the peer itself; leave include_self out"


class Safeguards(Section):
    """The safeguards that keep a conflict-averse mix from exploding, applied in this order. null: switched off."""

    nonfinite: Literal["leave-out"] | None = "leave-out"
    """Layer 4: rows with nan or inf are left out; if the solver finds no finite solution, all rows count the same. The
    thesis turns to equal weights for any nan, which a row with nan would spoil. Without the peer's own row the
    neighbours' rows are mixed; without any row the update is zero."""
    normalise: Literal["own-norm", "unit-norm"] | None = None
    """unit-norm: every row gets norm 1, so no task counts more because of the unit of its loss; the thesis needed it
    for dense tasks beside the layers (6.3.3). own-norm: every row gets the norm of the peer's own update (the median of
    the others if that is zero), which keeps the step length."""
    clip: Positive | None = 10.0
    """Layer 1: rows longer than this are shortened to it. The thesis has 10, later 5."""
    ridge: Positive | None = 1e-3
    """Layer 2: lambda |w|^2 times the rows' mean square, added to |g_w|^2. It pulls w towards equal weights, and stops
    the rescaling of a g_w that nearly vanishes."""
    bounds: tuple[float, float] | None = (0.0, 1.0)
    """Layer 3: weights are projected on low <= w <= high with sum 1."""
    ema: BelowOne | None = 0.9
    """Layer 5: w <- ema w_before + (1 - ema) w, over the rows that are there, with sum 1. 0.9 in the thesis."""
    clip_result: Positive | None = None
    """The result is shortened to this norm. The release does this with 5, in place of layer 1."""

    def _problems(self) -> Problems:
        if self.bounds is not None and not 0 <= self.bounds[0] < self.bounds[1] <= 1:
            yield f"bounds: expected 0 <= low < high <= 1, or null, found {list(self.bounds)}"


class ConflictAverse(Section):
    """The conflict-averse mix of `fedloom.peers.conflict_averse_mix`, in place of the method's mean."""

    c: BelowOne = 0.4
    rescale: Literal["none", "1+c^2", "1+c", "1.5+c^2"] = "1+c^2"
    add_own: bool = False
    safeguards: Safeguards = Safeguards()
    heads: Literal["mean", "averse"] = "mean"
    """Parts that only some models have, such as the heads of a task. mean: their mean. averse: per task, the same mix
    over the models that have it (figure 4.5 of the thesis: "HCA on scoped blocks")."""


class AdaptiveScope(Section):
    """Thresholds of the adaptive scope: encoder only from alignment `enter` on, the full model below `leave`."""

    enter: Cosine = 0.6
    leave: Cosine = 0.3

    def _problems(self) -> Problems:
        if self.leave > self.enter:
            yield f"leave must not exceed enter, found {self.leave} and {self.enter}"


class Warmup(Section):
    """The warm-up before round `until`: the method's mean with equal weights, in this scope (DFMTL thesis, eq. 4.20).

    Before round `alone` peers train alone and send nothing, as in the two to four phases of the thesis' section 6.2.2.
    """

    until: Count
    scope: Literal["encoder", "full"] = "encoder"
    alone: Count = 1

    def _problems(self) -> Problems:
        if self.alone > self.until:
            yield f"alone must not exceed until, found {self.alone} and {self.until}"


class PeersBase(Section):
    """Everything but the graph."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """asynchronous: each peer trains at its own pace (see scenario), and mixes the models that have arrived by then."""
    similarity: Similarity = Similarity()
    choose: Choose = Choose()
    weights: Weights = Weights()
    scope: Literal["encoder", "full", "adaptive"] = "full"
    adaptive: AdaptiveScope = AdaptiveScope()
    conflict_averse: ConflictAverse | None = None
    """null: models are mixed by the method's own aggregation."""
    warmup: Warmup | None = None
    rollback: Count | None = None
    """A peer stores its model every this many rounds, and returns to it if training is not finite or a mix fails (DFMTL
    thesis, section 6.2.2, four phases); null: it returns to its model of the round before."""
    penalty: NonNegative = 0.0
    """mu of mu/2 |w - mean of the models of candidates that were not chosen|^2 in the local loss."""
    scenario: Scenario | None = None
    """A network and its peers, or a YAML file with them; null: all peers are present, and nothing takes time."""
    deadline: Positive | None = None
    """Simulated seconds after which a round ends. What comes later is dropped; asynchronously, it comes in a later one.

    null: a round ends when all is done; asynchronously, when as many local rounds have ended as there are peers."""

    @field_validator("scenario", mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        # read here, so that the recipe in a run folder holds everything
        if not isinstance(value, str | Mapping):
            return value
        try:
            return Scenario.load(value)
        except RecipeError as error:
            raise ValueError(str(error)) from None

    @property
    def judges(self) -> bool:
        """Return whether similarities are needed at all."""
        choosing = any(rule is not None for rule in (self.choose.top, self.choose.threshold, self.choose.groups))
        return choosing or self.weights.kind == "soft" or self.scope == "adaptive"

    @property
    def sends_parts(self) -> bool:
        """Return whether a peer may get parts of others' models only."""
        groups = self.choose.groups
        scopes = {self.scope, "full" if self.warmup is None else self.warmup.scope}
        return scopes != {"full"} or (groups is not None and groups.fine is not None)

    def _problems(self) -> Problems:
        scales = self.similarity.scales
        unscaled = {signal for signal, scale in scales.items() if scale == "none"}
        negative = self.similarity.cross_loss == "negative" and "cross-loss" in unscaled
        if negative and self.weights.kind == "soft" and {*self.similarity.signals} == {"cross-loss"}:
            yield (
                "similarity.cross_loss 'negative' is never above 0, so soft weights would leave out every neighbour; "
                "set similarity.normalise to 'min-max', or weights.kind to 'uniform'"
            )
        if self.scope == "adaptive" and "gradient" not in self.similarity.signals:
            yield "scope 'adaptive' reads cosines of updates: add 'gradient' to similarity.signals"
        groups = self.choose.groups
        if groups is not None:
            for signal in self.similarity.measured:
                yield (
                    f"choose.groups needs similarities between any two peers, but {signal} compares only with the "
                    "peer itself"
                )
            if self.similarity.scale == "cosine" and unscaled & {"gradient", "parameters"}:
                yield (
                    "choose.groups needs similarities of at least 0, but similarity.scale is cosine; set "
                    "similarity.normalise: min-max"
                )
            if "z-score" in scales.values():
                yield "choose.groups needs similarities of at least 0, but similarity.normalise is z-score"
            if groups.fine is not None and self.scope != "full":
                yield f"choose.groups.fine applies to parts outside the encoder, but scope is {self.scope!r}"
            if self.mode == "asynchronous":
                yield (
                    "choose.groups compares all candidates at once, but mode 'asynchronous' judges them one by "
                    "one, as their messages arrive"
                )
        if self.choose.recency is not None and "z-score" in scales.values():
            yield "choose.recency needs similarities of at least 0, but similarity.normalise is z-score"
        if self.mode == "asynchronous":
            if self.scenario is None or self.scenario.speed is None:
                yield "mode 'asynchronous' needs scenario.speed, which determines who finishes first"
            if isinstance(self.similarity.every, dict):
                yield "similarity.every per signal needs peers in one round, but mode is asynchronous"
            if unscaled != scales.keys():
                yield (
                    f"similarity.normalise {self.similarity.normalise!r} compares all candidates, but mode "
                    "'asynchronous' judges them one by one, as their messages arrive"
                )
