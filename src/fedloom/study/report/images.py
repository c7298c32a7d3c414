"""The figures of a report as files, for papers: what the page draws, on white, as wide as a column, without controls,
with captions as text; or the numbers behind them.

plotly draws them in a browser that kaleido starts, all in one session. A figure whose views are selected
gives one image per view; a figure with a slider gives its last round.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from html import escape, unescape
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from fedloom.core.errors import UserError, writing
from fedloom.core.extras import need
from fedloom.study.report.plots import Figure, Trace
from fedloom.study.tables.sheet import Records

WIDTH = 340
"""Pixels of 1/96 inch across an image: 90 mm, a column of a page with two."""
LETTERS = 10.7
"""Size of letters in pixels: 8 pt, which stays legible where a figure is set at its size."""
CAPTIONS = "captions.txt"
"""The file with what stands below each figure, beside the figures."""
DOTS = {"png": 3, "svg": 1, "pdf": 1}
"""Format -> pixels a unit."""
LONG = 36
"""Letters of a name in a legend or on an axis, as on the page."""

_INK, _RULE = "#000", "#ddd"
_LETTER = 6.4  # pixels of a letter, about
_TITLE = 50  # letters of a line of the title
_NUMBERS = 10  # columns of a matrix from which on its cells have no room for numbers
_HIGH = 210  # pixels of a plot of lines


def images_of(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """File name without its ending -> plotly figure {"data", "layout"}, of a page's figures by their names."""
    found: dict[str, Figure] = {}
    taken: set[str] = set()
    for name, figure in figures.items():
        for title, view in _drawn(name, figure):
            stem = once = file_name(title) or name
            number = 1
            while stem.casefold() in taken:  # some file systems do not tell capital letters apart
                number += 1
                stem = f"{once}-{number}"
            taken.add(stem.casefold())
            found[stem] = _image(figure, view, title)
    return found


def save(figures: Mapping[str, Figure], folders: Mapping[str, Path], about: str = "") -> list[Path]:
    """Write all images of a page's figures; `folders` is "png", "svg", "pdf" or "csv" -> folder. Returns the files.

    In each folder is a file of captions too, which say what an image shows and end with `about`. CSV files have the
    numbers behind an image, and need no browser. Raises UserError where kaleido or a browser is absent, where the
    browser does not start, and for a file that cannot be written.
    """
    folders = dict(folders)
    captions = [_save_captions(images_of(figures), folder, about) for folder in dict.fromkeys(folders.values())]
    tables = folders.pop("csv", None)
    written = captions + ([] if tables is None else _save_numbers(images_of(figures), tables))
    if not folders:
        return written
    kaleido, errors = need("kaleido", "report"), need("kaleido.errors", "report")
    try:
        # names could hold TeX; without MathJax, which would come from the network, they stay as they are
        browser = kaleido.Kaleido(mathjax=False)
        return written + _run(_save(browser, images_of(figures), folders))
    except errors.ChromeNotFoundError:
        named = os.environ.get("BROWSER_PATH")
        raise UserError(
            "Images are drawn by Chrome or Chromium, which was not found"
            + (f" at BROWSER_PATH={named}" if named else "")
            + ": install one, or name its program with the variable BROWSER_PATH"
        ) from None
    except (errors.BrowserFailedError, errors.BrowserClosedError, TimeoutError) as error:
        why = " ".join(map(str, error.args[:1]))
        raise UserError(f"The browser that draws images failed: {why} BROWSER_PATH can name another one.") from error


def _save_captions(images: Mapping[str, Figure], folder: Path, about: str) -> Path:
    file = folder / CAPTIONS
    with writing(file):
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{stem}: {caption(image, about)}\n" for stem, image in images.items())
        file.write_text(text, encoding="utf-8", errors="replace")
    return file


def caption(image: Figure, about: str) -> str:
    """What stands below an image in a paper: what it shows, of how many, and what its lines and bands are."""
    traces = [trace["meta"] for trace in image["data"]]
    count = Counter(trace["kind"] for trace in traces)
    title = unescape(image["layout"]["title"]["text"].replace("<br>", " "))
    axis = unescape(image["layout"]["yaxis"].get("title", {}).get("text", ""))
    parts = [title, *([f"upwards {axis}"] if axis and not count["matrix"] else [])]
    if count["client"]:
        parts.append(
            f"thin lines are {count['client']} clients" + (", the thick one is their mean" if count["mean"] else "")
        )
    if count["line"]:
        parts.append("lines are " + ", ".join(trace["name"] for trace in traces if trace["kind"] == "line"))
    if count["band"]:
        parts.append(
            "the band is " + next(trace["name"] for trace in traces if trace["kind"] == "band" and trace["name"])
        )
    if count["best"]:
        parts.append("the star is the best round by validation data")
    if count["matrix"]:
        rows, columns = (
            next(len(trace[side]) for trace in traces if trace["kind"] == "matrix") for side in ("rows", "columns")
        )
        parts.append(f"{rows} rows" + (f", {columns} columns" if columns else ""))
    return "; ".join(parts) + "." + (f" {about}" if about else "")


def _save_numbers(images: Mapping[str, Figure], folder: Path) -> list[Path]:
    files = []
    for stem, image in images.items():
        file = folder / f"{stem}.csv"
        with writing(file):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(Records(("name", "x", "y", "value"), list(numbers_of(image))).to_csv(), encoding="utf-8")
        files.append(file)
    return files


