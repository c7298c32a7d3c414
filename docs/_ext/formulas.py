"""Formulas: those of docstrings, which stand in letters for terminals (`theta+ = theta + sum_k p_k Delta_k`), become
TeX, and TeX becomes MathML, which browsers draw without a script and without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

_GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi", "rho"),
    *("sigma", "tau", "phi", "omega", "Delta", "Omega", "Sigma"),
)
_SYMBOLS = {name: f"\\{name}" for name in _GREEK} | {
    "eps": r"\epsilon",
    "lam": r"\lambda",
    "mhat": r"\hat{m}",
    "ttil": r"\tilde{t}",
    "dw": r"\delta w",
    "KL": r"\mathrm{KL}",
    "CE": r"\mathrm{CE}",
}
_FUNCTIONS = {name: f"\\{name}" for name in ("sum", "max", "min", "cos", "exp", "log")} | {
    name: rf"\operatorname{{{name}}}"
    for name in (
        *("mean", "median", "argmin", "sgn", "sign", "softmax", "proj", "relu", "pinv", "diag", "tr", "clip", "clamp"),
        *("mask", "head", "deg", "grad"),
    )
}
_WORDS = {
    *("loss", "base", "step", "lr", "la", "rank", "limit", "margin", "calibration", "momentum", "penalty", "threshold"),
    *("floor", "tune", "clusters", "groups", "gap", "sim", "dist", "that", "out", "drop", "noise", "norm"),
}
"""Words that belong to a formula where they stand beside a sign, in a bracket's front, or have an index."""
_SIGNS = {
    "<-": r"\leftarrow ",
    "->": r"\rightarrow ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "!=": r"\ne ",
    "..": r"\ldots ",
    "*": r"\cdot ",
    "~": r"\sim ",
    "&": r"\cap ",
    "#": r"\#",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "'": "'",
}
_TOKEN = re.compile(
    r"(?P<word>(?:[A-Za-z]+[-'])+[A-Za-z]{2,}|[A-Za-z]{2,}-[a-z]\b|\w+'s\b|(?:[a-z]\.){2}"
    r"|[A-Z]+\d\w*|[A-Za-z]*\d+[A-Za-z]\w*(?<!\de))"
    r"|(?P<name>[A-Za-z]+\d?(?![A-Za-z0-9]))(?P<below>_\w+(?:,[a-z]+)*)?"
    r"|(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)|(?P<space>[^\S\n]+)"
    r"|(?P<sign><-|->|<=|>=|!=|\.\.|[=<>+\-*/|()\[\]{}~&#'^_%,:;])|(?P<other>\w+|.|\n)"
)
_OPEN, _CLOSE = "([{", ")]}"


class _Token(NamedTuple):
    """A piece of a docstring's line."""

    kind: str
    text: str
    name: str = ""
    below: str = ""


def _tokens(text: str) -> list[_Token]:
    return [
        _Token(str(m.lastgroup if not m["name"] else "name"), m[0], m["name"] or "", (m["below"] or "")[1:])
        for m in _TOKEN.finditer(text)
    ]


def html(text: str) -> str:
    """A text of a docstring as HTML, its formulas as MathML. A formula may go on in the next line."""
    text = re.sub(r"(?<=[-+*=])\n *", " ", re.sub(r"\([^()]*\([^()]*\)[^()]*\)|\([^()]*\)", _on_one_line, text))
    return "".join(mathml(piece) if formula else escape(piece, quote=False) for formula, piece in split(text))


def _on_one_line(found: re.Match[str]) -> str:
    return re.sub(r"\n *", " ", found[0])


def mathml(tex: str, *, display: bool = False) -> str:
    """TeX as MathML. A bar stands close to what is between bars."""
    made = convert(tex, display="block" if display else "inline")
    return re.sub(
        r"<mo[^>]*>(&#x0007C;|&#x02223;|\|)</mo>", r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', made
    )


def visit_inline(translator: Any, node: Any) -> None:
    """Sphinx calls this for a formula in a line of a page."""
    translator.body.append(mathml(node.astext()))
    raise SkipNode


