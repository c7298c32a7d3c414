"""A hostile server: what it asks of a node is refused with a sentence, or is what the recipe makes necessary.

Messages of an honest server are spoilt in one to three places, and honest ones are sent too often, for other rounds,
splits and models, to a node that begins anew now and then. Nothing is measured on training data, and no round has more
answers than the page promises.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fedloom.federation.rounds.federation import BuiltClient, Part
from fedloom.federation.rounds.server import dispatch
from fedloom.federation.runs.track import verified
from sites_support import Server, make_homes
from trials.scale import cases
from trials.test_nodes import spoilt

pytest.importorskip("flwr")

from fedloom.engines.flower import node as node_module
from fedloom.engines.flower.node import MOST, message_tree
from fedloom.engines.flower.wire import RefusedError

RUNS = {
    "one model": (),
    "task vectors": ("method=matu",),
    "prototypes": ("method=fedproto", "evaluation.models=[global, personal, trained]"),
    "peers": ("peers={similarity: {signals: {cross-loss: 1.0}}}",),
}
SPOILT, ASKED = cases(40, 1000), cases(60, 1500)
"""Messages to each run."""
ROUNDS = 5
Homes = dict[int, dict[str, str]]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Homes:
    return make_homes(tmp_path_factory.mktemp("sites"))


def honest(server: Server, rng: random.Random, round: int) -> tuple[str, dict[str, Any]]:
    """A message of an honest server to the clinic."""
    if server.recipe.peers is not None:
        turn = rng.choice(("train", "train", "choose", "answer", "mix"))
        return "train.peer", {
            "turn": turn,
            "names": sorted(server.built.federation.clients),
            "peer_messages": [],
            "state": {},
            "evaluate_trained": False,
        }
    built = server.built
    sent = dispatch(built, server.state["server"], ["clinic"])["clinic"]
    model = {"message": message_tree(sent), "state": {}, "tasks": ["digit"]}
    model["task"] = "digit" if built.method.task_vectors else None
    job = {"key": 0, "client": "clinic", "split": "test", "round": round, "personal": False, "costly": False}
    trained = "trained" in server.recipe.evaluation.models
    return rng.choice(
        (
            ("train.fedloom", {"message": message_tree(sent), "state": {}, "evaluate_trained": trained}),
            ("evaluate.fedloom", {"jobs": [{**job, **model}]}),
            ("query.export", {"models": [{"name": "global", "owner": None, "prefix": "", **model}]}),
        )
    )


@pytest.mark.parametrize("run", RUNS)
def test_spoilt_messages(
    run: str, homes: Homes, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    bugs, words = list[str](), list[str]()
    monkeypatch.setattr(node_module, "traceback", type("T", (), {"print_exc": lambda: bugs.append(last())}))
    server, rng, answered = Server(homes, *RUNS[run], f"training.rounds={SPOILT}"), random.Random(run), 0
    for round in range(1, SPOILT + 1):
        kind, tree = honest(server, rng, round)
        try:
            server.ask(kind, spoilt(tree, rng), round)
            answered += 1
        except RefusedError as error:
            words.append(str(error))
    assert bugs == []
    assert all(text.isprintable() and len(text) < 2000 for text in words)
    record_property("cases", SPOILT)
    record_property("answered", answered)


def last() -> str:
    return traceback.format_exc().splitlines()[-1]


@pytest.mark.parametrize("run", ["one model", "prototypes"])
def test_a_server_that_asks_too_much(
    run: str, homes: Homes, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    measured, part = set[str](), BuiltClient.part

    def noted(self: BuiltClient, split: str) -> Part:
        measured.add(split)
        return part(self, split)

    server, rng, told = Server(homes, *RUNS[run], f"training.rounds={ROUNDS}"), random.Random(run), Counter[str]()
    monkeypatch.setattr(BuiltClient, "part", noted)
    wanted = {"global", "personal"} & {*server.built.models}
    for _ in range(ASKED):
        round, moved = rng.randint(-1, ROUNDS + 1), float(rng.randint(0, 5))
        if rng.random() < 0.05:
            server.restart()
        job = {
            "split": rng.choice(("train", "val", "test")),
            "personal": rng.random() < 0.3,
            "client": rng.choice(("clinic", "clinic", "lab")),
            "tasks": rng.choice((["digit"], ["digit"], ["even"], ["digit", "even"])),
        }
        try:
            if rng.random() < 0.3:
                server.train(round, moved, evaluate_trained=rng.random() < 0.5)
            else:
                server.evaluate(round, moved=moved, job=job)
                personal = "personal" if job["personal"] else "global"
                assert (job["client"], job["tasks"], personal in wanted) == ("clinic", ["digit"], True)
                assert job["split"] != "train"
            told["answered"] += 1
        except RefusedError:
            told["refused"] += 1
    assert measured <= {"val", "test"}
    lines = [line for line in verified(server.home("clinic") / "audit.jsonl") if line.get("run") == server.at.run_id]
    for what in ("train", "evaluate"):
        for round in range(ROUNDS + 1):
            asked = {line["asked"] for line in lines if (line["what"], line["round"]) == (what, round)}
            assert len(asked) <= MOST
    assert {line["round"] for line in lines} <= {*range(ROUNDS + 1)}
    assert min(told["answered"], told["refused"]) > ASKED // 20
    for name, count in told.items():
        record_property(name, count)
