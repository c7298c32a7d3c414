"""The model of some tasks, made from what a recipe names or a user gives: any module, or an encoder with heads."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedloom.core.context import seeded
from fedloom.core.errors import RecipeError, RunWarning, UserError, choices
from fedloom.core.grouping import grouped
from fedloom.core.layout import Roles, rule_of
from fedloom.core.machine import need_memory, out_of_memory
from fedloom.core.settings.registry import Registered
from fedloom.models.changes import add_lora
from fedloom.models.encoders import ENCODERS
from fedloom.models.multitask import MultiTask, Picked, Plain
from fedloom.models.nets import Encoder, load_weights
from fedloom.models.signal import Lora, Signal, blank
from fedloom.models.tasks.labels import Linear
from fedloom.models.tasks.task import Task


@contextmanager
def _memory_for_training(what: str) -> Iterator[None]:
    """Ask for the memory of each parameter, a gradient and an update of it before it is filled with numbers. Memory
    that nothing is written to is not taken yet."""
    total = asked = 0

    def ask(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total, asked
        total += 0 if parameter is None else 3 * parameter.nbytes
        if total > 1.1 * asked:  # to ask the system takes longer than to make a small parameter
            asked = total
            need_memory(total, f"{what}: to train its parameters")

    handle = register_module_parameter_registration_hook(ask)
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error) and "Storage size" not in str(error):
            raise
        raise UserError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from None
    finally:
        handle.remove()


def build_model(
    encoder: str | Registered,
    params: Mapping[str, Any],
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    seed: int,
    weights: str | None = None,
    lora: Lora | None = None,
    signal: Signal | None = None,
) -> MultiTask:
    """Build the named encoder (with its parameters) and the tasks' heads on the CPU, initialised from `seed` alone.

    The registered function may also return any module, or the result of `fl.model` (see `as_multitask`). The encoder
    then loads the file `weights`, and `lora` freezes it and adds factors. The parts are drawn independently: heads are
    the same with and without weights or LoRA. `signal` is the kind of the inputs.

    The global random state of torch is unchanged. Raises RecipeError for an unknown encoder, inputs that it cannot
    take, a task name that cannot be used, a module that does not fit the tasks, or a target of LoRA that is no layer;
    UserError for weights that do not fit.
    """
    entry = ENCODERS[encoder] if isinstance(encoder, str) else encoder
    with seeded(seed, "init"):
        with _memory_for_training(f"a model with the encoder {entry.name!r}"):
            module = entry.make(input_shape, tasks, signal, **params)
            model = as_multitask(module, tasks, blank(input_shape, signal))
        if weights is not None:
            load_weights(model.encoder, weights)
        if lora is not None:
            add_lora(model.encoder, lora)
        return model


HEADS = ("head", "heads", "classifier", "classifiers", "fc", "output", "outputs")
GUESSES = {"head": HEADS, "decoder": ("decoder", "decoders")}
"""Role -> parts of parameters' names that speak for it; whatever else there is belongs to the encoder."""


@dataclass(frozen=True, eq=False)
class Own:
    """A module, and its description by `model`."""

    module: nn.Module
    heads: Mapping[str, nn.Module] | str | None = None
    roles: Roles | None = None


