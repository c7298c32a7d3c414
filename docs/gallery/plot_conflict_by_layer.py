"""
Where updates pull against each other
=====================================

Four clients with one task each, and one that holds all of them, train on handwritten digits. In which layers do their updates agree?
Every run records it, layer group by layer group: the cosine of each pair of clients' updates.
"""

# %%
# One run of six rounds. Nothing has to be switched on: ``diagnostics.jsonl`` in the run folder has the cosines.

import matplotlib.pyplot as plt
import numpy as np

import fedloom as fl

result = fl.run("digits-tasks", rounds=6)
print(result.run.log("diagnostics.jsonl")[0].keys())