def visit_block(translator: Any, node: Any) -> None:
    """Sphinx calls this for a formula of its own lines."""
    translator.body.append(f'<div class="math">{mathml(node.astext(), display=True)}</div>')
    raise SkipNode


def split(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the pieces of a line: (True, a formula as TeX) or (False, text as it stands)."""
    tokens = _tokens(text)
    inside = _inside(tokens)
    marks = [i in inside or _is_formula(tokens, i) for i in range(len(tokens))]
    start = 0
    while start < len(tokens):
        end = start + 1
        while end < len(tokens) and marks[end] == marks[start]:
            end += 1
        run = tokens[start:end]
        yield from _pieces(run) if marks[start] else [(False, "".join(token.text for token in run))]
        start = end


def _pieces(run: list[_Token]) -> Iterator[tuple[bool, str]]:
    """Yield a run of what may be a formula, without spaces and commas at its ends and without unmatched brackets."""
    if odd := _unmatched(run):
        i = min(odd)
        yield from _pieces(run[:i])
        yield False, run[i].text
        yield from _pieces(run[i + 1 :])
        return
    first, last = 0, len(run)
    while first < last and (run[first].kind == "space" or run[first].text in ",;:-/'"):
        first += 1
    while first < last and (run[last - 1].kind == "space" or run[last - 1].text in ",;:-/"):
        last -= 1
    before, inner, after = run[:first], run[first:last], run[last:]
    formula = any(token.kind == "name" for token in inner)
    yield False, "".join(token.text for token in before)
    yield formula, _tex(inner) if formula else "".join(token.text for token in inner)
    yield False, "".join(token.text for token in after)


def _unmatched(run: list[_Token]) -> set[int]:
    opened: list[int] = []
    odd = set()
    for i, token in enumerate(run):
        if token.text in [*_OPEN]:
            opened.append(i)
        elif token.text in [*_CLOSE]:
            if opened:
                opened.pop()
            else:
                odd.add(i)
    return odd | set(opened)


def _closing(tokens: list[_Token], start: int) -> int:
    """Return where the bracket at `start` closes, or the last position."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i].text in [*_OPEN]) - (tokens[i].text in [*_CLOSE])
        if not depth:
            return i
    return len(tokens) - 1


def _inside(tokens: list[_Token]) -> set[int]:
    """Return what stands in the brackets of a function, a subscript or an inner product, words too."""
    found: set[int] = set()
    for i, token in enumerate(tokens):
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        called = token.kind == "name" and (_is_symbol(token) or token.name in {*_FUNCTIONS, *_WORDS, "sqrt"})
        if (called or token.text in ("^", "'", "}")) and after == "(":
            found |= {*range(i, _closing(tokens, i + 1) + 1)}
        elif token.text in ("_", "^") and after == "{":
            found |= {*range(i - 1, _closing(tokens, i + 1) + 1)}
        elif token.text == "<" and after not in ("", " "):
            ends = [j for j in range(i, len(tokens)) if tokens[j].text == ">" and tokens[j - 1].kind != "space"]
            found |= {*range(i, ends[0] + 1)} if ends else set()
        elif token.text == "{" and i + 2 < len(tokens) and tokens[i + 2].text.strip() in (":", "") and after != " ":
            inner = tokens[i : _closing(tokens, i) + 1]
            found |= {*range(i, i + len(inner))} if any(_is_sign(t) for t in inner) else set()
    return found


def _is_symbol(token: _Token) -> bool:
    name, known = token.name, token.name in _SYMBOLS or token.name in _FUNCTIONS
    if token.below and not known and len(name) > 1:
        return len(token.below) < 3 + 2 * (name in _WORDS)  # no word_with_underscores
    numbered = re.fullmatch(r"([a-z]|alpha|beta|lambda|eps)\d", name)
    return len(name) == 1 or name in _SYMBOLS or bool(numbered) or bool(token.below)


def _is_sign(token: _Token) -> bool:
    return token.text in ("=", "<-", "<=", ">=", "<", ">", "+", "-", "*", "/", "^", "~", "!=", "->")


def _is_formula(tokens: list[_Token], i: int) -> bool:
    """Return whether a token by itself may belong to a formula."""
    token = tokens[i]
    if token.kind in ("number", "space"):
        return True
    if token.kind == "sign":
        return token.text not in ",;:"
    if token.kind != "name":
        return False
    near = [t for t in (*tokens[max(i - 2, 0) : i], *tokens[i + 1 : i + 3]) if t.kind != "space"]
    signs = any(_is_sign(t) and t.text not in "<>" for t in near)
    if i + 1 < len(tokens) and tokens[i + 1].text == ":" and len(token.text) > 2 and "_" not in token.text:
        return False  # a key of a recipe
    if token.name in ("a", "A", "I", "s") and not token.below:
        return signs or (i + 1 < len(tokens) and tokens[i + 1].text in ("'", "|", ")") and i > 0)
    if _is_symbol(token):
        return True
    if token.name in _FUNCTIONS:
        return bool(token.below) or any(
            _is_symbol(t) for t in tokens[i + 1 : i + 3] if t.kind == "name" and t.name != "a"
        )
    primed = token.name == "that" and tokens[i + 1 : i + 2] and tokens[i + 1].text == "'"
    return bool(primed) or (token.name in _WORDS and signs)


def _tex(tokens: list[_Token]) -> str:
    made: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        before = tokens[i - 1].text if i else " "
        after = tokens[i + 1].text if i + 1 < len(tokens) else " "
        place = tokens[i + 1 : i + 2]
        if token.text in ("^", "_") or (token.name == "sqrt" and after == "("):
            if after in ("(", "{"):
                end = _closing(tokens, i + 1)
                place = tokens[i + 2 : end]
            else:
                end = i + 1 + (after == "-")
                place = tokens[i + 1 : end + 1]
            made.append(f"{token.text.replace('sqrt', chr(92) + 'sqrt')}{{{_tex(place)}}}")
            i = end
        elif token.kind == "name" and after == "~":
            made.append(rf"\tilde{{{_name(token)}}}")
            i += 1
        elif token.kind == "name":
            made.append(_name(token))
        elif token.text in ("+", "*", "-") and before not in (" ", "(", "[", "=", "|") and after in " ,;)|_":
            made.append(f"^{{{token.text}}}")
        elif token.text == "<" and after != " ":
            made.append(r"\langle ")
        elif token.text == ">" and before != " ":
            made.append(r"\rangle ")
        elif token.kind == "space":
            signs = _is_sign(tokens[i - 1]) or (i + 1 < len(tokens) and _is_sign(tokens[i + 1]))
            made.append(" " if signs else r"\ " if len(token.text) == 1 else r"\quad ")
        else:
            made.append(_other(token))
        i += 1
    return re.sub(r"(?<=[\w}) ])\\ x \\ (?=[A-Z\\\d])", r"\\times ", "".join(made)).strip()


def _other(token: _Token) -> str:
    if token.kind == "number":
        return re.sub(
            r"^(?:1|(.+))e(-?\d+)$", lambda m: rf"{m[1] + chr(92) + 'cdot ' if m[1] else ''}10^{{{m[2]}}}", token.text
        )
    return _SIGNS.get(token.text, token.text) if token.kind == "sign" else _text(token.text)


def _text(word: str) -> str:
    return rf"\text{{{word}}}"


def _name(token: _Token) -> str:
    name = token.name
    if number := re.fullmatch(r"([a-z]+)(\d)", name):
        made = f"{_SYMBOLS.get(number[1], number[1])}_{{{number[2]}}}"
    elif len(name) > 1:
        made = _SYMBOLS.get(name) or _FUNCTIONS.get(name) or (r"\hat{t}" if name == "that" else _text(name))
    else:
        made = name
    if token.below:
        parts = (
            _SYMBOLS.get(p, p if len(p) < 3 or p.isdigit() else rf"\mathrm{{{p}}}") for p in token.below.split(",")
        )
        made += f"_{{{','.join(parts)}}}"
    return made + " "
