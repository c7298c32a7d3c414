"""Checkpoints: any tree of tensors and plain values, saved so that a crash at any instant loses nothing.

A checkpoint is two files: NAME.safetensors holds the tensors, NAME.json the tree with everything else (scalars,
strings, empty containers) and the checksum of the tensor file, and below it the checksum of that. Nothing is pickled.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedloom.core.errors import StateError, naming
from fedloom.federation.runs.recorded import digest_of, head_of, sum_of

_FORMAT = 2
_NAMES = ("{}.next", "{}", "{}.prev")


def split_tree(tree: Any, once: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """A JSON value and the tensors of a tree. Dictionaries need string keys; tuples come back as lists.

    With `once` a tensor that is several times in the tree is there once.
    Raises TypeError, with the path, for a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensor = value.detach().to("cpu").contiguous()
            name = str(len(tensors))
            if once and tensor.numel():
                name = names.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), name)
            tensors[name] = tensor
            return {"$tensor": name}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"state{path}: keys must be strings, found {key!r}")
            return {"$dict": {k: walk(v, f"{path}.{k}") for k, v in value.items()}}
        if isinstance(value, list | tuple):
            return [walk(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, float):
            return {"$float": value.hex()}  # exact, and inf and nan are not JSON
        if value is None or isinstance(value, bool | int | str):
            return value
        raise TypeError(f"state{path}: a {type(value).__name__} cannot be saved")

    return walk(tree, ""), tensors


def join_tree(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `split_tree`."""
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
    """The same tree with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {k: map_tensors(v, change) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [map_tensors(v, change) for v in tree]
    return tree


def save(folder: Path, name: str, tree: Any, **labels: Any) -> None:
    """Write a checkpoint atomically; the one before it is kept as NAME.prev.* until the next save.

    At every instant one of NAME.next, NAME, NAME.prev is a whole pair, possibly with its two halves under
    different names; `load` finds it by checksum.
    """
    skeleton, tensors = split_tree(tree)
    fresh, now, before = (n.format(name) for n in _NAMES)
    save_tensors(tensors, folder / f"{fresh}.safetensors")
    _sync(folder / f"{fresh}.safetensors")
    text = json.dumps(
        {**labels, "format": _FORMAT, "sha256": sum_of(folder / f"{fresh}.safetensors")[1], "tree": skeleton}
    )
    write_text(folder / f"{fresh}.json", f"{text}\n{digest_of(text)}\n")
    for kind in ("safetensors", "json"):
        if (folder / f"{now}.{kind}").exists():
            os.replace(folder / f"{now}.{kind}", folder / f"{before}.{kind}")
    for kind in ("safetensors", "json"):
        os.replace(folder / f"{fresh}.{kind}", folder / f"{now}.{kind}")
    _sync(folder)


def save_tensors(tensors: Mapping[str, Tensor], file: Path, labels: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, its labels in order: the library writes them in a random one.

    Raises OSError where the system refuses, as writing other files does.
    """
    try:
        save_file(_apart(tensors), file, metadata=None if labels is None else dict(labels))
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from None
    if labels is None:
        return
    with naming(file), file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(size))
        head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            opened.seek(8)
            opened.write(text.ljust(size))


def load(
    folder: Path,
    name: str,
    newest: Callable[[Mapping[str, Any]], Any],
    complete: Callable[[Any, Mapping[str, Any]], Any] = lambda tree, labels: tree,
) -> tuple[Any, dict[str, Any], list[str]]:
    """The newest whole checkpoint: (tree, labels, problems met on the way). `newest` maps labels to what is compared.

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
            head = head_of(path.read_text())
            heads.append((newest(head), path, head, head["sha256"], head["tree"]))
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.append(f"{path.name} is damaged ({error})")
    paths = [p for n in _NAMES if (p := folder / f"{n.format(name)}.safetensors").exists()]
    digests = {p: sum_of(p)[1] for p in paths}
    for _, path, head, digest, tree in sorted(heads, key=lambda h: h[0], reverse=True):
        for candidate in paths:
            if digests[candidate] != digest:
                continue
            try:
                # a copy, because the file may be replaced while the tensors are in use
                tensors = {k: t.clone() for k, t in load_file(candidate).items()}
                labels = {k: v for k, v in head.items() if k not in ("format", "sha256", "tree")}
                return complete(join_tree(tree, tensors), labels), labels, problems
            except (SafetensorError, KeyError, ValueError) as error:
                problems.append(f"{candidate.name} is damaged ({error})")
            except StateError as error:
                problems.append(f"{path.name} cannot be used: {error}")
        problems.append(f"{path.name} has no tensor file with its checksum, which is truncated, changed or missing")
    found = "; ".join(problems) or f"no file {name}.json there"
    raise StateError(f"{folder}: no whole checkpoint {name!r}: {found}")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: write, fsync, rename."""
    part = path.with_name(path.name + ".part")
    with naming(part), part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied if two share memory or one is only a part of its storage: safetensors refuses both."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in tensors.items():
        storage = t.untyped_storage()
        whole = storage.nbytes() == t.nbytes and storage.data_ptr() not in seen
        apart[name] = t if whole else t.clone()
        seen.add(storage.data_ptr())
    return apart


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
