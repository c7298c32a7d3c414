"""Data never becomes code that its reader did not allow: one test per door, with a trick that needs no module of the
attacker's and with a module of the attacker's own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app, message_of
from fedloom.core.lazy import need
from fedloom.core.settings import trust
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.trust import ALLOW, Origin, admit, located, names_in
from fedloom.data.folders import picture
from fedloom.data.inputs import opened
from fedloom.errors import DataError, RecipeError, UserError
from fedloom.experiments.export.bundle import Bundle
from fedloom.experiments.tournament import planned
from fedloom.federation.recipes import load
from fedloom.federation.recipes.loader import names, read
from fedloom.study.grid import load_grid, recipes

MINE = """
import pathlib
import fedloom as fl
from fedloom.methods import Method

with open("imported", "a") as file:
    file.write("again ")


def trimmed(*, limit: float = 0.5) -> Method:
    return fl.methods.fedavg()


def reckless(*, file: str = "owned"):
    pathlib.Path(file).touch()
"""
QUICK = ["training.rounds=1", "training.epochs=1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that somebody sent: recipes, and a module beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nfit = len\n")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("evil", "mine"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def tricks(folder: Path) -> dict[str, Any]:
    """Sections that would run code: one with nothing but the standard library, one with the attacker's module."""
    return {
        "timeit": {"name": "timeit:timeit", "setup": f"open({str(folder / 'owned')!r}, 'w')", "timer": None},
        "evil": {"name": "evil:fit"},
    }


def changed(value: dict[str, Any], path: str, section: Any) -> dict[str, Any]:
    """The recipe with a section put into a place of it."""
    *above, last = path.split("/")
    level = value
    for key in above:
        level[key] = level = level.get(key) if isinstance(level.get(key), dict) else {}
    level[last] = section
    return value


PLACES: dict[str, Callable[[dict[str, Any]], tuple[str, Any]]] = {
    "data": lambda trick: ("data", trick),
    "data in data": lambda trick: ("data", {"name": "several", "sets": {"a": trick}}),
    "partition": lambda trick: ("partition", trick),
    "model": lambda trick: ("model", trick),
    "method": lambda trick: ("method", trick),
    "add-on": lambda trick: ("method/add", {trick["name"]: {k: v for k, v in trick.items() if k != "name"}}),
    "codec": lambda trick: ("method/codec", trick["name"]),
    "attack": lambda trick: ("attack", trick),
    "graph": lambda trick: ("peers/graph", trick),
    "loss": lambda trick: ("tasks/digit", {"loss": trick["name"]}),
    "metric": lambda trick: ("tasks/digit", {"metrics": {"m": [trick["name"], "min"]}}),
}


def plain(name: str = "digits-tasks") -> dict[str, Any]:
    value: dict[str, Any] = read(name).value
    value["method"] = {"name": "fedavg"}
    return value


def refuses(*command: str) -> str:
    """Return what the command line says; it must refuse, in a sentence, with the names that it would import."""
    done = CliRunner().invoke(app, list(command))
    assert isinstance(done.exception, Exception), done.output
    text = message_of(done.exception)
    assert text is not None, done.exception
    assert "Nothing was imported" in text
    assert "--allow-code" in text
    assert ALLOW in text
    assert not Path("owned").exists()
    assert "evil" not in sys.modules
    return text


@pytest.mark.parametrize("trick", ["timeit", "evil"])
@pytest.mark.parametrize("place", PLACES)
def test_a_recipe_file(here: Path, place: str, trick: str) -> None:
    section = tricks(here)[trick]
    (here / "r.yaml").write_text(yaml.safe_dump(changed(plain(), *PLACES[place](section))))
    code = located(section["name"])
    assert code.file is not None
    assert str(code) in refuses("show", "r.yaml")
    with pytest.raises(RecipeError, match="Nothing was imported"):
        fl.run("r.yaml", here / "run")
    assert not (here / "run").exists()


def test_a_refusal_names_every_module_before_any_is_imported(here: Path) -> None:
    value = changed(plain(), "method", {"name": "mine:trimmed", "add": {"evil:fit": {}}})
    (here / "r.yaml").write_text(yaml.safe_dump(changed(value, "model", tricks(here)["timeit"])))
    text = refuses("run", "r.yaml")
    assert all(name in text for name in ("mine:trimmed (mine.py, sha256 ", "evil:fit (evil.py", "timeit:timeit ("))
    assert "--allow-code evil,mine,timeit" in text
    assert "mine" not in sys.modules
    digest = hashlib.sha256((here / "mine.py").read_bytes()).hexdigest()
    assert digest in text  # as sha256sum prints it


