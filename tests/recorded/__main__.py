"""Run short runs and write down all that came out, or find out what has changed since.

PYTHONPATH=src:tests python -m recorded write FILE.json    # every number and tensor of every run
PYTHONPATH=src:tests python -m recorded check FILE.json    # run again and print each difference; exit with 1 if any
PYTHONPATH=src:tests python -m recorded numbers            # what test_recorded.py expects, after an intended change

A file of `write` holds on one machine only: bits depend on the processor and on the version of torch. All is run
through the public door and read from run folders, so that the same runs can be made before and after code has moved.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from recorded.runs import known_runs, named_tensors, numbers, run
from recorded.summary import NUMBERS, summarised, summary


def digest(tensor: torch.Tensor) -> str:
    """Return type, shape and a checksum of the bytes of a tensor."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:24]}"


def outcome(folder: Path) -> dict[str, str]:
    """Return all that a run folder says, as texts: each tensor's checksum, each number with all its digits."""
    plan = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("recipe.yaml", "partition.json")
    }
    pictures = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
                for p in sorted((folder / "predictions").rglob("*")) if p.is_file()}  # fmt: skip
    tensors = {name: digest(tensor) for name, tensor in named_tensors(folder).items()}
    return {**plan, **pictures, **tensors, **{name: json.dumps(value) for name, value in numbers(folder).items()}}


def compare(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> int:
    """Print the differences of a run, and return how many there are."""
    different = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    for key in different:
        print(f"{name}: {key}: {found.get(key, 'nothing')} found, expected {expected.get(key, 'nothing')}")
    return len(different)


def found_in(name: str, read: Callable[[Path], Any], *, strict: bool) -> Any:
    """Run one run in a temporary folder, and read it; unless `strict`, an error is what was found."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = read(run(name, Path(folder, "run")))
        except Exception as error:
            if strict:
                raise
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
    print(f"{name}: {len(found)} values, {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="recorded", description="What do short runs compute, to the last bit?")
    parser.add_argument("command", choices=["write", "check", "numbers"])
    parser.add_argument("file", type=Path, nargs="?", default=NUMBERS, help="not for `numbers`, which has its own")
    parser.add_argument("--only", action="append", metavar="NAME", help="of this run alone; may be given several times")
    options = parser.parse_args()
    if (options.command == "numbers") != (options.file == NUMBERS):
        parser.error("write and check need a file, numbers takes none")
    torch.set_num_threads(1)
    expected = json.loads(options.file.read_text()) if options.only or options.command == "check" else {}
    if options.command == "check":
        names = options.only or list(expected)
        different = [compare(name, found_in(name, outcome, strict=False), expected.get(name, {})) for name in names]
        print(f"{len(names)} runs, {sum(different)} differences")
        return int(any(different))
    names, read = (summarised(), summary) if options.command == "numbers" else (list(known_runs()), outcome)
    expected |= {name: found_in(name, read, strict=True) for name in options.only or names}
    lines = [f"{json.dumps(name)}: {json.dumps(expected[name])}" for name in names if name in expected]
    options.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