def model(module: nn.Module, heads: Mapping[str, nn.Module] | str | None = None, *, roles: Roles | None = None) -> Own:
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
    for name, head in heads.items() if isinstance(heads, Mapping) else ():
        if not isinstance(head, nn.Module):
            raise RecipeError(f"model, heads: {name!r} is {head!r}, expected a torch.nn.Module")
    if not isinstance(heads, Mapping) and heads not in (None, "linear"):
        raise RecipeError(f"model: heads={heads!r} found, expected {{task: module}} or 'linear'")
    if roles is not None and heads is not None:
        raise RecipeError("model: roles= is only for a model without heads=; leave roles= out")
    if roles is not None and not isinstance(roles, Mapping) and not callable(roles):
        raise RecipeError(f"model: roles={roles!r} found, expected {{glob: role}} or a function of a name")
    return Own(module, heads, roles)


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
    parts = [own.module, *(own.heads.values() if isinstance(own.heads, Mapping) else ())]
    if any(isinstance(each, torch.jit.ScriptModule) for part in parts for each in part.modules()):
        raise RecipeError("model: a module of torch.jit found, expected the torch.nn.Module that it was made from")
    module = copy.deepcopy(own.module)  # training must not change the user's
    answer = _passed(module, example, "model")
    if _mixes(module, example, answer):
        advice = "give recurrent and attention layers batch_first=True, and batch norm its running statistics"
        found = "gives an example other outputs where the batch has other examples"
        warnings.warn(f"model: {type(module).__name__} {found}; {advice}", RunWarning, stacklevel=2)
    if own.heads is None:
        _fits(type(module).__name__, answer, tasks)
        if not any(p.requires_grad for p in module.parameters()):
            raise RecipeError(f"model: {type(module).__name__} found, which has no parameters to train")
        whole = MultiTask(Plain(module, tokens), tasks, {task.name: Picked(task.name) for task in tasks})
        whole.more_roles = _roles(module, own.roles, tasks)
        return whole
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        expected = f"is an encoder, expected features B x F, found {_shown(answer)} for one example"
        raise RecipeError(f"model: with heads, {type(module).__name__} {expected}")
    heads = {task.name: task.head(answer.shape[1]) for task in tasks} if isinstance(own.heads, str) else own.heads
    _apart({"the encoder": own.module, **{f"the head of {name!r}": head for name, head in heads.items()}})
    for task in tasks:
        if task.name not in heads:
            raise RecipeError(f"model, heads: no head for task {task.name!r}.{choices('Found', task.name, heads)}")
        head = _passed(heads[task.name], answer, f"model, heads: {task.name!r}")
        _fits(f"the head of {task.name!r}", head, [task])
    encoder = Plain(module, tokens, answer.shape[1])
    return MultiTask(encoder, tasks, {task.name: copy.deepcopy(heads[task.name]) for task in tasks})


def _apart(parts: Mapping[str, nn.Module]) -> None:
    """Refuse parts that share a parameter: each is copied by itself, so the copies would be trained apart."""
    whose: dict[nn.Parameter, str] = {}
    for what, part in parts.items():
        for parameter in part.parameters():
            if (other := whose.setdefault(parameter, what)) != what:
                found = f"{other} and {what} share parameters, expected parts without"
                advice = "give one module without heads=, from inputs to {task: outputs}"
                raise RecipeError(f"model, heads: {found}; {advice}")


def _shown(answer: Any) -> str:
    return f"shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__


def _passed(module: nn.Module, x: Tensor, where: str) -> Any:
    mode = module.training
    try:
        with torch.no_grad():
            return module.eval()(x)
    except Exception as error:
        ways = "; for tokens, 'transformer' has an embedding; for numbers, say signal='features' or 'series'"
        hint = "" if x.is_floating_point() else ways
        cannot = f"cannot take an input of shape {tuple(x.shape)}, {x.dtype}: {type(error).__name__}: {error}{hint}"
        raise RecipeError(f"{where}: {type(module).__name__} {cannot}") from error
    finally:
        module.train(mode)


def _mixes(module: nn.Module, example: Tensor, answer: Any) -> bool:
    """Return whether outputs of an example change with another example before it in the batch."""
    other = torch.ones_like(example) if not example.is_floating_point() else torch.linspace(0, 1, example.numel())
    batch = torch.cat([other.to(example).reshape(example.shape), example])

    def same(answers: Any) -> bool:
        both = [answer.values(), answers.values()] if isinstance(answer, Mapping) else [[answer], [answers]]
        pairs = zip(*both, strict=True)
        return all(torch.allclose(two[-1:], one, 1e-3, 1e-3 * float(one.abs().max()), True) for one, two in pairs)

    try:
        # outputs that are drawn at random differ as well where the example is alone
        return not same(_passed(module, batch, "model")) and same(_passed(module, example, "model"))
    except Exception:  # what is no output of a task, or takes no batch of two, is refused elsewhere
        return False