@pytest.mark.parametrize("trick", ["timeit", "evil"])
def test_a_grid_a_tournament_and_their_folders(here: Path, trick: str) -> None:
    section = tricks(here)[trick]
    grid = {"name": "g", "data": {"D": {"recipe": changed(plain(), "model", section)}}, "bases": {"A": {}}}
    (here / "g.yaml").write_text(yaml.safe_dump(grid))
    assert section["name"] in refuses("grid", "g.yaml", "--dry-run")
    grid = {"name": "g", "data": {"D": {"recipe": plain()}}, "bases": {"A": {"method.name": section["name"]}}}
    (here / "g" / "cells").mkdir(parents=True)
    (here / "g" / "grid.yaml").write_text(yaml.safe_dump(grid))
    assert section["name"] in refuses("grid", "g", "--dry-run")
    with pytest.raises(RecipeError, match="Nothing was imported"):
        recipes(load_grid(here / "g" / "grid.yaml"))
    tournament = {"name": "t", "recipe": changed(plain(), "data", section), "methods": ["fedavg"], "tries": 2}
    tournament |= {"tuning": [100], "least": 2, "most": 3}
    (here / "t").mkdir()
    (here / "t" / "tournament.yaml").write_text(yaml.safe_dump(tournament))
    with pytest.raises(RecipeError, match="Nothing was imported"):
        planned("t", (), None, (), {})
    tournament |= {"recipe": plain(), "methods": [f"fedavg+{section['name']}"]}
    (here / "t" / "tournament.yaml").write_text(yaml.safe_dump(tournament))
    with pytest.raises(RecipeError, match="Nothing was imported"):
        planned("t", (), None, (), {})
    assert not (here / "owned").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's run and what they exported of it."""
    folder = tmp_path_factory.mktemp("sent")
    fl.run("digits-tasks", folder / "run", overrides=QUICK)
    done = CliRunner().invoke(app, ["export", str(folder / "run"), "--out", str(folder / "bundle")])
    assert done.exit_code == 0, done.output
    return folder


def altered(file: Path, section: Any) -> str:
    """The text of a recipe with another model, and in run.json what a sender could write to be believed."""
    value = changed(yaml.safe_load(file.read_text("utf-8")), "model", section)
    return yaml.safe_dump(value, sort_keys=False)


@pytest.mark.parametrize("trick", ["timeit", "evil"])
def test_a_run_folder_even_if_it_records_the_true_source(here: Path, finished: Path, trick: str) -> None:
    section = tricks(here)[trick]
    source = located(section["name"])
    assert source.file is not None
    run = here / "run"
    subprocess.run(["cp", "-r", str(finished / "run"), str(run)], check=True)
    (run / "recipe.yaml").write_text(altered(run / "recipe.yaml", section))
    info = json.loads((run / "run.json").read_text())
    digest = hashlib.sha256(source.file.read_bytes()).hexdigest()[:16]
    info["origins"] = {section["name"]: {"module": section["name"].partition(":")[0], "source": digest}}
    info.pop("check")
    (run / "run.json").write_text(json.dumps(info))
    for command in ("resume run", "export run --out b", "relatedness run", "run --from run -q --out c"):
        assert section["name"] in refuses(*command.split())
    with pytest.raises(RecipeError, match="Nothing was imported"):
        fl.resume(run)


def test_the_card_of_a_bundle_names_the_code_that_it_needs(here: Path) -> None:
    trick = "method={name: 'mine:trimmed'}"
    out = fl.export(fl.run("digits-tasks", here / "run", overrides=[*QUICK, trick]), here / "bundle")
    assert "names code, mine:trimmed, which is not in this folder" in (out / "README.md").read_text("utf-8")


@pytest.mark.parametrize("trick", ["timeit", "evil"])
def test_a_bundle(here: Path, finished: Path, trick: str) -> None:
    section = tricks(here)[trick]
    subprocess.run(["cp", "-r", str(finished / "bundle"), "bundle"], check=True)
    (here / "bundle" / "recipe.yaml").write_text(altered(here / "bundle" / "recipe.yaml", section))
    for command in ("predict bundle r.png", "merge bundle bundle --base bundle --out merged"):
        assert section["name"] in refuses(*command.split())
    with pytest.raises(RecipeError, match="Nothing was imported"):
        Bundle.read(here / "bundle")


def test_what_is_typed_is_imported_and_must_be_what_its_place_expects(here: Path) -> None:
    assert load("digits-tasks", ["method=mine:trimmed"]).method.entry.name == "mine:trimmed"
    expected = r"a function whose return is not annotated found, expected Method: an object, a subclass"
    with pytest.raises(RecipeError, match=expected):
        load("digits-tasks", ["method={name: 'mine:reckless', file: owned}"])
    for name, what in (
        ("method=mine:pathlib.Path", r"the class Path found, expected Method"),
        ("model=fractions:Fraction", r"the class Fraction found, expected Module or Own"),
        ("model=os:environ", r"an object of _Environ found, expected Module or Own"),
        ("data=mine:trimmed", r"a function that returns Method found, expected Dataset or Federation"),
    ):
        with pytest.raises(RecipeError, match=what):
            load("digits-tasks", [name])
    with pytest.raises(RecipeError, match="a function whose return is not annotated"):
        load("digits-tasks", [f"data={json.dumps(tricks(here)['timeit'])}"])
    assert not (here / "owned").exists()
    (here / "later.py").write_text("def make() -> '__import__(\"absent\").Method':\n    pass\n")
    assert load("digits-tasks", ["method=later:make"]).method.name == "later:make"  # its annotation by name


