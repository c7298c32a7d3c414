"""Encoders, and the model with one encoder and one head per task. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy
from fedloom.models.encoders import ENCODERS as ENCODERS

if TYPE_CHECKING:
    from fedloom.models.build import build_model as build_model
    from fedloom.models.build import model as model
    from fedloom.models.multitask import MultiTask as MultiTask

__getattr__, __dir__ = lazy(__name__)
