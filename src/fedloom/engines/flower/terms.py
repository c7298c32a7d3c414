"""A run as its sender offers it, as text, and a site's own terms: a node refuses a run that does not fulfil them.

A site agrees to the text before anything of it is resolved, built or imported. What is unknown is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

from pydantic import BeforeValidator, Field

from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import Count, Positive, Section
from fedloom.core.settings.trust import Origin, admit, is_allowed, located, names_in, package_of
from fedloom.core.settings.yaml import parse, to_yaml
from fedloom.core.untrusted import shown
from fedloom.engines.flower.wire import RefusedError
from fedloom.federation.recipes.loader import changed, dump, names, read, resolved
from fedloom.federation.recipes.runtime import Privacy
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.refusals import judged_on_data
from fedloom.methods.method import Method
from fedloom.training.flat import integer_buffers


@dataclass(frozen=True, eq=False)
class Offer:
    """The text of a recipe, and the changes of a run: `flwr run --run-config 'changes="training.rounds=5; seed=1"'`."""

    where: str
    text: str
    changes: tuple[str, ...] = ()
    source: Recipe | None = None
    """The recipe that the text was written from, where it was made in Python."""

    @staticmethod
    def of(recipe: Recipe | Path | str, changes: str = "") -> Offer:
        """Take an app's recipe and a run's changes, separated by semicolons. Raises RecipeError for a bad file."""
        each = tuple(text.strip() for text in changes.split(";") if text.strip())
        if isinstance(recipe, Recipe):
            return Offer("the recipe", dump(recipe), each, recipe)
        if isinstance(recipe, str) and recipe in names():
            return Offer(recipe, to_yaml(read(recipe).value), each)
        try:
            return Offer(str(recipe), Path(recipe).read_bytes().decode("utf-8"), each)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{recipe}: {error}") from None

    @cached_property
    def sha256(self) -> str:
        """The checksum of the recipe's text, as `fedloom flower` prints it."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The recipe's plain content with the changes applied. Raises RecipeError for text that is no recipe."""
        return changed(self.where, parse(self.text, self.where), self.changes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of code in it."""
        return tuple(dict.fromkeys(names_in(self.content)))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the changes change."""
        return tuple(change.partition("=")[0].strip() for change in self.changes)

    def resolved(self) -> Recipe:
        """Return the recipe as nodes run it; import the code that it names. RecipeError where that is not allowed."""
        if self.source is not None and not self.changes:
            return self.source.at_nodes()
        admit(self.names, Origin.ELSEWHERE, self.where)
        return resolved(self.where, self.content, self.changes).at_nodes()


P = ParamSpec("P")


def _refusing(reasons: Callable[P, Iterator[str]]) -> Callable[P, None]:
    """Turn a generator of reasons to refuse into a function that raises RefusedError with the first of them."""

    @wraps(reasons)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        if why := next(reasons(*args, **kwargs), None):
            raise RefusedError(f"this site's terms: {why}")

    return check


Beside = Literal["examples", "losses", "scores"]
"""The kinds of numbers beside an update. examples: the numbers of examples and steps. losses: those of training, and
those among the scores. scores: all results of evaluations."""
BESIDE: tuple[Beside, ...] = ("examples", "losses", "scores")
_MEASURED = frozenset({"loss_received", "loss_trained"})
_TELL: Mapping[Beside, frozenset[str]] = {
    "examples": frozenset({"steps", "classes", "a", "prototype_labels", "share"}),
    "losses": _MEASURED,
    "scores": _MEASURED,
}
"""Extras, without a number at their ends, that disclose the same: a share as k/n discloses n."""

Package = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _joined(value: Any) -> Any:
    """Read a list of mappings as one mapping."""
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return {package: digest for one in value for package, digest in one.items()}
    return value


Packages = Annotated[dict[Package, Sha256], BeforeValidator(_joined)]


class AtLeast(Section):
    """Differential privacy that a run must have."""

    epsilon: Positive
    """Of all rounds of a run; with trust: local also of all trainings that this node answers in it, whoever asks."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    trust: Literal["central", "local"] = "central"
    """local: the server is not trusted to add noise, this node adds it."""


