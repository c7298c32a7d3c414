"""Every table that commands print, in every format, as a whole: `transcripts/` holds the commands with what they print.

The numbers in full precision are compared to 9 digits. After a wanted change, FEDLOOM_TRANSCRIPTS=write writes anew
what is printed, to be read before it is committed.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedloom as fl
from fedloom.cli import train
from fedloom.cli.app import main
from fedloom.core.settings.renamed import FOLDERS
from fedloom.errors import StateError
from fedloom.experiments.tune import Curve, chosen_of, curves_csv
from fedloom.study.comparison import compare as side_by_side
from fedloom.study.grid import Cell, open_folder, save
from fedloom.study.results import HEAD, SeedLine, Seeds, of_grid, of_seeds, read_seeds
from fedloom.study.significance import contrasts
from grid_support import DEA, FEDAVG, WORSE, benchmark, paper_grid, write_grid, write_run

TRANSCRIPTS = Path(__file__).with_name("transcripts")
SIZES = {"semseg": 0.4, "depth": 1.3, "normals": 26.0, "edge": 0.7}
ONE = {"recipe": "digits-tasks"}


def drawn(*about: object, tasks: Any = SIZES) -> dict[str, float]:
    """Draw numbers of some tasks that depend on the words about them alone; references count by their first names."""
    about = tuple(FOLDERS.get(str(word), word) for word in about)
    return {task: round(SIZES[task] * random.Random(f"{task} {about}").uniform(0.9, 1.1), 6) for task in tasks}


def complete(folder: Path) -> None:
    """Give all runs of a grid what tests over seeds and sums of bytes read."""
    for run in folder.glob("cells/*/*/*/s*"):
        info = json.loads((run / "run.json").read_text())
        hashes = {"partition_hash": run.name, "data_hash": run.parts[-4]}
        (run / "run.json").write_text(json.dumps({**hashes, "recipe_text": f"{run.parent}", **info}))
        sent = [{"client": "a", "role": "encoder", "task": None, "bytes": 1_234_567}]
        (run / "bytes.jsonl").write_text(json.dumps({"round": 1, "up": sent, "down": 2 * sent}) + "\n")


def with_loss(folder: Path) -> None:
    """Give all runs a loss of each task, a third of its metric."""
    for file in folder.rglob("metrics.jsonl"):
        line = json.loads(file.read_text())
        line["metrics"] += [{**entry, "metric": "loss", "value": entry["value"] / 3} for entry in line["metrics"]]
        file.write_text(json.dumps(line) + "\n")


def two_data_sets(folder: Path) -> None:
    """Three seeds beside the references; one combination is refused and one run is missing."""
    data = {"NYUD": ONE, "PASCAL_x": ONE}
    grid = paper_grid(data=data, seeds=[0, 1, 2], references=["centralised", "constant"])
    tasks = {"NYUD": SIZES, "PASCAL_x": ("semseg", "normals")}
    runs = {(d, *c, s): drawn(d, *c, s, tasks=tasks[d]) for d in data for c in grid.combinations for s in range(3)}
    runs = {key: of for key, of in runs.items() if key[:3] != ("PASCAL_x", "FedProx", "+DEA")}
    del runs["NYUD", "FedProx", "+DEA", 2]
    for (_, base, _, _), of in runs.items():
        of["semseg"] *= 0.5 if base == "constant" else 1.0
    write_grid(folder, grid, runs, {"PASCAL_x / FedProx / +DEA": "it_would change | nothing"})


def published(folder: Path) -> None:
    """The paper's numbers with one seed: Delta is +10.59. PASCAL has one run, one is refused, one goes on."""
    pascal = {"semseg": 40.0, "normals": 20.0}
    runs = {
        ("NYUD", "FedAvg", "-", 0): FEDAVG,
        ("NYUD", "FedAvg", "+DEA", 0): DEA,
        ("NYUD", "FedProx", "-", 0): FEDAVG | {"semseg": 20.0},
        ("NYUD", "FedProx", "+DEA", 0): FEDAVG | {"semseg": 0.0},
        ("PASCAL", "FedAvg", "-", 0): pascal,
    }
    write_grid(folder, paper_grid(), runs, {"PASCAL / FedProx / +DEA": "it_would change | nothing"})
    write_run(folder, Cell("PASCAL", "FedProx", "-", 0), pascal, status="running")


