"""
One direction for clients that disagree
=======================================

Three updates in the plane, and what five rules make of them. Stages work on plain matrices, so this needs no
federation.
"""

import matplotlib.pyplot as plt
import torch

from fedloom.stages import CAGrad, Mean, MinNorm, PCGrad, TopMagnitude

updates = torch.tensor([[3.0, 0.4], [-1.2, 1.4], [0.3, -0.9]])
rules = {
    "mean (FedAvg)": Mean(),
    "PCGrad": PCGrad() >> Mean(),
    "CAGrad, c = 0.4": CAGrad(0.4),
    "min-norm (MGDA)": MinNorm(),
    "FedDEA, rho = 0.5": TopMagnitude(0.5) >> Mean(),
}

figure, panels = plt.subplots(1, len(rules), figsize=(12, 2.8), sharex=True, sharey=True, layout="constrained")
worst = {}
for axes, (name, stage) in zip(panels, rules.items(), strict=True):
    (direction,), _ = stage.on(updates)
    for row in updates:
        axes.annotate("", row.tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": "0.6"})
    axes.annotate("", direction.tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": "C3", "lw": 2.5})
    worst[name] = float((updates @ direction).min())
    axes.set(title=name, xlim=(-1.8, 3.4), ylim=(-1.4, 1.9), xlabel=f"worst client: {worst[name]:+.2f}", aspect="equal")

# %%
# Under each: the smallest inner product of the direction with a client's update. Where it is negative, somebody is
# taken back.
assert worst["min-norm (MGDA)"] >= worst["mean (FedAvg)"]
