"""Private runs and sites' terms over Flower, from beginning to end."""

from __future__ import annotations

import base64
import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.context import new_secret
from fedloom.engines.api import Result
from fedloom.errors import UserError
from fedloom.federation.rounds.build import build
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.track import verified
from sites_support import Demand, Go, events, trained
from tests_support import assert_same, load_recipe

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")

from fedloom.engines.flower.engine import LocalGrid

Quick = Callable[..., Result]
FLOWER = "runtime.engine=flower"
PRIVATE = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3}"
FEDPER = "method={name: fedper, weights: uniform}"
LOCAL = "privacy.trust=local"
SMALL = "model={name: small-cnn, width: 1, hidden: 2}"


def spent(folder: Path) -> list[float]:
    return [record["epsilon"] for _, record in Run.read(folder).records("privacy")]


@pytest.mark.slow
def test_a_killed_private_run_goes_on_and_its_epsilon_too(tmp_path: Path) -> None:
    changes = (FEDPER, SMALL, PRIVATE, FLOWER, "training.rounds=6", "training.participation=0.5")
    folder = tmp_path / "run"
    run = [sys.executable, "-m", "fedloom", "run", "digits-tasks", *changes, "--out", str(folder)]
    work = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines, end = folder / "metrics.jsonl", time.monotonic() + 120
    while not (lines.is_file() and len(lines.read_text().splitlines()) > 2) and time.monotonic() < end:
        time.sleep(0.01)
    work.send_signal(signal.SIGKILL)
    work.wait()
    done = json.loads((folder / "state.json").read_text().splitlines()[0])["round"]
    assert 0 < done < 6
    assert fedloom.resume(folder).status == "finished"
    terms = build(load_recipe(*changes)).terms
    assert terms is not None
    charged = [n if n <= done else n + 2 for n in range(1, 7)]
    assert spent(folder) == pytest.approx([terms.epsilon(n) for n in charged])
    assert verified(folder / "audit.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trust", "more"),
    [((), ()), ((LOCAL,), ()), ((LOCAL,), ("peers={weights: {kind: uniform}}",))],
    ids=["server", "local", "peers"],
)
def test_noise_of_nodes_is_not_that_of_the_seed(quick: Quick, trust: tuple[str, ...], more: tuple[str, ...]) -> None:
    """In one process a run is the same again; over nodes, which all know the seed, only one without noise is."""
    base = (FEDPER, SMALL, "training.rounds=1", "evaluation.splits=[test]", *more)
    private = (*base, PRIVATE, *trust)
    assert_same(quick(*base), quick(*base, FLOWER))
    assert_same(quick(*private), quick(*private))
    for engine in ((FLOWER,), ()):
        with pytest.raises(AssertionError):
            assert_same(quick(*private, *engine), quick(*private, FLOWER), models_only=True)


@pytest.mark.parametrize("trust", ["central", "local"])
def test_the_secret_stays_where_it_was_drawn(
    quick: Quick, tmp_path: Path, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither in the run folder, nor in what server and nodes send each other."""
    drawn: list[bytes] = []
    sent: list[bytes] = []
    pull = LocalGrid.pull_messages

    def noted() -> bytes:
        drawn.append(new_secret())
        return drawn[-1]

    def heard(grid: LocalGrid, ids: Sequence[str]) -> list[Any]:
        asked = [grid._waiting[each] for each in ids if each in grid._waiting]
        answers = pull(grid, ids)
        sent.extend(pickle.dumps(message.content) for message in (*asked, *answers))
        return answers

    monkeypatch.setattr("fedloom.federation.rounds.rounds.new_secret", noted)
    monkeypatch.setattr("fedloom.federation.rounds.worker.new_secret", noted)
    monkeypatch.setattr(LocalGrid, "pull_messages", heard)
    local = (f"privacy.trust={trust}", "training.rounds=1", "evaluation.splits=[test]")
    run = quick(FEDPER, SMALL, PRIVATE, FLOWER, *local)
    assert drawn
    assert len(sent) > 5
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert run.folder.is_relative_to(tmp_path)
    for secret in drawn:
        forms = (secret, secret.hex().encode(), base64.b64encode(secret)[:-1], str(list(secret)).encode())
        assert not [form for form in forms for text in (*files, *sent) if form in text]


PEERS = "peers={similarity: {signals: {overlap: 1.0}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"leaves": ["encoder.*"]}, "leaves: heads."),
        ({"clients": 5}, "clients: 3 expected in a round, expected at least 5"),
    ],
)
def test_a_node_keeps_its_terms_among_peers(go: Go, demand: Demand, terms: dict[str, Any], why: str) -> None:
    home = demand(**terms)
    result = go(PEERS, "training.rounds=2", "evaluation.models=[personal]")
    assert trained(result.folder) == [["lab", "office"]] * 2
    dropped = [event for event in events(result.folder) if event["event"] == "answer dropped"]
    assert {event["client"] for event in dropped} == {"clinic"}
    assert all(why in event["why"] for event in dropped)
    assert "train" not in [line["what"] for line in verified(home / "audit.jsonl") if "run" in line]


@pytest.mark.slow
def test_a_node_counts_its_trainings_among_peers(go: Go, demand: Demand) -> None:
    home = demand(rounds=2)
    result = go(PEERS, "training.rounds=2", "evaluation.models=[personal]")
    assert trained(result.folder) == [["clinic", "lab", "office"]] * 2
    assert [line["what"] for line in verified(home / "audit.jsonl")].count("train") == 2
    demand(methods=["fedper"])
    with pytest.raises(UserError, match="2 of 3 nodes reported"):
        go(PEERS, "training.rounds=1", "seed=1", "runtime.flower.min_clients=3")
