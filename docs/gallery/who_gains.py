"""
Who gains by training together
==============================

A mean over clients hides those who lose. Five clients see the same digits in five renderings; all are tested on all
renderings.
"""

from statistics import mean

import matplotlib.pyplot as plt

import fedloom as fl

alone, together = (
    fl.run("digits-domains", method=m, rounds=12, evaluation={"every": 12}).run for m in ("local", "fedavg")
)

# %%
# The same clients with the same examples, so the difference is that they train together.


def accuracy(run):
    """Client -> its test accuracy, mean over its four tasks."""
    final = run.by_client()
    return {
        f"{n} ({run.info['clients'][n]['domain']})": mean(v["accuracy"] for v in final[n].values.values())
        for n in final
    }


before, after = accuracy(alone), accuracy(together)
gains = {name: 100 * (after[name] - before[name]) for name in before}
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.bar(list(gains), list(gains.values()), color=["C3" if gain < 0 else "C2" for gain in gains.values()])
axes.set_ylabel("gain in accuracy, points")
axes.tick_params(axis="x", rotation=20)

# %%
# One seed and twelve rounds: enough to see why tables here have a column for each client, and no more than that.
print(f"{sum(gain > 0 for gain in gains.values())} of {len(gains)} clients gain")
