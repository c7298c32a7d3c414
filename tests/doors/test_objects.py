"""Test what goes in as an object, and what a result gives back."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedloom as fl
from fedloom.core.lazy import need
from fedloom.data import Pool
from fedloom.engines.api import recipe_of
from fedloom.errors import DataError, RecipeError, RunWarning, StateError
from fedloom.experiments import grid_run
from fedloom.federation.rounds.build import build
from fedloom.tasks import Classification

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
SHORT: dict[str, Any] = {"rounds": 2, "steps": 2, "batch_size": 8}


class Rows(Dataset[Any]):
    """A map-style data set, as of files: it gives one example at a time, with some noise while it trains."""

    def __init__(self, part: slice, form: str, noise: float = 0.0) -> None:
        self.x, self.y, self.form, self.noise = X[part], Y[part], form, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x, y = self.x[i] + self.noise * torch.randn(6), int(self.y[i])
        return {"pair": (x, y), "tasks": (x, {"sort": y}), "mapping": {"features": x.numpy(), "label": y}}[self.form]


def federation(train: Any = None, tasks: Any = None, **options: Any) -> fl.Federation:
    clients = {"ann": fl.Client((X[:30], Y[:30]) if train is None else train), "bob": fl.Client((X[30:50], Y[30:50]))}
    tasks = {"sort": fl.task(classes=3)} if tasks is None else tasks
    return fl.Federation(clients, tasks, test=(X[50:], Y[50:]), **options)


@pytest.mark.parametrize("form", ["pair", "tasks", "mapping"])
def test_every_form_of_data_gives_the_same_numbers(form: str) -> None:
    keys: dict[str, Any] = {"inputs": "features", "labels": {"sort": "label"}} if form == "mapping" else {}
    each = [federation(), federation(Rows(slice(30), form), **keys), federation((X[:30].numpy(), {"sort": Y[:30]}))]
    tables = [fl.run(fed, model="mlp", **SHORT).run.rows() for fed in each]
    assert tables[0] == tables[1] == tables[2]


def test_a_comparison_is_not_continued_with_a_model_of_other_weights(tmp_path: Path) -> None:
    def ask(seed: int) -> str:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        options: dict[str, Any] = {"seeds": 1, "budget": {"trials": 1, "seeds": (100,)}, "tell": lambda text: None}
        return str(fl.compare(federation(), model=net, folder=tmp_path / "c", **options, **SHORT))

    assert ask(0) == ask(0)
    with pytest.raises(StateError, match=r"began with a model of other weights: pass the same ones .*or delete"):
        ask(1)
    for start in (tmp_path / "c").rglob("start.safetensors"):
        start.write_bytes(b"{}")
    with pytest.raises(DataError, match=r"start\.safetensors: cannot be read"):
        ask(0)


def test_what_a_data_set_draws_follows_from_the_seed() -> None:
    noisy = federation(Rows(slice(30), "pair", noise=0.5))
    one, two, other = (fl.run(noisy, model="mlp", seed=s, **SHORT).run.rows() for s in (0, 0, 1))
    assert one == two
    assert [r["value"] for r in one] != [r["value"] for r in other]
    assert [r["value"] for r in one] != [r["value"] for r in fl.run(federation(), model="mlp", **SHORT).run.rows()]


def test_clients_may_have_test_data_and_validation_data_of_their_own() -> None:
    fed = fl.Federation(
        {
            "ann": fl.Client((X[:20], Y[:20]), val=(X[20:25], Y[20:25]), test=(X[50:55], Y[50:55])),
            "bob": fl.Client((X[25:50], Y[25:50]), tasks={"sort": 2.0}, test=(X[55:], Y[55:])),
        },
        {"sort": Classification("any", 3)},
    )
    built = build(recipe_of(fed, "mlp"))
    ann, bob = (built.federation.clients[name] for name in ("ann", "bob"))
    assert [len(ann.part(s)) for s in ("train", "val", "test")] == [20, 5, 5]
    assert torch.equal(built.dataset.test.batch(bob.test.index, torch.device("cpu"))[0], X[55:])
    assert (ann.domain, bob.tasks["sort"][1], built.dataset.tasks[0].name) == ("ann", 2.0, "sort")


def test_a_client_without_test_data_is_not_tested_on_those_of_another() -> None:
    clients = {"ann": fl.Client((X[:20], Y[:20]), test=(X[50:55], Y[50:55])), "bob": fl.Client((X[20:50], Y[20:50]))}
    with pytest.warns(RunWarning, match="no test data for bob, so numbers on test data are those of the other clients"):
        alone = fl.Federation(clients, {"sort": fl.task(classes=3)})
    rows = fl.run(alone, model="mlp", **SHORT).run.rows()
    assert {row["client"] for row in rows if row["split"] == "test"} == {"ann"}
    shared = fl.Federation(clients, {"sort": fl.task(classes=3)}, test=(X[55:], Y[55:]))
    built = build(recipe_of(shared, "mlp"))
    ann, bob = (built.federation.clients[name].test for name in ("ann", "bob"))
    assert (ann.name, bob.name) == ("own", "shared")
    assert torch.equal(built.dataset.test.batch(bob.index, torch.device("cpu"))[0], X[55:])


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ([[0, 5, 9], [1, 2]], {"c00": [0, 5, 9], "c01": [1, 2]}),
        ({"ann": [3, 1], "bob": np.arange(10, 20)}, {"ann": [1, 3], "bob": list(range(10, 20))}),
        (lambda pool, seed: [range(0, len(pool), 2)], {"c00": list(range(0, 50, 2))}),
        ({"name": "listed", "clients": {"eve": [4, 5]}, "val_fraction": 0}, {"eve": [4, 5]}),
    ],
)
def test_one_data_set_is_dealt_out(partition: Any, expected: dict[str, list[int]]) -> None:
    data = TensorDataset(X[:50], Y[:50])
    fed = fl.Federation(data=data, partition=partition, tasks={"sort": fl.task(classes=3)}, test=(X[50:], Y[50:]))
    assert {s.client: sorted(s.index.tolist()) for s in fed.partition().shares} == expected
    assert "clients with train + validation examples" in repr(fed)
    assert fl.run(fed, model="mlp", **SHORT).status == "finished"


def test_a_partition_by_name_is_the_recipes_own() -> None:
    fed = fl.Federation(data=(X, Y), partition={"name": "iid", "clients": 3}, tasks={"sort": fl.task(classes=3)})
    recipe = recipe_of(fed, "mlp")
    named = recipe.partition.registry()["iid"].function(Pool.of(fed.dataset), 4, clients=3)
    assert fed.partition(4).hash == named.hash != fed.partition(5).hash
    assert build(recipe_of(fed, "mlp", seed=4)).partition.hash == named.hash


@pytest.mark.parametrize(
    "wrong",
    [{"weight": -1}, {"weight": float("inf")}, {"weight": True}, {"classes": 1}, {"classes": True}, {"classes": 2.0}],
)
def test_a_task_has_at_least_two_classes_and_a_finite_weight(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"task: {next(iter(wrong))}=.* found, expected a"):
        fl.task(**wrong)
    assert fl.task(classes=2, weight=0).weight == 0


def test_a_real_number_is_a_task_too() -> None:
    tasks = {"size": fl.task(metrics={"worst": (lambda o, t: (o[:, 0] - t).abs().max(), "min")})}
    fed = fl.Federation({"ann": fl.Client((X, X[:, 0] * 2))}, tasks)
    info = fl.run(fed, model=nn.Linear(6, 1), **SHORT).run.info["tasks"]["size"]
    assert (info["kind"], info["primary"], info["metrics"]["worst"]) == ("regression", "worst", "min")


def test_the_trivial_answer_has_a_loss_of_ones_own() -> None:
    """A constant answer is a view of a parameter, also where no gradient is taken."""

    def loss(**of: Any) -> float:
        fed = federation(tasks={"sort": fl.task(classes=3, **of)})
        return fl.run(fed, model="mlp", method="constant", **SHORT).run.final("test").values["sort"]["loss"]

    assert loss(loss=lambda o, t: 2 * nn.functional.cross_entropy(o, t)) == pytest.approx(2 * loss())


def test_metrics_are_of_the_data_set_and_not_means_over_batches() -> None:
    """The share of the most frequent prediction is no mean over batches; labels that are missing are left out."""
    seen: list[int] = []

    def mode(outputs: torch.Tensor, labels: torch.Tensor) -> float:
        seen.append(len(labels))
        return float(outputs.argmax(1).bincount().max()) / len(labels)

    labels = Y[50:].clone()
    labels[0] = -1
    fed = fl.Federation(
        {"ann": fl.Client((X[:50], Y[:50]))}, {"sort": fl.task(classes=3, metrics={"mode": mode})}, (X[50:], labels)
    )
    result = fl.run(fed, model=nn.Linear(6, 3), evaluation={"batch_size": 2, "splits": ["test"]}, **SHORT)
    assert set(seen) == {9}
    net = result.model()
    expected = float(net(X[51:]).argmax(1).bincount().max()) / 9
    last = [r["value"] for r in result.run.rows() if r["metric"] == "mode" and r["round"] == 2]
    assert last == [expected]


def test_objects_of_torchmetrics_are_updated_over_the_data_set() -> None:
    if find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not here")
    torchmetrics = need("torchmetrics", "test")
    mine = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    fed = federation(tasks={"sort": fl.task(classes=3, metrics={"f1": mine})})
    result = fl.run(fed, model=nn.Linear(6, 3), evaluation={"batch_size": 3}, **SHORT)
    mine.update(result.model()(X[50:]), Y[50:])
    last = [r["value"] for r in result.run.rows() if (r["metric"], r["round"], r["split"]) == ("f1", 2, "test")]
    assert last == pytest.approx([float(mine.compute())] * len(last))
    assert last


def test_an_encoder_with_heads_serves_methods_that_look_at_features() -> None:
    net = fl.model(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), heads="linear")
    result = fl.run(federation(), model=net, method="moon", **SHORT)
    assert result.status == "finished"
    own = fl.model(nn.Linear(6, 8), heads={"sort": nn.Sequential(nn.ReLU(), nn.Linear(8, 3))})
    assert set(fl.run(federation(), model=own, method="local", **SHORT).model("ann").heads) == {"sort"}


def test_a_factory_is_drawn_from_the_seed_and_a_module_is_not() -> None:
    def weights(model: Any, seed: int) -> torch.Tensor:
        return next(build(recipe_of(federation(), model, seed=seed)).module.parameters()).clone()

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

    assert torch.equal(weights(Net, 0), weights(lambda shape, tasks: nn.Linear(shape[0], tasks[0].channels), 0))
    assert not torch.equal(weights(Net, 0), weights(Net, 1))
    net = Net()
    assert torch.equal(weights(net, 0), weights(net, 1))


def test_roles_are_guessed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.decoder, self.sort, self.fc = (nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3),
                                                           nn.Linear(3, 3))  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.sort(self.decoder(self.body(x))))

    roles = {
        b.name: (b.role, b.task) for b in build(recipe_of(federation(), Net())).layout.blocks if "weight" in b.name
    }
    assert list(roles.values()) == [("encoder", None), ("decoder", None), ("head", "sort"), ("head", None)]
    assert "head of sort: sort.weight, sort.bias" in capsys.readouterr().err
    mine = fl.model(Net(), roles={"body.*": "encoder", "*": ("head", "sort")})
    blocks = build(recipe_of(federation(), mine)).layout.blocks
    assert [b.role for b in blocks if "weight" in b.name] == ["encoder", "head", "head", "head"]
    assert not capsys.readouterr().err


def test_what_a_run_of_a_comparison_needs_is_asked_without_its_notes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(by_name: Any) -> tuple[dict[str, str], dict[str, int]]:
        print("a note", file=sys.stderr)
        return {}, dict.fromkeys(by_name, 7)

    monkeypatch.setattr(grid_run, "_probe", noisy)
    monkeypatch.setattr(grid_run, "_ask", lambda function, *arguments: function(*arguments))
    assert grid_run.bytes_of(recipe_of(federation(), nn.Linear(6, 3))) == 7
    assert not capsys.readouterr().err


class TwoHeads(nn.Module):
    """Two tasks with one weight for both heads, and a third head whose weight the body uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({task: nn.Linear(6, 3) for task in ("sort", "also")} | {"back": nn.Linear(6, 6)})
        self.heads["also"].weight = self.heads["sort"].weight
        self.heads["back"].weight = self.body.weight

    def forward(self, x: torch.Tensor) -> Any:
        return {task: head(self.body(x))[:, :3] for task, head in self.heads.items()}


