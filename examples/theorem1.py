"""A numerical check of FedHCA2's Theorem 1: what training tasks together does that averaging their models does not.

N tasks share parameters theta and take M steps of gradient descent, one minibatch a step. Together (MTL) each step
follows the sum of the tasks' gradients; in federated learning (FL) each task takes its M steps alone, and the server
averages. With g_i(p) the gradient of task i on minibatch p at the start, the theorem (Eq. 43 of the supplement) says

    E[change by MTL - N * change by FL] = eta^2 / 2 * sum over p != q, i < j of grad <g_i(p), g_j(q)> + O(eta^3)

where E is over the order of the minibatches: MTL also ascends the inner products of the tasks' gradients. Here E is
exact, over all M! orders, so the error has to fall with the third power of eta: a slope of 3 between their logarithms.
(In the supplement the mean over clients is multiplied by N in silence, before its Eq. 31: "we can neglect the
coefficient 1/N". Without that the difference is of order eta.)

Run it with: python examples/theorem1.py [PICTURE.png]
"""

import itertools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

M = 4  # minibatches, and steps
ETAS = [2.0**-k for k in range(6, 11)]
Loss = Callable[[Tensor, int, int], Tensor]
"""(theta, task, minibatch) -> loss."""

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def regression(tasks: int, d: int, size: int = 6) -> tuple[Loss, Tensor]:
    """Logistic regression: every task has labels of its own for the same inputs."""
    x, y = torch.randn(M, size, d), torch.randint(0, 2, (tasks, M, size)).double()

    def loss(theta: Tensor, i: int, p: int) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x[p] @ theta, y[i, p])

    return loss, torch.randn(d)


def network(tasks: int, d: int, width: int = 3, size: int = 6) -> tuple[Loss, Tensor]:
    """A shared layer with tanh and a fixed head for each task: not convex."""
    x, y = torch.randn(M, size, d), torch.randn(tasks, M, size)
    heads = torch.randn(tasks, width)

    def loss(theta: Tensor, i: int, p: int) -> Tensor:
        return ((x[p] @ theta.view(d, width)).tanh() @ heads[i] - y[i, p]).square().mean()

    return loss, torch.randn(d * width)


def quadratics(tasks: int, d: int) -> tuple[Loss, Tensor]:
    """Quadratic losses with a Hessian and a minimum for each task and minibatch."""
    root, centre = torch.randn(tasks, M, d, d) / d**0.5, torch.randn(tasks, M, d)

    def loss(theta: Tensor, i: int, p: int) -> Tensor:
        return (root[i, p] @ (theta - centre[i, p])).square().sum() / 2

    return loss, torch.randn(d)


def descended(loss: Loss, theta: Tensor, tasks: list[int], order: tuple[int, ...], eta: float) -> Tensor:
    """The change by one pass over the minibatches on the sum of the tasks' losses."""
    step = grad(lambda t, p: sum(loss(t, i, p) for i in tasks))
    y = theta
    for p in order:
        y = y - eta * step(y, p)
    return y - theta


def difference(loss: Loss, theta: Tensor, tasks: int, eta: float) -> Tensor:
    """E[change by MTL - N * change by FL], over all orders of the minibatches."""
    orders = list(itertools.permutations(range(M)))
    total = torch.zeros_like(theta)
    for order in orders:
        together = descended(loss, theta, list(range(tasks)), order, eta)
        alone = torch.stack([descended(loss, theta, [i], order, eta) for i in range(tasks)])
        total += together - tasks * alone.mean(0)
    return total / len(orders)


def term(loss: Loss, theta: Tensor, tasks: int) -> Tensor:
    """1/2 sum over p != q, i < j of grad <g_i(p), g_j(q)>."""

    def inner(t: Tensor) -> Tensor:
        g = {(i, p): grad(loss)(t, i, p) for i in range(tasks) for p in range(M)}
        pairs = itertools.combinations(range(tasks), 2)
        return sum(g[i, p] @ g[j, q] for i, j in pairs for p, q in itertools.permutations(range(M), 2))

    return grad(inner)(theta) / 2


problems = {
    "quadratics, 2 tasks": (2, *quadratics(2, 5)),
    "logistic regression, 3 tasks": (3, *regression(3, 5)),
    "network, 2 tasks": (2, *network(2, 3)),
}
errors: dict[str, list[float]] = {}
for name, (tasks, loss, theta) in problems.items():
    expected = term(loss, theta, tasks)
    print(f"{name}: {theta.numel()} parameters, {M} minibatches, {math.factorial(M)} orders")
    errors[name] = []
    for eta in ETAS:
        found = difference(loss, theta, tasks, eta)
        errors[name].append(float((found - eta**2 * expected).norm()))
        share = errors[name][-1] / float(found.norm())
        print(
            f"  eta {eta:.2e}  difference {float(found.norm()):.3e}  error {errors[name][-1]:.3e} ({100 * share:.2f} %)"
        )
    x, y = torch.tensor(ETAS[-3:]).log(), torch.tensor(errors[name][-3:]).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    print(f"  slope of log error over log eta: {slope:.3f}")
    assert abs(slope - 3) < 0.1, "the theorem does not hold here"

if len(sys.argv) > 1:
    from fedloom.study.charts import lines, save

    several = {name: dict(zip(ETAS, values, strict=True)) for name, values in errors.items()}
    top = max(values[0] for values in errors.values())
    slope = {"slope 3": {eta: 2 * top * (eta / ETAS[0]) ** 3 for eta in ETAS}}
    title = "MTL - N FL against Eq. 43, exact mean over orders"
    chart = lines(several | slope, "eta", "error of the theorem's term", title=title, dashed=slope, log="xy")
    save(chart, sys.argv[1])
    print(sys.argv[1])
