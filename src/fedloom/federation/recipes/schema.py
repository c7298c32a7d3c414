"""The shape of a recipe: everything that determines a run, in one frozen, fully resolved value. Free of torch.

`data`, `partition`, `model` and `method` name a registered function and hold its parameters beside the name; the
function's signature is the schema of the section, and defaults are filled in when the recipe is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from fedloom.core.errors import MANY, RecipeError
from fedloom.core.settings.registry import Registered, Registry
from fedloom.core.settings.renamed import hashed
from fedloom.core.settings.section import Problem, Problems, Section, carry, explain, found, join, strict, value_at
from fedloom.core.settings.trust import Code, Origin, admit, imported, is_import, located, names_in, source
from fedloom.federation.recipes.runtime import EarlyStopping, Evaluation, Privacy, Runtime
from fedloom.methods.peers.config import PeersBase
from fedloom.models.signal import Lora
from fedloom.training.config import Training

QUIET = ("engine", "flower", "workers", "checkpoint_every", "diagnostics", "mirror", "track")
"""Keys of the section runtime on which results do not depend."""

LATER: dict[tuple[str, ...], dict[str, Any]] = {
    (): {"attack": None, "peers": None, "privacy": None},
    ("data",): dict.fromkeys(("signal", "axes", "ranges", "rename", "group", "time", "split")) | {"keep": 0},
    ("early_stopping",): {"relative": False},
    ("evaluation",): {"costly_every": None},
    ("method",): {"max_examples": None},
    ("model",): {"inputs": "data", "freeze": None, "frozen_statistics": False, "start": None},
    ("partition",): {"sizes": None, "named": False},
    ("peers",): {"mode": "synchronous", "rollback": None},
    ("peers", "choose"): {"groups": None, "recency": None},
    ("peers", "conflict_averse"): {"heads": "mean"},
    ("peers", "similarity"): {
        "gradient": "update",
        "scale": "unit",
        "cross_loss": "exp",
        "model": "trained",
        "parameters": "change",
        "samples": None,
        "release": False,
    },
    ("peers", "warmup"): {"alone": 1},
    ("runtime",): {"deterministic": False, "exact": True},
    ("training", "optimizer"): {"encoder_lr": None},
    ("training", "schedule"): {"warmup_share": 0.0},
}
"""Keys that came later, with their defaults, at which the hash of a recipe is what it was without them."""


GIVEN = "given"
"""The name of a section that holds a Python object; its key `what` describes the object."""


class Named(Section):
    """A section that names a function of a registry: call it with `section.make(...)`.

    In a recipe the parameters stand beside the name; a bare name is short for a section with defaults only. In Python
    an object may stand in the name's place (see `holding`).
    """

    home: ClassVar[tuple[str, str]]
    """Module and name of the registry, imported when a recipe is read."""
    section: ClassVar[str]
    """Its key path in a recipe."""
    argument: ClassVar[str] = ""
    """The argument of `fl.run` and `fl.resume` for an object in the name's place."""
    inline: ClassVar[str] = "params"
    expected: ClassVar[str] = "a name, or a mapping with 'name' and its parameters"

    name: str
    params: Annotated[dict[str, Any], Field(default_factory=dict, validate_default=True)]
    _held: Registered | None = PrivateAttr(None)

    @classmethod
    def registry(cls) -> Registry:
        """Return the functions that this section may name."""
        return registry(*cls.home)

    @classmethod
    def short(cls) -> list[str]:
        """Return names that are short for a section with another name."""
        return []

    @classmethod
    def names(cls) -> list[str]:
        """Return all that may stand as the section's name, but for imports."""
        return [*cls.registry().names, *cls.short()]

    @classmethod
    def common(cls) -> dict[str, Any]:
        """Return the keys that the section takes whatever its name is."""
        return {k: f for k, f in cls.model_fields.items() if k != "params"}

    @property
    def entry(self) -> Registered:
        """The function of the section, or one that gives its object. Raises RecipeError where that is not here."""
        if self._held is not None:
            return self._held
        if self.name == GIVEN:
            raise RecipeError(
                f"{self.section}: {self.params['what']!r} is a Python object, which a recipe cannot store; pass it as "
                f"{self.argument}= in Python (fedloom.run, fedloom.resume), or name it as package.module:name"
            )
        return self.registry()[self.name]

    @property
    def arguments(self) -> dict[str, Any]:
        """The parameters with which `entry` is called."""
        return {} if self.is_held else self.params

    @property
    def is_held(self) -> bool:
        """Return whether the section holds a Python object instead of a registered name."""
        return self._held is not None

    def make(self, *given: Any) -> Any:
        """Call what the section names."""
        return self.entry.make(*given, **self.arguments)

    def holding(self, thing: Any) -> Self:
        """Return the section with an object in the name's place."""
        return self.model_copy(update={"name": GIVEN, "params": {"what": described(thing)}})._with(thing)

    def _with(self, thing: Any) -> Self:
        self._held = self.registry().of(GIVEN, thing)
        return self

    @model_validator(mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return value
        if "name" not in value:
            known = cls.registry().names
            some = f"one of {', '.join(known)}" if len(known) <= MANY else f"one of {len(known)}, such as {known[0]}"
            raise carry([("name", f"missing, expected {some}")])
        common = cls.common()
        params = {k: v for k, v in value.items() if k not in common}
        return {**{k: v for k, v in value.items() if k in common}, "params": params}

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != GIVEN and (problem := cls.registry().problem(value)):
            raise carry([("", problem)])
        return cls.registry().current(value)

    @field_validator("params")
    @classmethod
    def _resolved(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" not in info.data:
            return value
        name = info.data["name"]
        params = _Given if name == GIVEN else cls.registry()[name].params
        values, problems = _resolve(params, value, cls.common())
        if problems:
            raise carry(problems)
        return values

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.params, **{k: getattr(self, k) for k in self.common()}}


class _Given(Section):
    what: str


class DataSection(Named):
    """The data set."""

    home = ("fedloom.data", "DATASETS")
    section = "data"
    argument = "federation"


class PartitionSection(Named):
    """Recipe section `partition`: the tasks and examples of each client."""

    home = ("fedloom.data.partition", "PARTITIONERS")
    section = "partition"
    argument = "federation"


class ModelSection(Named):
    """The encoder. `heads`: a client holds the heads of all tasks (all: a unified model) or of its own tasks (own)."""

    home = ("fedloom.models", "ENCODERS")
    section = "model"
    argument = "model"

    heads: Literal["all", "own"] = "all"
    weights: str | None = None
    """A file with the encoder's weights to start from (.safetensors, .pth), such as `fedloom study pretrain` writes."""
    start: str | None = None
    """A run's folder, or a model.safetensors: start from the model that all clients of that run share."""
    inputs: Literal["data", "weights"] = "data"
    """Normalise images as the data set does (data), or as timm's weights expect them (weights)."""
    freeze: str | None = None
    """A glob of parameter names, such as encoder.*: these parameters are never trained and never sent."""
    frozen_statistics: bool = False
    """true: norm layers of the encoder keep their initial running statistics, and use them in training too."""
    lora: Lora | None = None
    """Train low-rank factors beside the encoder's linear layers, which are frozen."""


class MethodSection(Named):
    """The federated method and its add-ons. The name of an add-on alone is short for FedAvg with this add-on."""

    home = ("fedloom.methods", "METHODS")
    section = "method"
    argument = "method"

    add: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="a mapping of add-ons, each with its parameters"
    )
    """Add-on name -> its parameters, applied in this order."""
    weights: Literal["size", "declared", "uniform"] | None = None
    """The weight of a client: its number of examples as its updates claim (size) or as known before the run (declared),
    or the same for all (uniform); null: as the method has it."""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """The largest number of examples that a client may count for, whatever it claims; null: no bound."""
    buffers: Literal["mean", "local", "pooled"] | None = None
    """Running statistics of norm layers: averaged, kept at the client, or pooled; null: as the method has it."""
    codec: str | None = Field(default=None, description="'raw', 'sparse', 'unified', package.module:name or null")
    """The encoding of updates; null: as the method has it."""
    python: str | None = None
    """In the recipe of a run: the Method from Python that replaced this section. Resuming needs it again."""

    def holding(self, thing: Any) -> Self:
        """Return the section with a Method in the name's place, which stays as it was."""
        return self.model_copy(update={"python": described(thing)})._with(thing)

    @classmethod
    def short(cls) -> list[str]:
        """Return the add-ons' names, each short for FedAvg with this add-on."""
        return list(registry("fedloom.methods", "ADDONS").names)

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        section = {"name": value} if isinstance(value, str) else value
        if isinstance(section, Mapping) and section.get("name") in cls.short():
            common, addon, beside = cls.common(), section["name"], section.get("add") or {}
            if not isinstance(beside, Mapping) or addon in beside:
                raise carry([("add", f"{found(beside)} found, expected other add-ons than {addon}, which is the name")])
            own = {key: each for key, each in section.items() if key not in common}
            kept = {key: each for key, each in section.items() if key in common}
            section = {**kept, "name": "fedavg", "add": {addon: own, **beside}}
        return section

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        if value is not None and (problem := registry("fedloom.methods", "CODECS").problem(value)):
            raise carry([("", problem)])
        return value

    @field_validator("add", mode="before")
    @classmethod
    def _resolve_add(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        addons = registry("fedloom.methods", "ADDONS")
        resolved: dict[str, Any] = {}
        problems: list[Problem] = []
        for name, params in value.items():
            if problem := addons.problem(name):
                problems.append((name, problem))
            elif not isinstance(params, Mapping | None):
                problems.append((name, f"{found(params)} found, expected a mapping with its parameters"))
            else:
                resolved[name], wrong = _resolve(addons[name].params, params or {}, {})
                problems += [(join(name, path), message) for path, message in wrong]
        if problems:
            raise carry(problems)
        return resolved


class GraphSection(Named):
    """The graph: the peers from which each peer receives. A new one is drawn every `every` rounds; 0: never."""

    home = ("fedloom.methods.peers.graph", "TOPOLOGIES")
    section = "peers.graph"

    every: Annotated[int, Field(ge=0)] = 0


class PeersSection(PeersBase):
    """Learning without a server: each peer chooses among its neighbours in the graph, and mixes their models."""

    graph: GraphSection = Field(default_factory=lambda: GraphSection.model_validate("full"))

    def _problems(self) -> Problems:
        yield from super()._problems()
        if self.weights.kind == "metropolis" and self.graph.params.get("directed"):
            yield (
                f"weights.kind 'metropolis' needs links in both directions, but graph {self.graph.name!r} is directed; "
                "set graph.directed: false"
            )


class AttackSection(Named):
    """Hostile clients, to test defences. The numbers of a run leave them out."""

    home = ("fedloom.methods.robust", "ATTACKS")
    section = "attack"

    clients: Annotated[int, Field(ge=1)] | list[str] = Field(
        default=1, description="a number of clients, or a list of their names"
    )
    """The number of hostile clients, drawn from the seed, or their names."""


class Recipe(Section):
    """All settings of a run. Equal recipes and equal versions give equal results."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="a name of letters, digits, '_', '-' and '.'")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    data: DataSection
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Task -> options that replace the data set's: loss weight, variants of the loss, metrics (ods, log, ...)."""
    partition: PartitionSection
    model: ModelSection
    method: MethodSection
    peers: PeersSection | None = None
    """null: with a server."""
    training: Training = Training()
    runtime: Runtime = Runtime()
    evaluation: Evaluation = Evaluation()
    early_stopping: EarlyStopping | None = None
    privacy: Privacy | None = None
    """null: updates and models are not protected by noise."""
    attack: AttackSection | None = None
    """null: all clients are honest."""

    @property
    def named(self) -> tuple[Named, ...]:
        """The sections that name something, or hold an object."""
        return self.data, self.partition, self.model, self.method, *([self.attack] if self.attack else [])

    def holding(self, **objects: Any) -> Recipe:
        """Return the recipe with objects in place of the names of sections (data, ...)."""
        return self.model_copy(update={key: getattr(self, key).holding(each) for key, each in objects.items()})

    def at_nodes(self) -> Recipe:
        """Return the recipe as nodes of Flower run it, whatever its engine: the source of noise depends on it."""
        return self.model_copy(update={"runtime": self.runtime.model_copy(update={"engine": "flower"})})

    @property
    def origins(self) -> dict[str, dict[str, str | None]]:
        """Key or name -> module, package, version and source of what is not fedloom's own."""
        entries = {section.section if section.is_held else section.name: section.entry for section in self.named}
        addons = registry("fedloom.methods", "ADDONS")
        entries |= {name: addons[name] for name in self.method.add}
        if self.method.codec is not None:
            entries[self.method.codec] = registry("fedloom.methods", "CODECS")[self.method.codec]
        origins = {name: entry.origin for name, entry in entries.items()}
        origins |= {
            name: source(imported(name))
            for options in self.tasks.values()
            for name in (options.get("loss"), *dict(options.get("metrics") or {}).values())
            if isinstance(name, str) and is_import(name)
        }
        return {name: origin for name, origin in origins.items() if origin is not None}

    @property
    def code(self) -> tuple[Code, ...]:
        """The names of code in it, with their sources."""
        return tuple(map(located, dict.fromkeys(names_in(self.model_dump(mode="json")))))

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Allow in a worker process what the process that sent the recipe was allowed to import."""
        super().__setstate__(state)
        admit(names_in(self.model_dump(mode="json")), Origin.TYPED, self.name)

    def _problems(self) -> Problems:
        if self.early_stopping and "val" not in self.evaluation.splits:
            needs = "early_stopping needs 'val': a model is never chosen on the test split"
            yield "evaluation.splits", f"{list(self.evaluation.splits)} found, but {needs}"
        if self.peers and "personal" not in self.evaluation.models:
            has = "peers have 'personal' ones"
            yield "evaluation.models", f"{list(self.evaluation.models)} found, but {has}"

    @model_validator(mode="after")
    def _sparing(self) -> Recipe:
        if self.peers and not (self.early_stopping or self.evaluation.model_fields_set & {"every", "costly_every"}):
            # each has a model of its own, and to measure all of them takes as long as to train them
            return self.model_copy(update={"evaluation": self.evaluation.model_copy(update={"every": 5})})
        return self


def recipe_hash(recipe: Recipe | Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits over what determines results: not the name, engine, workers or checkpoints.

    Also takes a resolved recipe as a mapping, as a run folder holds it.
    """
    value = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else dict(recipe)
    value.pop("name", None)
    for path, defaults in LATER.items():
        section: dict[str, Any] = value
        for key in path:
            if not section.get(key):
                break
            section[key] = section = dict(section[key])  # a copy: the caller's recipe stays as it is
        else:
            for key, default in defaults.items():
                if section.get(key) == default:
                    section.pop(key, None)
    value["runtime"] = {key: each for key, each in (value.get("runtime") or {}).items() if key not in QUIET}
    value["evaluation"] = {k: v for k, v in (value.get("evaluation") or {}).items() if k != "predictions"}
    # Keys are sorted below, but add-ons act in the order in which they stand. A Method is identified by its own text.
    method = {k: v for k, v in hashed(value["method"]).items() if k != "python"}
    value["method"] = {**method, "add": list(method.get("add", {}).items())}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def came_later(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a key (a path) is new since a resolved recipe `before` was written, and has its default `now`."""
    home, _, name = key.rpartition(".")
    was = value_at(before, home) if home else before
    defaults = LATER.get(tuple(home.split(".")) if home else (), {})
    return isinstance(was, Mapping) and name not in was and name in defaults and defaults[name] == value_at(now, key)


def described(thing: Any) -> str:
    """Return an object in a few words, which differ where data or the shape of a model differ, but not where only the
    seed of a federation's split does."""
    thing = getattr(thing, "_redrawn_of", None) or thing
    if hasattr(thing, "stage") and hasattr(thing, "name"):  # a Method
        return str(thing.name)
    dataset = getattr(thing, "dataset", thing)
    if hasattr(dataset, "fingerprint") or (hasattr(dataset, "train") and hasattr(dataset, "test")):
        digest = hashlib.sha256(dataset.train.fingerprint() + dataset.test.fingerprint())
        if (public := getattr(dataset, "public", None)) is not None:
            digest.update(public.numpy().tobytes())
        for client, model in getattr(dataset, "models", {}).items():
            digest.update(f"{client}: {model if isinstance(model, str | Mapping) else described(model)}".encode())
        return f"{dataset.name}, {len(dataset.train)} examples, {digest.hexdigest()[:8]}"
    module = getattr(thing, "module", thing)
    if hasattr(module, "state_dict") and not isinstance(module, type):
        # Layers such as nn.LazyLinear have no shape before the first input.
        tensors = module.state_dict().items()
        shapes = repr([(name, None if hasattr(t, "materialize") else tuple(t.shape)) for name, t in tensors])
        return f"{type(module).__name__}, {hashlib.sha256(shapes.encode()).hexdigest()[:8]}"
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def registry(module: str, name: str) -> Registry:
    """Return a registry by the module that has it and its name there."""
    return resolve_name(f"{module}:{name}")


def _resolve(
    model: type[BaseModel], params: Mapping[str, Any], also: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return all parameters of a registered function with defaults filled in, and what is wrong with those given."""
    try:
        return dict(strict(model, params)), []
    except ValidationError as error:
        return {}, explain(error, model, also)
