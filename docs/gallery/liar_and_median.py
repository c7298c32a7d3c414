"""
A liar and the median
=====================

One of seven clients sends its update turned round and ten times as long. What does the mean make of it, and what the
median?
"""

import matplotlib.pyplot as plt
import torch

import fedloom as fl
from fedloom.stages import Mean, Median

torch.manual_seed(0)
updates = torch.tensor([1.0, 0.5]) + 0.3 * torch.randn(7, 2)
honest = updates.mean(dim=0)
updates[0] *= -10
rules = {"mean": Mean(), "median": Median() >> Mean()}

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.plot(*updates[1:].T, "o", color="C7", label="honest updates")
axes.plot(*updates[0], "x", color="C3", ms=9, label="the liar's")
axes.plot(*honest, "*", color="C2", ms=14, label="mean, had it not lied")
for name, rule in rules.items():
    (result,), _ = rule.on(updates)
    axes.plot(*result, "s", ms=9, alpha=0.8, label=name)
axes.legend()

# %%
# The same in training: seven clients with one task, one of them hostile, and three honest clients with another task.
# A rule compares a client with those that hold the same tasks, or it would take the smaller task for the attack.

liar = {"name": "sign-flip", "factor": 10, "clients": ["c00"]}
runs = {
    "mean, nobody lies": {"method": "fedavg"},
    "mean, a liar": {"method": "fedavg", "attack": liar},
    "median, a liar": {"method": {"name": "fedavg", "add": {"median": {}}}, "attack": liar},
}
final = {}
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, changes in runs.items():
    run = fl.run("robust/digits", rounds=6, evaluation={"every": 1}, **changes).run
    scores = {r: sum(by.values()) / len(by) for r, by in run.scores("digit", "accuracy", "test").items()}
    axes.plot(list(scores), list(scores.values()), "o-", label=name)
    final[name] = scores[6]
axes.set(xlabel="round", ylabel="accuracy on digit, honest clients")
axes.legend()

# %%
# :doc:`/robust` says which rule is for what, what each costs where nobody lies, and what no rule withstands.
assert final["mean, a liar"] < 0.4 < 0.7 < final["median, a liar"]
