"""Robust aggregation as add-ons; `hostile` has the attacks that a recipe may name. Free of torch at import."""

from __future__ import annotations

from typing import Literal

from fedloom import stages
from fedloom.core.settings.section import Count, Natural, Positive, parameters
from fedloom.methods import registry as m
from fedloom.methods.robust.hostile import ATTACKS as ATTACKS

RULES = ("Krum", "MultiKrum", "MinimumDiameter", "NearestMix", "GeometricMedian", "ClipNorms", "TrimmedMean", "Median")


@parameters(*(f"fedloom.methods.robust.aggregation:{rule}" for rule in RULES))
class RobustSettings:
    f: Natural | None = None
    within: Literal["tasks", "all"] = "tasks"


@m.ADDONS.register("krum", source="Krum: Blanchard et al., NeurIPS 2017")
def krum(method: m.Method, rule: stages.Krum) -> m.Method:
    """Take the update that lies closest to most others, among the clients with the same tasks.

    s_i = sum of |Delta_i - Delta_j|^2 over the K - f rows nearest to i, itself among them;  u = Delta_i, least s_i.
    A group is the clients that hold the same tasks, K its size in a round; the groups' updates are then averaged with
    the method's weights. Acts at the server, from the K x K Gram matrix; nothing more is sent. No state.

    paper    the K - f - 2 nearest others, K >= 2 f + 3, among all clients
    release  none; byzfl takes the K - f - 1 nearest others
    here     as byzfl, so that K >= 2 f + 1 is enough; ties to the first client in order; within clients of the same
             tasks (`within: all` for the paper's: it removes honest minority tasks). f is how many clients of a group
             may be hostile; without it as many as a majority bears, (K - 1) // 2

    A group with fewer than 2 f + 1 clients (3 without f) is refused; one that has fewer in a round, because clients are
    absent, sends no update in that round, which is logged. Claimed numbers of examples have no effect within a group,
    but they do between groups: set `weights: declared` or `max_examples` beside it. Buffers, extras and auxiliary
    vectors (SCAFFOLD) are not guarded. The update of a single client is noisy; multi-krum uses more of them.

    Refused with methods without a plain mean (local training, personal mixes), and at peers.
    """
    return method.combined_by(rule >> stages.Mean())


@m.ADDONS.register("multi-krum", source="Krum: Blanchard et al., NeurIPS 2017")
def multi_krum(method: m.Method, rule: stages.MultiKrum) -> m.Method:
    """Average the K - f updates that lie closest to most others, among the clients with the same tasks.

    s_i as in krum;  u = the mean of the K - f updates with the least s_i. For groups, `f`, `within`, what is refused
    and what is not guarded see krum.

    paper    the m updates with the least s_i, m up to K - f - 2
    release  none; byzfl takes K - f
    here     m = K - f

    With 6 clients of one task and 2 of another, all honest, f = 2 and `within: all`, the smaller task gets weight 0.
    """
    return method.combined_by(rule >> stages.Mean())


@m.ADDONS.register("mda", source="MDA: El-Mhamdi, Guerraoui, Guirguis, Hoang, Rouault, PODC 2020")
def mda(method: m.Method, rule: stages.MinimumDiameter) -> m.Method:
    """Average the K - f updates that lie closest together, among the clients with the same tasks.

    u = the mean over S,  S = argmin over sets of K - f rows of max_{i, j in S} |Delta_i - Delta_j|
    For groups, `f`, `within`, what is refused and what is not guarded see krum.

    paper    minimum-diameter averaging, among all clients; the text was not at hand, the rule is as byzfl has it
    release  none; byzfl tries all sets, and takes the first of those with the least diameter
    here     as byzfl, from the Gram matrix; clients of a set in order, sets by their first clients. A group with more
             than 100,000 sets (20 clients with f = 9 have 167,960) is refused: name f where fewer are hostile

    Among all rules here its mean has the smallest worst-case error, and its cost grows fastest with f.
    """
    return method.combined_by(rule >> stages.Mean())


@m.ADDONS.register("nnm", source="NNM: Allouah et al., AISTATS 2023")
def nnm(method: m.Method, rule: stages.NearestMix) -> m.Method:
    """Replace each update by the mean of the K - f updates nearest to it, for the robust rule that follows.

    Delta_i <- (1 / (K - f)) sum of the K - f rows nearest to i, itself among them. For groups, `f` and `within` see
    krum. List it before the rule: `add: {nnm: , trimmed-mean: }`. By itself it is no defence, because a hostile row is
    nearest to itself and stays in the mean.

    paper    before any rule, where clients' data differ; among all clients
    release  byzfl: in 10 to 13 s for 20 rows of a million
    here     from the Gram matrix, within clients of the same tasks; the product with the rows is computed once, with
             the rule that follows

    Refused with methods that share nothing, and at peers.
    """
    return method.plus(rule, at="server")


