"""Low-rank factors in federations: FedSA-LoRA, FedEx-LoRA and FLoRA as add-ons, for models with `lora`."""

from __future__ import annotations

from dataclasses import replace

from fedloom import stages, training
from fedloom.core.settings.section import Count, Positive, parameters
from fedloom.methods import registry as m


@m.ADDONS.register("fedsa-lora", source="FedSA-LoRA: Guo et al., Selective Aggregation for LoRA in FL, ICLR 2025")
def fedsa_lora(method: m.Method) -> m.Method:
    """Share the factors A of all adapted layers, and keep the factors B at the clients.

    W_k = W_0 + (alpha / rank) B_k A;  A <- A + sum_k p_k Delta A_k, or as the method combines;  B_k stays at client k

    The model must have `lora`. The paper says that A learns general knowledge and B knowledge of the client. So half of
    the factors (for square layers) is sent. Heads and decoders are shared as the method has them. Not to be confused
    with the method `fedsa`, which aligns features.

    paper    FedAvg of A; classification heads are frozen or shared as the task asks
    release  not read
    here     any method that shares its model; heads by `model.heads`. A client that joins late begins with B = 0

    A client's updates of A are relative to its own B: where the clients' B differ in sign or basis, so do what their A
    mean, and averaging them cancels; `fedloom report` shows the cosines of A by layer. With FedDEA, pcgrad, heal: these
    see A, heads and decoders only. Refused without `model.lora`, and with methods that keep other blocks at their
    clients, such as FedPer.
    """
    from fedloom.models.changes import Factors

    if method.private is not None:
        raise ValueError(f"{method.name}: fedsa-lora keeps B private, but the method already has private blocks")
    return replace(method, model=(*method.model, Factors()), private=m.Select(name="*.lora_B.*"))


@parameters("fedloom.methods.lora.aggregation:ExactFactors")
class ExactFactorsSettings:
    scale: Positive = 1.0


@m.ADDONS.register("fedex-lora", source="FedEx-LoRA: Singhal, Ponkshe, Vepakomma, ACL 2025")
def fedex_lora(method: m.Method, rule: stages.ExactFactors) -> m.Method:
    """Average the factors, and add to the frozen weight the part of the mean product that this leaves out.

    A = sum_k p_k A_k,  B = sum_k p_k B_k,  W <- W + s (sum_k p_k B_k A_k - B A)
    so that W + s B A = sum_k p_k (W + s B_k A_k): each layer is the mean of the clients' layers. s = alpha / rank.

    The model must have `lora`; `scale` must be its alpha / rank, which is 1 where alpha is left out. Local training
    moves the factors and heads, never W. Acts at the server. No state.

    paper    the residual, of rank up to rank K, is sent to the clients, who add it to W
    release  not read
    here     W is a block of the model, so the server sends it whole, and a client's update of it is zero: the codec is
             `sparse`, which sends a bit for each of its values and 32 for those of the factors

    Equal factors, and one participant, give the mean, but for round-off. With FedDEA: the factors' updates are
    sparsified first, and the residual is of what arrived. pcgrad, gradvac: as FedDEA. Refused without `model.lora`,
    with a server step or optimiser (the mean of the products would no longer be met), with training in phases, with
    rules that set weights of coordinates (heal), and with methods that have no plain mean to replace.
    """
    if method.server != m.Plain():
        raise ValueError(f"{method.name}: fedex-lora replaces Plain(step=1.0), but the method has {method.server!r}")
    exact = replace(_beside_weights(method, "fedex-lora", rule.scale), codec=m.Sparse())
    return exact.combined_by(rule)


@m.ADDONS.register("flora", source="FLoRA: Wang et al., Federated Fine-Tuning with Heterogeneous LoRA, NeurIPS 2024")
def flora(method: m.Method, *, scale: Positive = 1.0, ranks: dict[str, Count] | None = None) -> m.Method:
    """Give each client low-rank factors of its own rank, and add the weighted sum of the products to the frozen weight.

    client k trains r_k components of A and B, from the initial factors in every round, B = 0
    W <- W + s sum_k p_k B_k A_k, or as the method combines these products;  s = alpha / rank of the model

    The model must have `lora`, whose rank is the largest; `ranks` names the clients that have less: {site-b: 4}.
    `scale` must be alpha / rank. Acts at the server, before all that looks at rows: what averages, compares or projects
    them sees products, which mean the same whatever the ranks and bases. No state.

    paper    stacks A = [p_1 A_1; ...], B = [B_1 ...], whose product is that sum; the stacks are sent to the clients,
             who add them to W and draw new factors; ranks 64, 32, 16, 16, 8, 8, 4, 4, 4, 4 of ten clients
    release  alpha = 2 r_k, so that s is 2 at all ranks; p_k by examples, on the rows of A
    here     each client sends its r_k components; the server sends W whole, and all begin again from the same A. One s
             for all. `docs/lora.md` says why products are the common space

    One participant: W + s B A, but for round-off. The rank of a sum is not bounded. With FedDEA: factors are sparsified
    at the client, and products are of what arrived. pcgrad, gradvac, heal: on products, listed before or after. Refused
    without `model.lora`, with training in phases, with methods whose clients start from models of their own (fedamp) or
    keep one beside the shared one (ditto), with feddyn, whose clients would remember factors and its server products,
    and with rows of tasks (matu).
    """
    if method.own_model:
        raise ValueError(f"{method.name}: flora cannot be combined with a personal model that trains all weights")
    if any(isinstance(rule, training.Dual) for rule in method.rules):
        raise ValueError(
            f"{method.name}: flora stores products at the server, so clients cannot keep factors: the two "
            "cannot be combined"
        )
    products = stages.FactorProducts(scale, ranks or {})
    low = replace(_beside_weights(method, "flora", scale), codec=m.Cropped(), stage=products >> method.stage)
    return low.with_local(training.OwnRank())


def _beside_weights(method: m.Method, name: str, scale: float) -> m.Method:
    """Return the method with weights beside low-rank factors in the updates, which local training leaves alone."""
    from fedloom.models.changes import FreeAdaptedWeights

    if method.phases:
        raise ValueError(f"{method.name}: {name} cannot be combined with training in phases")
    frozen = m.Phase(m.Select(exclude=m.Select(name="*.base_layer.weight")))
    return replace(method, model=(*method.model, FreeAdaptedWeights(scale)), local=(*method.local, frozen))