def own_models(folder: Path) -> None:
    """A line for each client's model: x has a task of its own, y and z share one. FedAvg has one model for all."""
    bases = {"Local": {"method": "local"}, "FedAvg": {"method": "fedavg"}, "FedAMP": {"method": "fedprox"}}
    more: dict[str, Any] = {"addons": {"-": {}}, "delta": "Local/-", "show": "clients", "seeds": [0, 1]}
    grid = paper_grid(data={"NYUD": ONE}, bases=bases, **more)
    tasks = {"x": ["semseg"], "y": ["depth"], "z": ["depth"]}
    cells = {("NYUD", n, "-", s): {c: drawn(n, s, c, tasks=t) for c, t in tasks.items()} for n in bases for s in (0, 1)}
    cells["NYUD", "Local", "-", 0]["x"]["semseg"] = 0.0
    cells |= {("NYUD", "FedAvg", "-", s): drawn(s, tasks=("semseg", "depth")) for s in (0, 1)}
    write_grid(folder, grid, cells)


def domains(folder: Path) -> None:
    """Two domains over three rounds, of which the best on validation data counts: not the best on test data."""
    more: dict[str, Any] = {"show": "domains", "also": ["average", "spread", "bits"], "at": "best-validation"}
    grid = paper_grid(data={"D": {"recipe": "digits-domains"}}, seeds=[0, 1], **more)
    write_grid(folder, grid, {})
    of = {"a": "photo", "b": "photo", "c": "sketch"}
    for base, addon in grid.combinations:
        for seed in (0, 1):
            test, val = (
                {r: {c: drawn(base, addon, seed, r, c, what, tasks=["semseg"]) for c in of} for r in (1, 2, 3)}
                for what in ("test", "val")
            )
            write_run(folder, Cell("D", base, addon, seed), test[3], history=test, val=val, domains=of)


def wide(folder: Path) -> None:
    """Data sets with the same tasks, too many to stand beside each other; one has not begun."""
    grid = paper_grid(data=dict.fromkeys(("1C", "2C_", "3C", "4C"), ONE))
    runs = {(d, b, "-", 0): drawn(d, b) for d in ("1C", "2C_", "3C") for b in ("FedAvg", "FedProx")}
    write_grid(folder, grid, runs | {("2C_", "FedAvg", "+DEA", 0): drawn("DEA")})


def thesis(folder: Path) -> None:
    """A thesis on tasks without a server, three runs of a loss each; it has p < 0.01 for A2 against A1."""
    losses = {"A1": (1.0931, 1.1259, 1.1206), "A2": (0.9828, 0.9792, 0.9857), "B4": (0.9730, 1.0078, 1.0013)}
    bases = {"A1": {"method": "fedavg"}, "A2": {"method": "fedprox"}, "B4": {"method": "local"}}
    seeds = (42, 123, 456)
    grid = paper_grid(data={"PASCAL": ONE}, bases=bases, addons={"-": {}}, seeds=seeds, delta="A1/-")
    runs = {("PASCAL", n, "-", s): {"normals": v} for n, of in losses.items() for s, v in zip(seeds, of, strict=True)}
    write_grid(folder, grid, runs)


def many_clients(folder: Path) -> None:
    """Four clients with one task and three with another; constant is better than all on the latter, edge."""
    bases = {"A1": {"method": "fedavg"}, "A2": {"method": "fedprox"}, "B4": {"method": "local"}}
    more: dict[str, Any] = {"addons": {"-": {}}, "delta": "A1/-", "references": ["constant"], "seeds": [1, 2, 3]}
    grid = paper_grid(data={"P": ONE}, bases=bases, **more)
    tasks = {f"c{i}": ["normals", "edge"][: 1 + (i < 3)] for i in range(4)}
    constant = {"normals": 40.0, "edge": 0.99}
    cells = [("P", n, "-", s) for n in (*bases, "constant") for s in (1, 2, 3)]
    runs = {cell: {c: drawn(*cell, c, tasks=t) for c, t in tasks.items()} for cell in cells}
    for cell in cells[-3:]:
        runs[cell] = {c: {task: constant[task] for task in t} for c, t in tasks.items()}
    write_grid(folder, grid, runs)
    with_loss(folder)