def test_a_weight_that_heads_share_is_trained_where_any_of_them_is(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {name: fl.task(classes=3) for name in ("sort", "also", "back")}
    clients = {"ann": fl.Client((X[:30], {"sort": Y[:30]})), "bob": fl.Client((X[30:], {"also": Y[30:]}))}
    clients["eve"] = fl.Client((X[:30], {"back": Y[:30]}))
    net = TwoHeads()
    result = fl.run(fl.Federation(clients, tasks), model=net, method="local", **SHORT)
    for who in ("ann", "bob"):
        trained = result.model(who)
        assert trained.heads["also"].weight is trained.heads["sort"].weight
        assert not torch.equal(trained.heads["also"].weight, net.heads["also"].weight)
    assert "encoder: body.weight, body.bias" in (said := capsys.readouterr().err)
    assert "\n  head: heads.sort.weight\n" in said
    assert "head of also: heads.also.bias" in said
    own = fl.model(nn.Linear(6, 6), heads={"sort": (head := nn.Linear(6, 3)), "also": head, "back": nn.Linear(6, 3)})
    with pytest.raises(RecipeError, match="the head of 'sort' and the head of 'also' share parameters"):
        fl.run(fl.Federation(clients, tasks), model=own, **SHORT)


@pytest.mark.parametrize(("kind", "outputs"), [("classification", 3), ("regression", 1)])
def test_an_output_per_step_is_refused(kind: Any, outputs: int) -> None:
    steps = X[:, None].expand(-1, 8, -1)
    fed = fl.Federation(
        {"ann": fl.Client((steps, Y.float() if outputs == 1 else Y))},
        {"sort": fl.task(kind=kind, classes=3 if outputs == 3 else None)},
    )
    net = nn.Sequential(nn.Conv1d(8, outputs, 1))
    with pytest.raises(RecipeError, match=rf"gives shape \(1, {outputs}, 6\) for one example of task 'sort'"):
        fl.run(fed, model=net, **SHORT)


class Recurrent(nn.Module):
    """Inputs as series of six steps: with `first` as torch's LSTM wants them, else examples stand for steps."""

    def __init__(self, first: bool, noise: float = 0.0) -> None:
        super().__init__()
        self.lstm, self.head, self.noise = nn.LSTM(1, 5, batch_first=first), nn.Linear(5, 3), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., None] + self.noise * torch.randn(*x.shape, 1)
        return self.head(self.lstm(x)[0][:, -1])