class SitePolicy(Section):
    """The section terms of node.yaml; null demands nothing. The node looks at the recipe that it runs itself, and takes
    the server's word only for how many clients there are."""

    methods: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of methods and add-ons that may run; a method made in Python is none of them."""
    robust: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Add-ons one of which the method must have, not with f: 0."""
    privacy: AtLeast | None = None
    leaves: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Globs of what may leave: parameters, running statistics and counters by their names, and beside:NAME for what a
    method or peers send beside the update (extras, auxiliary vectors, support, means of features)."""
    rounds: Count | None = None
    """Most rounds that a run may have, and most trainings that this node answers in it, whoever asks."""
    clients: Count | None = None
    """Least number of clients that are expected in a round."""
    code: Literal["none"] | Packages | None = None
    """Code that a recipe may name. none: no code. A mapping, or a list of mappings: these packages or modules, each
    with the checksum of its source. null: none but what FEDLOOM_ALLOW_CODE allows at this node."""
    recipes: Annotated[tuple[Sha256, ...], Field(min_length=1)] | None = None
    """Checksums of the recipe files that may run; null: any."""
    changes: tuple[str, ...] | None = None
    """Globs of keys that a run may change (--run-config changes=...); null: any, or none where `recipes` are listed."""
    statistics: Literal["allow", "forbid"] | None = None
    """Permission to send counts, means and deviations of columns and labels before the first round; null: allowed,
    except where `withhold` has examples."""
    withhold: tuple[Beside, ...] | None = None
    """The kinds of numbers that stay at the node although the recipe records them; null: all three where the recipe has
    privacy.trust: local, else nothing."""

    @_refusing
    def agree_to_offer(self, offer: Offer) -> Iterator[str]:
        """Raise RefusedError where a run's text does not fulfil the terms; then allow the code that they list."""
        if self.recipes is not None and offer.sha256 not in self.recipes:
            yield f"recipes: sha256 {offer.sha256} found, expected {' or '.join(self.recipes)}"
        globs = () if self.changes is None and self.recipes is not None else self.changes
        for key in offer.keys if globs is not None else ():
            if not any(fnmatchcase(key, glob) for glob in globs or ()):
                yield f"changes: {shown(key)} found, expected {', '.join(globs or ()) or 'none'}"
        known = self.code if isinstance(self.code, dict) else {}
        names = [name for name in offer.names if self.code is not None or not is_allowed(name)]
        sums = {code.name: code.sha256 for code in map(located, names)}
        if refused := [name for name in sums if known.get(package_of(name)) != sums[name]]:
            listed = ", ".join(f"{shown(name)} (sha256 {sums[name]})" for name in refused)
            expected = ", ".join(f"{package} with sha256 {digest}" for package, digest in known.items()) or "none"
            yield f"code: {listed} found, expected {expected}; nothing was imported"
        if isinstance(self.code, dict):  # only reached where nothing was refused
            admit(offer.names, Origin.TYPED, "this site's terms")

    @_refusing
    def agree(self, recipe: Recipe) -> Iterator[str]:
        """Raise RefusedError where a recipe does not fulfil the terms."""
        method, section, rounds = recipe.method, recipe.privacy, recipe.training.rounds
        named = ("made in Python" if method.is_held or method.python else method.name, *method.add)
        for name in named if self.methods is not None else ():
            if name not in (self.methods or ()):
                yield f"methods: {name} found, expected only {', '.join(self.methods or ())}"
        rules = [name for name, params in method.add.items() if params.get("f") != 0]  # for no liar is no defence
        if self.robust is not None and not set(self.robust) & set(rules):
            value = ", ".join(rules) or "no add-on"
            yield f"robust: {value} found, expected one of {', '.join(self.robust)}, with f above 0"
        if self.rounds is not None and rounds > self.rounds:
            yield f"rounds: {rounds} found, expected at most {self.rounds}"
        if self.privacy is None:
            return
        if section is None:
            yield "privacy: none found, expected a section privacy"
        elif self.privacy.trust == "local" and section.trust == "central":
            yield "privacy.trust: central found, expected local"
        elif section.delta > self.privacy.delta:
            yield f"privacy.delta: {section.delta:g} found, expected at most {self.privacy.delta:g}"
        elif section.bound is None or section.bound > self.privacy.epsilon:
            value = "no budget" if section.bound is None else f"{section.bound:g}"
            yield f"privacy.epsilon: {value} found, expected a budget of at most {self.privacy.epsilon:g}"

    @_refusing
    def agree_to(self, built: Built, clients: Any, answered: int = 0) -> Iterator[str]:
        """Raise RefusedError where the run does not fulfil the terms, after so many trainings for it."""
        self.agree(built.recipe)
        method, layout = built.method, built.layout
        if self.leaves is not None:
            names = [*method.shared_part(layout).names]
            if method.buffers != "local":
                names += [*method.shared_buffers(layout).names, *integer_buffers(built.module)]
            beside = [*sorted(method.extras), *method.auxiliary, *(("support",) if method.wants_support else ())]
            if (peers := built.recipe.peers) is not None and peers.judges:
                beside += {"features"} & peers.similarity.signals.keys()
            for name in (*names, *(f"beside:{name}" for name in beside)):
                if not any(fnmatchcase(name, glob) for glob in self.leaves):
                    yield f"leaves: {name} would leave, expected only {', '.join(self.leaves)}"
        cost = built.terms
        if self.privacy is not None and cost is not None and cost.trust == "local":  # spent by what this node answers
            epsilon, most = cost.epsilon(answered + 1), self.privacy.epsilon
            if epsilon > most:
                yield f"privacy.epsilon: {epsilon:.4g} after {answered + 1} trainings found, expected at most {most:g}"
        if self.rounds is not None and answered >= self.rounds:
            yield f"rounds: {answered} trainings are done, expected at most {self.rounds}"
        if self.clients is not None:
            known = clients if isinstance(clients, int) else 0
            expected = known * built.recipe.training.participation
            if expected < self.clients:
                why = f"{expected:g} expected in a round" if known else f"{shown(clients)} found"
                yield f"clients: {why}, expected at least {self.clients}"


