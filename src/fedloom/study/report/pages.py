"""The pages of runs and grids: one HTML file from the templates beside this, with its script, style and data in it.

Nothing is loaded from elsewhere, and every text is escaped where it enters a template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedloom.core.disclosure import shown
from fedloom.core.errors import first_of
from fedloom.core.grouping import grouped
from fedloom.federation.runs.reader import TaskMetric, human_bytes, mean_of, total
from fedloom.federation.runs.recorded import plainly
from fedloom.study.charts import COLORS, CONFIG, color, finished, script, thinned
from fedloom.study.output import Table, filled, text_of
from fedloom.study.report import records, words
from fedloom.study.report.against import Against, Method, by_gain
from fedloom.study.report.collect import GridReport, RunReport
from fedloom.study.report.figures import Figure, against_of, compared, figures_of
from fedloom.study.report.words import number, percent


def render(kind: str, title: str, data: Mapping[str, Any], figures: Mapping[str, Figure], **shown: Any) -> str:
    """Fill the template of a page with `data` for programs and figures. Raises UserError without a library."""
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
        data=in_script({"kind": kind, "title": title, **plainly(data), "config": CONFIG, "figures": views}),
        figures=figures,
        words=words,
        **shown,
    )


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

    score: records.Score
    constant: float | None
    """The score of the constant prediction; None where the page compares with a run."""
    change: words.Spread | None
    """The changes of the clients against the base."""
    spark: tuple[str, str]
    """The paths of the run and of the baseline."""


def tiles_of(report: RunReport) -> list[Tile]:
    """Return the result of each task, on the first split that has its own metric."""
    base = report.against
    each = {} if base is None else {e.row.task: [e.clients[n].percent for n in e.compared] for e in base.each}
    changes = {task: words.spread_of(of) for task, of in each.items()}
    judged, constant = records.primary(report.curves), report.run.constant if base is None else {}
    lines = report.constant_lines if base is None else base.over_rounds
    return [
        Tile(several[0], constant.get(task), changes.get(task),
             spark(judged[task].mean if task in judged else {}, lines.get(task, {})))
        for task, several in grouped((score.task, score) for score in report.scores if score.primary).items()
    ]  # fmt: skip


def sentences(report: RunReport, tiles: Sequence[Tile]) -> list[str]:
    """Say the results of a run, and whether it still improves."""
    base, rounds = report.against, max((max(c.mean, default=0) for c in report.curves), default=0)
    each = [f"{number(t.score.mean)} {words.metric(t.score.metric)} on {t.score.task}" for t in tiles]
    said = f"After {words.count(rounds, 'round')}: {words.listed(each)}." if each else ""
    if base is not None and base.each:
        said = words.ahead(rounds, base.label, base.delta_of)
    elif any(t.constant is not None for t in tiles):
        known = [(t.score, t.constant) for t in tiles if t.constant is not None]
        said = words.beats(rounds, {s.task: s.mean > c if s.direction == "max" else s.mean < c for s, c in known})
    return [text for text in (said, words.trend(slope(report.curves))) if text]


def conflict_of(agreement: records.UpdateAgreement) -> str:
    """Say which updates conflict; '' where the files do not say."""
    furthest = min(
        ((*pair, value) for pair, value in records.cosines(agreement).items()), key=lambda e: e[2], default=None
    )
    shares = {
        group: mean_of(known)
        for group, series in agreement.over_rounds.get(records.IN_CONFLICT, {}).items()
        if (known := [v for v in series.values() if not math.isnan(v)])
    }
    return words.conflict(shares, furthest)


def slope(curves: Sequence[records.Curves]) -> float:
    """Return the mean change of training losses in percent per round, by least squares over `LATELY` rounds, or nan."""
    slopes = []
    for c in curves:
        points = [(r, v) for r, v in c.mean.items() if not math.isnan(v)][-LATELY:] if c.split == "train" else []
        if len(points) > 2 and (level := mean_of([v for _, v in points])) > 0:
            at = fmean(r for r, _ in points)
            spread = math.fsum((r - at) ** 2 for r, _ in points)
            slopes.append(100 * total((r - at) * v for r, v in points) / spread / level)
    return mean_of(slopes) if slopes else math.nan


def spark(series: records.Series, base: records.Series) -> tuple[str, str]:
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
_NAMED = 3  # worst clients that are named, at most


def table(name: str, head: Iterable[str], lines: Iterable[Sequence[str]], *text: int) -> Table | None:
    """Return a table of a page; `text` are its columns that are no numbers. None without a line."""
    found = tuple(map(tuple, lines))
    return Table("", tuple(head), found, name=name, text=text) if found else None


def of_run(report: RunReport) -> str:
    """Return the HTML of a run's report. Raises UserError where vl-convert is absent."""
    views = [_view(report, 0)]
    figures = figures_of(report)
    for at, other in enumerate(report.others, 1):
        against = replace(report, against=other, base_found=False)
        views.append(_view(against, at))
        figures |= dict(against_of(against, views[at]["end"]))
    judging = [s for s in report.scores if s.primary]
    sent = [(role, task, human_bytes(up), human_bytes(down)) for role, task, up, down in records.totals(report.run)]
    return render(
        "run",
        report.title,
        _run_data(report),
        figures,
        report=report,
        lead=_lead(report),
        views=views,
        conflict=conflict_of(report.agreement or records.UpdateAgreement()),
        equal=any(s.clients > 1 for s in judging) and all(s.worst is None for s in judging),
        matrices=records.matrices(report.run),
        method=str(report.run.info.get("recipe_text", "")),
        recipe=words.without_folders((report.folder / "recipe.yaml").read_text("utf-8")),
        peers=report.run.recipe.get("peers") is not None,
        federation=_federation(report),
        sent=table(
            "bytes-table",
            ("role", "task", "sent by clients", "sent to clients"),
            [*sent, ("all", "", *map(human_bytes, report.run.bytes_total().values()))] if sent else (),
            1,
        ),
        events=table("events-table", ("what", "client", "times", "rounds"), records.happened(report.run), 1),
    )


