"""
Who helps whom
==============

Four clients, one task each. Every pair trains together, and everybody alone; the picture is what a partner brings.
"""

import itertools

import matplotlib.pyplot as plt
import numpy as np

import fedloom as fl

tasks = ("digit", "parity", "large", "holes")
order = np.random.default_rng(0).permutation(1200)[:400].reshape(4, 100)


def accuracy(together):
    """Task -> test accuracy, where the clients of these tasks train together."""
    mine = {task: order[tasks.index(task)].tolist() for task in together}
    partition = {"name": "listed", "clients": mine, "tasks": {task: [task] for task in mine}}
    data = {"name": "digits", "tasks": list(together)}
    model = {"name": "small-cnn", "heads": "own"}
    result = fl.run("digits-tasks", data=data, partition=partition, model=model, rounds=8, evaluation={"every": 8})
    return {task: result.final().values[task]["accuracy"] for task in together}


# %%
# Four runs alone and six of pairs. The diagonal is training alone; elsewhere, what the partner of the column adds to
# the row's task.

alone = {task: accuracy([task])[task] for task in tasks}
gain = np.zeros((4, 4))
for a, b in itertools.combinations(tasks, 2):
    found = accuracy([a, b])
    gain[tasks.index(a), tasks.index(b)] = found[a] - alone[a]
    gain[tasks.index(b), tasks.index(a)] = found[b] - alone[b]

figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
limit = np.abs(gain).max()
shown = axes.imshow(gain, cmap="PiYG", vmin=-limit, vmax=limit)
axes.set(
    xticks=range(4), yticks=range(4), xticklabels=tasks, yticklabels=tasks, xlabel="partner", ylabel="whose accuracy"
)
for i, j in itertools.product(range(4), repeat=2):
    axes.text(j, i, f"{alone[tasks[i]]:.2f}" if i == j else f"{gain[i, j]:+.2f}", ha="center", va="center")
figure.colorbar(shown, label="gain over training alone")

# %%
# It is not symmetric: here one task gains with every partner and another loses with each. With one seed and eight
# rounds it is an illustration: a table needs seeds and an interval.
assert limit > 0
