"""A method's stages as boxes, in HTML without a script, from the text that run.json has of it (`Method.__str__`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_INDENT = 2
_CALL = re.compile(r"(?P<name>[A-Za-z_]\w*)\((?P<arguments>.*)\)(?P<rest>[^()]*)")
_WIRE = re.compile(
    r"on the wire: (?P<codec>.*); private: (?P<private>.*); starts from: (?P<start>\w+) model(?P<more>.*)"
)
_PART = re.compile(r"in (?!each )")


@dataclass(frozen=True)
class Block:
    """A line of the text, and the lines that are indented below it."""

    text: str
    inside: tuple[Block, ...] = ()


def blocks(text: str) -> tuple[Block, ...] | None:
    """The lines by their indentation; None where it is not that of headings that end in ':' and what is below them."""
    lines = [line for line in text.splitlines() if line.strip()]
    levels = []
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if depth % _INDENT or line[:depth].strip(" "):
            return None
        levels.append(depth // _INDENT)
    for above, level, line in zip([-1, *levels], levels, ["", *lines], strict=False):
        if level > above and (level != above + 1 or (above >= 0 and not line.endswith(":"))):
            return None
    return _nested([line.strip() for line in lines], levels, 0, len(lines))


def _nested(lines: Sequence[str], levels: Sequence[int], start: int, end: int) -> tuple[Block, ...]:
    found = []
    while start < end:
        after = next((i for i in range(start + 1, end) if levels[i] <= levels[start]), end)
        found.append(Block(lines[start], _nested(lines, levels, start + 1, after)))
        start = after
    return tuple(found)


def diagram(text: str, peers: bool) -> str:
    """The way of an update through a round as HTML; '' where the text is not that of a method.

    Args:
        text: `str` of a method.
        peers: Whether peers mix the updates, not a server.
    """
    found = blocks(text)
    if not found or not found[0].text.startswith("method ") or not any(block.inside for block in found):
        return ""
    steps = []
    back = ""
    for block in found[1:]:
        wire = _WIRE.fullmatch(block.text)
        if block.text == "local training:":
            # losses, phases and a stream of one training: no order
            steps.append(_step("Local training", _list(block.inside)))
        elif block.text == "client, before sending:":
            steps.append(_step("Before sending", _chain(block.inside)))
        elif block.text == "server:":
            steps.append(_step("Peers" if peers else "Server", _chain(block.inside), wide=True))
        elif wire is not None:
            more = wire["more"].removeprefix("; ")
            facts = [f"private: {wire['private']}", *([more] if more else [])]
            steps.append(_step("On the wire", _leaf(wire["codec"]) + "".join(map(_fact, facts))))
            start = f"Local training starts from the {wire['start']} model"
            back = _step("Next round" if peers else "Back to the clients", _fact(start))
        else:
            title = block.text.removesuffix(":")
            steps.append(_step(title[:1].upper() + title[1:], _chain(block.inside) if block.inside else ""))
    return f'<ol class="flow">\n{"".join(steps)}{back}</ol>\n'


def _step(title: str, body: str, wide: bool = False) -> str:
    kind = ' class="main"' if wide else ""
    return f'<li{kind}><div class="step"><strong>{escape(title)}</strong>{body}</div></li>\n'


def _chain(several: Sequence[Block]) -> str:
    """Stages one after another; what works on different parts, or in different rounds, stands side by side."""
    groups: list[list[Block]] = []
    for block in several:
        if groups and _beside(groups[-1][-1], block):
            groups[-1].append(block)
        else:
            groups.append([block])
    items = []
    for group in groups:
        boxes = "".join(map(_box, group))
        items.append(f'<li><div class="beside">{boxes}</div></li>' if len(group) > 1 else f"<li>{boxes}</li>")
    return f'<ol class="chain">{"".join(items)}</ol>'


def _beside(one: Block, two: Block) -> bool:
    if not (one.inside and two.inside):
        return False
    parts = _PART.match(one.text) and _PART.match(two.text) and one.text != two.text
    return bool(parts) or (one.text.startswith("before round ") and two.text.startswith("from round "))


def _list(several: Sequence[Block]) -> str:
    return f'<ul class="parts">{"".join(f"<li>{_box(block)}</li>" for block in several)}</ul>'


def _box(block: Block) -> str:
    if not block.inside:
        return f'<div class="box">{_leaf(block.text)}</div>'
    heading = escape(block.text.removesuffix(":"))
    return f'<div class="box"><div class="heading">{heading}</div>{_chain(block.inside)}</div>'


def _leaf(text: str) -> str:
    """'Name(arguments); fact; fact' with the name first; any other text as it is."""
    call = _CALL.fullmatch(text)
    if call is None:
        return f'<div class="name">{escape(text)}</div>'
    first, *facts = call["rest"].split("; ")
    arguments = f'<div class="arguments">{escape(call["arguments"])}</div>' if call["arguments"] else ""
    name = f'<div class="name">{escape(call["name"] + first)}</div>{arguments}'
    return name + "".join(map(_fact, facts))


def _fact(text: str) -> str:
    return f'<div class="fact">{escape(text)}</div>'