def test_a_model_that_mixes_the_examples_of_a_batch_is_named(recwarn: pytest.WarningsRecorder) -> None:
    """One that draws at random, or normalises with statistics of its own, does not mix."""
    normed = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    for net in (Recurrent(True), Recurrent(True, noise=1.0), normed, nn.Linear(6, 3)):
        build(recipe_of(federation(), net, None))
    assert not [warning for warning in recwarn if "gives an example" in str(warning.message)]
    with pytest.warns(fl.errors.RunWarning, match="Recurrent gives an example other outputs where"):
        build(recipe_of(federation(), Recurrent(False), None))


def test_layers_that_take_their_shape_from_the_first_input(tmp_path: Path) -> None:
    def net() -> Any:
        return fl.model(nn.Sequential(nn.LazyLinear(8), nn.ReLU()), heads="linear")

    whole = fl.run(federation(), model=net(), **SHORT)
    fl.run(federation(), model=net(), folder=tmp_path / "run", **{**SHORT, "rounds": 1})
    resumed = fl.resume(tmp_path / "run", federation=federation(), model=net(), rounds=2)
    assert whole.run.rows() == resumed.run.rows()


def test_a_result_gives_tables_a_page_and_the_users_module() -> None:
    net = nn.Linear(6, 3)
    result = fl.run(federation(), model=net, method=fl.methods.fedavg(), **SHORT)
    page = result._repr_html_()
    assert "<th>sort</th>" in page
    assert "<svg" in page
    assert f"fedloom report {result.folder}" in page
    assert type(result.model("ann")) is nn.Linear
    assert not torch.equal(result.model("ann").weight, net.weight)
    folder = result.folder
    del result
    gc.collect()
    assert not folder.exists()
    with pytest.raises(
        StateError, match="it was temporary and is gone with its result; keep the result, or pass folder= to the run"
    ):
        fl.resume(folder, rounds=3)
    pandas = pytest.importorskip("pandas")
    frame = fl.run(federation(), model=net, **SHORT).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame) == ["seed", "round", "client", "task", "metric", "split", "model", "value"]


