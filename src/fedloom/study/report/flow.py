"""A method's stages as boxes, in HTML without a script, from the outline that run.json has of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedloom.core.outline import Box, Outline


def diagram(outline: Outline, peers: bool) -> str:
    """The way of an update through a round as HTML. `peers`: whether they mix the updates, and not a server."""
    wire = outline.wire
    return "".join(
        [
            '<ol class="flow">\n',
            _step(
                "Local training", f'<ul class="parts">{"".join(f"<li>{_box(box)}</li>" for box in outline.local)}</ul>'
            ),
            _step("Before sending", _chain(outline.edge)),
            _step("On the wire", _leaf(wire)),
            _step("Peers" if peers else "Server", _chain(outline.server), ' class="main"'),
            _step(
                "Next round" if peers else "Back to the clients",
                _fact(f"Local training starts from the {outline.start} model"),
            ),
            "</ol>\n",
        ]
    )


def _step(title: str, body: str, kind: str = "") -> str:
    return f'<li{kind}><div class="step"><strong>{escape(title)}</strong>{body}</div></li>\n'


def _chain(several: Sequence[Box]) -> str:
    """Stages one after another; what works on different parts, or in different rounds, stands side by side."""
    groups: list[list[Box]] = []
    for box in several:
        if groups and box.beside:
            groups[-1].append(box)
        else:
            groups.append([box])
    items = []
    for group in groups:
        boxes = "".join(map(_box, group))
        items.append(f'<li><div class="beside">{boxes}</div></li>' if len(group) > 1 else f"<li>{boxes}</li>")
    return f'<ol class="chain">{"".join(items)}</ol>'


def _box(box: Box) -> str:
    if not box.inside:
        return f'<div class="box">{_leaf(box)}</div>'
    return f'<div class="box"><div class="heading">{escape(box.title)}</div>{_chain(box.inside)}</div>'


def _leaf(box: Box) -> str:
    arguments = f'<div class="arguments">{escape(box.arguments)}</div>' if box.arguments else ""
    return f'<div class="name">{escape(box.title + box.after)}</div>{arguments}{"".join(map(_fact, box.facts))}'


def _fact(text: str) -> str:
    return f'<div class="fact">{escape(text)}</div>'
