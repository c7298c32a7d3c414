"""What models of peers give on some of their own data: features of encoders, and outputs."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.client import load
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.messages import Message
from fedloom.methods.peers.similarity import feature_statistics
from fedloom.training.flat import FeatureRecorder, FlatModel

_FEATURE_BATCHES, _OUTPUT_EXAMPLES = 50, 100  # as in the thesis' release


class Probe:
    """Runs a model, given as its shared parameters (d), with the rest as a peer's state has it."""

    def __init__(self, built: Built) -> None:
        self.built = built

    def features(self, client: BuiltClient, state: State, vector: Tensor) -> Tensor:
        """Channel means and deviations (2 x C) of the encoder on some of the client's training data."""
        model, names = self._loaded(state, vector), tuple(client.tasks)
        recorder, seen, part = FeatureRecorder(model), [], client.train
        with torch.no_grad(), recorder.recording():
            for batch in part.index.split(self._batch)[:_FEATURE_BATCHES]:
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                model.module(x, names)
                seen.append(recorder.now)
        return feature_statistics(torch.cat(seen))

    def outputs(self, client: BuiltClient, state: State, vector: Tensor) -> dict[str, Tensor]:
        """Outputs (flat) for the client's tasks on some of its validation data."""
        model, names = self._loaded(state, vector), tuple(client.tasks)
        part, found = client.part("val"), dict[str, list[Tensor]]()
        with torch.no_grad():
            for batch in part.index[:_OUTPUT_EXAMPLES].split(self._batch):
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                for name, output in model.module(x, names).items():
                    found.setdefault(name, []).append(output.flatten())
        return {name: torch.cat(each) for name, each in found.items()}

    def _loaded(self, state: State, vector: Tensor) -> FlatModel:
        server = state["server"]
        message = Message(vector, server["buffers"], server["integers"])
        load(self.built.method, self._model, message, state["client"])
        self._model.module.eval()
        return self._model

    @cached_property
    def _model(self) -> FlatModel:
        return FlatModel.copy_of(self.built.module)

    @property
    def _batch(self) -> int:
        return self.built.recipe.training.batch_size