def _view(report: RunReport, at: int) -> dict[str, Any]:
    """Return the parts of a page that compare the run with its `at`-th baseline, if any; `end` ends their names."""
    base, tiles = report.against, tiles_of(report)
    own, others = ([s for s in report.scores if s.primary is judging] for judging in (True, False))
    end = f"-{at}" if at else ""
    return {
        "base": base,
        "name": base.label if base else "the constant prediction" if report.run.constant else "nothing",
        "found": report.base_found,
        "sentences": sentences(report, tiles),
        "tiles": tiles,
        "gains": base and base.delta_of and words.spread_of(base.delta_of.values()),
        "several": base is not None and any(len(set(of)) > 1 for of in base.by_client.values()),
        "final": _scores(f"final-table{end}", own, base),
        "others": _scores(f"others-table{end}", others, base),
        "deltas": base
        and [(percent(delta), split, words.count(n, "task")) for split, (delta, n) in base.deltas.items()],
        "lowest": _lowest(report.scores, base),
        "gaps": [
            f"{gap}, {split} data."
            for split in dict.fromkeys(s.split for s in report.scores)
            for gap in report.run.final(split).gaps()
        ],
        "about": base and table(f"base-table{end}", ("the baseline", ""), base.facts, 1),
        "worse": _worse(f"worse-table{end}", base) if base is not None and base.each else None,
        "losses": _losses(base) if base is not None and base.each else [],
        "end": end,
    }


