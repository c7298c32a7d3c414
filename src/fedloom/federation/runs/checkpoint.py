"""Checkpoints: any tree of tensors and plain values, saved so that a crash at any instant loses nothing.

NAME.safetensors holds tensors under their checksums; NAME.json has the tree with everything else (scalars, strings,
empty containers) and the checksums of all its tensors, and below them the checksum of that. Nothing is pickled. Tensors
that did not change are not written again: they are in older files NAME.*.safetensors.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import StateError, naming
from fedloom.core.grouping import grouped
from fedloom.federation.runs.recorded import digest_of, head_of, sum_of, text_of

_FORMAT = 3
_NAMES = ("{}.next", "{}", "{}.prev")
_MOST = 32
"""A checkpoint has tensors in at most so many files beside its own."""
Turn = dict[str, dict[str, int]]
"""The files of a checkpoint, by the names that they have when the next but one is saved: checksum of a tensor -> its
bytes."""
UNREAD = (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError)
"""Errors from reading a checkpoint whose checksums are right and whose content `save` did not write."""


def split_tree(tree: Any, once: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return a JSON value and the tensors of a tree. Dictionaries need string keys; tuples come back as lists.

    With `once` a tensor that is several times in the tree is there once.
    Raises TypeError, with the path, for a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    return _split(tree, "", tensors, {} if once else None), tensors


def _split(value: Any, path: str, tensors: dict[str, Tensor], names: dict[Any, str] | None) -> Any:
    """Return the JSON value of a part of a tree. A function in `split_tree` that called itself would be a cycle, which
    would keep the tensors of every checkpoint until Python searches for garbage."""
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").contiguous()
        name = str(len(tensors))
        if names is not None and tensor.numel():
            name = names.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), name)
        tensors[name] = tensor
        return {"$tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"state{path}: keys must be strings, found {key!r}")
        return {"$dict": {k: _split(v, f"{path}.{k}", tensors, names) for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_split(v, f"{path}[{i}]", tensors, names) for i, v in enumerate(value)]
    if isinstance(value, float):
        return {"$float": value.hex()}  # exact, and inf and nan are not JSON
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"state{path}: a {type(value).__name__} cannot be saved")


def join_tree(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `split_tree`. Raises one of `UNREAD` for what it did not make."""
    if isinstance(skeleton, list):
        return [join_tree(v, tensors) for v in skeleton]
    if isinstance(skeleton, dict):
        ((kind, value),) = skeleton.items()
        if kind == "$tensor":
            return tensors[value]
        if kind == "$float":
            return float.fromhex(value)
        return {k: join_tree(v, tensors) for k, v in value.items()}
    return skeleton


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tree with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {k: map_tensors(v, change) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [map_tensors(v, change) for v in tree]
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(value)


def save(folder: Path, name: str, tree: Any, turns: list[Turn] | None = None, **labels: Any) -> None:
    """Write a checkpoint atomically; the one before it is kept as NAME.prev.* until the next save.

    At every instant one of NAME.next, NAME, NAME.prev is a whole checkpoint, possibly with its files under different
    names; `load` finds them by checksum. With `turns`, the same list for all saves of a process and [] at first, a
    tensor is not written that a file of the checkpoint before the last one has: the newest two share no file. Changes
    are found by checksum, because a tensor can be changed in place in ways that it does not count.
    """
    skeleton, tensors = split_tree(tree, once=True)
    sums = [_sum_of(tensor) for tensor in tensors.values()]
    of = dict(zip(sums, tensors.values(), strict=True))
    fresh, now, before = (n.format(name) for n in _NAMES)
    turns = [] if turns is None else turns
    last, files = turns[-1:], turns[0] if len(turns) == 2 else {}
    turns.clear()  # if this save fails, nothing is known of what is there
    mine = {
        file: held
        for file, held in files.items()  # at least half of each, so they are at most twice as large as the tensors
        if 2 * sum(size for digest, size in held.items() if digest in of) >= sum(held.values()) > 0
        and (folder / f"{file}.safetensors").exists()
    }
    if len(mine) > _MOST:
        mine = {}
    known = set().union(*mine.values())
    own = {digest: tensor for digest, tensor in of.items() if digest not in known}
    # tensors before the text that has their checksums, and both on the disk before any old file is moved
    save_tensors(own, folder / f"{fresh}.safetensors")
    text = json.dumps({**labels, "format": _FORMAT, "sha256": sums, "tree": skeleton})
    write_text(folder / f"{fresh}.json", f"{text}\n{digest_of(text)}\n")
    if before in mine:
        kept = f"{name}.{os.urandom(8).hex()}"
        os.replace(folder / f"{before}.safetensors", folder / f"{kept}.safetensors")
        mine[kept] = mine.pop(before)
    for kind in ("safetensors", "json"):
        if (folder / f"{now}.{kind}").exists():
            os.replace(folder / f"{now}.{kind}", folder / f"{before}.{kind}")
    for kind in ("safetensors", "json"):
        os.replace(folder / f"{fresh}.{kind}", folder / f"{now}.{kind}")
    sync(folder)
    mine[before] = {digest: tensor.nbytes for digest, tensor in own.items()}
    for stale in folder.glob(f"{name}.*.safetensors") if last else ():
        if stale.stem not in {*mine, *last[0]}:
            stale.unlink()
    turns += [*last, mine]


_DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Dtype -> its name in a file, in the order in which the format puts tensors: large numbers first."""


def _raw(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, as an array."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _sum_of(tensor: Tensor) -> str:
    """Return the checksum of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{_DTYPES[tensor.dtype]} {list(tensor.shape)} ".encode())
    digest.update(_raw(tensor))
    return digest.hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], file: Path, labels: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file to the disk.

    Nothing is copied, which `safetensors.torch.save_file` would do, nor are labels in a random order. Raises OSError
    where the system refuses, as writing other files does.
    """
    order = list(_DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    head: dict[str, Any] = {} if labels is None else {"__metadata__": dict(sorted(labels.items()))}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind = _DTYPES[tensors[name].dtype]
        head[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with naming(file), file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            opened.write(_raw(tensors[name]))
        opened.flush()
        os.fsync(opened.fileno())


def load(
    folder: Path,
    name: str,
    newest: Callable[[Mapping[str, Any]], Any],
    complete: Callable[[Any, Mapping[str, Any]], Any] = lambda tree, labels: tree,
) -> tuple[Any, dict[str, Any], list[str]]:
    """Return the newest whole checkpoint: (tree, labels, problems). `newest` maps labels to what is compared.

    A damaged file is passed over in favour of the checkpoint before it, and so is a tree that `complete`, which makes
    the result of a tree and its labels, refuses with a StateError. Raises StateError if none is whole.
    """
    problems: list[str] = []
    heads = []
    for pattern in _NAMES:
        path = folder / f"{pattern.format(name)}.json"
        if not path.exists():
            continue
        try:
            head = head_of(text_of(path))
            heads.append((newest(head), path, head, head["sha256"], head["tree"]))
        except (StateError, *UNREAD) as error:
            problems.append(f"{path.name} is damaged ({error})")
    files = sorted(folder.glob(f"{name}.*safetensors"))
    for _, path, head, sums, tree in sorted(heads, key=lambda h: h[0], reverse=True):
        try:
            tensors = _stored(sums, files)
            labels = {k: v for k, v in head.items() if k not in ("format", "sha256", "tree")}
            return complete(join_tree(tree, tensors), labels), labels, problems
        except UNREAD as error:
            problems.append(f"{path.stem}.safetensors is damaged ({error})")
        except StateError as error:
            problems.append(f"{path.name} cannot be used: {error}")
    problem = "; ".join(problems) or f"no file {name}.json there"
    raise StateError(f"{folder}: no intact checkpoint {name!r}: {problem}")


def _stored(sums: Any, files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors with these checksums, from whichever files have them intact, by their numbers.

    They are copies, because a file may be replaced while they are in use. Raises StateError if one is nowhere.
    """
    if isinstance(sums, str):  # older runs: the checksum of one file with all of them
        for file in files:
            if sum_of(file)[1] == sums:
                return {number: tensor.clone() for number, tensor in load_file(file).items()}
        files = ()
    left = grouped((digest, str(number)) for number, digest in enumerate(sums))
    found: dict[str, Tensor] = {}
    for file in files:
        with suppress(OSError, *UNREAD), safe_open(file, "pt") as opened:
            for digest in left.keys() & set(opened.keys()):
                if _sum_of(tensor := opened.get_tensor(digest)) == digest:
                    found |= {number: tensor.clone() for number in left.pop(digest)}
    if left:
        raise StateError("no file has all of its tensors: one is truncated, changed or missing")
    return found


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: write, fsync, rename."""
    part = path.with_name(path.name + ".part")
    with naming(part), part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


_NEEDED = (
    *("recipe.yaml", "partition.json", "nodes.json", "flower.json", "keys.json", "*.jsonl"),
    *("peers/*/*.safetensors", "peers/*/*.json"),
    *("best*.safetensors", "best*.json", "state.*.safetensors", "state.prev.json", "state.safetensors", "state.json"),
    "run.json",
)
"""Patterns of the files, in the order in which they are copied: peers before the rest, the checkpoint but one before
the last, and tensors before their text, so that at every instant the copy has a whole checkpoint."""


def mirror_of(folder: Path, parent: str | None) -> Path | None:
    """Return where the copy of a run folder lies in `parent`, under its name; None where that is the folder itself."""
    copy = None if parent is None else Path(parent).expanduser() / folder.resolve().name
    return None if copy is None or copy.resolve() == folder.resolve() else copy


def mirror(source: Path, target: Path) -> None:
    """Bring the files of a run in `target` that resuming needs to what `source` has. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    here = list(needed(source))
    for file in here:
        to = target / file.relative_to(source)
        if not (to.is_file() and filecmp.cmp(file, to)):  # by size and time of change, which are copied too
            to.parent.mkdir(parents=True, exist_ok=True)
            part = to.with_name(to.name + ".part")
            with naming(part):
                shutil.copy2(file, part)
                with part.open("rb") as opened:
                    os.fsync(opened.fileno())
            os.replace(part, to)
    kept = {file.relative_to(source) for file in here}
    for stale in [file for file in needed(target) if file.relative_to(target) not in kept]:
        stale.unlink()


def needed(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that a copy of a run has, or would have."""
    for pattern in _NEEDED:
        yield from sorted(folder.glob(pattern))
