"""One page of a run, a grid, a comparison or a relatedness study: an HTML file that needs no network. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedloom.core.errors import StateError, UserError, check_links, writing
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import runs_below
from fedloom.study import comparison, grid
from fedloom.study.output import Table
from fedloom.study.report import figures, pages, related, words
from fedloom.study.report.collect import GridReport, RunReport, of_grid, of_run
from fedloom.study.report.related import Relatedness

__all__ = ["collect", "render", "write"]

NAME = "report.html"


Report = RunReport | GridReport | Relatedness | Table
"""The contents of a page: of a comparison, the table that was printed."""


def collect(source: str | Path, base: str | Path | None = None) -> Report:
    """Read the contents of the page of a run, a grid, a relatedness study or a comparison.

    Where a folder is of several kinds, the first of these counts. Raises StateError where it is none of them.

    Args:
        source: The folder, or the name of a grid that ran in its own folder.
        base: The baseline: for a run another run's folder (StateError where they have nothing in common), for a grid
            one of its cells, as `fedloom compare --base` takes it (RecipeError where it has no such cell). UserError
            for the others, which cannot be compared.
    """
    folder = Path(source)
    if (folder / "run.json").is_file():
        return of_run(Run.read(folder), None if base is None else Run.read(base))
    if (folder / grid.FILE).is_file() or not folder.is_dir():
        opened, where = grid.open_folder(source)
        return of_grid(opened if base is None else grid.against(opened, str(base)), where)
    is_study, is_compared = ((folder / name).is_file() for name in (related.FILE, comparison.FILE))
    if base is not None and (is_study or is_compared):
        what = "relatedness study" if is_study else "comparison"
        raise UserError(f"--base {base}: expected a run or a grid to compare with, {folder} is a {what}")
    if is_study:
        return related.collect(folder)
    if is_compared:
        return comparison.saved(folder)
    raise StateError(
        f"{folder} is no folder of a run (with run.json), of a grid (with {grid.FILE}), of a comparison (with "
        f"{comparison.FILE}, which `fedloom compare RECIPE` writes at its end; run it again if it is missing) or of a "
        f"relatedness study (with {related.FILE}){runs_below(folder, 'name one')}"
    )


def render(report: Report) -> str:
    """Return the HTML of a report. Raises UserError where Jinja2 or vl-convert is absent."""
    if isinstance(report, Table):
        return report.to_html()
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
    if also and isinstance(report, Table):
        raise UserError(f"--{next(iter(also))}: the page of a comparison has no figures: leave it out")
    file = (Path(source) if isinstance(report, Table) else report.folder) / NAME if out is None else Path(out)
    text = render(report)
    if out is None:
        check_links([file])
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if also and not isinstance(report, Table):
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