@m.ADDONS.register("rfa", source="RFA: Pillutla, Kakade, Harchaoui, IEEE TSP 2022")
def rfa(method: m.Method, rule: stages.GeometricMedian) -> m.Method:
    """Replace the mean of the clients with the same tasks by their geometric median.

    u = argmin_v sum_i |Delta_i - v|, by Weiszfeld: v = sum_i c_i Delta_i, c_i ~ 1 / max(nu, |Delta_i - v|).
    For groups, `within`, what is refused and what is not guarded see krum; f only says how many clients a group needs.

    paper    smoothed with nu = 1e-6, 3 passes over the clients, weights by examples
    release  nu = 1e-5, up to 4 passes; byzfl nu = 0.1, 3 passes, so results depend on the updates' scale
    here     from the Gram matrix until no c_i moves by 1e-12 (at most 100 steps); nu a millionth of the smallest
             distance, so any scale gives the same; all clients of a group alike, since n is a claim

    Withstands fewer than half of a group, without f.
    """
    return method.combined_by(rule >> stages.Mean())


@parameters("fedloom.methods.robust.aggregation:CentredClip")
class CentredClipSettings(RobustSettings):
    limit: Positive | None = None
    steps: Count = 5


@m.ADDONS.register("centred-clip", source="Centred clipping: Karimireddy, He, Jaggi, ICML 2021")
def centred_clip(method: m.Method, rule: stages.CentredClip) -> m.Method:
    """Average the clients with the same tasks, with each update's distance from the average clipped.

    v <- v + (1/K) sum_i (Delta_i - v) min(1, limit / |Delta_i - v|), `steps` times from v = 0;  u = v.
    For groups, `within`, what is refused and what is not guarded see krum; f only says how many clients a group needs.

    paper    a fixed limit, from the aggregate of the round before, one step; on momentums of clients
    release  limit 10, 1 step; byzfl limit 100, so results depend on the updates' scale
    here     without `limit` the median of the distances, anew in each step: any scale gives the same; no state

    Among peers v begins at the peer's own update, all rows that it hears are one group, and no majority is needed.
    """
    return method.combined_by(rule >> stages.Mean())


@m.ADDONS.register("clip", source="Norm clipping: Sun et al., 2019; at peers ClippedGossip: He et al., 2022")
def clip(method: m.Method, rule: stages.ClipNorms) -> m.Method:
    """Shorten updates above the median length of the clients with the same tasks, then combine as the method does.

    Delta_i <- Delta_i min(1, c / |Delta_i|),  c = median of |Delta_j| over the clients with the same tasks.
    For groups and `within` see krum; f only says how many clients a group needs.

    paper    a fixed norm, chosen by hand
    release  none
    here     the (lower) median of the round, so any scale gives the same

    Among peers the difference to the peer's own update is clipped, all rows that it hears are one group, and no
    majority is needed: Delta_i <- Delta_own + clip(Delta_i - Delta_own), mixed with the peers' weights. That bounds how
    far one client moves the mean, but not where: against updates that are no longer than others it does nothing.
    Refused with methods that share nothing.
    """
    return method.plus(rule, at="server")


@m.ADDONS.register("trimmed-mean", source="Trimmed mean: Yin et al., ICML 2018")
def trimmed_mean(method: m.Method, rule: stages.TrimmedMean) -> m.Method:
    """Average each coordinate without its f smallest and f largest values, over the clients with the same tasks.

    u_i = mean of Delta_ki over the K - 2 f clients k in the middle. For groups, `f`, `within`, what is refused and what
    is not guarded see krum. Needs rows, not only their Gram matrix.

    paper    a share beta of the rows at each end, among all clients
    release  none; byzfl f rows at each end
    here     f rows; without f (K - 1) // 2, of which one or two are left: name f where it is known
    """
    return method.combined_by(rule >> stages.Mean())


@m.ADDONS.register("median", source="Median: Yin et al., ICML 2018")
def median(method: m.Method, rule: stages.Median) -> m.Method:
    """Take the median of each coordinate over the clients with the same tasks.

    u_i = median over k of Delta_ki, of an even number the mean of the middle two. For groups, `within`, what is refused
    and what is not guarded see krum; f only says how many clients a group needs. Needs rows, not only their Gram
    matrix.

    paper    among all clients
    release  none; byzfl as its array library has it: numpy means the middle two, torch takes the lower
    here     the mean of the middle two, within clients of the same tasks
    """
    return method.combined_by(rule >> stages.Mean())
