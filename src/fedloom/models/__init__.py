"""Encoders, and the model that puts one head per task on one. Importing this package does not import torch."""

from fedloom._lazy import lazy
from fedloom.models.encoders import ENCODERS

__all__ = ["ENCODERS", "MultiTask", "build_model"]

__getattr__, __dir__ = lazy("fedloom.models", {"multitask": "MultiTask build_model"})
