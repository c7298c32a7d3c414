"""
A late joiner
=============

Nine peers train without a server, each at its own pace, over links with delay. One comes late. Does it catch up?
"""

import matplotlib.pyplot as plt

import fedloom as fl

result = fl.run("gossip-digits", rounds=10, evaluation={"every": 2})
run = result.run
shares = {name: about["tasks"] for name, about in run.info["clients"].items()}
parity = [name for name, tasks in shares.items() if "parity" in tasks]

# %%
# The recipe says ``churn: {parity-1: {joins: 4}}``: this peer begins at second 4 of simulated time. What it begins
# with is what its neighbours send.

scores = run.scores("parity", "accuracy", "val")
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name in parity:
    rounds = [number for number in scores if name in scores[number]]
    late = name == "parity-1"
    axes.plot(
        rounds, [scores[r][name] for r in rounds], "o-", lw=3 if late else 1, label=f"{name}, late" if late else name
    )
axes.set(xlabel="round (as many local rounds as there are peers)", ylabel="accuracy on parity, validation")
axes.legend()
assert "parity-1" in parity
