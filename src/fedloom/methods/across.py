"""Methods for one task, adapted to clients with different tasks as the supplement of FedHCA2 does it."""

from __future__ import annotations

from dataclasses import replace

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("across-tasks", source="FedHCA2, supplement")
def across_tasks(method: m.Method) -> m.Method:
    """Average all decoders with each other, whatever their task, and keep heads personal.

    Encoder: as the method has it. Decoder of client i for task t: the plain mean of the decoders of all participants
    and all their tasks, tensor by tensor. Heads never leave a client.

    paper    FedAvg, FedProx, Ditto and FedAMP "aggregate the encoder and the decoders separately"; heads stay local
    release  has no baselines; its `fedavg` for decoders is the uniform mean over all of them
    here     the same, over parameters. Absent clients keep their decoders. Without this add-on decoders are averaged
             within a task only, which helps these methods: compare under the name that you used

    For methods with one mean for all (fedavg, fedprox, fedopt, ditto, ...). Others are refused, and so are methods with
    private parts and those whose server broadcasts vectors over all parameters (scaffold). Models without decoders get
    personal heads.

    Couples tasks by design: decoders of all tasks are averaged.
    """
    from fedloom.core.layout import Select

    if not method.stage.traits.reduces or method.private is not None or method.stage.traits.broadcasts:
        raise ValueError(f"{method.name}: across-tasks takes the place of a mean over all parameters, but it has none")
    split = stages.Split({"encoder": method.stage, "*": stages.AcrossTasks()})
    return replace(method, stage=split, private=Select(role="head"))