def withheld(terms: SitePolicy | None, privacy: Privacy | None, own: bool) -> frozenset[Beside]:
    """Return the kinds of numbers that a node withholds in a run with this privacy; the site's terms may loosen it.

    `own`: the node has data of its own. Otherwise its share is the recipe's, and all know how many examples that has.
    """
    usual: tuple[Beside, ...] = BESIDE if privacy is not None and privacy.trust == "local" else ()
    hidden = usual if terms is None or terms.withhold is None else terms.withhold
    return frozenset(what for what in hidden if own or what != "examples")


@_refusing
def agree_to_statistics(
    terms: SitePolicy | None, hidden: Collection[Beside], privacy: Privacy | None, table: bool, scales: Sequence[str]
) -> Iterator[str]:
    """Raise RefusedError where statistics may not leave the node: those of its `table`, or `scales` of these tasks."""
    stated, forbid = None if terms is None else terms.statistics, "statistics: forbid, but"
    withhold = "withhold: examples, but" if stated is None and "examples" in hidden else ""
    local = "set data.preprocess: local, and list the categories in data.inputs"
    if table and stated == "forbid":
        yield f"{forbid} data.preprocess is federated, which sends counts and means of columns; {local}"
    if table and withhold and (privacy is None or privacy.trust == "central"):  # else this node adds noise
        yield f"{withhold} data.preprocess: federated sends counts; set statistics: allow, or {local}"
    for task in scales if withhold or stated == "forbid" else ():
        sent = f"the report of this node has the mean and standard deviation of its labels of {task}"
        known = f"state those of all sites, approximately, in the recipe: tasks: {{{task}: {{mean: 0, std: 1}}}}"
        yield f"{withhold or forbid} {sent}; {known}{', or set statistics: allow' if withhold else ''}"


@_refusing
def agree_to_withhold(hidden: Collection[Beside], method: Method, recipe: Recipe) -> Iterator[str]:
    """Raise RefusedError where a run of a recipe and its method needs what a node withholds."""
    if "examples" in hidden and method.counts_examples:
        why = "a stage reads them" if method.weights == "uniform" else f"method.weights is {method.weights}"
        yield f"withhold: examples, but {method.name} needs them ({why}); set method.weights: uniform"
    for what, extras in _TELL.items():
        sent = sorted(name for name in method.extras if name.rstrip("0123456789") in extras)
        if what in hidden and sent:
            yield f"withhold: {what}, but {method.name} sends {sent[0]} beside the update, which reveals them"
    measured = ", ".join(sorted({"losses", "scores"} & {*hidden}))
    if measured and recipe.early_stopping is not None:
        yield f"withhold: {measured}, but early_stopping reads the validation loss; leave it out"
    for signal in judged_on_data(recipe.peers) if measured and recipe.peers is not None else ():
        yield f"withhold: {measured}, but by peers' {signal} others learn how models do on a peer's validation data"