def test_methods_are_compared(tmp_path: Path) -> None:
    mine = fl.methods.fedavg().plus(fl.stages.TopMagnitude(0.5))
    found = fl.compare(federation(), model="mlp", methods=["local", mine], seeds=2, folder=tmp_path, **SHORT)
    assert [c.label for c in found.columns] == ["local", "fedavg + TopMagnitude"]
    assert [len(c.runs) for c in found.columns] == [2, 2]
    assert "Δm" in str(found)
    if find_spec("pandas") is not None:
        assert set(found.to_pandas()["method"]) == {"local", "fedavg + TopMagnitude"}


def test_a_comparison_of_named_methods_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    rules = [fl.methods.fedprox(mu=mu) for mu in (0.1, 10.0)]

    def ask(*methods: Any) -> Any:
        options: dict[str, Any] = {"methods": ["local", *methods], "seeds": np.arange(2), "tell": heard.append}
        return fl.compare(federation(), model="mlp", folder=tmp_path / "c", **options, **SHORT)

    whole = ask(*rules)
    assert [c.label for c in whole.columns] == ["local", "fedprox [mu=0.1]", "fedprox [mu=10.0]"]
    assert heard[0].startswith("[1/6] 0-local-s0; 0:0")
    done = (tmp_path / "c/1-fedprox-s1/run.json").stat().st_mtime_ns
    with monkeypatch.context() as context:
        context.setattr("fedloom.engines.api.run_rounds", Mock(side_effect=OSError("the power went off")))
        with pytest.raises(OSError, match="the power went off"):
            ask(*rules, "fedavg")
    assert ask(*rules, "fedavg").to_text().count("fedavg") == 1
    assert (tmp_path / "c/1-fedprox-s1/run.json").stat().st_mtime_ns == done
    with pytest.raises(StateError, match="2-fedprox-s0: .*the method has changed since the run began .*; delete the"):
        ask(rules[0], fl.methods.fedprox(mu=1.0))
    with pytest.raises(RecipeError, match="unknown method 'fedavgg'"):  # before any other method runs
        fl.compare(federation(), model="mlp", folder=tmp_path / "d", methods=["local", "fedavgg"], **SHORT)
    assert not (tmp_path / "d").exists()


def test_a_recipe_takes_keywords_and_names_too() -> None:
    recipe = recipe_of("digits-tasks")
    assert recipe_of(recipe, method="fedprox", rounds=3, workers=2, training={"epochs": 1}).method.name == "fedprox"
    changed = recipe_of(recipe, {"name": "mlp", "heads": "own"}, rounds=3, training={"epochs": 1})
    assert (changed.model.params, changed.model.heads) == ({"hidden": [128, 64]}, "own")
    assert (changed.training.rounds, changed.training.epochs) == (3, 1)
    assert recipe_of(recipe, method="fedprox").method.name == "fedprox"
    assert recipe_of(recipe) is not None
