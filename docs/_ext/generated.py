"""What of the site is made from the package: a page for each method, add-on and stage, the commands, the public
names, pictures, and live pages of `fedloom report`. All of it goes to docs/_generated."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import formulas
import pictures
import prose
import uses
from sphinx.application import Sphinx
from typer.main import get_command

from fedloom import stages
from fedloom.cli.app import PANELS, app
from fedloom.cli.look import chosen, parameters, required
from fedloom.core.settings.registry import Registered, Registry
from fedloom.engines.api import plan
from fedloom.errors import UserError
from fedloom.federation.recipes import load
from fedloom.methods import ADDONS, METHODS
from fedloom.methods.method import Method
from fedloom.stages import Stage
from fedloom.study.grid import CHANGES, load_grid, names
from fedloom.study.output import environment

FACES = (
    *("fedloom", "fedloom.methods", "fedloom.stages", "fedloom.training", "fedloom.tasks", "fedloom.data"),
    *("fedloom.models", "fedloom.peers", "fedloom.relatedness", "fedloom.taskvectors", "fedloom.codecs"),
    "fedloom.server",
)
"""The modules whose names are public."""
REPORTS = {
    "run": ["run digits-tasks training.rounds=6 --out {out}/run -q", "report {out}/run --out {page}"],
    "relatedness": [
        "run digits-tasks method=matu training.rounds=4 --out {out}/matu -q",
        "relatedness {out}/matu --out {out}/alike -q",
        "report {out}/alike --out {page}",
    ],
    "grid": ['grid demo training.rounds=6 "seeds=[0,1]" --out {out}/grid -q', "report {out}/grid --out {page}"],
}
"""Kind of page -> the commands that make one."""
BEDS = ("digits-tasks", "robust/digits", "gossip-digits", "digits-tasks model=tiny-vit model.lora.rank=4")
"""Recipes; a method's page has the first that it runs on: four tasks, many clients, peers, low-rank factors."""
LETTERS = """A method says how clients train and what becomes of their updates; an add-on changes a method.
In the equations, Delta_k is the update of client k (its parameters after training minus those that it began with),
p_k its aggregation weight (the weights sum to 1), K the number of clients, d that of parameters, theta the model, u
the aggregated update, and theta+ the model after the round."""
"""What the index of methods says first, and their pages lead to."""
GLOSSARY = """[Which method?](../../which-method.md) says by situation which one to try; the
[glossary](../../glossary.md) has the words."""
STAGES = """A stage is one step of aggregation: it takes the matrix of updates, a row a client, and gives another. Every
[method](../methods/index.md) is a list of them; [write a stage](../../write-a-stage.md) goes through one."""
EVERYWHERE = ("Identity", "Mean")
"""Stages that most methods have."""
MEMBERS = "   :members:\n   :no-undoc-members:\n"
REQUIRED = {"step": 2}
"""Values that the pages give to parameters that have no default."""


def generate(site: Sphinx) -> None:
    """Write all pages, before Sphinx looks for them."""
    home = Path(site.srcdir) / "_generated"
    _methods(home / "methods", Path(site.srcdir) / "results")
    _write(home / "commands.md", "\n".join(_commands()))
    _stages(home / "stages")
    seen: set[int] = set()
    for face in FACES:
        _write(home / "api" / f"{face}.rst", _face(face, seen))
    pictures.draw(home / "pictures")
    if site.config.live_reports:
        _reports(home / "extra", Path(site.doctreedir) / "reports")


