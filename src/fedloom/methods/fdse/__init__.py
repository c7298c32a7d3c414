"""FDSE: layers with an extractor for all clients and an eraser of each client's domain shift."""

from __future__ import annotations

from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import NonNegative, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.fdse.rules:Consistency")
class ConsistencySettings:
    lam: NonNegative = 0.01
    beta: float = 0.1
    form: Literal["paper", "release"] = "paper"


@m.METHODS.register("fdse", source="FDSE: Wang, Wang, Fan, Wang, CVPR 2025", order=("lam", "beta", "tau", "form"))
def fdse(rule: training.Consistency, mix: stages.CosineMix) -> m.Method:
    """Split each encoder layer into an extractor, shared by all, and an eraser of the client's own domain shift.

    Layer: x = norm_e(extractor(input)), half of the channels; y = [x, eraser(x)] + shift, the eraser depthwise;
    output = norm(y), then what followed the layer. Eraser: `eraser` and norm_e, whose running statistics stay with the
    client.
    Loss: + lam sum_l w_l KL(N(mu_l, sigma_l^2) || N(m_l, v_l)), w_l proportional to exp(beta l), with mu, sigma^2 the
    running statistics of layer l's `norm` as received, m, v those of what enters it in this round; from round 2 on.
    Server, tensor by tensor: all but erasers move by mean_k |Delta_k| * (shortest convex combination of the unit
    Delta_k / |Delta_k|), see min-norm; client k's eraser becomes sum_j softmax_j(cos(e_k, e_j) / tau) e_j of the
    participants' erasers e_j. Every client counts alike.

    paper    as above
    release  lam 0.5, tau 0.5, beta 0.001 for PACS, 0.05, 0.5, 0.05 for Office-Caltech, 500 rounds, on an AlexNet whose
             linear layers are erased too. Its term is no divergence: mu^2 - m^2 in place of (mu - m)^2, and m, v are
             one number each that goes from layer to layer: `form: release`. The mean is plain for norm statistics
    here     the release's in-code defaults. KL by channel. The norm behind a layer (a ResNet's) is the layer's own
             `norm`, group norm becomes batch norm, and a layer without norm gets one; the extractor has no bias, since
             norm_e would take it away. A layer's weights at the start, also from a file, are those of its first half of
             channels. Weights of the minimum are exact but for round-off. Absent clients keep their erasers

    The network differs from the baselines' and has about half the parameters: give baselines the same budget, or state
    the difference. There is no global model: each client is measured with its own eraser. For encoders of convolutions
    and linear layers; transformers and LoRA are refused. lam = 0 has no term; a large tau gives all clients the mean
    eraser; one client trains as if alone.

    FedDEA acts at the client on all that is sent, erasers too; pcgrad on all but erasers, before the minimum.
    feature-modules stand behind the last erased layer and are shared, unless their `scope` says otherwise. Rules that
    set weights (heal) or replace a mean are refused.
    """
    from fedloom.methods.fdse.rules import ERASERS, Erase

    return m.Method(
        name="fdse",
        model=(Erase(),),
        local=(rule,),
        stage=stages.PartlyShared(m.Select(exclude=ERASERS), stages.PerBlock(stages.MinNorm()), stages.PerBlock(mix)),
        weights="uniform",
    )
