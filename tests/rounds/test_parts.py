"""Sampling, early stopping, codecs, ledger, federation, buffers: the parts of a round."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import fedloom
from fedloom.codecs import Raw, Sparse
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.data.dataset import TensorExamples
from fedloom.engines.api import plan
from fedloom.errors import UserError
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.federation import Common, Part, cohort
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.rounds import Patience, initial_state
from fedloom.federation.rounds.server import merge_buffers, server_init, server_step
from fedloom.federation.rounds.worker import check_device
from fedloom.methods.method import Method
from tests_support import Quick, load_recipe, outcome

REAL = Path(__file__).parents[3] / "shared" / "data"


@given(st.integers(1, 30), st.floats(0.01, 1), st.integers(0, 3), st.integers(1, 5))
def test_cohort_is_a_pure_function_of_seed_and_round(n: int, share: float, seed: int, round_: int) -> None:
    clients = [f"c{i:02d}" for i in range(n)]
    chosen = cohort(clients, share, seed, round_)
    assert chosen == cohort(clients[::-1], share, seed, round_)
    assert len(chosen) == max(1, int(share * n + 0.5))
    assert list(chosen) == sorted(set(chosen))


def test_cohorts_change_and_reach_everyone() -> None:
    clients = [f"c{i}" for i in range(6)]
    rounds = [cohort(clients, 0.34, 0, r) for r in range(1, 30)]
    assert set().union(*rounds) == set(clients)
    assert len(set(rounds)) > 5


LOST, DROPPED = {"event": "round lost"}, {"event": "update dropped", "client": "a"}


@pytest.mark.parametrize(
    ("events", "done", "used"),
    [
        ([], [], True),
        ([], ["a"], True),
        ([LOST], ["a"], False),
        ([LOST | {"peer": "a"}], ["a"], True),
        ([DROPPED], ["a"], False),
        ([DROPPED], ["a", "b"], True),
        ([DROPPED | {"peer": "b"}], ["a"], True),
        ([DROPPED | {"task": "digit"}], ["a"], True),
    ],
)
def test_a_round_is_used_unless_it_was_lost_or_all_its_updates_were_dropped(
    events: list[dict[str, str]], done: list[str], used: bool
) -> None:
    now = Round(build(load_recipe()), 1, Progress())
    now.events, now.done = events, [SimpleNamespace(client=client) for client in done]  # type: ignore[assignment]
    assert now.used is used


def test_patience_by_hand() -> None:
    p = Patience(2, min_delta=0.1)
    for round_, score in enumerate([float("nan"), 1.0, 0.95, 0.85], 1):
        p = p.see(score, round_)
    assert (p.best, p.best_round, p.waited, p.stop) == (0.85, 4, 0, False)
    assert p.see(0.8, 5).see(float("nan"), 6).stop


def test_patience_with_a_share_of_the_best() -> None:
    """Of a best of 10, a tenth is 1: 9.5 is no improvement, 8.9 is, and then 0.89 is asked for."""
    relative, absolute = Patience(2, 0.1, relative=True), Patience(2, 0.1)
    for p, improved in ((relative, [1, 1, 3, 3]), (absolute, [1, 2, 3, 4])):
        found = []
        for round_, score in enumerate([10.0, 9.5, 8.9, 8.1], 1):
            p = p.see(score, round_)
            found.append(p.best_round)
        assert found == improved


@pytest.mark.skipif(not (REAL / "thesis_early_stopping.npz").exists(), reason="the real series are not here")
@pytest.mark.parametrize("relative", [False, True])
def test_patience_replays_the_published_runs(relative: bool) -> None:
    """The release's rule; with a share of the best, as the text has it, they would have stopped in the same rounds."""
    z = np.load(REAL / "thesis_early_stopping.npz", allow_pickle=False)
    for i in range(len(z["es_patience"])):
        p = Patience(int(z["es_patience"][i]), float(z["es_min_delta"][i]), relative)
        stop = 0
        for round_, score in enumerate(z["es_series"][z["es_offsets"][i] : z["es_offsets"][i + 1]], 1):
            p = p.see(float(score), round_)
            if p.stop:
                stop = round_
                break
        assert stop == z["es_stop_round"][i]
        assert p.best_round == z["es_best_round"][i]
        assert p.best == pytest.approx(float(z["es_best_score"][i]), abs=1e-4)


