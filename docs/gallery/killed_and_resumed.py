"""
Killed, and resumed bit for bit
===============================

A run is stopped after three rounds and goes on to six. Another does six at once. Not a bit differs.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import fedloom as fl

with TemporaryDirectory() as home:
    stopped, whole = Path(home, "stopped"), Path(home, "whole")
    fl.run("digits-tasks", stopped, rounds=3)
    fl.resume(stopped, rounds=6)
    fl.run("digits-tasks", whole, rounds=6)
    same = (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

# %%
# It holds for every method, also after ``kill -9`` in the middle of a write: :doc:`/guarantees`.
print("the same, byte for byte" if same else "different")
assert same