def _run_data(report: RunReport) -> dict[str, Any]:
    """Return the numbers of the page's tables, for programs."""
    names = ("task", "metric", "split", "primary", "round", "model", "data", "mean", "clients", "worst")
    scores = [
        {name: getattr(s, name) for name in names}
        | {"worst": s.worst and dict(zip(("client", "value"), s.worst, strict=True))}
        for s in report.scores
    ]
    best = [
        {"task": c.task, "metric": c.metric, "split": c.split, "model": c.model, "round": c.best}
        for c in report.curves
        if c.best is not None
    ]
    sent = [{"role": role, "task": task, "up": up, "down": down} for role, task, up, down in records.totals(report.run)]
    base = {} if report.against is None else {"base": _base_data(report.against)}
    return {"about": dict(report.facts), "scores": scores, "best": best, "bytes": sent, **base}


def _base_data(base: Against) -> dict[str, Any]:
    means = [{"split": s, "task": t, "metric": m, **vars(change)} for (s, t, m), change in base.means.items()]
    each = [
        {"task": e.row.task, "metric": e.row.metric, "split": base.split, "client": name, **vars(change)}
        for e in base.each
        for name, change in e.clients.items()
    ]
    deltas = {split: delta for split, (delta, _) in base.deltas.items()}
    return {"about": dict(base.facts), "delta_m": deltas, "tasks": means, "clients": each}


def _lead(report: RunReport) -> str:
    """Say how far the run is, and what it took."""
    facts = dict(report.facts)
    (up, down), tasks = report.run.bytes_total().values(), len(report.run.info["tasks"])
    state = facts["status"]
    parts = [
        state if "round" in state else f"{state}, {words.count(int(facts['rounds']), 'round')}",
        f"{words.count(len(report.clients), 'client')}, {words.count(tasks, 'task')}",
        f"seed {facts['seed']}",
        f"{human_bytes(up)} sent by clients, {human_bytes(down)} to them",
    ]
    return " · ".join(parts)


def _scores(name: str, scores: Sequence[records.Score], base: Against | None) -> Table | None:
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
    return table(name, head, lines, *texts)


def _lowest(scores: Sequence[records.Score], base: Against | None) -> str:
    """Say which task has the lowest change; without a baseline the worst one of each metric that judges several."""
    if base is None:
        tasks = [f"{s.metric} on {s.split}: {s.task} ({number(s.mean)})" for s in records.worst_tasks(scores)]
        return f"Worst task by {'; by '.join(tasks)}." if tasks else ""
    named = {(s.task, s.metric): base.means.get((base.split, s.task, s.metric)) for s in scores if s.primary}
    changes = {key: of.percent for key, of in named.items() if of is not None and not math.isnan(of.percent)}
    if len(changes) < 2:
        return ""
    task, name = min(changes, key=lambda key: changes[key])
    return f"Lowest change on {base.split}: {task} ({name}), {percent(changes[task, name])}."


def _worse(name: str, base: Against) -> Table | None:
    """Return how many clients of each task have a worse model than with the baseline, and which."""
    lines = []
    for e in base.each:
        named = [f"{name} {percent(e.clients[name].percent)}" for name in e.worse[:WORST]]
        counts = [len(e.clients), len(e.worse), len(e.better), len(e.clients) - len(e.compared)]
        lines.append((str(e.row), *map(str, counts), ", ".join(named)))
    return table(name, ("task", "clients", "worse", "better", "not defined", "worst changes"), lines, 5)


def _losses(base: Against) -> list[str]:
    """Say how many clients have a worse model for one of their tasks, and over all of them."""
    worse, clients = {name for e in base.each for name in e.worse}, {name for e in base.each for name in e.clients}
    said = [
        f"{len(worse)} of {len(clients)} clients have a worse model than with the base for at least one of their tasks "
        f"({base.split})."
    ]
    if len(base.each) > 1 and (means := base.delta_of):
        lost = sum(mean < -words.NOTHING for mean in means.values())
        said.append(f"For {lost} of {len(means)} clients the mean change over all their tasks is below 0.")
    return said


