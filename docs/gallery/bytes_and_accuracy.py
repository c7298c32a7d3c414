"""
What fewer bytes cost
=====================

A sparse codec sends only values that are not zero, so keeping a share of each update saves bytes. How far can that
go?
"""

import matplotlib.pyplot as plt
import numpy as np

import fedloom as fl

points = []
for rho in (1.0, 0.5, 0.2, 0.05):
    method = {"name": "fedavg", "codec": "sparse", "add": {"feddea": {"rho": rho, "rescale": False}}}
    result = fl.run("digits-tasks", method=method, rounds=6, evaluation={"every": 6})
    scores = [values["accuracy"] for values in result.final().values.values()]
    points.append((rho, result.run.bytes_total()["up"] / 1e6, np.mean(scores)))

# %%
# Bytes are counted on what was packed, not estimated.

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for rho, sent, score in points:
    axes.plot(sent, score, "o", ms=9)
    axes.annotate(f"rho = {rho}", (sent, score), textcoords="offset points", xytext=(8, -3))
axes.set(xlabel="sent by clients, MB", ylabel="mean test accuracy over tasks")
axes.margins(x=0.2)
assert points[0][1] > 2 * points[-1][1]
