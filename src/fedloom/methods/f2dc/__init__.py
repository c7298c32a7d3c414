"""F2DC: decoupled and calibrated features, and aggregation weights that depend on domains."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import Count, Finite, NonNegative, Positive, parameters
from fedloom.methods import registry as m
from fedloom.methods.basic import fedavg

SOURCE = "F2DC: Wang et al., Domain-Skewed Federated Learning with Feature Decoupling and Calibration"


@parameters("fedloom.methods.f2dc.rules:AttachFeatureModules")
class AttachFeatureModulesSettings:
    layers: tuple[str, ...] = ()
    sigma: Positive = 0.1
    form: Literal["paper", "release"] = "paper"
    hidden: Count | None = None
    noise: Literal["gumbel", "logistic"] = "gumbel"
    noisy_eval: bool = False
    scope: Literal["aggregate", "identity", "local"] = "aggregate"
    correct: bool = True


@parameters("fedloom.methods.f2dc.rules:FeatureModules")
class FeatureModulesSettings:
    tau: Positive = 0.06
    lambda1: NonNegative = 0.8
    lambda2: NonNegative = 1.0


@m.ADDONS.register(
    "feature-modules",
    source=SOURCE + ", Table 3",
    order=("layers", "scope", "correct", "sigma", "tau", "lambda1", "lambda2", "form"),
)
def feature_modules(method: m.Method, attach: training.AttachFeatureModules, rule: training.FeatureModules) -> m.Method:
    """Add F2DC's decoupler and corrector (DFD + DFC) to any method; its server stays as it is.

    Behind the encoder's last map, or behind each of the encoder's modules in `layers`: M = mask(A_D(f)), f+ = M f,
    f- = (1-M) f, f* = f- + (1-M) A_C(f-), and f~ = f+ + f* takes the place of f. The loss grows by
    lambda1 (cos(l+, l-)/tau + CE(m(l+), y) + CE(m(l-), wrong)) + lambda2 CE(m(l*), y), where l are pooled features, m
    is a linear head of its own and `wrong` the main classifier's most confident wrong class. Of several `layers` it is
    the mean of these terms (eq. 9).

    scope    aggregate: the modules are averaged like the encoder. identity: they never leave a client, and are left out
             when a model is measured. local: they never leave a client, and the client is measured with them
    correct  false: no corrector (DFD alone), so that f~ = f. lambda1 = 0: DFC alone

    paper    two convolutions without a stated width; logistic noise; modules "stay on the client", yet Table 7 measures
             a model with them
    release  `form: release` (three convolutions, 50 channels), Gumbel noise also in evaluation (`noisy_eval`), modules
             averaged
    here     64 channels (the first release's), Gumbel noise in training and none in evaluation; modules averaged by
             default, which is what the paper's numbers need

    For tasks with one class per example; composes with every method whose encoder has maps, but for `scope` identity
    and local with fedbn. A linearised encoder is refused.
    """
    changed = replace(method.with_local(rule), model=(*method.model, attach))
    if attach.scope == "aggregate" or method.shares_nothing:
        return changed
    own = m.Select(role=()) if method.private is None else m.as_select(method.private)
    if own == m.Select(role=own.role):
        roles = (own.role,) if isinstance(own.role, str) else own.role or ()
        return replace(changed, private=m.Select(role=(*roles, "private")))
    if own.exclude is None:
        raise ValueError(
            f"feature-modules: with scope {attach.scope!r} the modules stay at the client, but {method.name} chooses "
            "what stays there by other things than its role; set scope to 'aggregate'"
        )
    return changed  # everything but some part of the network is private, so the modules are too


@parameters("fedloom.methods.f2dc.rules:DomainWeights")
class DomainWeightsSettings:
    discrepancy: Literal["total", "class", "none"] = "total"
    alpha: Finite = 1.0
    beta: Finite = 0.4
    domains: Count | None = None


@m.ADDONS.register("domain-weights", source=SOURCE + ", eqs. 10-11")
def domain_weights(method: m.Method, rule: stages.DomainWeights) -> m.Method:
    """Give clients weights that grow with their data and fall with their domain discrepancy (DaA).

    d_k = sqrt(1/2 sum_c (B_k^c - 1/Q)^2), B_k^c = n_k / N, Q the number of domains (eq. 10);
    p_k proportional to sigmoid(alpha n_k / N - beta d_k) (eq. 11).

    paper    alpha = 1, beta = 0.4
    release  n_k / N (`discrepancy: none`); alpha and beta are read and never used
    here     eqs. 10-11; `class`: B_k^c = n_k^c / n^c, as eq. 10 before its simplification. N and sums are over the
             clients of the round, Q over the domains seen so far unless `domains` says it. With more clients than
             domains d_k falls with n_k, and the weights are nearly uniform. Statistics of batch norm keep the
             method's own weights (n_k / N), as in the release

    Acts at the server, just before rows are combined; with pcgrad or heal mind the order.

    Couples tasks by design: weights compare a client's data with that of all clients.
    """
    return method.plus(rule, at="server")


@m.METHODS.register("f2dc", source=SOURCE)
def f2dc() -> m.Method:
    """Run FedAvg with feature-modules (DFD + DFC) and domain-weights (DaA), each with its defaults.

    For other settings name the parts: {name: fedavg, add: {feature-modules: {sigma: 0.5}, domain-weights: {beta: 1}}}.

    paper    modules are not sent, yet a global model is measured with them
    release  no DaA: clients count n_k / N
    here     modules are averaged like the encoder; DaA as printed. `fedloom methods feature-modules` and `fedloom
             methods domain-weights` have the equations and the differences

    Without corrector, with lambda1 = lambda2 = 0 and weights by size it is FedAvg, bit for bit.

    Couples tasks by design: weights compare a client's data with that of all clients.
    """
    return replace(feature_modules(domain_weights(fedavg())), name="f2dc")
