"""Models of one's own: any module, an encoder with heads, and roles of parameters guessed from their names."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import RecipeError, choices
from fedloom.core.layout import Roles, rule_of
from fedloom.models.multitask import MultiTask, Picked, Plain
from fedloom.models.nets import Encoder
from fedloom.models.tasks.task import Task

GUESSES = {
    "head": ("head", "heads", "classifier", "classifiers", "fc", "output", "outputs"),
    "decoder": ("decoder", "decoders"),
}
"""Role -> parts of parameters' names that speak for it; whatever else there is belongs to the encoder."""


@dataclass(frozen=True, eq=False)
class Own:
    """A module, and its description by `model`."""

    module: nn.Module
    heads: Mapping[str, nn.Module] | None = None
    linear: bool = False
    roles: Roles | None = None


def model(
    module: nn.Module,
    heads: Mapping[str, nn.Module] | str | None = None,
    *,
    roles: Roles | None = None,
) -> Own:
    """Describe your own model, for `fl.run(federation, model=...)` or as the object behind `package.module:name`.

    module    with `heads`: an encoder, which maps inputs (B x ...) to features (B x F). Without: a whole model, which
              maps them to the outputs of its task (B x classes), or to {task: outputs}
    heads     {task: a module from features to outputs}, or "linear" for a linear layer a task
    roles     whole models only: glob of parameters' names -> "encoder", "decoder" or "head", or (role, task) for what
              belongs to one task, or a function from a name to one of these. By default a parameter with the name of a
              task as a part of its own name belongs to that task, and roles are guessed from names; they are printed

    Roles matter where a method treats parts apart (FedHCA2, FedPer, ...) and where clients hold different tasks.

    Raises RecipeError for arguments of another kind.
    """
    if not isinstance(module, nn.Module):
        raise RecipeError(f"model: {module!r} found, expected a torch.nn.Module")
    if isinstance(heads, Mapping):
        for name, head in heads.items():
            if not isinstance(head, nn.Module):
                raise RecipeError(f"model, heads: {name!r} is {head!r}, expected a torch.nn.Module")
    elif heads not in (None, "linear"):
        raise RecipeError(f"model: heads={heads!r} found, expected {{task: module}} or 'linear'")
    if roles is not None and heads is not None:
        raise RecipeError("model: roles= is only for a model without heads=; leave roles= out")
    if roles is not None and not isinstance(roles, Mapping) and not callable(roles):
        raise RecipeError(f"model: roles={roles!r} found, expected {{glob: role}} or a function of a name")
    return Own(module, heads if isinstance(heads, Mapping) else None, heads == "linear", roles)


def is_whole(model: MultiTask) -> bool:
    """Return whether the model is one module, whose features are unknown."""
    return any(isinstance(head, Picked) for head in model.heads.values())


def as_multitask(model: Any, tasks: Sequence[Task], example: Tensor) -> MultiTask:
    """Return an encoder of fedloom's, a user's module or `model(...)` as a model of these tasks.

    `example` is one input (1 x ...): it is passed through once, in evaluation mode, so that a model that does not fit
    is said here. Raises RecipeError.
    """
    tokens = not example.is_floating_point()
    if isinstance(model, Encoder):
        if tokens:
            _passed(model, example, "model")
        model.reads_tokens = tokens
        return MultiTask(model, tasks)
    if not isinstance(model, Own | nn.Module):
        raise RecipeError(f"model: {type(model).__name__} found, expected a torch.nn.Module, or fl.model(...)")
    own = model if isinstance(model, Own) else Own(model)
    module = copy.deepcopy(own.module)  # training must not change the user's
    answer = _passed(module, example, "model")
    if own.heads is None and not own.linear:
        _fits(type(module).__name__, answer, tasks)
        if not any(p.requires_grad for p in module.parameters()):
            raise RecipeError(f"model: {type(module).__name__} found, which has no parameters to train")
        whole = MultiTask(Plain(module, tokens), tasks, {task.name: Picked(task.name) for task in tasks})
        whole.more_roles = _roles(module, own.roles, tasks)
        return whole
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        what = f"shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        raise RecipeError(
            f"model: with heads, {type(module).__name__} is an encoder, expected features B x F, found {what} for "
            "one example"
        )
    heads = own.heads or {task.name: task.head(answer.shape[1]) for task in tasks}
    for task in tasks:
        if task.name not in heads:
            raise RecipeError(f"model, heads: no head for task {task.name!r}.{choices('Found', task.name, heads)}")
        head = _passed(heads[task.name], answer, f"model, heads: {task.name!r}")
        _fits(f"the head of {task.name!r}", head, [task])
    encoder = Plain(module, tokens, answer.shape[1])
    return MultiTask(encoder, tasks, {task.name: copy.deepcopy(heads[task.name]) for task in tasks})