def test_a_flag_or_a_variable_allows_a_package_and_nothing_else(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "r.yaml").write_text(yaml.safe_dump(changed(plain(), "method", "mine:trimmed")))
    assert "evil:fit" not in refuses("show", "r.yaml", "--allow-code", "evil,min,mine.inner")
    said = CliRunner().invoke(app, ["show", "r.yaml", "--allow-code", "other,mine"])
    assert said.exit_code == 0, said.output
    digest = hashlib.sha256((here / "mine.py").read_bytes()).hexdigest()
    assert f"code: mine:trimmed (mine.py, sha256 {digest})" in said.output
    monkeypatch.setattr(trust, "_allowed", set())
    monkeypatch.setenv(ALLOW, "mine")
    told = CliRunner().invoke(app, ["show", "r.yaml", "--json"])
    assert json.loads(told.output)["code"] == [
        {"name": "mine:trimmed", "file": str(here / "mine.py"), "sha256": digest}
    ]


def fedloom(*command: str) -> tuple[int, str]:
    """Exit code and words of a command as in a new process: nothing is allowed or imported yet."""
    trust._allowed.clear()
    sys.modules.pop("mine", None)
    done = CliRunner().invoke(app, list(command))
    text = message_of(done.exception) if isinstance(done.exception, Exception) else None
    return (done.exit_code, done.output) if text is None else (2, text)


def test_a_run_of_ones_own_goes_on_until_its_source_changes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = fedloom("run", "digits-tasks", "method=mine:trimmed", *QUICK, "-q", "--out", "run")
    assert code == 0, said
    code, said = fedloom("resume", "run", "training.rounds=2", "-q")
    assert code == 0, said
    (here / "imported").unlink()
    with monkeypatch.context() as patch:
        patch.setenv(trust.CONFIG, str(here / "other"))  # not the user who began it
        assert fedloom("resume", "run", "training.rounds=3", "-q")[0] == 2
    (here / "mine.py").write_text(MINE + "\n# changed\n")
    code, said = fedloom("resume", "run", "training.rounds=3", "-q")
    assert code == 2
    assert "mine:trimmed (mine.py" in said
    assert not (here / "imported").exists()
    code, said = fedloom("resume", "run", "training.rounds=3", "-q", "--allow-code", "mine")
    assert code == 0, said


