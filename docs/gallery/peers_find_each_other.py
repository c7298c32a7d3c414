"""
Peers that find each other
==========================

Twelve peers with two of four tasks each know nothing of each other. Every round each judges the others by their
gradients and by the tasks they tell, and asks the three most alike for their models.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedloom as fl

run = fl.run("dfmtl-digits", rounds=6, evaluation={"every": 6}).run
names = list(run.info["clients"])
seen = [record for number, record in run.records("peer") if number == run.last_round]

# %%
# Left, how alike each peer finds the others; right, whom it chose. Peers are sorted by their tasks, so blocks on the
# diagonal are peers with the same tasks that found each other.

names.sort(key=lambda name: sorted(run.info["clients"][name]["tasks"]))
alike, chosen = np.full((2, len(names), len(names)), np.nan)
for record in seen:
    row = names.index(record["peer"])
    for other, value in record["similarity"].items():
        alike[row, names.index(other)] = value
    for other, weight in record["weights"].items():
        chosen[row, names.index(other)] = weight
labels = ["+".join(run.info["clients"][name]["tasks"]) for name in names]
figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
for axes, values, title in zip(panels, (alike, chosen), ("similarity", "weight in the mix"), strict=True):
    shown = axes.imshow(values, cmap="viridis")
    axes.set(title=title, xticks=[], yticks=range(len(names)), yticklabels=labels if axes is panels[0] else [])
    figure.colorbar(shown, ax=axes, shrink=0.7)

# %%
# How often is a chosen neighbour one that has a task in common?
pairs = [(record["peer"], other) for record in seen for other in record["neighbours"]]
common = np.mean([bool({*run.info["clients"][a]["tasks"]} & {*run.info["clients"][b]["tasks"]}) for a, b in pairs])
print(f"{common:.0%} of the choices share a task")
assert common > 0.5