def _write(file: Path, text: str) -> None:
    """Write a page, unless it is the same: Sphinx reads again what is new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_text("utf-8") != text:
        file.write_text(text, "utf-8")


def _methods(home: Path, results: Path) -> None:
    grids = _in_grids()
    pages = (page for page in sorted(results.glob("*.md")) if page.name != "verdicts.md")  # that is a part of a page
    measured = {page: _with_tables(page) for page in pages}
    lines = ["# Methods and add-ons", "", _raw(f"<p>{prose.inline(LETTERS)}</p>"), "", GLOSSARY, ""]
    entries = {entry.name: (registry, entry) for registry in (METHODS, ADDONS) for entry in registry}
    for group in uses.GROUPS:
        lines += [f"## {group.title}", "", group.when, ""]
        lines += ["| name | what it does | source |", "|---|---|---|"]
        for name in group.names:
            registry, entry = entries[name]
            _write(home / f"{name}.md", _page(registry, entry, grids.get(name, ()), measured))
            kind = " (add-on)" * (registry is ADDONS)
            about = _math(entry.summary)
            lines.append(f"| [{name}]({name}.md){kind} | {about} | {_cell(entry.source or entry.package)} |")
        lines.append("")
    lines += ["```{toctree}", ":hidden:", "", *sorted(entries), "```", ""]
    _write(home / "index.md", "\n".join(lines))


def _with_tables(page: Path) -> str:
    """The text of a page of results, with the tables that it includes."""
    return re.sub(r"```\{include\} (\S+)", lambda of: (page.parent / of[1]).read_text("utf-8"), page.read_text("utf-8"))


def _page(registry: Registry, entry: Registered, grids: Sequence[str], measured: dict[Path, str]) -> str:
    """One method: what it is for, a command, what `fedloom methods NAME` says, its stages, where it was used."""
    keys = parameters(entry)
    about, _, rest = (inspect.getdoc(entry.function) or "").partition("\n\n")
    values, addon, made = _values(entry), registry is ADDONS, _made(registry, entry)
    lines = [f"# {entry.name}", _raw(prose.html(about)), uses.group_of(entry.name).when]
    lines.append(f"```console\nfedloom run {_example(chosen(registry, entry, values))}\n```")
    lines.append(f"*{registry.kind.capitalize()}{', ' + _cell(entry.source) if entry.source else ''}*")
    if rest:
        lines += ["## What it computes", _raw(prose.html(rest)), "[What the letters stand for](index.md)"]
    if keys:
        rows = (f"| {_code(row['parameter'])} | {_cell(row['default'])} | {_cell(row['allowed'])} |" for row in keys)
        lines += ["## Parameters", "\n".join(["| key | default | allowed |", "|---|---|---|", *rows])]
    lines.append("## An update's way through a round")
    if addon:
        lines.append("Here the add-on is on top of FedAvg.")
    flow: Any = environment().get_template("flow.html").module
    lines.append(_raw(str(flow.diagram(made.outline, False))))
    if own := [f"[{name}](../stages/{name}.rst)" for name in _stages_of(made) if name in stages.__all__]:
        lines.append(f"Its stages: {', '.join(own)}.")
    lines += ["## In Python", "The same method, and what it prints:"]
    given = ", ".join(["fl.methods.fedavg()"] * addon + [f"{name}={value}" for name, value in values.items()])
    python = f"import fedloom as fl\n\nprint(fl.methods.{entry.name.replace('-', '_')}({given}))"
    lines.append(f"```python\n{python}\n```\n\n```text\n{made}\n```")
    lines.append("## Where it was measured")
    pages = [f"[{page.stem}](../../results/{page.name})" for page, text in measured.items() if _names(text, entry.name)]
    lines.append(f"In the results: {', '.join(pages)}." if pages else "No page of results has it yet.")
    lines.append(
        f"Packaged grids with it: {', '.join(f'`{g}`' for g in grids)}." if grids else "No packaged grid has it."
    )
    return "\n\n".join([*lines, ""])


def _values(entry: Registered) -> dict[str, Any]:
    return {name: REQUIRED[name] for name in required(entry)}


def _made(registry: Registry, entry: Registered) -> Method:
    """The method, or FedAvg with the add-on, with the defaults."""
    base = [METHODS["fedavg"].make()] if registry is ADDONS else []
    return entry.make(*base, **_values(entry))


def _stages_of(method: Method) -> list[str]:
    """The names of a method's stages, in their order."""

    def titles(boxes: Sequence[Any]) -> Iterator[str]:
        for box in boxes:
            yield box.title
            yield from titles(box.inside)

    return list(dict.fromkeys(titles((*method.outline.edge, *method.outline.server))))


