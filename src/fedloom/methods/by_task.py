"""Each task of a client trained alone and sent by itself, as MaTU's paper compares with."""

from __future__ import annotations

from dataclasses import replace

from fedloom.methods import registry as m


@m.ADDONS.register("by-task", source="MaTU, Table 2")
def by_task(method: m.Method) -> m.Method:
    """Train each task of a client alone from the received model, and send an update for each.

    A client with k tasks trains k times, on the examples of one task each, and sends k updates; the rows of the matrix
    are (client, task), weighted by the task's examples. What the server does with the rows is the method's. A row has
    what tasks share and what its task has alone, so that heads are averaged over the rows of their task, as where each
    client has the heads of its own tasks only (`model.heads: own`). There, with one task a client, this is the method.

    paper    "competing methods transmit multiple adapters, one per task": 20.43 M bits a round instead of 6.32 M
    release  none
    here     there is still one model for all at the server, and each client receives it once: the paper does not say
             what else FedAvg, which has no tasks, would do with several adapters. Parts that stay at the client, as
             FedPer's, are kept for each task

    For methods with one model at the server. Refused with a model of the client's own beside it, vectors beside the
    update (scaffold), tuning, and among peers. Models with running statistics are refused.
    """
    if method.rows == "client-task":
        raise ValueError(f"{method.name}: rows (client, task) are there already")
    return replace(method, rows="client-task")
