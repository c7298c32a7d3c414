"""The pages of runs and grids: one HTML file from the templates beside this, with its script, style and data in it.

Nothing is loaded from elsewhere, and every text is escaped where it enters a template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from fedloom.core.lazy import need
from fedloom.core.outline import Box
from fedloom.federation.runs.reader import TaskMetric, human_bytes, mean_of, total
from fedloom.study.charts import COLORS, CONFIG, color, finished, plain, script, style, thinned
from fedloom.study.output import Table
from fedloom.study.report import words
from fedloom.study.report.against import Against, Change, Method
from fedloom.study.report.collect import GridReport, RunReport
from fedloom.study.report.figures import Figure, against_of, compared, figures_of
from fedloom.study.report.records import (
    IN_CONFLICT,
    Curves,
    Score,
    Series,
    UpdateAgreement,
    cosines,
    primary,
    worst_tasks,
)
from fedloom.study.report.words import number, percent
from fedloom.study.statistics import Estimate

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


def render(kind: str, title: str, data: Mapping[str, Any], figures: Mapping[str, Figure], **shown: Any) -> str:
    """Fill the template of a kind of page, with `data` for programs and the figures in it.

    Raises UserError where Jinja2 or vl-convert is absent.
    """
    views = {
        name: [{"name": view.name, "group": view.group, "chart": finished(view.chart)} for view in figure.views]
        for name, figure in figures.items()
    }
    return filled(
        kind,
        script=text_of("page.js"),
        pictures=text_of("pictures.js"),
        title=title,
        vega=script(),
        data=in_script({"kind": kind, "title": title, **data, "config": CONFIG, "figures": views}),
        figures=figures,
        **shown,
    )


def filled(kind: str, **shown: Any) -> str:
    """Fill the template of a kind of page, with the style and the palette that all pages have.

    Characters that cannot be written as UTF-8, as in a folder's name of other bytes, become question marks.
    """
    template = _environment().get_template(f"{kind}.html")
    text = str(template.render(kind=kind, policy=_POLICY, style=style(), **shown))
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(name: str) -> str:
    """Return a file that lies beside the templates."""
    return (files("fedloom.study.report") / "templates" / name).read_text("utf-8")


def part(template: str, macro: str, *arguments: Any) -> str:
    """Return the HTML of one macro of a template."""
    return str(getattr(_environment().get_template(template).module, macro)(*arguments))


@cache
def _environment() -> Any:
    jinja2 = need("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.study.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"beside": beside}
    return environment


def beside(several: Iterable[Box]) -> list[list[Box]]:
    """Group stages: those that work on different parts, or in different rounds, stand side by side."""
    groups: list[list[Box]] = []
    for box in several:
        if groups and box.beside:
            groups[-1].append(box)
        else:
            groups.append([box])
    return groups


def in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever texts are in it: no '<', '>' or '&' is left."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


LATELY = 10
"""Rounds over which the trend of the training loss is computed."""
_POINTS = 30  # of a small line


@dataclass(frozen=True)
class Tile:
    """The result of one task."""

    task: str
    about: str
    value: str
    constant: str
    """The score of the constant prediction; '' where the page compares with a run."""
    change: str
    interval: str
    excludes_zero: bool | None
    """True if the interval excludes 0; None without an interval."""
    best: tuple[str, str] | None
    """The best client with its number; None where all have the same."""
    worst: tuple[str, str] | None
    spark: tuple[str, str]
    """The paths of the run and of the baseline."""


@dataclass(frozen=True)
class Glance:
    """The contents of the first screen; unknown parts are empty or None."""

    sentences: tuple[str, ...]
    hint: str
    tiles: tuple[Tile, ...]
    about_tiles: str
    about_gains: str


def glance_of(report: RunReport) -> Glance:
    """Return the first screen of a run."""
    base = report.against
    label = "" if base is None else base.label
    changes = {} if base is None else base.delta_of
    each = {} if base is None else {e.row.task: [e.clients[n].percent for n in e.compared] for e in base.each}
    by_task = {task: Estimate.of(of) for task, values in each.items() if (of := [v for v in values if v == v])}
    rounds = max((max(c.mean, default=0) for c in report.curves), default=0)
    first: dict[str, Score] = {}
    for score in report.scores:  # each task's own metric, on the first split that has it
        if score.primary:
            first.setdefault(score.task, score)
    results = words.came_out(rounds, [(s.task, s.metric, words.number(s.mean)) for s in first.values()])
    judged = primary(report.curves)
    constant = report.constant if base is None else {}
    if base is not None and base.each:
        results = words.ahead(rounds, label, changes)
    elif constant:
        results = words.beats(rounds, {t: is_better(s, constant[t]) for t, s in first.items() if t in constant})
    sentences = [results, words.trend(slope(report.curves))]
    lines = report.constant_lines if base is None else base.over_rounds
    return Glance(
        tuple(text for text in sentences if text),
        words.about_base(label, report.base_found, bool(report.others), bool(constant)),
        tuple(_tile(s, judged.get(s.task), lines, by_task, constant.get(s.task)) for s in first.values()),
        words.about_changes(label) if by_task else "",
        "" if base is None else _about_gains(label, changes, any(len(set(of)) > 1 for of in base.by_client.values())),
    )


def conflict_of(report: RunReport) -> str:
    """Say which updates conflict; '' where the files do not say."""
    agreement = report.agreement or UpdateAgreement()
    furthest = min(((*pair, value) for pair, value in cosines(agreement).items()), key=lambda e: e[2], default=None)
    shares = {
        group: mean_of(known)
        for group, series in agreement.over_rounds.get(IN_CONFLICT, {}).items()
        if (known := [v for v in series.values() if not math.isnan(v)])
    }
    return words.conflict(shares, furthest)


def slope(curves: Sequence[Curves]) -> float:
    """Return the change of the training loss in percent per round, over the last `LATELY` ones: the mean over tasks.

    Least squares for each task's mean over clients; nan with fewer than three rounds.
    """
    slopes = []
    for c in curves:
        points = [(r, v) for r, v in c.mean.items() if not math.isnan(v)][-LATELY:] if c.split == "train" else []
        if len(points) > 2 and (level := mean_of([v for _, v in points])) > 0:
            at = fmean(r for r, _ in points)
            spread = math.fsum((r - at) ** 2 for r, _ in points)
            slopes.append(100 * total((r - at) * v for r, v in points) / spread / level)
    return mean_of(slopes) if slopes else math.nan


def is_better(score: Score, constant: float) -> bool:
    """Return whether a task's number is better than the constant prediction's."""
    return score.mean > constant if score.direction == "max" else score.mean < constant


def _tile(
    score: Score,
    curve: Curves | None,
    base: Mapping[str, Series],
    changes: Mapping[str, Estimate],
    constant: float | None,
) -> Tile:
    of = changes.get(score.task)
    best, worst = (None if c is None else (c[0], words.number(c[1])) for c in (score.best, score.worst))
    return Tile(
        score.task,
        words.axis(score.metric, score.direction, score.unit),
        words.number(score.mean),
        "" if constant is None else words.number(constant),
        "" if of is None else words.change(of.mean),
        "" if of is None else words.interval(of),
        words.excludes_zero(of),
        best,
        worst,
        spark({} if curve is None else curve.mean, base.get(score.task, {})),
    )


def _about_gains(base: str, changes: Mapping[str, float], several: bool) -> str:
    """Explain the dots; `several`: a client has several tasks, with other changes."""
    if not changes:
        return ""
    of = Estimate.of(list(changes.values()))
    ends = words.interval(of)
    return (
        f"One dot per client: its change against {base}"
        + (", the mean of its tasks; the line goes from its worst task to its best." if several else ".")
        + f" All clients: {words.change(of.mean)}"
        + (f" ({ends}, 95 % t-interval over clients)." if ends else ".")
    )


def spark(series: Series, base: Series) -> tuple[str, str]:
    """Return the SVG paths of a run's line and of its baseline's in a box of 100 x 30."""
    known = [{r: v for r, v in of.items() if not math.isnan(v)} for of in (series, base)]
    rounds, values = ([each for of in known for each in side(of)] for side in (dict.keys, dict.values))
    if not values:
        return "", ""
    (left, wide), (low, high) = ((min(of), (max(of) - min(of)) or 1) for of in (rounds, values))
    paths = [
        [f"{2 + 96 * (r - left) / wide:.1f} {27 - 24 * (of[r] - low) / high:.1f}" for r in thinned(sorted(of), _POINTS)]
        for of in known
    ]
    first, second = (f"M{'L'.join(path)}" if path else "" for path in paths)
    return first, second


WORST = 5
"""Clients with a worse model that are named, at most."""


def of_run(report: RunReport) -> str:
    """Return the HTML of a run's report. Raises UserError where Jinja2 or vl-convert is absent."""
    views = [_view(report, 0)]
    figures = figures_of(report)
    for at, other in enumerate(report.others, 1):
        against = replace(report, against=other, base_found=False)
        views.append(_view(against, at))
        figures |= dict(against_of(against, views[at]["end"]))
    primary = [s for s in report.scores if s.primary]
    return render(
        "run",
        report.title,
        _run_data(report),
        figures,
        report=report,
        lead=_lead(report),
        views=views,
        conflict=conflict_of(report),
        equal=any(s.clients > 1 for s in primary) and all(s.worst is None for s in primary),
        federation=_federation(report),
        sent=_bytes(report),
        events=_events(report),
    )