def numbers_of(image: Figure) -> Iterator[tuple[Any, ...]]:
    """(name, x, y, value) of all that an image shows: a line's points have no value, a matrix's cells no name."""
    for trace in image["data"]:
        about = trace["meta"]
        if trace["type"] == "heatmap":
            columns, rows = about["columns"] or trace["x"], about["rows"]
            for row, values in zip(rows, trace["z"], strict=True):
                yield from (("", column, row, value) for column, value in zip(columns, values, strict=False))
        elif about["kind"] not in ("arrows", "peers"):
            yield from ((about.get("name", ""), x, y, None) for x, y in zip(trace["x"], trace["y"], strict=True))


def _run(work: Coroutine[Any, Any, list[Path]]) -> list[Path]:
    """Run it; in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def _save(browser: Any, images: Mapping[str, Figure], folders: Mapping[str, Path]) -> list[Path]:
    from rich.console import Console
    from rich.progress import track

    todo = [(folder / f"{stem}.{kind}", image) for kind, folder in folders.items() for stem, image in images.items()]
    watch = Console(stderr=True)
    async with browser:
        for file, image in track(todo, "images", console=watch, disable=not sys.stderr.isatty(), transient=True):
            kind = file.suffix[1:]
            size = {"width": image["layout"]["width"], "height": image["layout"]["height"]}
            drawn = await browser.calc_fig(image, opts={"format": kind, "scale": DOTS[kind], **size})
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(drawn)
    return [file for file, _ in todo]


def file_name(title: str) -> str:
    """A title as a name for a file: letters, digits and '-' only; '' where none is left."""
    name = "-".join(re.findall(r"\w+", title))
    return name.encode()[:120].decode(errors="ignore").strip("-")


def _drawn(name: str, figure: Figure) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(title, view) of the views to draw."""
    title = figure.get("title", "")
    if figure["control"] == "select":
        for view in figure["views"]:
            yield ": ".join(part for part in (title, view["name"]) if part), view
        return
    last = {view.get("set", ""): view for view in figure["views"]}
    for of, view in last.items():
        yield ", ".join(part for part in (title or name, of, f"round {view['name']}") if part), view


def _image(figure: Figure, view: Mapping[str, Any], title: str) -> Figure:
    """One view as plotly draws it on paper."""
    shared = [*figure["shared"], *[{}] * len(view["data"])]
    columns = {to: figure["columns"][at] for to, at in view.get("columns", {}).items()}
    traces = [_trace({**common, **own, **columns}) for common, own in zip(shared, view["data"], strict=False)]
    base = figure["layout"]
    heats = [t["meta"]["rows"] for t in traces if t["type"] == "heatmap"]
    names = [n for t in traces if t["type"] == "heatmap" for n in (*t["meta"]["rows"], *t["meta"]["columns"])]
    width = WIDTH
    long = max(0, max((_width(name[:LONG]) for name in names), default=0) - 60)
    if "scaleanchor" in base["yaxis"]:
        height: float = WIDTH - 50  # squares, with their names below and their colours beside them
    elif heats:
        height = min(560, 130 + 14 * len(heats[0])) + long
    else:
        height = _HIGH + 30
    lines = textwrap.wrap(title, _TITLE, max_lines=3, placeholder="…")
    rows, entry = _legend(traces, width)
    top = 14 + 15 * len(lines)
    axis = {"gridcolor": _RULE, "zerolinecolor": _RULE, "linecolor": _RULE, "automargin": True}
    alias = {escape(name, quote=False): _cut(name) for name in names if len(name) > LONG}
    upright = {"tickangle": -90} if long else {}  # slanted names would run into the colours
    x, y = ({"title": {"text": view[of]}} if view.get(of) else {} for of in ("across", "axis"))
    layout = {
        **base,
        "width": width,
        "height": height + top + 16 * rows,
        "xaxis": {**axis, "labelalias": alias, **upright, **base["xaxis"], **x},
        "yaxis": {**axis, "labelalias": alias, **base["yaxis"], **y},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "font": {"color": _INK, "size": LETTERS},
        "title": {
            "text": "<br>".join(escape(line, quote=False) for line in lines),
            "font": {"size": LETTERS + 1},
            "x": 0.5,
            "xanchor": "center",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 8 + 7 * (len(lines) - 1)},
        },
        "margin": {"l": 40, "r": 8, "t": top, "b": 40 + 16 * rows},
        "showlegend": rows > 0,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "entrywidth": entry,
            "entrywidthmode": "pixels",
        },
    }
    return {"data": traces, "layout": layout}


def _trace(trace: Trace) -> Trace:
    about = trace["meta"]
    if trace["type"] == "scatter" and len(about.get("name", "")) > LONG:
        trace["name"] = _cut(about["name"])
    if about["kind"] == "mean":
        trace["line"] = {**trace["line"], "color": _INK}
    if about["kind"] == "matrix":
        trace["colorbar"] = {"thickness": 12, "outlinewidth": 0, **trace.get("colorbar", {})}
        if len(about["columns"] or trace["x"]) > _NUMBERS:
            trace.pop("texttemplate", None)
    return trace


def _legend(traces: list[Trace], width: float) -> tuple[int, float]:
    """(lines, width of an entry) of the legend below the plot, of which the page knows the letters' widths."""
    shown = [t for t in traces if t["type"] == "scatter" and t.get("showlegend", True) and t["meta"].get("name")]
    if len(traces) < 2 or not shown:
        return 0, 0
    widest = max(_width(t["meta"]["name"][:LONG]) for t in shown)
    entry = min(width - 60, widest + 8)
    across = max(1, int((width - 10) / (entry + 42)))
    return -(-len(shown) // across), entry


def _width(text: str) -> float:
    return sum(_LETTER * (2 if east_asian_width(letter) in "WF" else 1) for letter in text)


def _cut(name: str) -> str:
    return escape(name[: LONG - 1], quote=False) + "…"
