"""
Weights that a method learns
============================

In FedHCA² each client adds a learned share of everybody's direction to its own update. The share is learned at the
server, from whether the client goes on in the direction that was added.
"""

import matplotlib.pyplot as plt

import fedloom as fl

run = fl.run(
    "digits-tasks", method={"name": "fedhca2", "lr": 0.1}, model={"name": "small-cnn", "heads": "own"}, rounds=8
).run

# %%
# What stages record stands in ``metrics.jsonl``; ``fedloom papers hyper RUN`` prints and draws the same.

curves = {}
for _, record in run.records("hyper-weights"):
    if record["part"] == "encoder":
        for name, weight in record["weights"].items():
            curves.setdefault(name, []).append(weight)
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, weights in curves.items():
    axes.plot(range(1, len(weights) + 1), weights, "o-", label=name)
axes.set(xlabel="round", ylabel="share of everybody's direction")
axes.legend()

# %%
# All begin at 0.1. A client whose training goes on in the direction that was added gets more of it.
assert all(weights[0] == 0.1 for weights in curves.values())
