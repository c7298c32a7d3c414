"""The columns of the matrix of updates: Block, Select, Layout."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import twice

ROLES = ("encoder", "decoder", "head", "adapter", "norm", "buffer", "private", "public")
RoleRule = str | tuple[str, str]
Roles = Mapping[str, RoleRule] | Callable[[str], RoleRule | None]
Columns = slice
_NORMS: dict[str, type[nn.Module]] = {
    "batch-norm": nn.modules.batchnorm._NormBase,
    "layer-norm": nn.LayerNorm,
    "group-norm": nn.GroupNorm,
    **({"rms-norm": nn.RMSNorm} if hasattr(nn, "RMSNorm") else {}),
}


@dataclass(frozen=True)
class Block:
    """One named tensor of a model: `size` consecutive columns.

    `role` is the tensor's role (norm layers and buffers are recognised by type), `part` the part that contains it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: str = "encoder"
    task: str | None = None
    part: str | None = None
    kind: str | None = None
    """The kind of a norm layer: batch-norm, layer-norm, group-norm or rms-norm."""

    def __post_init__(self) -> None:
        for value in (self.role, self.part or self.role):
            if value not in ROLES:
                raise ValueError(f"block {self.name!r}: role {value!r} is unknown; roles: {', '.join(ROLES)}")
        object.__setattr__(self, "shape", tuple(int(s) for s in self.shape))

    @cached_property
    def size(self) -> int:
        """Number of columns."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Select:
    """A choice of blocks: all conditions must hold. `role` also matches a block's part, and `name` is a glob.

    `kind` is the kind of a norm layer. `exclude` removes blocks from the choice:
    `Select(role="encoder", exclude=Select(role="norm"))`.
    """

    role: str | tuple[str, ...] | None = None
    task: str | tuple[str, ...] | None = None
    name: str | tuple[str, ...] | None = None
    kind: str | tuple[str, ...] | None = None
    exclude: Select | None = None

    def matches(self, block: Block) -> bool:
        """Return whether a block is chosen."""
        if self.name is not None and not any(fnmatch.fnmatchcase(block.name, g) for g in _many(self.name)):
            return False
        asked = ((self.role, {block.role, block.part}), (self.task, {block.task}), (self.kind, {block.kind}))
        if any(wanted is not None and has.isdisjoint(_many(wanted)) for wanted, has in asked):
            return False
        return self.exclude is None or not self.exclude.matches(block)


Selector = str | Select
EVERYTHING = Select()
ALL_BUT_ENCODER = Select(exclude=Select(role="encoder"))


def as_select(selector: Selector) -> Select:
    """Return a role name, or "*" for everything, as a Select."""
    if isinstance(selector, Select):
        return selector
    return EVERYTHING if selector == "*" else Select(role=selector)


@dataclass(frozen=True)
class Layout:
    """Ordered blocks: which column is which parameter."""

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if again := twice(self.names):
            raise ValueError(f"two blocks have the name {again[0]!r}")

    @staticmethod
    def from_module(module: nn.Module, roles: Roles | None = None) -> Layout:
        """Build a module's layout: parameters in order, then floating-point buffers; integer buffers are not in the
        matrix.

        A frozen parameter (one without a gradient) is not a block: it stays in the module unchanged, and is neither
        trained nor sent nor counted. Adapters are recognised by the layers that peft makes: their parameters have the
        role "adapter" and lie in the part that their rule names.

        `roles` maps a glob on parameter names to a role, or to (role, task); the first match counts. It may be a
        function of the name, and defaults to `module.roles()`.

        Raises ValueError for a parameter that no rule names (norm layers need no rule: their type is enough).
        """
        if roles is None:
            roles = module.roles()  # type: ignore[operator]
        norms = {
            f"{prefix}.{name}" if prefix else name: kind
            for prefix, m in module.named_modules()
            for kind, norm in _NORMS.items()
            if isinstance(m, norm)
            for name, _ in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
        }
        adapters = {
            f"{prefix}.{which}.{name}".removeprefix(".")
            for prefix, m in module.named_modules()
            for which in getattr(m, "adapter_layer_names", ())
            for name, _ in getattr(m, which).named_parameters()
        }
        blocks = []
        for name, p in module.named_parameters():
            if not p.requires_grad:
                continue
            rule = rule_of(roles, name)
            if rule is None and name not in norms:
                known = "the rules are a function" if callable(roles) else f"rules: {', '.join(roles)}"
                raise ValueError(f"no role rule matches the parameter {name!r} {tuple(p.shape)}; {known}")
            part, task = rule or (None, None)
            role = "norm" if name in norms else "adapter" if name in adapters else part
            blocks.append(Block(name, tuple(p.shape), dtype_name(p), role or "norm", task, part, norms.get(name)))
        persistent = module.state_dict(keep_vars=True)
        for name, b in module.named_buffers():
            if b.is_floating_point() and name in persistent:
                part, task = rule_of(roles, name) or (None, None)
                blocks.append(Block(name, tuple(b.shape), dtype_name(b), "buffer", task, part))
        return Layout(tuple(blocks))

    @cached_property
    def d(self) -> int:
        """Number of columns."""
        return sum(b.size for b in self.blocks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Block names in order."""
        return tuple(b.name for b in self.blocks)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that have blocks of their own, in order of appearance."""
        return tuple(dict.fromkeys(b.task for b in self.blocks if b.task is not None))

    @cached_property
    def slices(self) -> tuple[Columns, ...]:
        """Columns of each block."""
        return tuple(Columns(a, b) for a, b in pairwise(self._ends))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate((b.size for b in self.blocks), initial=0))

    def run(self, first: int, end: int) -> Columns:
        """Return the columns of consecutive blocks, from position `first` up to but not including `end`."""
        return Columns(self._ends[first], self._ends[end])

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def slice(self, name: str) -> Columns:
        """Return the columns of one block. Raises KeyError with the known names."""
        if name not in self._position:
            raise KeyError(f"no block {name!r}; blocks: {', '.join(self.names)}")
        return self.slices[self._position[name]]

    def select(
        self,
        role: Selector | tuple[str, ...] | None = None,
        task: str | tuple[str, ...] | None = None,
        name: str | tuple[str, ...] | None = None,
    ) -> Layout:
        """Return the blocks that match, as a layout of their own. `role` may also be a whole Select."""
        key = role, task, name
        if key not in self._chosen:
            chosen = as_select(role) if isinstance(role, str | Select) else Select(role=role)
            more = Select(task=task, name=name)
            blocks = tuple(b for b in self.blocks if chosen.matches(b) and more.matches(b))
            self._chosen[key] = self if len(blocks) == len(self.blocks) else Layout(blocks)
        return self._chosen[key]

    @cached_property
    def _chosen(self) -> dict[Any, Layout]:
        """The results of `select`, `without` and `trained`, which are called for each client: layouts are expensive."""
        return {}

    def without(self, other: Layout) -> Layout:
        """Return the blocks that are not in `other`."""
        if not other.blocks:
            return self
        if (key := ("without", other.names)) not in self._chosen:
            self._chosen[key] = Layout(tuple(b for b in self.blocks if b.name not in other._position))
        return self._chosen[key]

    def having(self, have: Sequence[bool]) -> Layout:
        """Return the blocks for which `have` (one value per block) is true."""
        return self if all(have) else Layout(tuple(b for b, there in zip(self.blocks, have, strict=True) if there))

    def trained(self, tasks: Iterable[str]) -> Layout:
        """Return the parameters that receive a gradient when these tasks are trained: shared ones and their own."""
        if (key := frozenset(tasks)) not in self._chosen:
            blocks = tuple(b for b in self.parameters.blocks if b.task is None or b.task in key)
            self._chosen[key] = self.parameters if blocks == self.parameters.blocks else Layout(blocks)
        return self._chosen[key]

    @cached_property
    def predicts(self) -> bool:
        """Return whether some block is predictions of a task, which only its holders have."""
        return any(block.role == "public" for block in self.blocks)

    @cached_property
    def common(self) -> Layout:
        """The blocks that belong to no task."""
        return Layout(tuple(b for b in self.blocks if b.task is None))

    @cached_property
    def own(self) -> Layout:
        """The blocks that belong to a task."""
        return self.without(self.common)

    @cached_property
    def parameters(self) -> Layout:
        """Everything but buffers."""
        return Layout(tuple(b for b in self.blocks if b.role != "buffer"))

    @cached_property
    def sizes(self) -> Mapping[tuple[str, str | None], int]:
        """(role, task) -> number of columns."""
        totals: dict[tuple[str, str | None], int] = {}
        for b in self.blocks:
            totals[b.role, b.task] = totals.get((b.role, b.task), 0) + b.size
        return totals

    @cached_property
    def buffers(self) -> Layout:
        """Floating-point buffers only."""
        return self.select("buffer")

    def positions(self, part: Layout) -> list[int]:
        """Return the indices, in this layout, of the blocks of `part`."""
        return [self._position[name] for name in part.names]

    def spans(self, part: Layout) -> tuple[Columns, ...]:
        """Return columns of `part` in this layout, in the order of `part`, neighbours merged."""
        if part is self and part.blocks:
            return (Columns(0, self.d),)
        merged: list[Columns] = []
        for i in self.positions(part):
            s = self.slices[i]
            if merged and merged[-1].stop == s.start:
                s = Columns(merged.pop().start, s.stop)
            merged.append(s)
        return tuple(merged)

    def places(self, part: Layout, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the columns `index` are of `part`, as positions in `index`, and their columns in `part`."""
        here, columns, at = [index[:0]], [index[:0]], 0
        for s in self.spans(part):
            here.append(((index >= s.start) & (index < s.stop)).nonzero().flatten())
            columns.append(index[here[-1]] + (at - s.start))
            at += s.stop - s.start
        return torch.cat(here), torch.cat(columns)

    def take(self, X: Tensor, part: Layout) -> Tensor:
        """Return columns of `part` (last dimension) from X: a view where they are consecutive, else a copy."""
        if part is self:
            return X
        spans = self.spans(part)
        if len(spans) == 1:
            return X[..., spans[0]]
        return torch.cat([X[..., s] for s in spans], dim=-1) if spans else X[..., :0]

    def put(self, X: Tensor, part: Layout, values: Tensor) -> Tensor:
        """Write `values` into the columns of `part` of X, in place, and return X."""
        if part is self:
            X[...] = values
            return X
        at = 0
        for s in self.spans(part):
            size = s.stop - s.start
            X[..., s] = values[..., at : at + size]
            at += size
        return X

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a model's blocks as one vector (d): a view where `bind` made them consecutive, else a copy."""
        tensors = _tensors(module)
        parts = [self._checked(tensors, b) for b in self.blocks]
        whole = getattr(module, "_fedloom_vector", None)
        if whole is not None and parts and parts[0].data_ptr() == whole.data_ptr() and len(whole) == self.d:
            return whole
        return torch.cat([p.detach().reshape(-1) for p in parts]) if parts else torch.zeros(0)

    def load(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a vector (d) into a model's blocks."""
        if vector.shape != (self.d,):
            raise ValueError(f"expected a vector of {self.d} values, found shape {tuple(vector.shape)}")
        tensors = _tensors(module)
        with torch.no_grad():
            for b, s in zip(self.blocks, self.slices, strict=True):
                self._checked(tensors, b).copy_(vector[s].view(b.shape))

    def bind(self, module: nn.Module) -> Tensor:
        """Make a model's blocks views of one vector (d), which is returned. Raises ValueError where they cannot be."""
        tensors = _tensors(module)
        kinds = {(self._checked(tensors, b).dtype, tensors[b.name].device) for b in self.blocks}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"expected blocks of one dtype on one device, found {listed}")
        vector = self.flatten(module)
        vector = vector.clone() if vector is getattr(module, "_fedloom_vector", None) else vector
        for b, s in zip(self.blocks, self.slices, strict=True):
            tensors[b.name].data = vector[s].view(b.shape)
        module._fedloom_vector = vector
        return vector

    @staticmethod
    def _checked(tensors: Mapping[str, Tensor], block: Block) -> Tensor:
        tensor = tensors.get(block.name)
        if tensor is None or tuple(tensor.shape) != block.shape:
            what = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(f"block {block.name!r}: expected shape {block.shape} in the model, found {what}")
        return tensor

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON value from which `from_json` rebuilds the layout."""
        return [{**asdict(b), "shape": list(b.shape)} for b in self.blocks]

    @staticmethod
    def from_json(value: Iterable[Mapping[str, Any]]) -> Layout:
        """Invert `to_json`."""
        return Layout(tuple(Block(**{**v, "shape": tuple(v["shape"])}) for v in value))

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits over names, shapes, dtypes, roles and tasks."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]


def pieces(columns: Columns, step: int) -> list[Columns]:
    """Return consecutive columns in pieces of `step`; the last one may be shorter."""
    return [Columns(a, min(a + step, columns.stop)) for a in range(columns.start, columns.stop, step)]


EMPTY = Layout(())
"""No columns."""


def _many(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def rule_of(roles: Roles, name: str) -> tuple[str, str | None] | None:
    """Return the role of a parameter and its task, by the first rule that matches; None where none does."""
    if callable(roles):
        rule = roles(name)
    else:
        rule = next((r for glob, r in roles.items() if fnmatch.fnmatchcase(name, glob)), None)
    if rule is None:
        return None
    return (rule, None) if isinstance(rule, str) else rule
