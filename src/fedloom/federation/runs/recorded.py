"""Schemas and checksums of the files of a run folder, checked before anything is read from them. Free of torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from itertools import repeat, zip_longest
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from fedloom.core.errors import CONTROL, LINE, StateError, printable, twice
from fedloom.core.settings import renamed
from fedloom.core.settings.trust import Origin, changed_sources
from fedloom.core.settings.yaml import parse
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe

LOGS = ("metrics.jsonl", "bytes.jsonl", "diagnostics.jsonl")
"""The files with a line a round."""
MODEL = "model.safetensors"
NEXT = "recipe.next.yaml"
"""A recipe that is about to take the place of recipe.yaml."""
RUNNING = "running"
TEMPORARY = "fedloom-"
"""The beginning of the names of temporary folders, which are deleted with their results."""
_CHANGED = "{}: the content differs from what the run wrote: the file was changed or truncated"

Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = float | None
"""null stands for nan."""


def no_run(folder: Path, name: str) -> StateError:
    """Return the error for a folder that lacks a file which every run has."""
    gone = not folder.exists() and any(each.name.startswith(TEMPORARY) for each in (folder, folder.parent))
    lost = "it was temporary and is gone with its result; keep the result, or pass folder= to the run"
    why = lost if gone else f"{name} is absent"
    return StateError(f"{folder} is not a run folder: {why}{runs_below(folder, 'name these')}")


def runs_below(folder: Path, advice: str) -> str:
    """Return the end of a message about a folder that is no run but has some, with what to do; '' where it has none."""
    files = [*folder.glob("*/run.json")] or folder.glob("cells/*/*/*/*/run.json")  # the second of a grid's folder
    below = sorted(file.parent.relative_to(folder).as_posix() for file in files)
    several = f"{len(below)} folders in it are run folders" if len(below) > 1 else "1 folder in it is a run folder"
    return f"; {several}, such as {below[0]}: {advice}" if below else ""


# These take types that are made here, which a type checker would not follow.
_typed: Any = TypedDict
_Dict: Any = dict
_List: Any = list
_Maybe: Any = NotRequired


def _open(name: str, /, **fields: Any) -> Any:
    """Return a schema with these fields; files may hold more: later versions and users' own stages add to them."""
    kind = _typed(name, fields)
    kind.__pydantic_config__ = ConfigDict(extra="allow", strict=True)
    return kind


_Name: Any = Annotated[str, Field(pattern=f"^{LINE}$")]
"""A name in one line; `_loaded` has replaced other control characters."""


def _judged(task: Mapping[str, Any]) -> Mapping[str, Any]:
    if task["primary"] not in task["metrics"]:
        raise ValueError(f"primary {task['primary']!r} found, expected one of the metrics")
    return task


_TASK: Any = Annotated[_open("Task", primary=str, metrics=_Dict[_Name, Literal["max", "min"]]), AfterValidator(_judged)]
_CLIENT = _open(
    "Client",
    tasks=_Dict[_Name, float],
    domain=_Maybe[_Name | None],
    **dict.fromkeys(("train", "val", "test"), _Maybe[Natural]),
)
_PAIR = Field(min_length=2, max_length=2)
_CHANGE = _open("Change", after_round=Natural, keys=dict[str, Annotated[list[Any], _PAIR]])
_INFO = _open(
    "Info",
    tasks=_Dict[_Name, _TASK],
    clients=_Dict[_Name, _CLIENT],
    status=_Name,
    method=_Maybe[_Name],
    **dict.fromkeys(("redrawn", "validated"), _Maybe[float]),
    files=_Maybe[dict[str, list[int | str]]],
    changes=_Maybe[_List[_CHANGE]],
    recipe=_Maybe[dict[str, Any]],
    table=_Maybe[_open("Table", minimum=Natural) | None],
    origins=_Maybe[dict[str, dict[str, Any]]],
    **dict.fromkeys(("fedloom", "recipe_text", "layout_hash"), _Maybe[str]),
    **dict.fromkeys(("rounds", "final_round", "parameters"), _Maybe[Natural]),
)
# recipe.yaml, as far as readers of runs look at it
_SECTIONS = ("data", "partition", "model", "method", "training", "runtime", "evaluation", "early_stopping", "peers")
_PRESENCE: Any = _open("Presence", joins=_Maybe[int], away=_Maybe[_List[Annotated[_List[int | None], _PAIR]]])
_SCENARIO = _Maybe[_open("Scenario", churn=_Maybe[_Dict[str, _PRESENCE]]) | None]
_SECTIONS_OF = dict.fromkeys(_SECTIONS, _Maybe[dict[str, Any] | None])
_SECTIONS_OF["peers"] = _Maybe[_open("Peers", scenario=_SCENARIO) | None]
_RECIPE = _open("Recipe", name=_Maybe[_Name], seed=_Maybe[Natural], **_SECTIONS_OF)
_METRIC = _open("Metric", client=str | None, **dict.fromkeys(("task", "metric", "model", "split"), _Name), value=Number)