def _stages(home: Path) -> None:
    """Write a page for each stage: what it does, its fields, and the methods that have it."""
    users: dict[str, list[str]] = {}
    for registry in (METHODS, ADDONS):
        for entry in registry:
            for stage in _stages_of(_made(registry, entry)):
                users.setdefault(stage, []).append(entry.name)
    offered = {name: getattr(stages, name) for name in sorted(stages.__all__)}
    found = {name: thing for name, thing in offered.items() if inspect.isclass(thing) and issubclass(thing, Stage)}
    lines = ["# Stages", "", STAGES, "", "| stage | what it does |", "|---|---|"]
    for name, stage in found.items():
        text = f"{name}\n{'=' * len(name)}\n\n.. autoclass:: fedloom.stages.{name}\n{MEMBERS}\n"
        if name in users and name not in EVERYWHERE:
            links = ", ".join(f":doc:`{user} <../methods/{user}>`" for user in users[name])
            text += f"Methods and add-ons with it: {links}.\n"
        _write(home / f"{name}.rst", text)
        lines.append(f"| [{name}]({name}.rst) | {_plain((inspect.getdoc(stage) or '').split(chr(10) * 2)[0])} |")
    _write(home / "index.md", "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *found, "```", ""]))


def _example(changes: list[str]) -> str:
    """The first of the benchmarks on which a method runs, planned here, with the changes, as words of a command."""
    refused = []
    for name, *more in map(str.split, BEDS):
        try:
            plan(load(name, [*more, *changes]))
        except UserError as error:
            refused.append(str(error))
        else:
            return shlex.join([name, *more, *changes])
    raise RuntimeError(f"no benchmark of the pages runs with {' '.join(changes)}: {refused}")


def _names(text: str, name: str) -> bool:
    """Whether a page of results names a method: as papers spell it, as code, or in a cell of a table, not as a verb."""
    spelled = re.escape(name).replace(r"\-", "[- ]")
    for found in re.finditer(rf"(?<![\w-]){spelled}(?![\w-])", text.replace("²", "2"), re.IGNORECASE):
        around = found.string[: found.start()].rstrip("* ")[-1:] + found.string[found.end() :].lstrip("* ")[:1]
        if not found[0].islower() or "-" in found[0] or re.fullmatch(r"[`|+]{2}", around):
            return True
    return False


def _in_grids() -> dict[str, list[str]]:
    """Name of a method or add-on -> the packaged grids that have it in a row."""
    found: dict[str, list[str]] = {}
    for name in names():
        grid = load_grid(name)
        rows = [grid.set, *(row.set for row in grid.data.values()), *(CHANGES[row] for row in grid.reference_rows)]
        rows += [changes for some in (grid.bases, grid.addons, grid.cells) for changes in some.values()]
        for method in sorted({method for changes in rows for method in _methods_in(changes)}):
            found.setdefault(method, []).append(name)
    return found


def _methods_in(changes: Mapping[str, Any]) -> Iterator[str]:
    """The method and the add-ons that a row of a grid chooses."""
    for key, value in changes.items():
        if key == "method" and isinstance(value, dict):
            yield from _methods_in({f"method.{k}": v for k, v in value.items()})
        elif key in ("method", "method.name"):
            yield value
        elif key == "method.add":
            yield from value
        elif found := re.match(r"method\.add\.([\w-]+)", key):
            yield found[1]


def _commands() -> Iterator[str]:
    """The help of every command, in the groups that `fedloom --help` has."""
    root: Any = get_command(app)
    yield "# Commands\n\nWhat `fedloom COMMAND --help` says, of every command.\n"
    for panel, members in PANELS.items():
        yield f"## {panel}\n"
        for name in members:
            command = root.commands[name]
            below = getattr(command, "commands", None)
            for path, one in {f"{name} {k}": v for k, v in below.items()}.items() if below else [(name, command)]:
                yield from _command(path, one)