@pytest.mark.parametrize(("answer", "code"), [("n", 2), ("y", 0)])
def test_a_terminal_asks_once(here: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    (here / "r.yaml").write_text(yaml.safe_dump(changed(plain(), "method", "mine:trimmed")))
    monkeypatch.setenv(trust.CONFIG, str(here / "config"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "show", "r.yaml"], cwd=here, stdin=slave, stdout=subprocess.DEVNULL,
        stderr=slave,
    )  # fmt: skip
    os.close(slave)
    os.write(master, f"{answer}\n".encode())
    assert process.wait(60) == code
    assert "r.yaml uses mine:trimmed (mine.py, sha256 " in os.read(master, 4096).decode()
    os.close(master)
    assert fedloom("show", "r.yaml")[0] == code  # where nobody can be asked
    (here / "mine.py").write_text(MINE + "\n# changed\n")
    assert fedloom("show", "r.yaml")[0] == 2


def test_a_package_has_the_checksum_of_all_its_modules(here: Path) -> None:
    package = here / "pack" / "inner"
    package.mkdir(parents=True)
    for file in ("pack/__init__.py", "pack/inner/__init__.py", "pack/inner/deep.py"):
        (here / file).write_text("raise RuntimeError('imported')\n")
    code = located("pack.inner.deep:thing")
    assert (code.file, code.root) == (package / "deep.py", here / "pack")
    before = code.sha256
    (here / "pack" / "__init__.py").write_text("raise RuntimeError('other')\n")
    assert located("pack.inner.deep:thing").sha256 != before
    assert located("nothing.here:thing").file is None
    assert "no source found" in str(located("nothing.here:thing"))
    assert located("os.path:join").file is not None


def test_a_checksum_covers_all_that_python_imports(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one/space/other", "two/space/deep/deeper"):
        (here / folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(here / "one"), str(here / "two"), *sys.path])
    for name in ("space.deep.mod", "space.deep.deeper.mod"):
        file = here / "two" / (name.replace(".", "/") + ".py")
        file.write_text("x = 1\n")
        code = located(f"{name}:x")
        before = code.sha256
        file.write_text("x = 2\n")
        assert code.file == file
        assert before != located(f"{name}:x").sha256
    pack = here / "odd"
    (pack / "folder.py").mkdir(parents=True)
    (pack / "__init__.py").touch()
    (pack / "dangling.py").symlink_to("nowhere")
    os.mkfifo(pack / "pipe.py")
    sums = {located("odd:x").sha256}
    for compiled in ("core.so", "core.pyc"):
        (pack / compiled).touch()
        sums.add(located("odd:x").sha256)
    assert len(sums) == 3
    (pack / "link").symlink_to(here / "two", target_is_directory=True)
    assert located("odd:x").sha256 == trust.UNKNOWN
    trust.keep_run(["odd:x"])
    with pytest.raises(RecipeError, match="Nothing was imported"):
        admit(["odd:x"], Origin.FOLDER, "a run")


def test_a_grid_asks_once_and_a_folder_of_ones_own_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(trust, "_agreed", lambda where, codes: asked.append(f"{where} {[c.name for c in codes]}"))
    bases = {"A": {"method.name": "mine:trimmed"}, "B": {"method.add.evil:fit": {}}}
    value = {"name": "g", "data": {"D": {"recipe": "r.yaml"}}, "bases": bases, "references": []}
    (here / "r.yaml").write_text(yaml.safe_dump(plain()))
    (here / "g.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(RecipeError, match="(?s)^grid g names code .*mine:trimmed.*evil:fit.*Nothing was imported"):
        recipes(load_grid("g.yaml"))
    assert asked == ["grid g ['mine:trimmed', 'evil:fit']"]
    del bases["B"]
    value["data"] = {"D": {"recipe": plain()}}
    (here / "g" / "cells").mkdir(parents=True)
    (here / "g" / "grid.yaml").write_text(yaml.safe_dump(value))
    trust.keep_run(["mine:trimmed"])
    assert len(recipes(load_grid(here / "g" / "grid.yaml"))) == 3
    (here / "mine.py").write_text(MINE + "# changed")
    monkeypatch.setattr(trust, "_allowed", set())
    with pytest.raises(RecipeError, match="Nothing was imported"):
        recipes(load_grid(here / "g" / "grid.yaml"))


def test_a_question_shows_what_a_terminal_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not trust._agreed("r\x1b[2K\r.yaml", [located("timeit:timeit")])
    assert sys.stderr.getvalue().startswith(r"r\x1b[2K\r.yaml uses timeit:timeit (")


def test_what_lies_in_the_current_folder_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "evil-1.dist-info").mkdir()
    (here / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (here / "evil-1.dist-info" / "entry_points.txt").write_text("[fedloom.methods]\nclipped = evil:fit\n")
    for path in ("", str(here)):
        monkeypatch.setattr(sys, "path", [path, *sys.path])
        with pytest.raises(UserError, match="needs the package 'evil', which is not installed"):
            need("evil", "wandb")
        assert "clipped" not in Registry("method", "fedloom.methods").names
    assert not (here / "owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "cluster"])
def test_processes_do_not_look_into_the_current_folder_first(here: Path, engine: str) -> None:
    for name in ("multiprocessing", "socket", "torch", "typer", "yaml"):
        (here / f"{name}.py").write_text(f"open({str(here / 'owned')!r}, 'w')")
    main = "import sys; sys.path.remove(''); from fedloom.cli import main; main()"  # as the command `fedloom` begins
    changes = [f"runtime.engine={engine}", "runtime.workers=2", "data.size=8", *QUICK]
    done = subprocess.run(
        [sys.executable, "-c", main, "run", "digits-tasks", *changes, "-q"], cwd=here, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert not (here / "owned").exists()
    assert done.returncode == 0, done.stderr


def test_an_image_is_not_handed_to_another_program(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    monkeypatch.setattr(plugin, "Ghostscript", lambda *given: (here / "owned").touch())
    page = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"
    (here / "0.png").write_text(page)
    for opens in (opened, lambda file: picture(file, "image", True)):
        with pytest.raises(DataError, match="cannot be read"):
            opens(here / "0.png")
    assert not (here / "owned").exists()


def test_names_that_are_no_code_are_not_asked_about() -> None:
    value = {"data": {"name": "arrays", "labels": {"grade": "ns:field"}}, "runtime": {"device": "cuda:0"}, 3: ["a:b"]}
    assert list(names_in(value)) == []
    admit([], Origin.ELSEWHERE, "a bundle")


def test_packaged_recipes_name_no_code() -> None:
    for name in names():
        assert not list(names_in(read(name).value)), name