def _view(report: RunReport, at: int) -> dict[str, Any]:
    """Return the parts of the page that compare the run with the report's baseline, the page's `at`-th, or with none.

    `end` is the end of the names of their figures and tables, because a page may have none of a name.
    """
    base = report.against
    own, others = ([s for s in report.scores if s.primary is judging] for judging in (True, False))
    end = f"-{at}" if at else ""
    return {
        "base": base,
        "name": base.label if base else "the constant prediction" if report.constant else "nothing",
        "glance": glance_of(report),
        "final": _scores(f"final-table{end}", own, base) if own else None,
        "others": _scores(f"others-table{end}", others, base) if others else None,
        "deltas": "" if base is None else _deltas(base),
        "lowest": _lowest(report.scores, base),
        "about": base and Table("", ("the baseline", ""), base.facts, name=f"base-table{end}", text=(1,)),
        "worse": _worse(f"worse-table{end}", base) if base is not None and base.each else None,
        "losses": () if base is None else _losses(base),
        "end": end,
    }


def _run_data(report: RunReport) -> dict[str, Any]:
    """Return the numbers of the page's tables, for programs."""
    names = ("task", "metric", "split", "primary", "round", "model", "data", "mean", "clients", "worst")
    scores = [
        {name: getattr(s, name) for name in names}
        | {"mean": plain(s.mean), "worst": s.worst and {"client": s.worst[0], "value": plain(s.worst[1])}}
        for s in report.scores
    ]
    best = [
        {"task": c.task, "metric": c.metric, "split": c.split, "model": c.model, "round": c.best}
        for c in report.curves
        if c.best is not None
    ]
    totals = [{"role": role, "task": task, "up": up, "down": down} for role, task, up, down in report.totals]
    base = {} if report.against is None else {"base": _base_data(report.against)}
    return {"about": dict(report.facts), "scores": scores, "best": best, "bytes": totals, **base}