def _federation(report: RunReport) -> Table | None:
    domains = ("domain",) if any(about.get("domain") for about in report.clients.values()) else ()
    lines = [
        (
            name,
            ", ".join(t if w == 1 else f"{t} (weight {w:g})" for t, w in about["tasks"].items()),
            *(str(about.get(key) or "") for key in domains),
            *(shown(about[key], report.minimum) if key in about else "" for key in ("train", "val")),
        )
        for name, about in report.clients.items()
    ]
    text = (1, 2) if domains else (1,)
    return table("clients-table", ("client", "tasks", *domains, "train examples", "validation"), lines, *text)


def of_grid(report: GridReport) -> str:
    """Return the HTML of a grid's report. Raises UserError where vl-convert or Jinja2 is absent."""
    facts = dict(report.facts)
    head = ("run", "status", "rounds", "sent by clients", "sent to clients", "seconds")
    figures = figures_of(report)
    for at, methods in enumerate(report.methods.values()):
        figures |= dict(compared(methods, report.palette, at))
    seeds = f"seeds {facts['seeds']}" if "," in facts["seeds"] else f"seed {facts['seeds']}"
    ranks = report.ranks and report.ranks.as_table()
    by_data = grouped((m.data, m) for m in report.worst)
    return render(
        "grid",
        report.title,
        _grid_data(report),
        figures,
        report=report,
        lead=f"runs: {facts['runs']} · {seeds}",
        table=report.table.as_table() if report.table else None,
        key=_key(report),
        worst=[
            (data if len(by_data) > 1 else "", sheet)
            for at, (data, several) in enumerate(by_data.items())
            if (sheet := _worst(several, f"worst-{at}"))
        ],
        cells=table("cells-table", head, report.cells),
        bases=[name or "nothing" for name in report.methods],
        views=[
            [
                _compared(f"{at}-{place}", data, of_data, report.smallest)
                for place, (data, of_data) in enumerate(grouped((m.data, m) for m in methods).items())
            ]
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
            **({} if entry.estimate is None else vars(entry.estimate)),
        }
        for line in (table.lines if table else ())
        for entry in line
    ]
    worst = [
        {
            "data": m.data,
            "method": m.label,
            "reference": m.reference,
            "task": m.worst_task and {"task": m.worst_task[0].task, **vars(m.worst_task[1])},
            "clients": {row.task: {"clients": names, **vars(of)} for row, (of, names) in m.worst_clients.items()},
        }
        for m in report.worst
    ]
    return {"about": dict(report.facts), "table": lines, "worst": worst}


def _compared(name: str, data: str, methods: Sequence[Method], smallest: float) -> dict[str, Any]:
    """Return the methods of a data set at a glance; the names of their figures begin with `name`."""
    ranked = by_gain(methods)
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
    costs = table(f"costs-{name}", head, lines, 2)
    return {"name": name, "data": data, "sentence": sentence, "costs": costs}


def _worst(methods: Sequence[Method], name: str) -> Table | None:
    """Return the table of a data set: the task with the lowest change, and the worst clients."""
    changed = any(m.worst_task for m in methods)
    rows = list(dict.fromkeys(row for m in methods for row in m.worst_clients))
    if not changed and not rows:
        return None
    head = ["method", *(("worst task", "change", "against") if changed else ()), *(f"worst client: {r}" for r in rows)]
    lines = []
    for m in methods:
        cells = [""] * len(rows)
        for at, row in enumerate(rows):
            if row in m.worst_clients:
                of, names = m.worst_clients[row]
                cells[at] = f"{of} ({first_of(names, _NAMED) or 'all the same'})"
        if changed and m.worst_task is not None:
            cells = [str(m.worst_task[0]), f"{m.worst_task[1].signed}\u00a0%", m.reference, *cells]
        elif changed:
            cells = ["", *(("base", "") if m.label == m.reference else ("", m.reference)), *cells]
        lines.append((m.label, *cells))
    text = [at for at in range(len(head)) if at != 2 or not changed]  # names of clients need to break
    return table(name, head, lines, *text)
