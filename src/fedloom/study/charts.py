"""One grammar of charts, for pages, papers and notebooks: functions from plain numbers to Vega-Lite specifications.

A chart is such a specification with its numbers in it. Pages draw it with Vega in the reader's colours of day or night;
`save` writes it as a file, with vl-convert, which needs no browser. Free of torch.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import quantiles
from typing import Any

from fedloom.core.errors import UserError, printable, writing
from fedloom.core.lazy import need

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b6d31", "#7f5fc7")
"""Colours that colour-blind people tell apart; lines beyond the last one begin anew with other dashes."""
DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2], [8, 3, 2, 3])
INK, SOFT, RULE, PAPER = "var(--ink)", "var(--soft)", "var(--rule)", "var(--paper)"
"""Colours that pages have by day and by night."""
TWO_SIDED, ONE_SIDED = (COLORS[1], PAPER, COLORS[0]), (PAPER, COLORS[0])
"""Colours of what lies on two sides of a middle, orange is against and blue with; and from nothing to much."""
WIDTH, HEIGHT = 300, 190
"""Pixels of a panel in a file; with its axis it is as wide as a column of a page with two."""
KINDS = ("svg", "png", "pdf", "html", "json")
"""The formats in which a chart can be written."""

_DAY = {INK: "#000000", SOFT: "#444444", RULE: "#dddddd", PAPER: "#ffffff"}
_WRITTEN = 12  # columns of a map up to which numbers stand in its cells
_MARKERS = 30  # points of a line up to which each is marked
_NAMED = 40  # rows of intervals up to which each has its name and number, and of bars up to which they are no dots
CROWD = 4
"""Lines of a panel up to which each has its band, and cells up to which they share one."""

Chart = dict[str, Any]
"""A Vega-Lite specification."""
Row = dict[str, Any]
Line = Mapping[Any, float]
"""x -> y."""
Ends = tuple[float, float]

CONFIG: Chart = {
    "background": PAPER,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelColor": SOFT, "titleColor": SOFT, "gridColor": RULE, "domainColor": RULE, "tickColor": RULE}
    | {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelLimit": 150},
    "legend": {"orient": "bottom", "labelColor": INK, "labelFontSize": 11, "titleColor": SOFT, "titleFontSize": 11}
    | {"labelLimit": 230, "symbolLimit": 100, "titleFontWeight": "normal", "gradientThickness": 10},
    "title": {"color": INK, "subtitleColor": SOFT, "fontSize": 12, "subtitleFontSize": 10, "anchor": "start"},
    "header": {"labelColor": INK, "titleColor": SOFT},
}
"""The look of all charts."""


def color(number: int) -> str:
    """Return the colour of the line of this number; they begin anew after the last one."""
    return COLORS[number % len(COLORS)]


def plain(value: float | None) -> float | None:
    """Return the number, or None for nan and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def thinned(values: Sequence[Any], most: int, keep: Iterable[Any] = ()) -> list[Any]:
    """Return at most about `most` values, evenly spaced, with the first, the last and those to keep."""
    if len(values) <= most:
        return list(values)
    chosen = {round(i * (len(values) - 1) / (most - 1)) for i in range(most)} if most > 1 else set[int]()
    kept = tuple(keep)
    return [value for i, value in enumerate(values) if i in chosen or value in kept]


def tenths(lines: Sequence[Line], at: Iterable[Any]) -> dict[Any, Ends]:
    """Return the 10 % and the 90 % quantile of several lines at each of these x at which one has a number."""
    ends_at = {}
    for x in at:
        values = [of[x] for of in lines if x in of and not math.isnan(of[x])]
        if values:
            ends = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
            ends_at[x] = (ends[0], ends[-1])
    return ends_at