def _command(path: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["fedloom", path, *(_argument(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    yield f"### fedloom {path}\n\n```text\n{usage}\n```\n\n{_plain(command.help)}\n"
    rows = [(_argument(p), p.help) for p in arguments]
    for p in options:
        flags = ", ".join([*p.opts, *p.secondary_opts])
        value = "" if p.is_flag else f" {p.make_metavar(None)}" if p.metavar else f" {p.type.name.upper()}"
        shown = p.show_default if isinstance(p.show_default, str) else p.default
        default = f" Default: {_plain(shown)}." if shown not in (None, False, (), []) and not callable(shown) else ""
        rows.append((flags + value, f"{p.help or ''}{default}"))
    if rows:
        yield "| | |\n|---|---|"
        yield from (f"| {_code(flag)} | {_plain(about)} |" for flag, about in rows)
        yield ""


def _argument(parameter: Any) -> str:
    name = parameter.metavar or str(parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def _face(face: str, seen: set[int]) -> str:
    """The public names of a module, for autodoc; `seen` are those that another page has."""
    module = importlib.import_module(face)
    about = "\n".join(prose.literal((inspect.getdoc(module) or "").split("\n")))
    text = f"{face}\n{'=' * len(face)}\n\n{about}\n"
    for name in _offered(module):
        thing = getattr(module, name)
        if isinstance(thing, type) and issubclass(thing, Stage):
            text += f"\n- :doc:`../stages/{name}`\n"
            continue
        again = "   :no-index:\n" * (id(thing) in seen)
        seen.add(id(thing))
        if inspect.isclass(thing):
            text += f"\n.. autoclass:: {face}.{name}\n{MEMBERS}{again}"
        elif inspect.isroutine(thing):
            text += f"\n.. autofunction:: {face}.{name}\n{again}"
        elif not inspect.ismodule(thing):
            text += f"\n.. autodata:: {face}.{name}\n   :no-value:\n{again}"
    return text


def _offered(module: Any) -> list[str]:
    """What a module says that it offers, or else what it defines."""
    mine = (name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
    return sorted(getattr(module, "__all__", None) or (name for name in mine if not name.startswith("_")))


def _reports(home: Path, out: Path) -> None:
    """Live pages of `fedloom report`, from runs that this makes once."""
    for kind, commands in REPORTS.items():
        page = home / f"report-{kind}.html"
        if not page.is_file():
            for line in commands:
                words = re.findall(r'"[^"]*"|\S+', line.format(out=out, page=page))
                subprocess.run([sys.executable, "-m", "fedloom", *(w.strip('"') for w in words)], check=True)


def _raw(html: str) -> str:
    return f"```{{raw}} html\n{html}\n```"


def _plain(text: Any) -> str:
    """Text of ours in Markdown, on one line, with no markup but code."""
    parts = " ".join(str(text or "").split()).split("`")
    return "".join(_code(p) if i % 2 else _cell(p) for i, p in enumerate(parts))


def _code(text: str) -> str:
    """Code in a cell of a table, where a bar alone would end the cell."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def _math(text: str) -> str:
    """A sentence with formulas in letters, in Markdown."""
    pieces = (
        (i % 2, piece)
        for i, part in enumerate(text.split("`"))
        for piece in ([part] if i % 2 else formulas.split(part))
    )
    return "".join(_code(p) if code else _in_cell(p[1]) if p[0] else _cell(p[1]) for code, p in pieces)


def _in_cell(tex: str) -> str:
    return f"${tex.replace('|', chr(92) + 'vert ')}$"


def _cell(text: Any) -> str:
    return re.sub(r"([\\*_|<>\[\]#])", r"\\\1", str(text)) if "`" not in str(text) else escape(str(text))


def _docstring(site: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: show them so, and those of stages, which have formulas, as on pages of methods."""
    if what == "class" and issubclass(thing, Stage):
        lines[:] = [".. raw:: html", "", *(f"   {line}" for line in prose.html("\n".join(lines)).split("\n")), ""]
    else:
        lines[:] = prose.literal(lines)


def setup(site: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    site.add_config_value("live_reports", True, "env")
    site.add_html_math_renderer("mathml", (formulas.visit_inline, None), (formulas.visit_block, None))
    site.connect("builder-inited", generate, priority=100)
    site.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True}