def _square(record: Mapping[str, Any]) -> Mapping[str, Any]:
    if {len(record["tasks"])} != {len(record["similarity"]), *map(len, record["similarity"])}:
        raise ValueError("expected a number of similarity for each two tasks")
    return record


def _fitting(look: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the diagnostics of a round, if each list has as many numbers as there are rows and pairs."""
    rows, shown = len(look["rows"]), look["shown"]
    pairs = len(shown) * (len(shown) - 1) // 2 if look.get("peer") is None else max(len(shown) - 1, 0)
    of_pairs = (len(group[key]) for group in look["groups"] for key in ("cosine", "sign"))
    of_rows = (len(each) for group in look["groups"] for each in group.get("weights") or ())
    if any(n != pairs for n in of_pairs) or any(n != rows for n in of_rows) or any(at >= rows for at in shown):
        raise ValueError("expected a number for each row and each pair of the rows that are shown")
    return look


_GROUP = _open(
    "Group",
    **dict.fromkeys(("part", "layers"), str),
    **dict.fromkeys(("looked", "size"), Annotated[int, Field(ge=1)]),
    **dict.fromkeys(("cosine", "sign"), _List[Number]),
    **dict.fromkeys(("kept", "explained"), _Maybe[_List[Number] | None]),
    task=str | None,
    weights=_Maybe[list[list[Number]] | None],
)
_LOOK = _open(
    "Look",
    **dict.fromkeys(("rows", "out"), list[Annotated[list[str | None], _PAIR]]),
    shown=list[Natural],
    peer=_Maybe[str | None],
    groups=_List[_GROUP],
)
_WEIGHTS = _Maybe[_Dict[str, Number] | None]
_RECORDS: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(fields)
    for kind, fields in {
        "diagnostics": Annotated[_LOOK, AfterValidator(_fitting)],
        "clock": _open("Clock", start=float, end=float),
        "staleness": _open("Staleness", seconds=_open("Seconds", mean=float)),
        "task-vectors": Annotated[
            _open("Vectors", tasks=list[str], similarity=list[list[Number]], partners=_Maybe[list[list[str]]]),
            AfterValidator(_square),
        ],
        "mixing": _open("Mixing", weights=dict[str, dict[str, Number]]),
        "peer": _open("Peer", peer=str, neighbours=_Maybe[list[str]], weights=_WEIGHTS, similarity=_WEIGHTS),
        "conflict-averse": _open("Averse", peer=str, weights=_WEIGHTS, acted=_Maybe[_Dict[str, Any] | None]),
        "hyper-weights": _open("Hyper", weights=dict[str, Number | dict[str, dict[str, Number]]]),
        "withheld": _open("Withheld", what=str, clients=list[str]),
        "constant prediction": _open("Constant", tasks=dict[str, Annotated[list[str | Number], _PAIR]]),
    }.items()
}
"""Kind of a record that readers look into -> its schema. Users' own stages may record other kinds."""


def check_record(kind: str, fields: Any) -> Any:
    """Return the fields of a record. Raises ValueError, with the first that is wrong, where readers need others."""
    try:
        return fields if kind not in _RECORDS else _RECORDS[kind].validate_python(fields)
    except ValidationError as error:
        raise ValueError(" ".join(_first(error))) from None


_ROUND = _open(
    "Round",
    round=Natural,
    metrics=_List[_METRIC],
    cohort=_Maybe[list[str]],
    train=_Maybe[_List[_open("Trained", client=str, task=str, loss=Number)]],
    events=_Maybe[_List[_open("Event", event=str)]],
    records=_Maybe[
        _List[
            Annotated[
                _open("Record", kind=str, peer=_Maybe[str | None]), AfterValidator(lambda r: check_record(r["kind"], r))
            ]
        ]
    ],
    **dict.fromkeys(("seconds", "seconds_of"), _Maybe[dict[str, Number]]),
)
_COSTS = _List[_open("Cost", client=str, role=str, task=str | None, bytes=Natural)]
_CELLS: Any = Annotated[_List[str | list[str]], Field(min_length=1)]  # the best cell of a line is a list
_KINDS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind)
    for name, kind in {
        "run.json": _INFO,
        "recipe.yaml": _RECIPE,
        "metrics.jsonl": _ROUND,
        "bytes.jsonl": _open("Bytes", round=Natural, up=_COSTS, down=_COSTS),
        "comparison.json": _open("Shown", title=str, head=list[str], lines=_List[_CELLS], notes=list[str]),
    }.items()
}
_LINE = TypeAdapter(_open("Line", round=Natural))