def change_run(folder: Path, *cell: Any, recipe: Any = None, **about: Any) -> None:
    """Change what a run says about itself, or keys of its recipe's section data."""
    path = Cell(*cell).folder(folder)
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, **about}))
    if recipe is not None:
        keys = yaml.safe_load((path / "recipe.yaml").read_text())
        (path / "recipe.yaml").write_text(yaml.safe_dump(keys | {"data": keys["data"] | recipe}))


def odd_pairs(folder: Path) -> None:
    """The base has numbers below 0 and of 0, and each of the other methods cannot be tested, or not as usual."""
    seeds = (1, 2, 3)

    def clients(names: str, *normals: float) -> dict[str, dict[str, float]]:
        return {c: {"normals": v, "edge": -1 - v, "semseg": 0.0} for c, v in zip(names, normals, strict=True)}

    numbers = {
        "A1": {s: clients("ab", s, s + 0.1) for s in seeds},
        "same gain": {s: clients("ab", s - 0.5, s - 0.4) for s in seeds},
        "nan": {s: clients("ab", math.nan if s == 2 else s / 2, s / 3) for s in seeds},
        "twice": {1: clients("ab", 1, 2), 2: clients("ab", 1, 2), 3: clients("ab", 3, 1)},
        "one seed": {1: clients("ab", 0.5, 0.4)},
        "others": {s: clients("bc", s / 3, s / 4) for s in seeds},
        "examples": {s: clients("ab", s / 4, s / 5) for s in seeds},
        "data": {s: clients("ab", s / 5, s / 6) for s in seeds},
        "nobody": {s: clients("xy", s / 6, s / 7) for s in seeds},
    }
    bases = {name: {"method": "fedavg", "training.rounds": n} for n, name in enumerate(numbers, 1)}
    runs: dict[tuple[Any, ...], Any] = {("P", n, "-", s): of for n, by in numbers.items() for s, of in by.items()}
    shared = {
        ("Q", n, "-", s): {c: {"normals": s + k} for c in "ab"} for k, n in enumerate(("A1", "nan")) for s in (1, 2)
    }
    grid = paper_grid(data={"P": ONE, "Q": ONE}, bases=bases, addons={"-": {}}, seeds=seeds, delta="A1/-")
    write_grid(folder, grid, runs | shared)
    change_run(folder, "P", "examples", "-", 2, partition_hash="another")
    change_run(folder, "P", "data", "-", 2, data_hash="another")
    for seed in (1, 2):  # nothing but training differs
        for name in ("A1", "nan"):
            change_run(folder, "Q", name, "-", seed, partition_hash="p", data_hash="d")


def odd_runs(folder: Path) -> None:
    """Runs that are hard to compare, and runs of one method that differ in keys of their recipes."""
    names = ("one", "running", "gave up", "data", "tasks", "rho 0.1", "rho 0.3", "size 9", *(f"m{i}" for i in range(8)))
    bases = {name: {"method": "fedavg", "training.rounds": n} for n, name in enumerate(names, 1)}
    grid = paper_grid(data={"P": ONE}, bases=bases, addons={"-": {}})
    runs = {("P", name, "-", 0): {"depth": 1.0 + n / 8} for n, name in enumerate(names) if "rho" not in name}
    runs["P", "tasks", "-", 0] = {"semseg": 1.0}
    write_grid(folder, grid, runs)
    for rho in (0.1, 0.3):
        write_run(folder, Cell("P", f"rho {rho}", "-", 0), {"depth": 1.0}, rho=rho)
        change_run(folder, "P", f"rho {rho}", "-", 0, method="fedavg + feddea")
    change_run(folder, "P", "size 9", "-", 0, recipe={"size": 9}, method="one-")
    change_run(folder, "P", "running", "-", 0, recipe={"size": 16}, status="running", partition_hash="another")
    change_run(folder, "P", "gave up", "-", 0, status="gave up")
    change_run(folder, "P", "data", "-", 0, data_hash="another")


