"""A run in a notebook: its final numbers, curves over the rounds, and where the report is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fedloom.federation.runs.reader import Final, Run

WIDTH, HEIGHT = 260, 110  # of a curve, in pixels


def page(run: Run, final: Final, status: str) -> str:
    """Return HTML without scripts."""
    metrics = list(dict.fromkeys(metric for values in final.values.values() for metric in values))
    head = "".join(f"<th>{escape(text)}</th>" for text in ("", *metrics))
    rows = "".join(
        f"<tr><th>{escape(task)}</th>"
        + "".join(f"<td>{values[m]:.4f}</td>" if m in values else "<td></td>" for m in metrics)
        + "</tr>"
        for task, values in final.values.items()
    )
    history = run.history(final.split)
    curves = "".join(
        _curve(f"{judged.task}: {judged.metric}", {h.round: h.values[judged.task][judged.metric] for h in history})
        for judged in run.judged
        if all(judged.metric in h.values.get(judged.task, {}) for h in history)
    )
    report = run.folder / "report.html"
    where = f"<code>fedloom report {escape(str(run.folder))}</code> writes its page"
    if report.is_file():
        where = f'<a href="{escape(report.resolve().as_uri())}">{escape(str(report))}</a>'
    about = f"{escape(run.label)}, {escape(status)}: {escape(final.caption)}"
    return f"<p>{about}</p><table><tr>{head}</tr>{rows}</table><div>{curves}</div><p>{where}</p>"


def _curve(title: str, points: Mapping[int, float]) -> str:
    """Return a polyline over the rounds, with the smallest and the largest value at its side."""
    known = {x: y for x, y in points.items() if math.isfinite(y)}
    if len(known) < 2:
        return ""
    left, right, low, high = min(known), max(known), min(known.values()), max(known.values())
    places: Sequence[str] = [
        f"{45 + (x - left) / (right - left) * (WIDTH - 50):.1f},"
        f"{HEIGHT - 15 - ((y - low) / (high - low) if high > low else 0.5) * (HEIGHT - 40):.1f}"
        for x, y in known.items()
    ]
    line = f'<polyline fill="none" stroke="#1f77b4" stroke-width="1.5" points="{" ".join(places)}"/>'
    texts = ((5, 14, title), (2, 28, f"{high:.3g}"), (2, HEIGHT - 12, f"{low:.3g}"), (45, HEIGHT - 1, f"round {left}"))
    marks = [f'<text x="{x}" y="{y}" font-size="10" fill="currentColor">{escape(text)}</text>' for x, y, text in texts]
    marks.append(f'<text x="{WIDTH - 30}" y="{HEIGHT - 1}" font-size="10" fill="currentColor">{right}</text>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{line}{"".join(marks)}</svg>'