def _fits(what: str, answer: Any, tasks: Sequence[Task]) -> None:
    """Refuse outputs that are not those of the tasks."""
    if isinstance(answer, Tensor) and len(tasks) > 1:
        expected = f"{{task: outputs}} for the tasks {', '.join(t.name for t in tasks)}"
        advice = "or give an encoder: fl.model(encoder, heads='linear')"
        raise RecipeError(f"model: {what} gives one tensor, expected {expected}; {advice}")
    if not isinstance(answer, Tensor | Mapping):
        raise RecipeError(f"model: {what} gives {type(answer).__name__}, expected a tensor or {{task: outputs}}")
    for task in tasks:
        if isinstance(answer, Mapping) and task.name not in answer:
            found = ", ".join(map(str, answer))
            raise RecipeError(f"model: {what} gives no outputs of task {task.name!r}. Found: {found}")
        mine = answer if isinstance(answer, Tensor) else answer[task.name]
        axes = None if isinstance(task.known, Linear) else 2  # maps have more
        if not isinstance(mine, Tensor) or mine.ndim < 2 or mine.shape[:axes] != (1, task.channels):
            of = f"for one example of task {task.name!r}, expected 1 x {task.channels}"
            raise RecipeError(f"model: {what} gives {_shown(mine)} {of}")


def _roles(module: nn.Module, roles: Roles | None, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return parameter name -> its role, or (role, task); guessed ones are printed."""
    every_name = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    names = grouped((id(each), name) for name, each in every_name)  # a tied parameter has several
    if roles is None:
        known_tasks = [t.name for t in tasks]
        rules = {every[0]: _common([_guess(name, known_tasks) for name in every]) for every in names.values()}
        by_role = grouped((rules[name], name) for name, _ in module.named_parameters())
        called = {" of ".join(role) if isinstance(role, tuple) else role: each for role, each in by_role.items()}
        lines = [f"  {role}: {', '.join(each)}" for role, each in called.items()]
        _tell("\n".join(["roles guessed from names (fl.model(net, roles=...) sets them):", *lines]))
    else:
        rules = {every[0]: _common([rule_of(roles, name) for name in every]) for every in names.values()}
    known, result = {t.name for t in tasks}, {}
    for name, rule in rules.items():
        if rule is None:
            raise RecipeError(f"model, roles: no rule names {name!r}; add one, such as {{'*': 'encoder'}} at the end")
        role, task = rule if isinstance(rule, tuple) else (rule, None)
        if role not in ("encoder", "decoder", "head") or task not in (None, *known):
            one_of = f"'encoder', 'decoder' or 'head', or (role, task) with one of the tasks {', '.join(sorted(known))}"
            raise RecipeError(f"model, roles: {(rule if task else role)!r} found for {name!r}, expected {one_of}")
        result[f"encoder.net.{name}"] = role if task is None else (role, task)
    return result


def _common(rules: Sequence[Any]) -> Any:
    """Return the role of a parameter that has these by its names: parts that share it have none of it alone."""
    first, *others = [rule for rule in rules if rule is not None] or [None]
    if all(other == first for other in others):
        return first
    roles = {rule[0] if isinstance(rule, tuple) else rule for rule in (first, *others)}
    return roles.pop() if len(roles) == 1 else "encoder"


@cache
def _tell(text: str) -> None:
    """Print a text on stderr, once."""
    print(text, file=sys.stderr)


def _guess(name: str, tasks: Sequence[str]) -> str | tuple[str, str]:
    parts = name.split(".")[:-1]
    role = next((role for role, words in GUESSES.items() if any(part in words for part in parts)), None)
    task = next((task for task in tasks if task in parts), None)
    return (role or "head", task) if task is not None else role or "encoder"
