"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("scaffold", source="Karimireddy et al., ICML 2020")
def scaffold() -> m.Method:
    """Control variates: every local gradient is corrected by c - c_k.

    Client: g + c - c_k at every step; c_k+ = mean of the round's raw gradients. Server: theta+ = theta + mean_S Delta_k
    (uniform), c+ = c + (1/N) sum_S (c_k+ - c_k), N counting absent clients. c and c_k start at 0. c travels down and
    the change of c_k up, so traffic doubles both ways.

    For a task's blocks N counts the clients that train the task, because only they are corrected: with all N, the mean
    of the corrections would not be zero, and a head of one client would see a share 1/N of its gradient.

    paper    option I: full gradient at theta; option II: c_k - c + (theta - theta_k) / (tau lr), derived for plain SGD
    release  no official one; public ports divide by |S| instead of N, or apply option II under momentum
    here     the mean raw gradient, which is option II for plain SGD and also right under momentum, Adam, clipping and
             schedules. The correction covers only parameters that a client trains: c is not zero on other tasks' heads.

    With FedDEA: c_k comes from raw gradients, the selection acts on Delta_k only. Batch norm statistics are never
    corrected.
    """
    return m.Method(
        name="scaffold",
        local=(training.ControlVariate(),),
        stage=stages.ControlVariates() >> stages.Mean(),
        weights="uniform",
    )