def lines(
    several: Mapping[str, Line],
    x: str,
    y: str,
    *,
    title: str = "",
    bands: Mapping[str, Mapping[Any, Ends]] = {},
    bars: bool = False,
    strong: Iterable[str] = (),
    dashed: Iterable[str] = (),
    groups: Mapping[str, str] = {},
    stars: Mapping[str, Line] = {},
    log: str = "",
    zero: bool = False,
    palette: Sequence[str] = (),
) -> Chart:
    """Draw lines, name -> x -> y, with tooltips and a legend; a value that is no number is a gap.

    With the x axis "round", x is a whole number. `bands` are intervals by name, as areas, or with `bars` as bars side
    by side with all points marked; one without a line is grey. More than `CROWD` bands would hide each other, so only
    their last intervals are drawn, side by side. `strong` lines are thick and in the colour of letters, `dashed` ones
    thin; a line that lies on an earlier one has dashes, so that both show. Lines of one group in `groups` (name ->
    group) share a colour and differ in dashes. `stars` are single points. `log` names the logarithmic axes: "x", "y" or
    "xy". With `zero` the axis upwards begins at 0. Names have the colours of `palette`, where it names them all.
    """
    strong, dashed = set(strong), set(dashed)
    names = list(dict.fromkeys([*several, *bands, *stars]))
    number = {name: at for at, name in enumerate(palette or (n for n in several if n not in strong))}
    if groups:
        own = list(dict.fromkeys(groups.values()))
        members = {group: [name for name in several if groups[name] == group] for group in own}
        number = {n: own.index(g) + len(COLORS) * members[g].index(n) for n, g in groups.items()}
    grey = [name for name in names if name not in several]
    inks = [COLORS[1] if n in stars else INK if n in strong else SOFT if n in grey else color(number[n]) for n in names]
    on = _covering(several)
    dashes = [
        [5, 4] if n in dashed else DASHES[(number.get(n, 0) // len(COLORS) + on.get(n, 0)) % len(DASHES)] for n in names
    ]
    widths = [3 if n in strong else 1 if len(names) > 8 or n in dashed else 1.7 for n in names]

    def rows(of: Mapping[str, Line]) -> list[Row]:
        return [{"name": n, "x": at, "y": plain(v)} for n, line in of.items() for at, v in line.items()]

    is_crowd = not bars and len(bands) > CROWD
    ends = {
        n: [{"name": n, "x": at, "low": plain(low), "high": plain(high)} for at, (low, high) in band.items()]
        for n, band in bands.items()
        if band
    }
    if is_crowd:
        ends = {n: [max(of, key=lambda row: row["x"])] for n, of in ends.items()}
    # pixels to the side: of intervals at the same x, on both sides of it, or behind the last one
    first = 5 if is_crowd else -2 * (len(ends) - 1)
    aside = {n: {"xOffset": first + 4 * at} for at, n in enumerate(ends)} if bars or is_crowd else {}
    few = bars or max((len(of) for of in several.values()), default=0) <= _MARKERS
    shown = _named(names, inks)
    whole: Chart = {"format": "d"} if x == "round" else {}
    at_all = [int(at) for line in (*several.values(), *bands.values()) for at in line] if whole else []
    if at_all and max(at_all) - min(at_all) <= 6:  # else there would be ticks between two rounds
        whole["values"] = [*range(min(at_all), max(at_all) + 1)]
    across: Chart = {"type": "log" if "x" in log else "linear", "zero": False, "nice": False}
    across |= {"padding": 2 * len(ends) + 4} if bars and len(ends) > 1 else {}
    up = {"scale": {"type": "log" if "y" in log else "linear", "zero": zero}}
    drawn = {
        channel: {"field": "name", "type": "ordinal", "title": None, "legend": shown["legend"] and {}}
        | {"scale": {"type": "ordinal", "domain": names, "range": of}}
        for channel, of in (("strokeDash", dashes), ("strokeWidth", widths))
    }
    tooltip = [_said("name", ""), _said("x", x), _said("y", y, ".5~g")]
    point: Any = {"size": 14, "filled": True} if few else "transparent"
    mark, span = "rule" if aside else "area", {"y": _number("low", y, **up), "y2": {"field": "high"}}
    layers = [_layer(mark, of, aside.get(n, {"opacity": 0.18}), **span) for n, of in ends.items()]
    for part in [{n: several[n]} for n in several] if bars else [several]:
        shift = aside.get(next(iter(part)), {}) if bars else {}
        look = {"point": point | shift if few else point, **shift}
        layers.append(_layer("line", rows(part), look, y=_number("y", y, **up), tooltip=tooltip, **drawn))
    if stars:
        look = {"shape": _STAR, "size": 90, "filled": True}
        layers.append(_layer("point", rows(stars), look, y=_number("y", y, **up)))
    axis = {"grid": False, "tickCount": 6, **whole}
    encoding = {"x": _number("x", x, scale=across, axis=axis), "color": shown}
    about = [f"{len(several)} lines: {', '.join(several)}" if len(several) > 1 else "", *grey]
    return _chart(title, {"encoding": encoding, "layer": layers}, ". ".join(filter(None, about)))


def _covering(several: Mapping[str, Line]) -> dict[str, int]:
    """Return name -> the number of earlier lines on which it lies: on average within 1 % of all values' range."""
    known = [v for of in several.values() for v in of.values() if math.isfinite(v)]
    if len(several) > 2 * len(COLORS) or not known:
        return {}
    near = (max(known) - min(known)) / 100
    on: dict[str, int] = {}
    for n, of in several.items():
        twins = (several[m] for m in on if several[m].keys() == of.keys() and len(of) > 1)
        on[n] = sum(sum(abs(of[at] - other[at]) for at in of) <= near * len(of) for other in twins)
    return on


_STAR = "M0,-1L0.29,-0.4L0.95,-0.31L0.48,0.15L0.59,0.81L0,0.5L-0.59,0.81L-0.48,0.15L-0.95,-0.31L-0.29,-0.4Z"


def heat(
    cells: Mapping[str, Mapping[Any, float | None]],
    columns: Sequence[Any],
    *,
    title: str = "",
    down: str = "",
    along: str = "",
    value: str = "value",
    low: float | None = None,
    high: float | None = None,
    middle: float | None = None,
    spoken: str = ".3~g",
    texts: Mapping[tuple[str, Any], str] | None = None,
    numbers: str = "",
    notes: Mapping[tuple[str, Any], str] = {},
    colors: Sequence[str] = (),
) -> Chart:
    """Draw a map of rows by columns, the first row on top; a cell without a number is empty.

    `down` is the meaning of a row, `along` of a column and `value` of a number. Colours go from `low` to `high`, by
    default the least and the largest number; with a `middle` they show on which side of it a number is. `spoken` is the
    format of numbers in tooltips, `numbers` that in cells, where there are few. `texts` (row, column) stand in cells,
    `notes` in tooltips. `colors` go from low to high, by default from paper to blue, or from orange to blue.
    """
    known = [v for of in cells.values() for v in of.values() if v is not None and math.isfinite(v)]
    low = min(known, default=0.0) if low is None else low
    high = max(known, default=1.0) if high is None else high
    if middle is not None:
        far = max(abs(low - middle), abs(high - middle)) or 1.0
        low, high = middle - far, middle + far
    if low == high:
        low, high = low - 0.5, high + 0.5
    names = [str(column) for column in columns]
    has_texts = texts is not None or (bool(numbers) and len(names) <= _WRITTEN)
    rows: list[Row] = []
    for name, of in cells.items():
        for column in columns:
            if (v := plain(of.get(column))) is not None:
                share = (v - low) / (high - low)
                light = share > 0.65 if middle is None else abs(share - 0.5) > 0.33
                row: Row = {"row": name, "column": str(column), "value": v, "light": light}
                if notes:
                    row["note"] = notes.get((name, column), "")
                if has_texts:
                    row["text"] = f"{v:{numbers}}" if texts is None else texts.get((name, column), "")
                rows.append(row)
    shades = list(colors or (ONE_SIDED if middle is None else TWO_SIDED))
    scale = {"domain": [low, high] if len(shades) == 2 else [low, (low + high) / 2, high], "range": shades}
    # numbers in all cells need no legend
    legend = None if has_texts and texts is None else {"format": spoken, "gradientLength": 110, "tickCount": 3}
    shade = _number("value", value, scale=scale | {"clamp": True, "interpolate": "lab"}, legend=legend)
    tooltip = [_said("row", down), _said("column", along), _said("value", value, spoken)]
    tooltip += [_said("note", "of")] if notes else []
    layers = [_layer("rect", None, {"stroke": PAPER, "strokeWidth": 0.5}, color=shade, tooltip=tooltip)]
    if has_texts:
        ink = {"condition": {"test": "datum.light", "value": "#ffffff"}, "value": INK}
        layers.append(_layer("text", None, {"fontSize": 10}, text={"field": "text"}, color=ink, tooltip=tooltip))
    long = max(map(len, names), default=0)
    axis = {"domain": False, "ticks": False, "labelOverlap": "parity" if len(names) > 40 else False}
    is_level = long * len(names) < 40 or long <= 2
    slanted = {"labelAngle": 0, "labelOverlap": "parity"} if is_level else {"labelAngle": -45}
    chart = {
        "data": {"values": rows},
        "encoding": {
            "x": _ordinal("column", names, along, axis | slanted),
            "y": _ordinal("row", list(cells), down, axis),
        },
        "layer": layers,
        "height": (22 if len(cells) <= 12 else 16 if len(cells) <= 30 else 10) * len(cells),
        "usermeta": {"widest": 200 + (96 if legend is None else 48) * len(names)},
    }
    return _chart(title, chart, f"{len(cells)} rows, {len(names)} columns")


def intervals(
    several: Mapping[str, tuple[float, float, float]],
    x: str,
    *,
    small: Mapping[str, Sequence[float]] = {},
    texts: Mapping[str, str] = {},
    signed: bool = True,
    palette: Sequence[str] = (),
) -> Chart:
    """Draw a dot with its interval for each name -> (number, low, high), the first on top.

    Ends that are nan are left out. `small` are further numbers by name, as of seeds, and `texts` stand beside the
    intervals. If `signed`, 0 is marked, and numbers below it have another colour; `palette` is as in `lines`.
    """
    rows: list[Row] = []
    for name, (v, low, high) in several.items():
        ends = (plain(v if math.isnan(end) else end) for end in (low, high))
        rows.append({"name": name, "value": plain(v)} | dict(zip(("low", "high"), ends, strict=True)))
        rows[-1]["text"] = texts.get(name, "")
    points = [{"name": name, "value": plain(v)} for name, of in small.items() for v in of if name in several]
    ink: Chart = {"value": COLORS[0]}
    if palette:
        ink = _from(palette)
    elif signed:
        ink = {"condition": {"test": "datum.value < -1e-9", "value": COLORS[1]}, "value": COLORS[0]}
    few = len(rows) <= _NAMED
    across = {"scale": {"zero": signed, "nice": True}, "axis": {"tickCount": 6, "tickMinStep": 0 if signed else 1}}
    y = _ordinal("name", list(several), "", {"ticks": False, "domain": False, "labels": few, "labelLimit": 170})
    tooltip = [_said("name", ""), *(_said(part, part, ".4~g") for part in ("value", "low", "high"))]
    low_to_high = {"x": _number("low", x, **across), "x2": {"field": "high"}}
    value = _number("value", x, **across)
    dot = {"size": 70 if few else 14, "opacity": 1}
    layers = [
        _layer("rule", rows, {"strokeWidth": 3, "opacity": 0.4}, y=y, color=ink, **low_to_high),
        _layer("circle", rows, dot, x=value, y=y, color=ink, tooltip=tooltip),
    ]
    if signed:
        layers.insert(0, _layer("rule", [{}], {"color": INK}, x={"datum": 0}))
    if points:
        layers.append(_layer("circle", points, {"size": 20, "opacity": 0.5}, x=value, y=y, color=ink))
    if few and texts:
        look = {"align": "left", "dx": 8, "color": INK, "fontSize": 11}
        layers.append(_layer("text", rows, look, x=_number("high", x, **across), y=y, text={"field": "text"}))
    return _chart("", {"layer": layers, "height": (20 if few else 4) * len(rows)}, f"{len(rows)} rows")


def scatter(
    points: Sequence[Row],
    x: str,
    y: str,
    *,
    title: str = "",
    labels: bool = False,
    color_by: str = "",
    shape_by: str = "",
    spoken: str = "~s",
    zero: bool = False,
    size: int = 40,
    axes: bool = True,
    colors: Sequence[str] = COLORS,
    palette: Sequence[str] = (),
) -> Chart:
    """Draw points with `name`, `x` and `y`, and perhaps further fields, with tooltips.

    With `labels` the names stand beside the points. `color_by` and `shape_by` are fields that choose a point's colour
    (of `colors`) and shape. `spoken` is the format of numbers across. With `zero`, 0 is marked on the axis upwards.
    `palette` is as in `lines`.
    """
    far: Chart = {"scale": {"zero": zero, "nice": True}} | ({} if axes else {"axis": None})
    marked = {"axis": {"format": spoken, "tickCount": 4}} if axes else {}
    look: Chart = {"color": _from(palette) if palette else {"value": colors[0]}}
    if color_by:
        values = list(dict.fromkeys(str(point[color_by]) for point in points))
        look["color"] = _named(values, [colors[at % len(colors)] for at in range(len(values))], color_by)
    if shape_by:
        look["shape"] = {"field": shape_by, "type": "nominal", "title": None}
    look["tooltip"] = [_said("name", ""), _said("x", x, spoken), _said("y", y, ".4~g")]
    layers = [_layer("point", None, {"filled": True, "size": size, "opacity": 0.8}, **look)]
    if labels:
        beside = {"align": "left", "dx": 7, "color": INK, "fontSize": 10, "limit": 150}
        layers.append(_layer("text", None, beside, text={"field": "name"}))
    if zero:
        layers.insert(0, _layer("rule", None, {"color": SOFT}, x=None, y={"datum": 0}))
    encoding = {"x": _number("x", x, **far | marked), "y": _number("y", y, **far)}
    chart = {"data": {"values": list(points)}, "encoding": encoding, "layer": layers, "height": 230}
    return _chart(title, chart, f"{len(points)} points")


def bars(
    several: Mapping[str, Mapping[str, float]],
    x: str,
    *,
    title: str = "",
    ends: Mapping[tuple[str, str], Ends] = {},
    dots: Mapping[str, Sequence[float]] = {},
    texts: Mapping[str, str] = {},
) -> Chart:
    """Draw horizontal bars in groups, group -> part -> length, the first group on top; parts have colours.

    `ends` are intervals by (group, part), `dots` numbers that are marked in a group, as of seeds, and `texts` stand
    behind both. Many bars become dots, those of a group on one line.
    """
    parts = list(dict.fromkeys(part for of in several.values() for part in of))
    rows: list[Row] = []
    for group, of in several.items():
        for part, v in of.items():
            interval = zip(("low", "high"), map(plain, ends.get((group, part), ())), strict=False)
            rows.append({"group": group, "part": part, "value": plain(v), **dict(interval)})
    are_dots = len(parts) > 1 and len(rows) > _NAMED
    offset = {"yOffset": _ordinal("part", parts)} if len(parts) > 1 and not are_dots else {}
    shade = _named(parts, [color(at) for at in range(len(parts))], "part")
    tooltip = [_said("group", ""), _said("part", ""), _said("value", x, ".5~g")]
    value = _number("value", x)
    mark, drawn = ("circle", {"size": 45, "opacity": 0.9}) if are_dots else ("bar", {"opacity": 0.75})
    layers = [_layer(mark, rows, drawn, x=value, color=shade, tooltip=tooltip, **offset)]
    if ends:
        layers.append(_layer("rule", rows, {"color": INK}, x=_number("low", x), x2={"field": "high"}, **offset))
    if dots:
        marked = [{"group": group, "value": plain(v)} for group, of in dots.items() for v in of]
        layers.append(_layer("circle", marked, {"size": 22, "color": INK, "opacity": 1}, x=value))
    if texts:
        drawn_at = {group: (*of.values(), *dots.get(group, ())) for group, of in several.items()}
        tops = {group: max(filter(math.isfinite, of), default=0.0) for group, of in drawn_at.items()}
        labels = [{"group": group, "value": top, "text": texts.get(group, "")} for group, top in tops.items()]
        look = {"align": "left", "dx": 6, "fontSize": 10, "color": INK}
        layers.append(_layer("text", labels, look, x=value, text={"field": "text"}))
    upwards = _ordinal("group", list(several), "", {"labelLimit": 200, "grid": are_dots})
    height = (16 if are_dots else max(18, 11 * len(parts) + 6)) * len(several)
    return _chart(title, {"encoding": {"y": upwards}, "layer": layers, "height": height}, f"{len(several)} groups")


def concat(
    charts: Sequence[Chart], columns: int = 4, title: str = "", about: str = "", same: Iterable[str] = ()
) -> Chart:
    """Put several charts on one sheet under a title, with their own scales but for the `same` ones, such as "y"."""
    fits = min(columns, len(charts)) * WIDTH // 6
    heading = {
        "text": textwrap.wrap(title, fits) or [""],
        "subtitle": textwrap.wrap(about, int(fits * 1.2)),
        "anchor": "start",
    }
    own = dict.fromkeys(("color", "strokeDash", "strokeWidth"), "independent")
    shared = {"resolve": {"scale": own | dict.fromkeys(same, "shared")}}
    return {"title": heading, "columns": min(columns, len(charts)), "concat": list(charts), **shared}


def rows_of(chart: Chart) -> list[Row]:
    """Return the numbers behind a chart."""
    rows = list(chart.get("data", {}).get("values", ()))
    for part in (*chart.get("layer", ()), *chart.get("concat", ())):
        rows += rows_of(part)
    return list({json.dumps(row): row for row in rows if row}.values())


def save(chart: Chart, file: str | Path) -> None:
    """Write a chart in the format that the file's ending says, one of `KINDS`. Raises UserError."""
    file = Path(file)
    kind = file.suffix[1:]
    if kind not in KINDS:
        raise UserError(f"{file}: a chart is written as one of {', '.join(f'.{known}' for known in KINDS)}")
    convert = need("vl_convert", "report")
    spec = finished({"config": CONFIG, **chart}, _DAY)
    if kind == "json":
        content: Any = json.dumps(spec)
    else:
        options: dict[str, dict[str, Any]] = {"png": {"scale": 3.0}, "html": {"bundle": True}}
        content = getattr(convert, f"vegalite_to_{kind}")(spec, **options.get(kind, {}))
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content, encoding="utf-8")


@cache
def script() -> str:
    """Return the JavaScript that draws charts on pages. Raises UserError where vl-convert is absent."""
    return str(need("vl_convert", "report").javascript_bundle())


def finished(part: Any, colors: Mapping[str, str] = {}) -> Any:
    """Return a specification with colours in the place of their names, and spaces in the place of what has no shape.

    Vega's expressions take no separators of lines in texts, and a control sign ends the process that draws it.
    """
    if isinstance(part, dict):
        return {finished(k): finished(v, {} if k == "values" else colors) for k, v in part.items()}
    if isinstance(part, list | tuple):
        return [finished(v, colors) for v in part]
    if isinstance(part, str) and not part.isprintable():
        return printable(part, "\u00a0", " ")
    return colors.get(part, part) if isinstance(part, str) else part


def wrapped(title: str) -> list[str]:
    """Return a title in lines that fit a panel in a file."""
    return textwrap.wrap(title, WIDTH // 6)


def _chart(title: str, chart: Chart, about: str) -> Chart:
    heading = {"title": wrapped(title)} if title else {}
    return {**heading, "description": about, "width": WIDTH, "height": HEIGHT, **chart}


def _layer(mark: str, values: Sequence[Row] | None, look: Chart, **encoding: Any) -> Chart:
    """Return a layer; without `values` it draws those of its chart."""
    data = {} if values is None else {"data": {"values": list(values)}}
    return {**data, "mark": {"type": mark, **look}, "encoding": encoding}


def _number(field: str, title: str, **more: Any) -> Chart:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _ordinal(field: str, names: Sequence[str], title: str = "", axis: Mapping[str, Any] | None = None) -> Chart:
    """Return the encoding of names as places, ordered by the scale: sorting takes no hostile names."""
    channel = {
        "field": field,
        "type": "ordinal",
        "sort": None,
        "title": title or None,
        "scale": {"domain": list(names)},
    }
    return channel if axis is None else channel | {"axis": axis}


def _named(names: Sequence[str], colors: Sequence[str], field: str = "name") -> Chart:
    """Return the encoding of names by colours, with a legend where there are several."""
    widest = max(map(len, names), default=1)
    columns = max(1, (WIDTH + 60) // (6 * min(widest, 36) + 26))
    symbol = {"symbolType": "stroke" if field == "name" else "circle", "symbolOpacity": 1}
    scale = {"domain": list(names), "range": list(colors)}
    legend = {"columns": columns, **symbol} if len(names) > 1 else None
    return {"field": field, "type": "nominal", "title": None, "scale": scale, "legend": legend}


def _from(palette: Sequence[str]) -> Chart:
    """Return the encoding of names by the colours of their places in a palette, without a legend."""
    scale = {"domain": list(palette), "range": [color(at) for at in range(len(palette))]}
    return {"field": "name", "type": "nominal", "scale": scale, "legend": None}


def _said(field: str, title: str, spoken: str = "") -> Row:
    """Return a line of a tooltip."""
    more = {"type": "quantitative", "format": spoken} if spoken else {"type": "nominal"}
    return {"field": field, "title": title or field, **more}