def test_early_stopping_restores_the_best_round(quick: Quick) -> None:
    # a learning rate that spoils what was learnt, after a warm-up that learns
    changes = (
        "training.rounds=8",
        "training.steps=10",
        "training.optimizer={name: sgd, lr: 3.0}",
        "training.schedule={name: constant, warmup: 30}",
    )
    full = quick(*changes)
    stopped = quick(*changes, "early_stopping={patience: 1}")
    info = json.loads((stopped.folder / "run.json").read_text())
    assert stopped.status == info["status"] == "stopped early"
    best = info["final_round"]
    assert best < info["rounds"] < 8
    _, lines = outcome(full)
    _, stopped_lines = outcome(stopped)
    assert stopped_lines[best]["metrics"] == lines[best]["metrics"]
    assert stopped.run.final().round == best
    shorter = quick(*changes[1:], "training.rounds=8", "early_stopping={patience: 1, restore_best: false}")
    assert json.loads((shorter.folder / "run.json").read_text())["final_round"] == info["rounds"]
    with safe_open(stopped.folder / "model.safetensors", "pt") as file:
        assert file.metadata()["round"] == str(best)


LAYOUT = Layout((Block("e", (4, 5)), Block("h", (7,), role="head", task="a"), Block("g", (3,), role="head", task="b")))


@pytest.mark.parametrize("codec", [Raw(), Sparse()], ids=repr)
@pytest.mark.parametrize("present", [None, [[True, False, True]], [[True, True, True]], [[False, False, False]]])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_codecs_give_back_what_they_were_given(codec: Raw | Sparse, present: object, density: float) -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(1, LAYOUT.d, generator=g) * (torch.rand(1, LAYOUT.d, generator=g) < density)
    if present is not None:
        for s, here in zip(LAYOUT.slices, present[0], strict=True):
            X[:, s] *= here
    u = Updates.of(X, None, LAYOUT, ["c"], present=present)
    packed = codec.pack(u)
    like = u.replace(X=torch.zeros_like(X))
    assert torch.equal(codec.unpack(packed, like), X)
    count = codec.count(packed, like)
    assert sum(count.values()) == sum(t.nbytes for t in packed.values())
    if present and not present[0][1]:
        assert count.get(("head", "a"), 0) == 0


def test_sparse_shrinks_what_is_sparse() -> None:
    X = torch.zeros(1, 1000)
    X[0, ::10] = 1
    assert sum(t.nbytes for t in Sparse().pack(Updates.of(X)).values()) == 100 * 4 + 125
    # 62 values and 8 bytes of mask are as large as 64 values
    assert "mask" not in Sparse().pack(Updates.of(torch.ones(1, 64).index_fill_(1, torch.tensor([0, 1]), 0.0)))
    assert "mask" in Sparse().pack(Updates.of(torch.ones(1, 64).index_fill_(1, torch.tensor([0, 1, 2]), 0.0)))


def test_bytes_of_a_run(quick: Quick) -> None:
    result = quick("model.heads=own")
    line = json.loads((result.folder / "bytes.jsonl").read_text().splitlines()[1])
    layout = build(load_recipe()).layout
    encoder = 4 * layout.select("encoder").d
    for way in ("up", "down"):
        found = {(e["client"], e["role"], e["task"]): e["bytes"] for e in line[way]}
        assert found["digit-0", "encoder", None] == encoder
        assert found["digit-0", "head", "digit"] == 4 * layout.select(task="digit").d
        assert ("digit-0", "head", "parity") not in found
        assert found["all-0", "head", "parity"] == 4 * layout.select(task="parity").d
    assert quick("method=local").run.bytes_total() == {"up": 0, "down": 0}
    dense, sparse = (
        quick("method.add.feddea.rho=0.1", f"method.codec={c}").run.bytes_total() for c in ("raw", "sparse")
    )
    assert sparse["up"] < 0.15 * dense["up"]
    assert sparse["down"] == dense["down"]


def test_the_plan_says_what_a_round_sends(quick: Quick) -> None:
    for change in ("method=fedavg", "model.heads=own", "model={name: resnet10, width: 4}", "method=local"):
        recipe = load_recipe(change, "training.rounds=1")
        line = json.loads((quick(change, "training.rounds=1").folder / "bytes.jsonl").read_text().splitlines()[1])
        expected = plan(recipe)
        assert sum(e["bytes"] for e in line["up"]) == expected.bytes_up
        assert sum(e["bytes"] for e in line["down"]) == expected.bytes_down


