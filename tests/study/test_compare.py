"""Test what comparisons are made of: changes in percent, intervals, who is best, and what keys are called."""

from __future__ import annotations

import math

import pytest

from fedloom.study import delta_m
from fedloom.study.tables.compare import shortened
from fedloom.study.tables.estimate import Estimate, clear_best, delta_terms, without_base
from grid_support import DEA, DIRECTIONS, FEDAVG


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
    assert Estimate(23.05, 30.0, 3).of_metric("miou") == "23.05 ± 30.00"  # in percent, as papers have it


def test_keys_in_labels_are_as_short_as_they_can_be():
    keys = ["training.rounds", "peers.warmup.rounds", "method.mu", "training.schedule.name", "seed"]
    assert shortened(keys) == dict(
        zip(keys, ["training.rounds", "warmup.rounds", "mu", "schedule.name", "seed"], strict=True)
    )
