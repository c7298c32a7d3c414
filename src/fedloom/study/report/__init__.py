"""One page that shows a run, a grid or a relatedness study: an HTML file that needs no network. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedloom.core.errors import StateError, UserError, check_links, writing
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import runs_below
from fedloom.study import grid
from fedloom.study.report import figures, pages, related, words
from fedloom.study.report.collect import GridReport, RunReport, of_grid, of_run
from fedloom.study.report.related import Relatedness

__all__ = ["collect", "render", "write"]

NAME = "report.html"


def collect(source: str | Path, base: str | Path | None = None) -> RunReport | GridReport | Relatedness:
    """Read the contents of the page of a run, a grid or a relatedness study.

    Where a folder is of several kinds, the first of these counts. Raises StateError where it is none of them.

    Args:
        source: The folder, or the name of a grid that ran in its own folder.
        base: The baseline: for a run another run's folder (StateError where they have nothing in common), for a grid
            one of its cells, as `fedloom compare --base` takes it (RecipeError where it has no such cell). UserError
            for a relatedness study, which cannot be compared.
    """
    folder = Path(source)
    if (folder / "run.json").is_file():
        return of_run(Run.read(folder), None if base is None else Run.read(base))
    if (folder / grid.FILE).is_file() or not folder.is_dir():
        opened, where = grid.open_folder(source)
        return of_grid(opened if base is None else grid.against(opened, str(base)), where)
    if (folder / related.FILE).is_file():
        if base is not None:
            raise UserError(f"--base {base}: expected a run or a grid to compare with, {folder} is a relatedness study")
        return related.collect(folder)
    raise StateError(
        f"{folder} is no folder of a run (with run.json), of a grid (with {grid.FILE}) or of a relatedness study (with "
        f"{related.FILE}){runs_below(folder, 'name one')}"
    )


def render(report: RunReport | GridReport | Relatedness) -> str:
    """Return the HTML of a report. Raises UserError where Jinja2 or vl-convert is absent."""
    if isinstance(report, Relatedness):
        return related.render(report)
    return pages.of_run(report) if isinstance(report, RunReport) else pages.of_grid(report)


def write(
    source: str | Path, out: str | Path | None = None, also: Mapping[str, Path] = {}, base: str | Path | None = None
) -> Path:
    """Write the page of what `collect` finds; returns the file.

    `base` is that of `collect`. Without `out` the file is report.html in that folder. `also` is "png", "svg", "pdf" or
    "csv" -> a folder, and every figure is written there too, see `figures.save`. Raises StateError where there is
    nothing to show, UserError where Jinja2 or vl-convert is absent or a file cannot be written.
    """
    report = collect(source, base)
    file = report.folder / NAME if out is None else Path(out)
    text = render(report)
    if out is None:
        check_links([file])
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if also:
        drawn = related.figures_of(report) if isinstance(report, Relatedness) else figures.figures_of(report)
        figures.save(drawn, also, _about(report))
    return file


def _about(report: RunReport | GridReport | Relatedness) -> str:
    """Return the part of a caption that is the same for all figures: their source, and whether there is an interval."""
    facts = dict(report.facts)
    if isinstance(report, RunReport):
        of = f"{words.count(len(report.clients), 'client')}, {words.count(int(facts['rounds']), 'round')}"
        return f"{report.title}: {of}, seed {facts['seed']}; of one seed there is no interval."
    if isinstance(report, GridReport):
        return f"{report.title}: means over seeds {facts['seeds']}; no interval is drawn, the table has them."
    return f"{report.title}: {facts['tasks']} tasks, {facts['pairs of tasks']} pairs."