def _base_data(base: Against) -> dict[str, Any]:
    def plainly(change: Change) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(change).items()}

    means = [{"split": s, "task": t, "metric": m, **plainly(change)} for (s, t, m), change in base.means.items()]
    each = [
        {"task": e.row.task, "metric": e.row.metric, "split": base.split, "client": name, **plainly(change)}
        for e in base.each
        for name, change in e.clients.items()
    ]
    deltas = {split: plain(delta) for split, (delta, _) in base.deltas.items()}
    return {"about": dict(base.facts), "delta_m": deltas, "tasks": means, "clients": each}


def _lead(report: RunReport) -> str:
    """Say how far the run is, and what it took."""
    facts = dict(report.facts)
    up, down = report.sent
    state = facts["status"]
    parts = [
        state if "round" in state else f"{state}, {words.count(int(facts['rounds']), 'round')}",
        f"{words.count(len(report.clients), 'client')}, {words.count(len(report.tasks), 'task')}",
        f"seed {facts['seed']}",
        f"{human_bytes(up)} sent by clients, {human_bytes(down)} to them",
    ]
    return " · ".join(parts)


def _scores(name: str, scores: Sequence[Score], base: Against | None) -> Table:
    against = () if base is None else (f"base: {base.label}", "change")
    worst = any(s.worst is not None for s in scores)
    value = "mean over clients" if any(s.clients > 1 for s in scores) else "value"
    who = ("worst client", "its number") if worst else ()
    head = ("task", "split", value, *against, "clients", *who, "model", "data", "round")
    lines = []
    for s in scores:
        change = None if base is None else base.means.get((s.split, s.task, s.metric))
        compared = (number(change.base), percent(change.percent)) if change else ("",) * len(against)
        cells: tuple[str, ...] = ()
        if worst:
            same = "all the same" if s.clients > 1 and not math.isnan(s.mean) else ""
            cells = (same, "") if s.worst is None else (s.worst[0], number(s.worst[1]))
        row = str(TaskMetric(s.task, s.metric, s.direction))
        lines.append((row, s.split, number(s.mean), *compared, str(s.clients), *cells, s.model, s.data, str(s.round)))
    texts = [i for i, title in enumerate(head) if title in ("worst client", "model", "data", "split")]
    return Table("", head, tuple(lines), name=name, text=texts)


