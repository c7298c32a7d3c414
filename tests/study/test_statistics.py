"""Tests and changes over seeds, against scipy, published tables, and numbers of a thesis that were recomputed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.errors import StateError
from fedloom.study import delta_m
from fedloom.study.comparison import shortened
from fedloom.study.grid import Cell, Grid, open_folder
from fedloom.study.results import of_grid
from fedloom.study.significance import Contrasts, Over, contrasts
from fedloom.study.statistics import (
    Estimate,
    against_zero,
    bound,
    clear_best,
    delta_terms,
    detectable_gain,
    hedges,
    holm,
    judge,
    p_is,
    paired,
    ranking,
    shift,
    signed_rank,
    two_sided,
    without_base,
)
from fedloom.study.table import tabulate
from grid_support import DEA, DIRECTIONS, FEDAVG, paper_grid, write_grid

# A thesis on tasks without a server, PASCAL, three runs each: total loss at the best round.
A1 = [1.0931, 1.1259, 1.1206]
A2 = [0.9828, 0.9792, 0.9857]
B4 = [0.9730, 1.0078, 1.0013]

numbers = st.floats(-100, 100).map(lambda v: round(v, 3))
pairs = st.lists(st.tuples(numbers, numbers), min_size=2, max_size=9)


def test_the_numbers_of_a_thesis_recomputed():
    # it printed p < 0.001 and d = 6.81 for the first, p < 0.05 for the second
    found = paired(A1, A2)
    assert found.p == pytest.approx(0.0067, abs=5e-5)
    assert found.d_av == pytest.approx(10.3, abs=0.05)
    assert found.d_z == pytest.approx(7.03, abs=0.005)
    assert (found.wilcoxon, found.least) == (0.25, 0.25)
    assert paired(A2, B4).p == pytest.approx(0.42, abs=5e-3)


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 99, 499])
def test_students_t_as_scipy_has_it(freedom):
    for t in (0.0, 0.01, 0.3, 1.0, 2.5, 40.0, 1e6, math.inf):
        assert two_sided(-t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-9, abs=0)
    for level in (0.99, 0.5, 0.05, 1e-6):
        assert bound(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), rel=1e-9)


@settings(max_examples=25)
@given(pairs)
def test_as_scipy_has_it(sample):
    values, base = zip(*sample, strict=True)
    found = paired(values, base)
    if found.is_constant:
        assert found.low == found.mean == found.high
        return
    theirs = stats.ttest_rel(values, base)
    low, high = theirs.confidence_interval()
    assert (found.t, found.p) == pytest.approx((theirs.statistic, theirs.pvalue), rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
    assert found.d_z == pytest.approx(found.t / math.sqrt(found.n))


@settings(max_examples=25)
@given(pairs, st.randoms())
def test_neither_the_order_of_seeds_nor_which_side_is_the_base_matters(sample, random):
    shuffled = random.sample(sample, len(sample))
    one, other = paired(*zip(*sample, strict=True)), paired(*zip(*shuffled, strict=True))
    for name in ("mean", "low", "high", "t", "p", "wilcoxon", "d_z", "d_av"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9, nan_ok=True), name
    values, base = zip(*sample, strict=True)
    turned = paired(base, values)
    for name in ("mean", "t", "d_z", "d_av"):
        assert getattr(turned, name) == pytest.approx(-getattr(one, name), rel=1e-6, abs=1e-9, nan_ok=True), name
    assert (turned.p, turned.wilcoxon) == pytest.approx((one.p, one.wilcoxon), nan_ok=True)


@settings(max_examples=25)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=7))
def test_signed_ranks_by_trying_all_signs(differences):
    kept = [d for d in differences if d]
    ranks = stats.rankdata([abs(d) for d in kept]) if kept else []
    sums = [
        sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in itertools.product((0, 1), repeat=len(kept))
    ]
    found = sum(r for r, d in zip(ranks, kept, strict=True) if d > 0)
    tail = min(sum(s <= found for s in sums), sum(s >= found for s in sums))
    assert signed_rank(differences) == min(1.0, 2 * tail / len(sums))


def test_signed_ranks_as_scipy_has_them():
    d = [0.4, -0.1, 0.9, 1.3, -0.2, 0.7, 2.1]
    assert signed_rank(d) == stats.wilcoxon(d, method="exact").pvalue
    many = [float((-1) ** (i % 3 == 0) * (i % 70)) for i in range(400)]  # zeros and ties among them
    near = stats.wilcoxon(many, method="asymptotic", correction=False).pvalue
    assert signed_rank(many) == pytest.approx(near, rel=1e-9)
    assert signed_rank([1.0, 2, 3, 4, 5, 6]) == 0.03125  # the first n at which 5 % can be reached


def test_equal_differences_are_defined_and_said():
    same = paired([0.3, 0.4, 0.5], [0.2, 0.3, 0.4])  # equal but for rounding
    assert same.is_constant
    assert (same.t, same.d_z, same.low, same.high) == (math.inf, math.inf, same.mean, same.mean)
    assert math.isnan(same.p)
    assert same.wilcoxon == 0.25
    assert paired([0.2, 0.3], [0.3, 0.4]).d_z == -math.inf
    none = paired([1.0, 2.0], [1.0, 2.0])
    assert (none.mean, none.wilcoxon, none.d_av) == (0.0, 1.0, 0.0)
    assert math.isnan(none.d_z)
    assert paired([2.0, 2.0], [1.0, 1.0]).d_av == math.inf
    assert math.isnan(against_zero([1.0, 2.0]).d_av)


def test_what_cannot_be_tested_is_refused():
    with pytest.raises(ValueError, match="two or more pairs, 1 found"):
        paired([1.0], [2.0])
    with pytest.raises(ValueError, match="pairs expected, 2 and 3"):
        paired([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="finite"):
        paired([1.0, math.nan], [1.0, 2.0])


def test_hedges_correction():
    # the usual approximation 1 - 3 / (4 df - 1) is good to a percent from four degrees of freedom
    assert hedges(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert all(hedges(df) == pytest.approx(1 - 3 / (4 * df - 1), rel=0.01) for df in range(4, 60))
    assert math.isnan(hedges(1))
    assert math.isnan(paired([1.0, 2.0], [0.0, 5.0]).g_z)
    found = paired(A1, A2)
    assert (found.g_z, found.g_av) == pytest.approx((found.d_z / math.sqrt(math.pi), found.d_av / math.sqrt(math.pi)))


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # a textbook's four
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([math.nan, 0.02])[1] == 0.02
    assert math.isnan(holm([math.nan, 0.02])[0])
    assert holm([]) == []


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_raw_and_bonferroni_and_keeps_the_order(ps):
    adjusted = holm(ps)
    assert all(p <= a <= min(1.0, len(ps) * p) for p, a in zip(ps, adjusted, strict=True))
    assert [a for _, a in sorted(zip(ps, adjusted, strict=True))] == sorted(adjusted)


def test_the_corrected_resampled_test_by_hand():
    """Nadeau and Bengio: mean 2, sd 1, n = 5, a test part a quarter of the training part."""
    gains = [2 - math.sqrt(2), 2.0, 2.0, 2.0, 2 + math.sqrt(2)]  # sum of squares 4 = (n - 1) sd^2
    plain, corrected = against_zero(gains), against_zero(gains, ratio=0.25)
    assert (plain.t, corrected.t) == pytest.approx((2 / math.sqrt(0.2), 2 / math.sqrt(0.45)))
    assert corrected.high - corrected.mean == pytest.approx(2.7764 * math.sqrt(0.45), abs=1e-4)
    assert corrected.p == pytest.approx(2 * stats.t.sf(2 / math.sqrt(0.45), 4))
    assert corrected.d_z == plain.d_z == pytest.approx(2)
    assert Estimate.of(gains, 0.25).half == pytest.approx(corrected.high - corrected.mean)
    assert paired([g + 1 for g in gains], [1.0] * 5, 0.25).t == pytest.approx(corrected.t)


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 40, 5000])
def test_the_shift_gives_a_power_of_80_percent(freedom: int) -> None:
    assert stats.nct.sf(stats.t.isf(0.025, freedom), freedom, shift(freedom)) == pytest.approx(0.8, abs=1e-6)


def test_the_detectable_gain_is_about_two_sums_of_quantiles():
    # Cohen's approximation, t(0.975) + t(0.8) standard errors, is good from some ten seeds on
    half = 2.2622 * 0.5  # of an interval over ten seeds with a standard error of 0.5
    assert detectable_gain(half, 10) == pytest.approx((2.2622 + 0.8834) * 0.5, rel=2e-3)


def test_three_verdicts():
    def verdict(gains: list[float], **more: Any) -> str:
        return judge(against_zero(gains), more.pop("smallest", 1.0), **more).label

    clear = [4.8, 5.0, 5.2, 5.1, 4.9]
    assert verdict(clear) == "yes"
    assert verdict(clear, p=0.06) == "cannot tell"  # after Holm's correction
    assert verdict(clear, reason="benchmark not sensitive") == "cannot tell"
    small = [0.48, 0.50, 0.52, 0.51, 0.49]
    assert verdict(small) == "no"  # significant, and never a yes: it excludes 1 %
    assert verdict(small, smallest=0.2) == "yes"
    assert verdict([0.9, 0.8, 1.0, 1.15, 0.85]) == "cannot tell"  # significant, around the smallest that counts
    assert verdict([0.0, 0.3, -0.2, 0.1, -0.1]) == "no"
    assert verdict([-g for g in clear]) == "no, worse"
    assert verdict([-g for g in small]) == "no"
    assert verdict([-3.0, 9.0, 2.0]) == "cannot tell"
    same = judge(against_zero([2.0, 2.0, 2.0]), 1.0)
    assert (same.answer, same.reason) == ("cannot tell", "the same at every seed")
    assert judge(None, 1.0).answer == "cannot tell"


def test_what_a_verdict_says():
    open_ = judge(against_zero([-3.0, 9.0, 2.0]), 1.0)
    # half the interval is 4.303 standard errors, and 5.653 of these are detected with 80 % power
    error = stats.sem([-3.0, 9.0, 2.0])
    assert open_.detectable == pytest.approx(5.6535 * error, rel=1e-4)
    assert open_.in_words(" %") == f"cannot tell (detectable: {5.6535 * error:.2g} %)"
    assert (
        judge(against_zero([5.0, 5.1]), 1.0, reason="not converged: x").in_words() == "cannot tell (not converged: x)"
    )


def test_the_critical_difference_of_the_published_table():
    # Demsar 2006, table 5(a): q at 5 % for 2, 3, 4, 5 and 10 classifiers
    for k, q in ((2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)):
        block = {str(i): float(i) for i in range(k)}
        assert ranking([block] * 14).critical == pytest.approx(q * math.sqrt(k * (k + 1) / (6 * 14)), abs=5e-4)


def test_ranks_and_groups():
    blocks = [{"a": 9.0, "b": 5.0 + (i % 2) * 2, "c": 6.0, "d": 1.0} for i in range(20)]
    found = ranking(blocks)
    assert dict(found.ranks) == {"a": 1.0, "b": 2.5, "c": 2.5, "d": 4.0}
    assert next(iter(found.ranks)) == "a"
    assert found.groups == (("a",), ("b", "c"), ("d",))
    theirs = stats.friedmanchisquare(*([block[name] for block in blocks] for name in "abcd"))
    assert (found.chi2, found.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    few = ranking(blocks[:4])  # groups that overlap: a and d alone are far enough apart
    assert few.critical == pytest.approx(2.569 * math.sqrt(20 / 24), abs=1e-3)
    assert few.groups == (("a", "b", "c"), ("b", "c", "d"))


def test_ties_share_their_rank_and_nothing_is_significant_without_a_difference():
    found = ranking([{"a": 1.0, "b": 1.0, "c": 1.0}] * 30)
    assert dict(found.ranks) == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert math.isnan(found.chi2)
    assert found.groups == (("a", "b", "c"),)
    two = ranking([{"a": 2.0, "b": 1.0}] * 9)
    assert math.isnan(two.p)
    assert two.groups == (("a",), ("b",))


def test_incomplete_blocks_are_refused():
    for blocks in ([], [{"a": 1.0}], [{"a": 1.0, "b": 2.0}, {"a": 1.0}], [{"a": 1.0, "b": math.nan}]):
        with pytest.raises(ValueError, match="a ranking needs|every block needs"):
            ranking(blocks)


def thesis(names: list[str], *seeds: int) -> Grid:
    """A grid of one data set, whose first method the others are compared with."""
    bases = {name: {"method": "fedavg", "training.rounds": at} for at, name in enumerate(names, 1)}
    data = {"P": {"recipe": "digits-tasks"}}
    return paper_grid(data=data, bases=bases, addons={"-": {}}, seeds=seeds, delta=f"{names[0]}/-")


def against_base(folder: Path, over: Over = "seeds") -> Contrasts:
    return contrasts(of_grid(*open_folder(folder)), over)


def change_run(path: Path, **about: Any) -> None:
    """Change what a run says about itself."""
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, **about}))


def test_pairs_must_have_the_same_examples(tmp_path: Path) -> None:
    losses = {"A1": A1, "A2": A2, "B4": B4}
    runs = {
        ("P", n, "-", s): {"normals": v} for n, of in losses.items() for s, v in zip((42, 123, 456), of, strict=True)
    }
    grid = write_grid(tmp_path, thesis(list(losses), 42, 123, 456), runs)
    cell = Cell("P", "A2", "-", 123)
    change_run(cell.folder(grid), partition_hash="other")
    made = against_base(grid)
    assert {t.method: t.state for t in made.tests} == {"A2": "refused", "B4": "tested"}
    assert any("not the same clients with the same examples at seed 123" in note for note in made.notes)
    # other tasks on the same examples are a comparison that papers make
    for name, train in (("A1", [0, 1]), ("A2", [0, 1])):
        shares = [{"client": "a", "tasks": {name: 1.0}, "train": train, "val": []}]
        path = Cell("P", name, "-", 123).folder(grid)
        (path / "partition.json").write_text(json.dumps({"clients": shares}))
    assert {t.state for t in against_base(grid).tests} == {"tested"}
    (grid / "cells" / "P" / "A2" / "plain" / "s123" / "partition.json").write_text('{"clients": [{"client": "a"}]}')
    with pytest.raises(StateError, match=r"partition\.json: not a partition: 'train'"):
        against_base(grid)
    change_run(cell.folder(grid), data_hash="other")
    assert any("not the same data set at seed 123" in note for note in against_base(grid).notes)


def test_what_forbids_a_verdict(tmp_path: Path) -> None:
    names = {"base": (0.20, 0.22, 0.21), "better": (0.30, 0.33, 0.31), "short": (0.40, 0.41)}
    tasks = {"edge": 0.0, "semseg": 1.0}
    runs = {
        ("P", name, "-", seed): {task: value + more for task, more in tasks.items()}
        for name, values in names.items()
        for seed, value in enumerate(values)
    }
    grid = write_grid(tmp_path, thesis(list(names), 0, 1, 2), runs)

    def said() -> dict[tuple[str, str], str]:
        tests = against_base(grid).tests
        return {(t.method, t.row.task if t.row else "all"): t.verdict.in_words() for t in tests if t.verdict}

    assert said() == {
        **{("better", task): "yes" for task in ("edge", "semseg", "all")},
        **{("short", task): "cannot tell (no seed 2: short)" for task in ("edge", "semseg", "all")},
    }
    # R2 of 0.01 is no baseline for a change in percent; the other task's verdict stays
    for file in grid.rglob("run.json"):
        info = json.loads(file.read_text())
        info["tasks"]["edge"] |= {"primary": "r2", "metrics": {"r2": "max"}}
        file.write_text(json.dumps(info))
        metrics = file.with_name("metrics.jsonl")
        line = json.loads(metrics.read_text())
        for entry in line["metrics"]:
            if entry["task"] == "edge":
                entry |= {"metric": "r2", "value": entry["value"] - 0.2}
        metrics.write_text(json.dumps(line) + "\n")
    note = "P: base is about 0 on edge, so a change in percent of it says little."
    assert note in tabulate(*open_folder(grid)).notes
    about_0 = "cannot tell (about 0 with base, so no percent: edge)"
    assert [said()["better", task] for task in ("edge", "semseg", "all")] == [about_0, "yes", about_0]


def test_a_client_of_one_class_has_no_number_and_the_others_have(tmp_path: Path) -> None:
    values = {"A1": (0.5, 0.6, 0.7, 0.8), "A2": (0.6, 0.8, 0.75, 0.9)}
    cells = {
        ("P", name, "-", seed): {f"c{i}": {"edge": v + i * seed / 100, "semseg": v} for i, v in enumerate(of)}
        for name, of in values.items()
        for seed in (1, 2)
    }
    folder = write_grid(tmp_path, thesis(["A1", "A2"], 1, 2), cells)
    for file in folder.rglob("metrics.jsonl"):
        line = json.loads(file.read_text())
        losses = [{**entry, "metric": "loss", "value": 0.5} for entry in line["metrics"]]
        for entry in line["metrics"]:
            if entry["task"] == "edge" and (
                entry["client"] == "c3" or (entry["client"] == "c2" and "s2" in file.parts)
            ):
                entry["value"] = None
        file.write_text(json.dumps({**line, "metrics": line["metrics"] + losses}) + "\n")
    made = against_base(folder, "clients")
    edge = next(t for t in made.tests if t.row and t.row.task == "edge")
    assert (edge.state, list(edge.gains)) == ("tested", ["c0", "c1", "c2"])
    assert list(edge.gains.values()) == pytest.approx([0.1, 0.2, 0.05])
    seeds = next(t for t in against_base(folder).tests if t.row and t.row.task == "edge")
    assert (seeds.better, seeds.worst) == pytest.approx((1.0, (0.05 + 0.1) / 2))
    assert "P: odsf of edge: no value at 1 of 4 clients (c3), at seed 1." in made.notes
    assert "P: odsf of edge: no value at 2 of 4 clients (c2, c3), at seed 2." in made.notes
    assert "P: odsf of edge: no value at 1 of 4 clients (c3), at seed 1." in tabulate(*open_folder(folder)).notes


def test_a_mean_gain_of_0_is_not_shown_as_its_rounding(tmp_path: Path) -> None:
    numbers = {"A1": (0.5, 0.5, 0.5), "A2": (0.6, 0.7, 0.2)}
    cells = {
        ("P", name, "-", seed): {"c0": {"edge": value}, "c1": {"edge": value + (name == "A2") / 10}}
        for name, of in numbers.items()
        for seed, value in enumerate(of, 1)
    }
    made = against_base(write_grid(tmp_path, thesis(["A1", "A2"], 1, 2, 3), cells))
    (test,) = (t for t in made.tests if t.row and t.row.task == "edge")
    assert 0 < abs(test.worst) < 1e-15
    assert made.as_table().lines[0][-1] == "+0"


def test_clients_are_paired_by_their_means_over_seeds(tmp_path: Path) -> None:
    numbers = {("A1", 1): (1.0, 2.0, 3.0, 4.0), ("A1", 2): (1.2, 2.4, 2.0, 4.0)}
    numbers |= {("A2", 1): (0.5, 1.7, 2.9, 4.1), ("A2", 2): (0.9, 2.0, 1.0, 4.3)}
    cells = {("P", n, "-", s): {f"c{i}": {"normals": v} for i, v in enumerate(of)} for (n, s), of in numbers.items()}
    folder = write_grid(tmp_path, thesis(["A1", "A2"], 1, 2), cells)
    made = against_base(folder, "clients")
    base, mine = ([1.1, 2.2, 2.5, 4.0], [0.7, 1.85, 1.95, 4.2])
    found, overall = (row for row in made.records().rows())
    assert (found["over"], found["n"], found["seeds"], found["df"]) == ("clients", 4, (1, 2), 3)
    t = stats.ttest_rel(base, mine)  # less is better
    assert (found["t"], found["p"]) == pytest.approx((t.statistic, t.pvalue))
    assert found["wilcoxon_p"] == pytest.approx(stats.wilcoxon(base, mine, method="exact").pvalue)
    assert found["gain"] == pytest.approx(sum(base) / 4 - sum(mine) / 4)
    percent = [100 * (b - m) / b for b, m in zip(base, mine, strict=True)]
    assert overall["p"] == pytest.approx(stats.ttest_1samp(percent, 0).pvalue)
    text = made.to_text()
    assert text.startswith("A table: paired tests over clients, against A1")
    assert "their gains are not independent and p is smaller" in text
    assert "no test here counts them" not in text
    # the mean is that of tests over seeds, where all clients are there at both seeds
    seeds = against_base(folder).tests[0]
    assert made.tests[0].mean == pytest.approx(seeds.mean)
    assert (seeds.change.n, made.tests[0].change.n) == (2, 4)


def test_delta_m_of_the_published_table():
    assert delta_m(DEA, FEDAVG, DIRECTIONS) == pytest.approx(10.593, abs=5e-4)
    terms = delta_terms(DEA, FEDAVG, DIRECTIONS)
    assert terms["semseg"] == pytest.approx(33.5358, abs=1e-4)
    assert terms["depth"] > 0 > terms["edge"]


def test_delta_m_leaves_out_undefined_bases_but_not_undefined_values():
    base = {"semseg": 0.0, "depth": 0.5, "normals": math.nan, "edge": 50.0}
    values = {"semseg": 1.0, "depth": 0.4, "normals": 1.0, "edge": 55.0}
    assert delta_m(values, base, DIRECTIONS) == pytest.approx(15.0)
    assert math.isnan(delta_m({"depth": math.nan}, {"depth": 1.0}, DIRECTIONS))
    assert math.isnan(delta_m({"depth": 1.0}, {"depth": 0.0}, DIRECTIONS))


def test_the_change_of_a_negative_base_has_the_right_sign():
    """R2 from -2 to -1 is better by half of 2; a loss from -4 to -5 is better by a quarter of 4."""
    directions = {"r2": "max", "loss": "min", "worse": "max", "across": "max", "none": "max"}
    base = {"r2": -2.0, "loss": -4.0, "worse": -1.0, "across": -0.5, "none": 0.0}
    values = {"r2": -1.0, "loss": -5.0, "worse": -1.5, "across": 0.5, "none": 1.0}
    terms = delta_terms(values, base, directions)
    assert terms == {"r2": 50.0, "loss": 25.0, "worse": -50.0, "across": 200.0}
    assert without_base(values, base) == ["none"]
    assert delta_m(values, base, directions) == (50 + 25 - 50 + 200) / 4


def test_t_interval():
    e = Estimate.of([1.0, 2.0, 3.0])
    assert e.mean == 2.0
    assert e.half == pytest.approx(4.302652729749464 / math.sqrt(3), rel=1e-12)
    assert math.isnan(Estimate.of([2.0]).half)
    assert str(Estimate.of([2.0])) == "2.0000"
    assert str(Estimate.of([20.0, 22.0])) == "21.00 ± 12.71"
    assert str(Estimate.of([1.0, math.nan])) == "nan"


def test_the_best_is_marked_only_where_its_interval_stands_clear():
    def of(mean, half=math.nan):
        return Estimate(mean, half, 3)

    assert clear_best({"a": of(5, 1), "b": of(2, 1), "c": of(math.nan)}, "max") == {"a"}
    assert clear_best({"a": of(5, 1), "b": of(2, 1)}, "min") == {"b"}
    assert clear_best({"a": of(5, 2), "b": of(2, 1)}, "max") == set()  # the intervals meet
    assert clear_best({"a": of(5), "b": of(5), "c": of(4)}, "max") == {"a", "b"}  # one seed: the numbers as they are
    assert clear_best({"a": of(5)}, "max") == set()


def test_intervals_of_fractions_end_at_0_and_1():
    e = Estimate(0.98, 0.05, 3)
    assert e.of_metric("accuracy") == "0.9800 (0.9300 to 1.0000)"
    assert e.of_metric("rmse") == "0.9800 ± 0.0500"
    assert Estimate(0.5, 0.1, 3).of_metric("miou") == "0.5000 ± 0.1000"
    assert e.of_metric("accuracy", percent=True) == "98.00 (93.00 to 100.00)"
    assert Estimate(0.0512, 0.01, 3).of_metric("miou", percent=True) == "5.12 ± 1.00"
    assert Estimate(0.5, math.nan, 1).of_metric("miou", percent=True) == "50.00"
    assert Estimate(23.05, 30.0, 3).of_metric("miou") == "23.05 ± 30.00"  # in percent, as papers have it


def test_keys_in_labels_are_as_short_as_they_can_be():
    keys = ["training.rounds", "peers.warmup.rounds", "method.mu", "training.schedule.name", "seed"]
    assert shortened(keys) == dict(
        zip(keys, ["training.rounds", "warmup.rounds", "mu", "schedule.name", "seed"], strict=True)
    )


@pytest.mark.parametrize(("p", "said"), [(0.0424, "p = 0.0424"), (0.00004, "p <0.0001"), (math.nan, "p = nan")])
def test_a_p_in_a_sentence(p: float, said: str) -> None:
    assert p_is(p) == said
