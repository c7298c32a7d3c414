"""Relatedness by diagonal Fisher information: which parameters a task's predictions depend on."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Kind = Literal["empirical", "true"]
Likelihood = Literal["categorical", "gaussian"]
Similarity = Literal["cosine", "task2vec"]


def fisher_diagonal(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    kind: Kind = "empirical",
    *,
    likelihood: Likelihood = "categorical",
    parameters: Sequence[str] | None = None,
    ignore: int = 255,
    seed: int = 0,
    at_once: int = 32,
) -> Tensor:
    """Diagonal of the Fisher information (d, float64): the mean over samples of (d log p(y | x) / d theta_i)^2.

    `batches` gives (inputs, targets). kind="empirical" takes the targets as y; "true" draws y from the model, one per
    sample, and does not look at them. "categorical": the module's output is logits (n x C, or n x C x ..; log p of a
    sample is the sum over positions), y class numbers, positions with y = `ignore` left out. "gaussian": y is normal
    around the output with variance 1.

    `parameters` are globs on names, for example those of the shared encoder; without, all parameters. They follow each
    other in the result in the order of the module. The module runs as in evaluation, `at_once` samples at a time.
    """
    for name, value, among in (("kind", kind, Kind), ("likelihood", likelihood, Likelihood)):
        if value not in get_args(among):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(among))}, found {value!r}")
    wanted = {
        name: p.detach()
        for name, p in module.named_parameters()
        if parameters is None or any(fnmatch.fnmatchcase(name, g) for g in parameters)
    }
    if not wanted:
        raise ValueError(f"parameters: no parameter of the module matches {parameters}")
    device = next(iter(wanted.values())).device
    rest = {k: v.detach() for k, v in (*module.named_parameters(), *module.named_buffers()) if k not in wanted}

    def log_p(some: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(module, {**rest, **some}, (x[None],))[0]
        if likelihood == "gaussian":
            return -((out - y.reshape(out.shape)) ** 2).sum() / 2
        safe = torch.where(y == ignore, 0, y)
        chosen = out.log_softmax(0).gather(0, safe[None])[0]
        return torch.where(y == ignore, 0.0, chosen).sum()

    each = vmap(grad(log_p), in_dims=(None, 0, 0))
    total = torch.zeros(sum(p.numel() for p in wanted.values()), dtype=torch.float64, device=device)
    count, generator = 0, torch.Generator().manual_seed(seed)
    was_training = module.training
    module.eval()
    try:
        for x, y in batches:
            for part, target in zip(x.to(device).split(at_once), y.to(device).split(at_once), strict=True):
                drawn = _drawn(module, part, likelihood, generator) if kind == "true" else target
                total += _squares(each, wanted, part, drawn)
                count += len(part)
    finally:
        module.train(was_training)
    return total / max(count, 1)


def _squares(each: Callable[..., Any], wanted: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    found = each(wanted, x, y if y.is_floating_point() else y.long())
    return torch.cat([found[name].double().square().sum(0).reshape(-1) for name in wanted])


@torch.no_grad()
def _drawn(module: nn.Module, x: Tensor, likelihood: Likelihood, generator: torch.Generator) -> Tensor:
    """One target per sample (and position), drawn from what the model predicts."""
    out = module(x)
    if likelihood == "gaussian":
        return out + torch.randn(out.shape, generator=generator).to(out)
    p = out.movedim(1, -1).softmax(-1)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]).cpu(), 1, generator=generator)
    return drawn.reshape(p.shape[:-1]).to(x.device)


def fim(diagonals: Tensor | Sequence[Tensor], kind: Similarity = "cosine") -> Tensor:
    """Similarity of tasks by the diagonals f (T x d) of their Fisher information: T x T, float64, in [0, 1].

    "cosine": of f_a and f_b. "task2vec": of f_a / (f_a + f_b) and f_b / (f_a + f_b), which gives every parameter the
    same say; where both are 0 it has none. A diagonal that is all zero has similarity 0 to every task, itself too.
    """
    if kind not in get_args(Similarity):
        raise ValueError(f"kind: expected one of {', '.join(get_args(Similarity))}, found {kind!r}")
    rows = [f.double() for f in diagonals]
    S = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[: i + 1]):
            x, y = a, b
            if kind == "task2vec":
                whole = a + b
                some = whole > 0
                x, y = (torch.where(some, f / whole, 0.0) for f in (a, b))
            size = float(x.norm() * y.norm())
            S[i, j] = S[j, i] = min(float(x @ y) / size, 1.0) if size > 0 else 0.0
    return S