def _passed(module: nn.Module, x: Tensor, where: str) -> Any:
    mode = module.training
    try:
        with torch.no_grad():
            return module.eval()(x)
    except Exception as error:
        hint = "" if x.is_floating_point() else "; for tokens, 'transformer' has an embedding"
        raise RecipeError(
            f"{where}: {type(module).__name__} cannot take an input of shape {tuple(x.shape)}, {x.dtype}: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    finally:
        module.train(mode)


def _fits(what: str, answer: Any, tasks: Sequence[Task]) -> None:
    """Refuse outputs that are not those of the tasks."""
    if isinstance(answer, Tensor) and len(tasks) > 1:
        raise RecipeError(
            f"model: {what} gives one tensor, expected {{task: outputs}} for the tasks "
            f"{', '.join(t.name for t in tasks)}; or give an encoder: fl.model(encoder, heads='linear')"
        )
    if not isinstance(answer, Tensor | Mapping):
        raise RecipeError(f"model: {what} gives {type(answer).__name__}, expected a tensor or {{task: outputs}}")
    for task in tasks:
        if isinstance(answer, Mapping) and task.name not in answer:
            raise RecipeError(
                f"model: {what} gives no outputs of task {task.name!r}. Found: {', '.join(map(str, answer))}"
            )
        mine = answer if isinstance(answer, Tensor) else answer[task.name]
        if not isinstance(mine, Tensor) or mine.ndim < 2 or mine.shape[:2] != (1, task.channels):
            shape = f"shape {tuple(mine.shape)}" if isinstance(mine, Tensor) else type(mine).__name__
            raise RecipeError(
                f"model: {what} gives {shape} for one example of task {task.name!r}, expected 1 x {task.channels}"
            )


def _roles(module: nn.Module, roles: Roles | None, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return parameter name -> its role, or (role, task); guessed ones are printed."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if roles is None:
        rules: dict[str, Any] = {name: _guess(name, [t.name for t in tasks]) for name in names}
        by_role: dict[Any, list[str]] = {}
        for name, _ in module.named_parameters():
            by_role.setdefault(rules[name], []).append(name)
        lines = [
            f"  {' of '.join(role) if isinstance(role, tuple) else role}: {', '.join(each)}"
            for role, each in by_role.items()
        ]
        _tell("\n".join(["roles guessed from names (fl.model(net, roles=...) sets them):", *lines]))
    else:
        rules = {name: rule_of(roles, name) for name in names}
    known = {t.name for t in tasks}
    result = {}
    for name, rule in rules.items():
        if rule is None:
            raise RecipeError(f"model, roles: no rule names {name!r}; add one, such as {{'*': 'encoder'}} at the end")
        role, task = rule if isinstance(rule, tuple) else (rule, None)
        if role not in ("encoder", "decoder", "head") or task not in (None, *known):
            raise RecipeError(
                f"model, roles: {(rule if task else role)!r} found for {name!r}, expected 'encoder', 'decoder' or "
                f"'head', or (role, task) with one of the tasks {', '.join(sorted(known))}"
            )
        result[f"encoder.net.{name}"] = role if task is None else (role, task)
    return result


@cache
def _tell(text: str) -> None:
    """Print a text, once."""
    print(text, file=sys.stderr)


def _guess(name: str, tasks: Sequence[str]) -> str | tuple[str, str]:
    parts = name.split(".")[:-1]
    role = next((role for role, words in GUESSES.items() if any(part in words for part in parts)), None)
    task = next((task for task in tasks if task in parts), None)
    return (role or "head", task) if task is not None else role or "encoder"