def benchmarks(folder: Path) -> None:
    """A benchmark that can judge, and one on which centralised training is worse than training alone."""
    benchmark(folder / "good")
    benchmark(folder / "poor", centralised=WORSE, **{"centralised-by-task": WORSE})
    grid = benchmark(folder / "part")
    save(grid.model_copy(update={"data": {**grid.data, "Later": grid.data["NYUD"]}}), folder / "part", {})
    benchmark(folder / "nan", Local={"semseg": math.nan, "depth": 1.8})


MADE = {
    made.__name__: made
    for made in (
        *(two_data_sets, published, own_models, domains, wide, thesis, many_clients, odd_pairs, odd_runs, benchmarks),
    )
}  # fmt: skip
NUMBER = re.compile(r"(-?\d+\.\d+(?:e-?\d+)?)")


@pytest.mark.parametrize("name", MADE)
def test_what_is_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    MADE[name](Path("g"))
    complete(Path("g"))
    file = TRANSCRIPTS / f"{name}.txt"
    expected = file.read_text("utf-8")
    commands = re.findall(r"^\$ (.*)$", expected, re.MULTILINE)
    printed = "".join(f"$ {command}\n{_answer(command, monkeypatch, capsys)}" for command in commands)
    if os.environ.get("FEDLOOM_TRANSCRIPTS") == "write":
        file.write_text(printed, "utf-8")
    texts, numbers = NUMBER.split(printed), NUMBER.split(expected)
    assert texts[::2] == numbers[::2]
    assert [float(x) for x in texts[1::2]] == pytest.approx([float(x) for x in numbers[1::2]], rel=1e-9)


