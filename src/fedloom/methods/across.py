"""Methods for one task, adapted to clients with different tasks as the supplement of FedHCA2 does it."""

from __future__ import annotations

from dataclasses import replace

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("across-tasks", source="FedHCA2, supplement")
def across_tasks(method: m.Method) -> m.Method:
    """Aggregate all decoders with each other, whatever their task, apart from encoders, and keep heads personal.

    Encoder: as the method has it. Decoder of client i for task t: the plain mean of the decoders of all participants
    and all their tasks, tensor by tensor. With fedamp: it is drawn to the mix of the decoders of all clients and all
    their tasks that resemble it, by the distances between decoders. Heads never leave a client.

    paper    for FedAvg and FedProx "we apply their aggregation mechanisms to the encoders and decoders separately. The
             update strategies of FedAMP and Ditto are similarly extended to both encoders and decoders"
    release  has no baselines; its `fedavg` for decoders is the uniform mean over all of them, and heads stay local
    here     the same, over parameters. Absent clients keep their decoders. Without this add-on decoders are averaged
             within a task only, which helps these methods: compare under the name that you used

    For methods with one mean for all (fedavg, fedprox, fedopt, ditto, ...) and for fedamp. Others are refused, and so
    are methods with private parts (fedamp with `share: encoder`) and those whose server broadcasts vectors over all
    parameters (scaffold). Models without decoders get personal heads.

    Couples tasks by design: decoders of all tasks are averaged.
    """
    from fedloom.core.layout import Select

    heads = Select(role="head")
    if isinstance(found := method.stage, stages.Attention) and method.private is None:
        across = stages.AttentionAcrossTasks(found.alpha, found.sigma, found.scale)
        return replace(method, stage=across, private=heads)
    if not method.stage.traits.reduces or method.private is not None or method.stage.traits.broadcasts:
        raise ValueError(
            f"{method.name}: across-tasks takes the place of one mean or one attention over all parameters, "
            "but it has none"
        )
    return replace(method, stage=stages.Split({"encoder": method.stage, "*": stages.AcrossTasks()}), private=heads)
