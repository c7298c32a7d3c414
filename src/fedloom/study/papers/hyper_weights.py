"""FedHCA2's hyper weights of a run, read from its records: alpha per client, beta per decoder and layer, as a picture.

The run must use the method `fedhca2`, or one of its stages. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run, number_of
from fedloom.study import charts
from fedloom.study.charts import Chart, thinned
from fedloom.study.tables.output import HasTables, Records, Table

KIND = "hyper-weights"
CSV = ("round", "weight", "client", "task", "layer", "value", "used")
_LINES = 12
_NAMED = 12  # lines of one panel that are drawn and named each

Series = Mapping[int, float]
"""Round -> weight, of the rounds in which it was used."""


def used(value: float) -> float:
    """Return a weight as a round uses it: clamped to [0, 1]. The learned weight itself may lie outside."""
    return min(max(value, 0.0), 1.0)


@dataclass(frozen=True)
class HyperWeights(HasTables):
    """The weights of one run, as learned, not clamped. A client has no weight in rounds without it."""

    label: str
    rounds: tuple[int, ...]
    alpha: Mapping[str, Series]
    """Client -> its weight over the rounds."""
    beta: Mapping[tuple[str, str], Mapping[str, Series]]
    """(client, task) -> layer -> its weight over the rounds."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the layers of decoders, in the order of the network."""
        return tuple(dict.fromkeys(layer for layers in self.beta.values() for layer in layers))

    def alphas(self) -> Table:
        """Return rounds by clients; of a long run, some evenly spaced. Weights outside [0, 1] stand in brackets."""
        lines = [
            (str(r), *(_text(of[r]) if r in of else "" for of in self.alpha.values()))
            for r in thinned(self.rounds, _LINES)
        ]
        return Table(f"{self.label}: alpha of the encoders", ("round", *self.alpha), tuple(lines))

    def betas(self) -> Table:
        """Return decoders by layers: first use > last use."""
        lines = []
        for decoder, layers in self.beta.items():
            each = [[*layers.get(name, {}).values()] for name in self.layers]
            cells = [" > ".join(map(_text, [*values[:1], *values[1:][-1:]])) for values in each]
            lines.append((" ".join(decoder).strip(), *cells))
        return Table(f"{self.label}: beta of the decoders, first > last", ("decoder", *self.layers), tuple(lines))

    def tables(self) -> list[Table]:
        """Return alpha and beta, where there are any."""
        return [*([self.alphas()] if self.alpha else []), *([self.betas()] if self.beta else [])]

    def records(self) -> Records:
        """Return every weight of every round, as learned and as used."""
        lines = [(r, "alpha", client, "", "", v) for client, of in self.alpha.items() for r, v in of.items()]
        for (client, task), layers in self.beta.items():
            lines += [(r, "beta", client, task, layer, v) for layer, of in layers.items() for r, v in of.items()]
        ordered = sorted(lines, key=lambda line: line[0])
        return Records(CSV, [(*line, used(line[-1])) for line in ordered])


def table(run: str | Path | Run) -> HyperWeights:
    """Read the hyper weights that a run recorded. Raises StateError where it recorded none."""
    run = run if isinstance(run, Run) else Run.read(run)
    alpha: dict[str, dict[int, float]] = {}
    beta: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    rounds = []
    for round, record in run.records(KIND):
        rounds.append(round)
        for client, value in record["weights"].items():
            if record["part"] == "encoder":
                alpha.setdefault(client, {})[round] = number_of(value)
                continue
            for task, layers in value.items():
                for layer, weight in layers.items():
                    beta.setdefault((client, task), {}).setdefault(layer, {})[round] = number_of(weight)
    if not rounds:
        raise StateError(f"{run.folder}: no hyper weights recorded; run with method=fedhca2")
    label = f"{run.recipe['name']}, {run.label}, seed {run.seed}"
    return HyperWeights(label, tuple(dict.fromkeys(rounds)), dict(sorted(alpha.items())), dict(sorted(beta.items())))


def picture(several: Sequence[HyperWeights]) -> Chart:
    """Draw one run below the other: the weights as they were used (clamped to [0, 1]).

    alpha of each client over the rounds; beta of each decoder over the rounds, the mean of its layers; and the last
    beta of every decoder and layer (FedHCA2's Figures 6 and 7; 2 and 3 of its supplement).
    """
    drawn = []
    for weights in several:
        if weights.alpha:
            alphas = {client: _by_round([of]) for client, of in weights.alpha.items()}
            drawn.append(_over_rounds(f"{weights.label}: encoder of each client", "α", alphas))  # noqa: RUF001
        if weights.beta:
            named = {" ".join(decoder).strip(): layers for decoder, layers in weights.beta.items()}
            betas = {name: _by_round(layers.values()) for name, layers in named.items()}
            drawn.append(_over_rounds(f"{weights.label}: decoders, mean of their layers", "β", betas))
            last = {name: {layer: used([*of.values()][-1]) for layer, of in by.items()} for name, by in named.items()}
            title = f"{weights.label}: β of the decoders in round {weights.rounds[-1]} or last used"
            drawn.append(charts.heat(last, weights.layers, title=title, value="β", spoken=".3f", numbers=".3f"))
    return charts.concat(drawn, 3)


def _over_rounds(title: str, weight: str, lines: Mapping[str, Mapping[int, Sequence[float]]]) -> Chart:
    """Draw the mean of each line's weights; of many lines, those with the least and the largest end, and a band."""
    means = {name: {r: math.fsum(of) / len(of) for r, of in by.items()} for name, by in lines.items()}
    ranked = sorted(means, key=lambda name: [*means[name].values()][-1])
    named = ranked if len(ranked) <= _NAMED else [ranked[0], ranked[-1]]
    bands = {}
    if rest := [means[name] for name in ranked if name not in named]:
        bands = {f"{len(rest)} more": {r: (min(of), max(of)) for r, of in _by_round(rest).items()}}
    return charts.lines({name: means[name] for name in named}, "round", weight, title=title, bands=bands)


def _by_round(several: Iterable[Series]) -> dict[int, list[float]]:
    """Return round -> the weights of several lines as used, in the order of the rounds."""
    each: dict[int, list[float]] = {}
    for of in several:
        for round, value in of.items():
            each.setdefault(round, []).append(used(value))
    return dict(sorted(each.items()))


def _text(value: float) -> str:
    return f"{value:.4f}" if 0 <= value <= 1 else f"{used(value):.4f} ({value:.3g})"