def _answer(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints, errors too, without the style of pages."""
    words = [w for word in command.split() for w in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as done:
        main()
    out, err = capsys.readouterr()
    out = re.sub(r"<style>.*?</style>", "<style></style>", out, flags=re.DOTALL)
    return out + err + (f"[exit code {done.value.code}]\n" if done.value.code else "")


def test_tables_go_to_files_and_ranks_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(tmp_path)
    thesis(Path("g"))
    complete(Path("g"))
    runs = "g/cells/PASCAL/*/*/s*"
    assert (
        _answer(f"fedloom compare {runs} --tests --format latex --out new/t.tex", monkeypatch, capsys) == "new/t.tex\n"
    )
    assert Path("new/t.tex").read_text("utf-8").startswith("\\begin{table}\n\\caption{Paired tests over seeds")
    _answer("fedloom compare g --ranks seeds --plot new/cd.svg --out t.txt", monkeypatch, capsys)
    _answer(f"fedloom compare {runs} --ranks tasks --plot cd.png", monkeypatch, capsys)
    assert "A2" in Path("new/cd.svg").read_text("utf-8")
    assert Path("cd.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_is_bold_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    published(Path("g"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert re.search(r"\x1b\[1m *30\.78\x1b", _answer("fedloom compare g", monkeypatch, capsys))


def test_a_narrow_terminal_has_a_line_a_run_where_that_is_narrower(tmp_path: Path) -> None:
    names = [f"{'long-' * 9}{i}" for i in range(5)]
    bases = {name: {"method": "fedavg", "training.rounds": n} for n, name in enumerate(names, 1)}
    grid = paper_grid(data={"P": ONE}, bases=bases, addons={"-": {}})
    write_grid(tmp_path, grid, {("P", name, "-", 0): {"depth": 1.0} for name in names})
    complete(tmp_path)
    result = side_by_side([Cell("P", name, "-", 0).folder(tmp_path) for name in names])
    labels = [f"{name}-" for name in names]
    assert result.as_table(400).head == ("", *labels)
    assert [line[0] for line in result.as_table(220).lines] == labels


def test_every_number_as_a_data_frame(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is not a grid's folder: grid.yaml is absent"):
        fl.grid(tmp_path)
    save(paper_grid(), tmp_path, {})
    with pytest.raises(StateError, match="no cell of grid paper has finished"):
        fl.grid(tmp_path).to_pandas()
    published(tmp_path)
    complete(tmp_path)
    opened = fl.grid(str(tmp_path))
    assert "FedAvg" in opened.table()
    compared = side_by_side([path.parent for path in tmp_path.glob("cells/NYUD/*/*/*/run.json")])
    pytest.importorskip("pandas")
    columns = ["seed", "round", "client", "task", "metric", "split", "model", "value"]
    assert list(opened.to_pandas()) == ["data", "base", "addon", *columns]
    assert set(opened.to_pandas()["addon"]) == {"-", "+DEA"}
    assert list(compared.to_pandas()) == ["method", *columns]
    assert set(compared.to_pandas()["method"]) == {column.label for column in compared.columns}


def test_every_seed_is_a_line(tmp_path: Path) -> None:
    two_data_sets(tmp_path / "g")
    made = of_seeds(*open_folder(tmp_path / "g"))
    assert made.records().head == HEAD
    assert HEAD[:6] == ("data", "method", "seed", "task", "metric", "value")
    (tmp_path / "g.csv").write_text(made.to_csv())
    assert read_seeds(tmp_path / "g.csv").to_csv() == made.to_csv()
    (tmp_path / "bad.csv").write_text("data,method\nx,y\n")
    with pytest.raises(StateError, match="bad.csv: the column seed is absent"):
        read_seeds(tmp_path / "bad.csv")
    head, line, *_ = made.to_csv().splitlines()
    fields = line.split(",")
    for at, found, why in (
        (HEAD.index("direction"), "up", "line 2: direction: expected max or min, found 'up'"),
        (HEAD.index("falling"), "-3", "line 2: falling: expected a number of 0 or more, found -3"),
        (HEAD.index("ratio"), "-5", "line 2: ratio: expected a number of 0 or more, found -5"),
        (HEAD.index("seed"), "first", "line 2: .*'first'"),
        (0, "\xff", "no CSV file in UTF-8"),
    ):
        changed = ",".join([*fields[:at], found, *fields[at + 1 :]])
        (tmp_path / "bad.csv").write_bytes(f"{head}\n{changed}\n".encode("latin-1"))
        with pytest.raises(StateError, match=why):
            read_seeds(tmp_path / "bad.csv")
    (tmp_path / "bad.csv").write_text(f"{head}\n{line}\n{line}\n")
    with pytest.raises(StateError, match="line 3: a second number of NYUD, FedAvg, 0, "):
        read_seeds(tmp_path / "bad.csv")
    lines = {line[:5]: line[5] for line in made.records().lines}
    assert lines["NYUD", "FedAvg", 1, "depth", "rmse"] == drawn("NYUD", "FedAvg", "-", 1)["depth"]
    assert lines["PASCAL_x", "constant", 0, "semseg", "miou"] == drawn("PASCAL_x", "constant", "-", 0)["semseg"] / 2
    assert ("NYUD", "FedProx +DEA", 2, "depth", "rmse") not in lines
    assert len(lines) == len(made.to_csv().splitlines()) - 1


def test_the_demo_says_each_methods_change(tmp_path: Path) -> None:
    thesis(tmp_path / "g")
    complete(tmp_path / "g")
    sentences = train._gains(tmp_path / "g")
    tested = [t for t in contrasts(of_grid(*open_folder(tmp_path / "g"))).tests if t.row is None and t.gains]
    assert len(sentences) == len(tested) > 0
    assert all(s.startswith(t.method) and f"{t.mean:+.1f} %" in s for s, t in zip(sentences, tested, strict=True))


@pytest.mark.parametrize(
    "label", ["=1+1", "'=1+1", "''@a", "+DEA (a)", "'+DEA (a)", "+DEA", "-", "'a", "'", "@", '"=a"', "=a,b"]
)
def test_labels_that_look_like_formulas_are_read_as_they_were(label: str, tmp_path: Path) -> None:
    line = SeedLine(label, label, 0, label, label, 0.5, "max", 0.1, 0.2, 3.0)
    made = Seeds("s", (line,))
    (tmp_path / "s.csv").write_text(made.to_csv())
    assert read_seeds(tmp_path / "s.csv").lines == made.lines
    curve = Curve(label, {'{"x": 1}': 2.0}, False)
    (tmp_path / "curves.csv").write_text(curves_csv([(label, curve)]))
    assert chosen_of(tmp_path / "curves.csv") == {label: {label: {"x": 1}}}
    assert not re.search(r"(^|[,\n])\"?([=@]|[+-][^,]*\()", made.to_csv())