def _lowest(scores: Sequence[Score], base: Against | None) -> str:
    """Say which task has the lowest change; without a baseline the worst one of each metric that judges several."""
    if base is None:
        return words.worst_tasks([(s.metric, s.split, s.task, number(s.mean)) for s in worst_tasks(scores)])
    changes = {(s.task, s.metric): base.means.get((base.split, s.task, s.metric)) for s in scores if s.primary}
    return words.lowest(
        {key: of.percent for key, of in changes.items() if of is not None and not math.isnan(of.percent)}, base.split
    )


def _deltas(base: Against) -> str:
    each = [(percent(delta), split, words.count(count, "task")) for split, (delta, count) in base.deltas.items()]
    return words.deltas(base.label, each)


def _worse(name: str, base: Against) -> Table:
    """Return how many clients of each task have a worse model than with the baseline, and which."""
    lines = []
    for e in base.each:
        named = [f"{name} {percent(e.clients[name].percent)}" for name in e.worse[:WORST]]
        counts = [len(e.clients), len(e.worse), len(e.better), len(e.clients) - len(e.compared)]
        lines.append((str(e.row), *map(str, counts), ", ".join(named)))
    head = ("task", "clients", "worse", "better", "not defined", "worst changes")
    return Table("", head, tuple(lines), name=name, text=(5,))


def _losses(base: Against) -> tuple[str, ...]:
    worse, clients = {name for e in base.each for name in e.worse}, {name for e in base.each for name in e.clients}
    over_all = words.worse_over_all(base.delta_of) if len(base.each) > 1 else ""
    return (words.worse(len(worse), len(clients), base.split), over_all) if clients else ()


def _federation(report: RunReport) -> Table:
    lines = []
    domains = any(about.get("domain") for about in report.clients.values())
    for name, about in report.clients.items():
        tasks = ", ".join(t if w == 1 else f"{t} (weight {w:g})" for t, w in about["tasks"].items())
        sizes = [str(about.get(part, "")) for part in ("train", "val")]
        lines.append((name, tasks, *((str(about.get("domain") or ""),) if domains else ()), *sizes))
    head = ("client", "tasks", *(("domain",) if domains else ()), "train examples", "validation")
    return Table("", head, tuple(lines), name="clients-table", text=(1, 2) if domains else (1,))


def _bytes(report: RunReport) -> Table | None:
    lines = [(role, task, human_bytes(up), human_bytes(down)) for role, task, up, down in report.totals]
    total = ("all", "", *map(human_bytes, report.sent))
    head = ("role", "task", "sent by clients", "sent to clients")
    return Table("", head, (*lines, total), name="bytes-table", text=(1,)) if lines else None


def _events(report: RunReport) -> Table | None:
    lines = tuple(
        (h.what, h.who, str(h.times), str(h.first) if h.first == h.last else f"{h.first} to {h.last}")
        for h in report.happened
    )
    head = ("what", "client", "times", "rounds")
    return Table("", head, lines, name="events-table", text=(1,)) if lines else None


def of_grid(report: GridReport) -> str:
    """Return the HTML of a grid's report. Raises UserError where vl-convert or Jinja2 is absent."""
    facts = dict(report.facts)
    head = ("run", "status", "rounds", "sent by clients", "sent to clients", "seconds")
    figures = figures_of(report)
    for at, methods in enumerate(report.methods.values()):
        figures |= dict(compared(methods, report.palette, at))
    seeds = f"seeds {facts['seeds']}" if "," in facts["seeds"] else f"seed {facts['seeds']}"
    ranks = None if report.ranks is None else report.ranks.as_table()
    return render(
        "grid",
        report.title,
        _grid_data(report),
        figures,
        report=report,
        lead=f"runs: {facts['runs']} · {seeds}",
        table=report.table.as_table().fragment() if report.table else "",
        key=_key(report),
        worst=[part for at, data in enumerate(_by_data(report.worst)) if (part := _worst(report.worst, data, at))],
        cells=Table("", head, report.cells, name="cells-table") if report.cells else None,
        bases=[name or "nothing" for name in report.methods],
        views=[
            [_compared(f"{at}-{place}", *of, report.smallest) for place, of in enumerate(_by_data(methods).items())]
            for at, methods in enumerate(report.methods.values())
        ],
        ranks=ranks and (replace(ranks, title="", notes=(), name="ranks-table", text=(2,)), ranks.notes),
    )


