"""A finished run's models as named tensors, for a file that is readable without fedloom."""

from __future__ import annotations

from torch import Tensor

from fedloom.context import Ctx
from fedloom.runtime.build import Built
from fedloom.runtime.measure import models_for
from fedloom.runtime.steps import for_task, load, load_personal, tune
from fedloom.stages.stage import State
from fedloom.training.flat import FlatModel


def export(built: Built, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Named tensors: the global model under its own names, a task's under task/NAME/, a personal one under client/NAME/
    (and a client's own of a task under client/NAME/task/NAME/)."""
    model = FlatModel(built.module, built.layout)
    tensors: dict[str, Tensor] = {}
    training, seed = built.recipe.training, built.recipe.seed
    seen: set[str] = set()
    for name, client in built.federation.clients.items():
        models = models_for(built, state, name)
        shared = {m.task for m in models if m.name == "global"} if built.method.rows == "client-task" else set()
        for one in models:
            if one.name == "personal" and one.task in shared:
                continue  # what the task's model becomes on its way to the client
            prefix = ("" if one.name == "global" else f"client/{name}/") + (f"task/{one.task}/" if one.task else "")
            if prefix in seen:
                continue
            seen.add(prefix)
            message = for_task(built.method, model, built.federation, name, one.message, one.task)
            load(built.method, model, message, one.state)
            if one.name == "personal":
                load_personal(model, one.state.get("personal", {}))
                tune(built.method, model, client, training, Ctx(state["round"], seed))
            tensors |= {prefix + k: v.clone() for k, v in model.module.state_dict().items()}
    labels = {
        "method": built.method.name,
        "recipe": built.recipe.name,
        "round": str(state["round"]),
        "tasks": ", ".join(f"{t.name} ({t.kind}, {t.channels})" for t in built.federation.tasks),
    }
    return tensors, labels