def check(name: str, value: Any, where: str) -> None:
    """Raise StateError, with the first field that is wrong, unless a value is what a file of this name holds."""
    try:
        _KINDS.get(name, _LINE).validate_python(value)
    except ValidationError as error:
        field, problem = _first(error)
        raise StateError(f"{where}{field and ', '}{field}: {problem}") from None


def _first(error: ValidationError) -> tuple[str, str]:
    """Return (field, problem) of the first that is wrong."""
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":  # of `_Name`
        problem = f"{first['input']!r} found, expected a name in one line"
    return printable(".".join(map(str, first["loc"]))), problem[:1].lower() + problem[1:]


def text_of(file: Path) -> str:
    """Return a text file of a run. Raises StateError where it is no UTF-8, or no regular file: a pipe would never end.

    FileNotFoundError where there is none.
    """
    if file.exists() and not file.is_file():
        raise StateError(f"{file}: expected a regular file")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise StateError(f"{file}: {error}") from None


def json_of(file: Path) -> Any:
    """Return a JSON file of a run. Raises StateError where it is none, or where a key occurs twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if again := twice(key for key, _ in pairs):
            raise ValueError(f"the key {again[0]!r} occurs twice")
        return dict(pairs)

    try:
        return _loaded(text_of(file), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file}: {error}") from None


def _loaded(text: str | bytes, **how: Any) -> Any:
    """Return JSON whose texts have no control characters: a file from elsewhere could write to the terminal."""
    text = text.decode() if isinstance(text, bytes) else text
    value = json.loads(text, **how)
    is_plain = text.rstrip("\n").isprintable() and "\\" not in text  # fast, and so for nearly every line
    return value if is_plain else _harmless(value)


def _harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return {_harmless(key): _harmless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_harmless(each) for each in value]
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


def plainly(value: Any) -> Any:
    """Return mappings, sequences, dataclasses, texts and numbers as what JSON has: nan and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plainly(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plainly(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def checksum(value: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits over what run.json holds beside them, as its key `check`."""
    return digest_of(json.dumps(value, sort_keys=True))[:16]


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of run.json. Raises StateError where that is not what was written."""
    file = folder / "run.json"
    info = json_of(file)
    if not isinstance(info, dict):
        raise StateError(f"{file}: expected an object, found {type(info).__name__}")
    check_ = info.pop("check", None)  # runs from before it have none
    if check_ not in (None, checksum(info)):
        raise StateError(f"{file}: the checksum does not match the content: the file was changed")
    return renamed.info(info)


def recipe_in(folder: Path) -> Recipe:
    """Return the recipe of a run's folder. Raises RecipeError where it names code that this user did not run."""
    origins = read_info(folder).get("origins") if (folder / "run.json").is_file() else None
    file = replaced(folder) or folder / "recipe.yaml"
    return load(file, (), Origin.FOLDER, origins if isinstance(origins, Mapping) else {})


def other_code(folder: Path, held: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return which of the user's own modules have changed since they made a run, with both sources; '' for none.

    `held` are the origins of objects that are here (`Recipe.origins`).
    """
    return "; ".join(dict.fromkeys(changed_sources(read_info(folder).get("origins", {}), held)))


def replaced(folder: Path) -> Path | None:
    """Return the file of the recipe that run.json belongs to, where a kill came before it took the name recipe.yaml.

    None where nothing was cut off, or before run.json was the new one: then the recipe was not changed.
    """
    file = folder / NEXT
    if not (file.is_file() and (folder / "run.json").is_file()):
        return None
    return file if parse(text_of(file), str(file)) == read_info(folder).get("recipe") else None


def verify(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise StateError where a finished run's recipe or logs are not those that it wrote, by the sums in its run.json.

    A run that goes on is compared with its newest checkpoint, as far as that reaches.
    """
    finished = info["status"] != RUNNING
    for name, (size, digest) in (info.get("files", {}) if finished else _saved(folder)).items():
        stored = sum_of(folder / name, None if finished else size)
        if name == MODEL or stored == [size, digest]:
            continue
        if finished or stored[0] == size:  # a resumed run may have cut a log, and write it anew
            raise StateError(_CHANGED.format(folder / name))


def verify_model(folder: Path) -> None:
    """Raise the same for model.safetensors, which readers of numbers do not open."""
    stated = read_info(folder).get("files", {}).get(MODEL) if (folder / "run.json").is_file() else None
    if stated is not None and sum_of(folder / MODEL) != stated:
        raise StateError(_CHANGED.format(folder / MODEL))


def digest_of(text: str) -> str:
    """Return the checksum of a text, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def sum_of(file: Path, size: int | None = None) -> list[Any]:
    """Return [bytes, checksum] of a file, or of its first `size` bytes; an absent file counts as empty."""
    digest, left = hashlib.sha256(), float("inf") if size is None else size
    total = 0
    if file.is_file():
        with file.open("rb") as opened:
            while part := opened.read(int(min(1 << 20, left))):
                digest.update(part)
                total, left = total + len(part), left - len(part)
    return [total, digest.hexdigest()]


def head_of(text: str) -> dict[str, Any]:
    """Return the content of a checkpoint's text file. Raises ValueError where that is not what was written."""
    head, _, stated = text.partition("\n")
    value: dict[str, Any] = json.loads(head)
    # the first format had no checksum
    if stated.strip() != digest_of(head) and not (value["format"] == 1 and not stated):
        raise ValueError("its checksum does not match its content")
    return value


def _saved(folder: Path) -> Mapping[str, Any]:
    """Log -> (bytes, checksum) as the newest checkpoint has them; nothing where it is damaged, as resuming says."""
    try:
        logs: Mapping[str, Any] = head_of(text_of(folder / "state.json")).get("logs", {})
    except (StateError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return logs


def began(folder: Path) -> float:
    """Return when the run in a folder began, by the time of its recipe."""
    return (folder / "recipe.yaml").stat().st_mtime


def changed(recipe: Recipe) -> float:
    """Return when the last of the files changed that a recipe's data section names, or that lie in folders it names.

    Their content may be what it was. 0 where it names none.
    """

    def paths(value: Any) -> Iterator[Path]:
        each = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, of in each:
            if key in ("path", "root") and isinstance(of, str) and of and Path(of).exists():
                yield Path(of)
                yield from Path(of).rglob("*")
            yield from paths(of)

    stats = [path.stat() for path in paths(recipe.data.model_dump(mode="json"))]
    return max((max(of.st_mtime, of.st_ctime) for of in stats), default=0.0)


def sums(folder: Path) -> dict[str, Any]:
    """Return file -> [bytes, checksum] of what a run that is over has written, for its run.json."""
    names = (*LOGS, "recipe.yaml", "partition.json", MODEL)
    return {name: sum_of(folder / name) for name in names if (folder / name).is_file()}


MANY = 64
"""From so many clients on, their entries in a line become one."""
_LISTS = ("train", "metrics", "up", "down")  # the lists of a line that have an entry for each client
_LARGEST = 10_000_000  # a list never has more entries than this


def packed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round's line as its file holds it: entries that differ in the client and in numbers alone are one.

    It has `clients`, a position in the line's `groups`, and lists of numbers that are not the same. See `unpacked`.
    """
    groups: dict[tuple[str, ...], int] = {}
    lists = {name: _together(line[name], groups) for name in _LISTS if name in line}
    return {**line, **lists, **({"groups": [list(names) for names in groups]} if groups else {})}


def _together(entries: Sequence[Mapping[str, Any]], groups: dict[tuple[str, ...], int]) -> list[Mapping[str, Any]]:
    """Return entries with those of MANY clients as one, whose clients are added to `groups`, if they are new."""
    alike: dict[Any, list[Mapping[str, Any]]] = {}
    words: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Any]] = {}  # keys -> the words under them
    for entry in entries if len(entries) >= MANY else ():
        if (keys := tuple(entry)) not in words:
            words[keys] = itemgetter("client", *(k for k in keys if k != "client" and isinstance(entry[k], str)))
        of_words = words[keys](entry)
        alike.setdefault((keys, of_words[1:] if isinstance(of_words, tuple) else ()), []).append(entry)
    if not any(len(some) >= MANY for some in alike.values()):
        return [*entries]
    result: list[Mapping[str, Any]] = []
    for some in alike.values():
        names = tuple(entry["client"] for entry in some)
        if len(set(names)) < max(MANY, len(names)):
            result += some
            continue
        one: dict[str, Any] = {"clients": groups.setdefault(names, len(groups))}
        for key, first in some[0].items():
            if isinstance(first, str):
                one |= {} if key == "client" else {key: first}
                continue
            column = [entry[key] for entry in some]
            same = first == column[-1] and not isinstance(first, list) and len(set(map(repr, column))) == 1
            one[key] = first if same else column
        result.append(one)
    return result


def unpacked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line with an entry for each client, client by client. Raises an error of Python if it is damaged."""
    if "groups" not in line:
        return line
    lists = {name: _apart(line[name], line["groups"]) for name in _LISTS if name in line}
    return {**{key: value for key, value in line.items() if key != "groups"}, **lists}


def _apart(entries: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]]) -> list[Mapping[str, Any]]:
    """Return the entries of `_together` one by one; those that were alone come last."""
    if sum(len(groups[entry["clients"]]) for entry in entries if "clients" in entry) > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST} entries")
    many = []
    for one in (entry for entry in entries if "clients" in entry):
        names = groups[one["clients"]]
        rest = {key: value for key, value in one.items() if key != "clients"}
        columns = [value if isinstance(value, list) else repeat(value, len(names)) for value in rest.values()]
        values = zip(names, *columns, strict=True)
        many.append([dict(zip(("client", *rest), of_client, strict=True)) for of_client in values])
    in_order = [entry for of_client in zip_longest(*many) for entry in of_client if entry is not None]
    return [*in_order, *(entry for entry in entries if "clients" not in entry)]


def recipe_of(folder: Path) -> dict[str, Any]:
    """Return recipe.yaml as plain values. Raises StateError or RecipeError where it is not one that a run wrote."""
    file = folder / "recipe.yaml"
    recipe: dict[str, Any] = parse(text_of(file), str(file))
    check("recipe.yaml", recipe, str(file))
    return recipe


_NO_LINE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
"""Errors from reading a line that is no round's."""


def line_of(file: Path, round_: int) -> Mapping[str, Any] | None:
    """Return the newest line of a round in a JSON-lines file, looked for from the end; None where it has none."""
    for text in reversed(file.read_bytes().splitlines()) if file.is_file() else ():
        try:
            line = _loaded(text)
            if line["round"] != round_:
                continue
            value = unpacked(line)
        except _NO_LINE as error:
            raise StateError(f"{file}: expected the JSON of rounds, one a line: {error}") from None
        check(file.name, value, str(file))
        return value
    return None


def lines_of(file: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the rounds in a JSON-lines file, each once, without a torn last line. Raises StateError for others."""
    result: dict[int, Mapping[str, Any]] = {}
    if not file.is_file():
        return ()
    torn = 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if torn:
                raise StateError(f"{file}, line {torn}: expected the JSON of a round")
            try:
                value = unpacked(_loaded(line))
                result[int(value["round"])] = value
            except _NO_LINE:
                torn = number
                continue
            check(file.name, value, f"{file}, line {number}")
    return tuple(result.values())
