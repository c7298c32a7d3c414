"""NTK-FedAvg: federated averaging of a linearised model."""

from __future__ import annotations

from fedloom.methods import registry as m


@m.METHODS.register(
    "ntk-fedavg", source="NTK-FedAvg: Muhamed, Mankikar, Smith, 2024; linearisation: Ortiz-Jimenez et al., NeurIPS 2023"
)
def ntk_fedavg() -> m.Method:
    """FedAvg on the encoder's first-order expansion f(x; theta_0) + J(x) (theta - theta_0) at the initial parameters.

    Features are linear in theta, so averaging the clients' encoders averages their features: models of different tasks
    interfere less than those of a network. theta <- theta + sum_k p_k Delta_k.

    paper    task vectors of linearised models are averaged, then one adapter a task where a client has several
    release  none
    here     the expansion point is the initial model in all rounds; the network is in evaluation there (no dropout,
             fixed norm statistics). Decoders and heads stay as they are and are trained as usual, so only features are
             linear. With `model.lora` the expansion is in the two factors: since B is 0 at first it is B A_0, and A
             never moves. The coefficient of task arithmetic is the add-on server-step

    Encoders of features only, no maps. A step costs about twice a plain one, more for attention (no fused kernel has
    forward mode). Composes with every add-on as FedAvg does.
    """
    from fedloom.models.changes import Linearise

    return m.Method(name="ntk-fedavg", model=(Linearise(),))
