"""
Epsilon against accuracy
========================

What does it cost that nobody can tell whether a client took part? Two hundred clients hold seven handwritten digits
each and learn together which have holes. Every update is clipped, and the server adds noise to the sum.
"""

import matplotlib.pyplot as plt

import fedloom as fl

ROUNDS = 8
federation = {
    "data": {"name": "digits", "tasks": ["holes"], "size": 8},
    "partition": {"name": "iid", "clients": 200, "val_fraction": 0},
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedavg", "weights": "uniform"},
}


def run(privacy):
    """(the run, its accuracy after the last round)."""
    options = {"training": {"epochs": 5}, "evaluation": {"every": ROUNDS}, "rounds": ROUNDS}
    result = fl.run("private-digits", privacy=privacy, **federation, **options)
    (holes,) = result.final().values.values()
    return result.run, holes["accuracy"]


_, without = run(None)
private = {epsilon: run({"clip": 1.0, "epsilon": epsilon, "delta": 1e-3}) for epsilon in (8, 2, 0.5, 0.2)}

# %%
# The smaller epsilon, the less the model tells of any one client, and the longer the noise. ``fedloom show`` says
# before the run whether it will learn.

accuracy = {epsilon: score for epsilon, (_, score) in private.items()}
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
axes.semilogx(list(accuracy), list(accuracy.values()), "o-", base=2)
axes.axhline(without, color="C7", ls="--", label="no privacy")
axes.set(xlabel="epsilon of all rounds", ylabel="accuracy on holes")
axes.legend()

# %%
# What was spent after each round, as it stands in ``metrics.jsonl``: a run that would go over its budget stops.

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for epsilon, (record, _) in private.items():
    spent = {number: line["epsilon"] for number, line in record.records("privacy")}
    axes.semilogy(list(spent), list(spent.values()), "o-", label=f"epsilon {epsilon}")
axes.set(xlabel="round", ylabel="epsilon spent")
axes.legend()

# %%
# One seed, and a task that a small network learns in seconds: :doc:`/privacy` has a federation of several tasks, says
# what is hidden from whom, and what is not.
assert accuracy[8] > without - 0.05 > accuracy[0.2]
