"""
FedDEA's mask, and its control
==============================

FedDEA keeps the largest half of each update and multiplies it by two. What remains of an update, and is it the
selection that helps, or only the longer step?
"""

import matplotlib.pyplot as plt
import torch

import fedloom as fl
from fedloom.stages import TopMagnitude

torch.manual_seed(0)
update = torch.randn(1, 4000) * torch.rand(1, 4000)  # many small values, few large ones, as updates have
(kept,), _ = TopMagnitude(0.5).on(update)

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
axes.hist(update[0].numpy(), bins=80, alpha=0.6, label="update")
axes.hist(kept[kept != 0].numpy(), bins=80, alpha=0.6, label="what FedDEA sends")
axes.set(title=f"norm x {float(kept.norm() / update.norm()):.2f}", yscale="log", xlabel="value")
axes.legend()

# %%
# The norm almost doubles, so the control is the same step without selection: ``server-step`` with that factor.

methods = {
    "FedAvg": "fedavg",
    "FedDEA": {"name": "fedavg", "add": {"feddea": {"rho": 0.5}}},
    "control: longer step": {"name": "fedavg", "add": {"server-step": {"step": 1.9}}},
}
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, method in methods.items():
    run = fl.run("digits-tasks", method=method, rounds=6).run
    losses = run.validation_losses()
    axes.plot(list(losses), list(losses.values()), label=name)
axes.set(title="validation loss", xlabel="round")
axes.legend()

# %%
# One seed and six rounds only show how to ask. :doc:`The claims </results/claims>` have the answer with seeds, on
# benchmarks that can tell: most of the gain is the step.
assert kept.norm() > 1.8 * update.norm()
