"""
Where updates conflict
=====================================

Four clients with one task each, and one that holds all of them, train on handwritten digits. In which layers do their
updates agree? Every run records it for groups of layers: the cosine of each pair of clients' updates.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedloom as fl

result = fl.run("digits-tasks", rounds=6)

# %%
# ``diagnostics.jsonl`` in the run folder has, for each round and group of layers, the upper triangle of the matrix of
# cosines.

rounds = [line["diagnostics"][0] for line in result.run.log("diagnostics.jsonl")]
clients = [row[0] for row in rounds[0]["rows"]]
shared = [i for i, group in enumerate(rounds[0]["groups"]) if group["task"] is None]
cosines = [np.mean([each["groups"][i]["cosine"] for each in rounds], axis=0) for i in shared]
figure, panels = plt.subplots(1, len(shared), figsize=(9, 3.2), layout="constrained")
for axes, i, mean in zip(panels, shared, cosines, strict=True):
    upper = np.zeros((len(clients), len(clients)))
    upper[np.triu_indices(len(clients), 1)] = mean
    shown = axes.imshow(upper + upper.T + np.eye(len(clients)), cmap="RdBu", vmin=-1, vmax=1)
    axes.set(title=rounds[0]["groups"][i]["layers"], xticks=range(len(clients)), yticks=range(len(clients)))
    axes.set_xticklabels(clients, rotation=60, ha="right")
    axes.set_yticklabels(clients)
figure.colorbar(shown, ax=panels, label="cosine of updates, mean over rounds")

# %%
# The first layer serves everybody; the further up, the less the tasks have in common. That is why methods treat the
# encoder's layers, and heads, apart.
first, final = cosines[0].mean(), cosines[-1].mean()
print(f"mean cosine: {first:.2f} in the first layer, {final:.2f} in the last shared one")
assert first > final