def _key(report: GridReport) -> list[tuple[str, str]]:
    """Return (method, colour) of all curves of the page; empty where colours begin anew, so that dashes count, too."""
    drawn = [name for name in report.palette if any(name in lines for lines in report.curves.values())]
    places = {name: at for at, name in enumerate(report.palette)}
    return [] if len(places) > len(COLORS) else [(name, color(places[name])) for name in drawn if name != "constant"]


def _grid_data(report: GridReport) -> dict[str, Any]:
    table = report.table
    lines = [
        {
            "base": entry.base,
            "addon": entry.addon,
            "owner": entry.owner,
            "data": entry.column.data,
            "task": entry.column.task,
            "metric": entry.column.metric,
            "kind": entry.kind,
            **({} if entry.estimate is None else _estimate(entry.estimate)),
        }
        for line in (table.lines if table else ())
        for entry in line
    ]
    worst = [
        {
            "data": m.data,
            "method": m.label,
            "reference": m.reference,
            "task": m.worst_task and {"task": m.worst_task[0].task, **_estimate(m.worst_task[1])},
            "clients": {
                row.task: {"clients": list(names), **_estimate(of)} for row, (of, names) in m.worst_clients.items()
            },
        }
        for m in report.worst
    ]
    return {"about": dict(report.facts), "table": lines, "worst": worst}


def _estimate(of: Estimate) -> dict[str, float | int | None]:
    return {"mean": plain(of.mean), "half": plain(of.half), "n": of.n}


def _by_data(methods: Sequence[Method]) -> dict[str, list[Method]]:
    by_data: dict[str, list[Method]] = {}
    for method in methods:
        by_data.setdefault(method.data, []).append(method)
    return by_data


def _compared(name: str, data: str, methods: Sequence[Method], smallest: float) -> dict[str, Any]:
    """Return the methods of a data set at a glance; the names of their figures begin with `name`."""
    ranked = sorted((m for m in methods if m.delta is not None), key=lambda m: -m.delta.mean if m.delta else 0.0)
    head = ("method", "Δ %", "verdict", "bytes", "seconds")
    lines = []
    for m in [*ranked, *(m for m in methods if m.delta is None)]:
        delta = m.delta.signed if m.delta else "base" if m.label == m.reference else ""
        verdict = m.verdict.in_words(" %") if m.verdict else ""
        lines.append((m.label, delta, verdict, human_bytes(m.sent), f"{m.seconds:.1f}"))
    verdicts = {m.label: m.verdict for m in ranked if m.verdict}
    seeds = max((len(m.seeds) for m in ranked), default=0)
    sentence = words.of_methods(verdicts, {m.reference for m in ranked}, smallest, seeds)
    if not verdicts and any(m.is_method for m in ranked):
        sentence = "One seed has no interval, so there is no verdict on any method."
    costs = Table("", head, tuple(lines), name=f"costs-{name}", text=(2,))
    return {"name": name, "data": data, "sentence": sentence, "costs": costs}


def _worst(methods: Sequence[Method], data: str, at: int) -> tuple[str, Table] | None:
    """Return the table of a data set with its heading: the task with the lowest change, and the worst clients."""
    mine = [m for m in methods if m.data == data]
    changed = any(m.worst_task for m in mine)
    rows = list(dict.fromkeys(row for m in mine for row in m.worst_clients))
    if not changed and not rows:
        return None
    head = ["method", *(("worst task", "change", "against") if changed else ()), *(f"worst client: {r}" for r in rows)]
    lines = []
    for m in mine:
        cells = [_with_names(*m.worst_clients[row]) if row in m.worst_clients else "" for row in rows]
        if changed:
            cells = [*_lowest_of(m), *cells]
        lines.append((m.label, *cells))
    text = [i for i in range(len(head)) if i != 2 or not changed]  # names of clients need to break
    heading = data if len(_by_data(methods)) > 1 else ""
    return heading, Table("", tuple(head), tuple(lines), name=f"worst-{at}", text=text)


def _lowest_of(m: Method) -> tuple[str, str, str]:
    if m.worst_task is None:
        return ("", "base", "") if m.label == m.reference else ("", "", m.reference)
    row, change = m.worst_task
    return str(row), f"{change.signed}\u00a0%", m.reference


def _with_names(estimate: Estimate, names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{estimate} ({', '.join(names[:most]) or 'all the same'}{more})"