def test_clients_of_a_domain_share_its_test_images(quick: Quick) -> None:
    recipe = load_recipe("data.domains=[plain, inverted]", "partition={name: domains, clients: 2}")
    clients = build(recipe).federation.clients.values()
    tests = {c.domain: set(c.test.positions.tolist()) for c in clients}
    assert len(tests) == 2
    assert not set.intersection(*tests.values())
    result = fedloom.run(recipe)
    assert {m["data"] for m in result.run.rounds[-1]["metrics"]} == {"own val", "shared test"}


def payload(client: str, n: float, mean: float, var: float) -> Payload:
    return Payload((client, None), n, buffers=torch.tensor([mean, var]))


@pytest.mark.parametrize(("count", "there"), [(0, 0), (1, 2), (2, 3)])
def test_cuda_devices_are_numbered_from_0(count: int, there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    names = ["cuda", "cuda:0", "cuda:1", "cuda:2"]
    assert [check_device(name) for name in names[:there]] == ["cuda:0", "cuda:0", "cuda:1"][:there]
    for name in names[there:]:
        with pytest.raises(UserError, match=f"'{name}' found, but this machine has {count} CUDA devices"):
            check_device(name)
    assert check_device("cpu") == "cpu"


def test_the_server_begins_with_the_buffers_and_counters_that_it_merges() -> None:
    layout = Layout((Block("encoder.w", (2,)), Block("encoder.bn.running_mean", (1,), role="buffer", part="encoder")))
    initial, counters = torch.tensor([1.0, 2, 3]), {"encoder.bn.num_batches_tracked": torch.tensor(5)}
    for buffers in ("mean", "pooled", "local"):
        state = server_init(Method(buffers=buffers), layout, initial, counters)
        assert state["model"].tolist() == [1, 2]
        if buffers == "local":
            assert (state["buffers"], state["integers"]) == (None, {})
        else:
            assert state["buffers"].tolist() == [3]
            assert state["integers"] == counters


def test_buffers_are_averaged_or_pooled_over_those_who_trained_them() -> None:
    layout = Layout(
        (
            Block("b.running_mean", (1,), role="buffer", task="digit"),
            Block("b.running_var", (1,), role="buffer", task="digit"),
        )
    )
    common = partial(Common, layout=layout, federation=build(load_recipe()).federation)
    before = torch.tensor([0.0, 1.0])
    given = [payload("digit-0", 1, 0.0, 1.0), payload("all-0", 3, 4.0, 2.0), payload("parity-0", 100, 9.0, 9.0)]
    assert merge_buffers(common(Method()), given, before).tolist() == [3.0, 1.75]
    pooled = merge_buffers(common(Method(buffers="pooled")), given, before)
    assert pooled.tolist() == [3.0, 1.75 + (9 * 1 + 1 * 3) / 4]
    uniform = merge_buffers(common(Method(weights="uniform")), given, before)
    assert uniform.tolist() == [2.0, 1.5]
    assert merge_buffers(common(Method()), given[2:], before).tolist() == before.tolist()


def test_buffers_never_receive_a_transform(quick: Quick) -> None:
    """Rescaling running variances by 1/rho could make them negative; they are aggregated as they are."""
    change = "model={name: resnet10, width: 4}"
    tensors, _ = outcome(quick(change, "method.add.feddea.rho=0.05"))
    variances = [t for name, t in tensors.items() if name.endswith("running_var")]
    assert variances
    assert all(bool((t > 0).all()) for t in variances)


def test_local_buffers_differ_between_clients_and_make_the_model_personal(quick: Quick) -> None:
    tensors, lines = outcome(quick("model={name: resnet10, width: 4}", "method.buffers=local"))
    means = [t for name, t in tensors.items() if name.endswith("encoder.norm.running_mean")]
    assert len(means) == 5
    assert not torch.equal(means[0], means[1])
    weights = [t for name, t in tensors.items() if name.endswith("encoder.stem.weight")]
    assert all(torch.equal(weights[0], w) for w in weights)
    assert {m["model"] for m in lines[-1]["metrics"]} == {"personal"}


def test_absent_clients_keep_their_state(quick: Quick) -> None:
    result = quick("method=local", "training.participation=0.4", "training.rounds=1")
    tensors, lines = outcome(result)
    initial = build(load_recipe()).module.state_dict()
    for client in ("all-0", "digit-0", "holes-0", "large-0", "parity-0"):
        moved = any(not torch.equal(tensors[f"client/{client}/{k}"], v) for k, v in initial.items())
        assert moved == (client in lines[1]["cohort"])


def test_nobody_left_changes_nothing() -> None:
    built = build(load_recipe())
    state = initial_state(built)["server"]
    row = ("digit-0", None)
    out = server_step(
        built,
        [Payload(row, 5.0, finite=False)],
        state,
        fedloom.Ctx(1, 0, (row,)),
    )
    assert out is state


def test_support_reaches_the_stage(quick: Quick) -> None:
    """SupportMean divides a head's update by the clients that trained it only."""
    from fedloom.stages import SupportMean

    support, plain = quick(method=Method(name="s", stage=SupportMean())), quick()
    a, b = outcome(support)[0], outcome(plain)[0]
    start = build(load_recipe()).module.state_dict()
    moved = {name: float((t - start[name]).norm()) for name, t in a.items()}
    for task in ("digit", "parity"):
        key = f"heads.{task}.weight"
        assert moved[key] > 1.5 * float((b[key] - start[key]).norm())


def test_trained_models_are_measured_before_aggregation(quick: Quick) -> None:
    _, lines = outcome(quick("evaluation.models=[global, trained]"))
    assert {m["model"] for m in lines[1]["metrics"]} == {"global", "trained"}
    _, alone = outcome(quick("method=local", "evaluation.models=[personal, trained]"))

    def values(kind: str) -> dict[object, float]:
        return {
            (m["client"], m["task"], m["metric"], m["split"]): m["value"]
            for m in alone[1]["metrics"]
            if m["model"] == kind
        }

    assert values("trained") == values("personal")


def test_a_part_in_a_worker_process_has_the_same_groups() -> None:
    labels = {"all": [0, 1, 0, 1], "some": [-1, 1, 0, -1], "few": [0, -1, -1, -1], "same": [-1, 0, 0, -1]}
    examples = TensorExamples(torch.zeros(4, 1), {task: torch.tensor(values) for task, values in labels.items()})
    part = Part(examples, np.array([1, 2, 3]), "own")
    groups = {("all",): [1, 2, 3], ("some", "same"): [1, 2], ("few",): []}
    for _ in range(2):  # the second time it has been asked before
        part = pickle.loads(pickle.dumps(part))
        assert {names: found.positions.tolist() for found, names in part.by_labels(labels)} == groups
        assert part.has(labels).keys() == {"some", "same", "few"}


def test_vectors_beside_the_model_count_the_blocks_that_a_client_has(quick: Quick) -> None:
    """SCAFFOLD sends a control variate of the model's shape each way: twice what FedAvg sends, for every client."""

    def sent(method: str) -> dict[tuple[str, str], int]:
        rounds = quick(f"method={method}", "training.rounds=1", "model.heads=own").run.traffic
        total: dict[tuple[str, str], int] = {}
        for way in ("up", "down"):
            for entry in rounds[-1][way]:
                key = way, entry["client"]
                total[key] = total.get(key, 0) + entry["bytes"] * (entry["role"] != "side" or method == "scaffold")
        return total

    plain, double = sent("fedavg"), sent("scaffold")
    assert len({*plain.values()}) > 1
    assert {key: double[key] - 8 * (key[0] == "up") for key in plain} == {key: 2 * n for key, n in plain.items()}


def test_a_task_of_one_class_is_doubted(tmp_path: Path) -> None:
    """Every prediction is right, and nothing was learned."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    np.savez(tmp_path / "t.npz", x=x, one=np.ones(40, int), two=np.arange(40) % 2)
    data = {"name": "arrays", "path": str(tmp_path / "t.npz"), "images": "x", "test_fraction": 0.2}
    recipe = {"name": "t", "model": "mlp", "method": "fedavg", "partition": {"name": "iid", "clients": 2}}
    built = build(load({**recipe, "data": {**data, "labels": {"one": "one", "two": "two"}}}))
    assert built.dataset.doubts == ("task 'one': all training examples are of one class, so there is nothing to learn",)
