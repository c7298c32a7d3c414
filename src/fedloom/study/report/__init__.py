"""One page that shows a run or a grid: a single HTML file that needs no network. Reads files only; free of torch.

`collect` gathers what there is to show, `plots` makes figures of it, `page` writes the HTML.
"""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import UserError
from fedloom.study.report.collect import collect
from fedloom.study.report.page import render

__all__ = ["collect", "render", "write"]

NAME = "report.html"


def write(source: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run's or a grid's folder, or of a packaged grid; returns the file.

    Without `out` the file is report.html in that folder. Raises StateError where `source` is neither, UserError where
    plotly is absent or the file cannot be written.
    """
    found = collect(source)
    file = found.folder / NAME if out is None else Path(out)
    text = render(found)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    return file
