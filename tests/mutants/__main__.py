"""Do the tests notice? Change the source in one place at a time and run the nearest tests: `make mutants`.

First every test file runs once on the source as it is, under coverage, to learn which test runs which line and how long
it takes (kept in build/mutants until the source or the test changes). Then each change of a seeded sample is made in a
copy of the repository, and the tests that run the changed line are run, the quickest first, until one fails. What no
test notices has survived. Survivors that change nothing are named in equivalent.yaml, with the reason.

Own code, because mutmut leaves out decorated functions, class bodies and so all defaults, and cosmic-ray changes the
tree itself and knows one test command for all files.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # also lets a process that has loaded torch be forked safely

import argparse
import compileall
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import py_compile
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import numpy  # noqa: F401  # loaded here once, every fork has it
import pytest
import torch  # noqa: F401
import yaml

from mutants.changes import Change, changes

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "mutants"
SOURCES = (
    *("core/combine.py", "core/context.py", "core/draws.py", "core/untrusted.py", "core/gram.py", "core/layout.py"),
    *("core/mean.py", "core/outline.py", "core/codecs.py", "core/server.py", "models/signal.py"),
    *("core/stage.py", "core/taskvectors.py", "core/updates.py"),
    *("methods", "models/tasks", "study/tables/estimate.py", "study/relatedness", "training", "federation/rounds"),
    *("federation/recipes/runtime.py", "engines/peers/peer.py"),
)
# Quick tests. Coverage sees one process, so those that start others would say nothing of the lines that run there.
TESTS = (
    *("attacks", "core", "methods", "peers", "recorded", "rounds", "stages", "tasks", "training"),
    *("test_codecs.py", "test_defaults.py", "test_relatedness.py", "test_server.py", "test_taskvectors.py"),
    *("cli/test_cli.py", "doors/test_going_on.py", "doors/test_objects.py", "doors/test_wrong_calls.py"),
    *("models/test_lora.py", "models/test_timm.py", "recipes/test_loader.py", "recipes/test_sections.py"),
    *("runs/test_nothing_silent.py", "runs/test_old_runs.py", "runs/test_track.py"),
    *("doors/test_hugging_face.py", "doors/test_kinds.py", "doors/test_odd_data.py", "doors/test_same_as_a_recipe.py"),
    *("doors/test_trust.py", "engines/test_auto.py"),
    *("models/test_dense.py", "models/test_erased.py", "models/test_linearised.py", "models/test_models.py"),
    *("models/test_sequences.py", "data/test_signals.py"),
    *("study/test_features.py", "study/test_losses.py", "study/test_recorded.py"),
    *("engines/test_cluster_columns.py", "engines/test_gossip.py", "engines/test_peers.py"),
    *("engines/test_peers_groups.py", "engines/test_peers_methods.py", "engines/test_pool.py"),
    *("flower/test_flower_hostile.py", "flower/test_flower_private.py", "flower/test_flower_strategy.py"),
    *("flower/test_flower_terms.py", "flower/test_flower_wire.py", "study/test_relatedness_study.py"),
)
AT_IMPORT = "tests/test_defaults.py"
"""Tests of values that are made at import, which no single test runs."""
SHARED = (
    *("conftest.py", "tests_support.py", "quadratics.py", "peers_support.py", "stages_support.py"),
    *("recorded/runs.py", "recorded/summary.py", "recorded/runs.yaml", "recorded/variants.yaml"),
    "recorded/numbers.json",
)
FEW = 0.05  # the share of survivors without a reason that is allowed


@dataclass
class Known:
    """What the clean run taught: how long each test takes, and which tests run a line (none for one run at import)."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    breadth: Counter[str] = field(default_factory=Counter)
    """Test -> how many lines of all sources it runs: the fewer, the more it is about each."""

    def add(self, told: Mapping[str, Any]) -> None:
        self.seconds.update(told["seconds"])
        for path, lines in told["lines"].items():
            here = self.lines.setdefault(path, {})
            for line, tests in lines.items():
                here.setdefault(int(line), []).extend(test for test in tests if test)
                self.breadth.update(test for test in tests if test)

    def tests(self, change: Change, budget: float) -> list[str]:
        """Return tests that run what is changed, then what is around it, of at most `budget` seconds together.

        A third of the budget is for the quickest, a third for those that run the fewest other lines, which are about
        this one. With the rest every file of tests has a say: the quickest test of each is chosen, then the second of
        each, and so on. Those chosen run the quickest first. Around it, because what
        is kept for later (a cache, a fixture) runs only in the first test that needs it. For what runs at import, the
        tests of AT_IMPORT come first.
        """
        lines = self.lines.get(change.path, {})
        found: dict[str, tuple[int, float, str]] = {}
        for i, (first, last) in enumerate(change.places):
            for test in {test for line in range(first, last + 1) for test in lines.get(line, ())}:
                found.setdefault(test, (i, self.seconds[test], test))
        if change.at_import:
            found |= {test: (-1, self.seconds[test], test) for test in self.seconds if test.startswith(AT_IMPORT)}
        quickest = sorted(found, key=found.__getitem__)
        before: Counter[tuple[int, str]] = Counter()
        turns: dict[str, tuple[int, int, float]] = {}
        for test in quickest:
            place, seconds, _ = found[test]
            file = (place, test.partition("::")[0])
            turns[test] = (place, before[file], seconds)
            before[file] += 1
        chosen: dict[str, float] = {}
        narrowest = sorted(found, key=lambda test: (found[test][0], self.breadth[test], test))
        by_file = sorted(turns, key=turns.__getitem__)
        for order, limit in ((quickest, budget / 3), (narrowest, 2 * budget / 3), (by_file, budget)):
            for test in order:
                if not chosen or sum({**chosen, test: self.seconds[test]}.values()) <= limit:
                    chosen[test] = self.seconds[test]
        return sorted(chosen, key=found.__getitem__)


class Slot:
    """A copy of the repository in which one process at a time runs tests."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests", "benchmarks", "docs", "examples", "README.md", "pyproject.toml"):
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, folder / name)
        # Byte code that is checked by the hash of its source: nothing is compiled twice, and no change is missed.
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        self.process: Any = None
        self.finish: Callable[[int | None], None] = lambda code: None
        self.end = 0.0

    def start(self, job: Callable[[Path], int], finish: Callable[[int | None], None], limit: float) -> None:
        """Run job(folder) in a fork; `finish` gets its exit status, None if it was stopped after `limit` seconds."""
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # else examples pass from change to change
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(job,))
        self.process.start()
        self.finish, self.end = finish, time.monotonic() + limit

    def _run(self, job: Callable[[Path], int]) -> None:
        os.setsid()
        os.chdir(self.folder)
        with open("output.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["PYTHONPATH"] = str(self.folder / "src")
        sys.path.insert(0, str(self.folder / "src"))
        sys.dont_write_bytecode = True
        os._exit(job(self.folder))

    def poll(self) -> None:
        """Tell of the process if it has ended or its time is over."""
        if self.process is None or (self.process.is_alive() and time.monotonic() < self.end):
            return
        late = self.process.is_alive()
        code = self.stop()
        self.finish(None if late else code)

    def stop(self) -> int | None:
        """End the process with all that it started; its exit status."""
        if self.process is None:
            return None
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        code, self.process = self.process.exitcode, None
        return code


def run_all(slots: Sequence[Slot], jobs: Iterator[Callable[[Slot], None]]) -> None:
    """Give every free slot the next job until all are done."""
    more = True
    try:
        while True:
            for slot in slots:
                slot.poll()
                if slot.process is None and more:
                    job = next(jobs, None)
                    more = job is not None
                    if job is not None:
                        job(slot)
            busy = [slot.process.sentinel for slot in slots if slot.process is not None]
            if not busy:
                return
            multiprocessing.connection.wait(busy, timeout=1.0)
    finally:
        for slot in slots:
            slot.stop()


class Watch:
    """A pytest plugin: runs the wanted tests in their order and remembers seconds and the first failure."""

    def __init__(self, wanted: Sequence[str] = (), switch: Callable[[str], None] = lambda name: None) -> None:
        self.wanted, self.switch = {name: i for i, name in enumerate(wanted)}, switch
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.wanted:
            items[:] = sorted((x for x in items if x.nodeid in self.wanted), key=lambda x: self.wanted[x.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.switch(item.nodeid)
        begin = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - begin
        self.switch("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def pytest_here(files: Sequence[str], watch: Watch, limit: float) -> int:
    """Run the tests of these files in this process; one that takes longer than `limit` seconds has failed."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--basetemp=temporary")
    return int(pytest.main([*files, *options, f"--timeout={limit}"], plugins=[watch]))


def clean(file: str, sources: Sequence[str]) -> Callable[[Path], int]:
    """A job: one test file on the source as it is, under coverage; writes told.json."""

    def job(folder: Path) -> int:
        seen = coverage.Coverage(data_file=None, include=[str(folder / path) for path in sources], config_file=False)
        watch = Watch(switch=seen.switch_context)
        seen.start()
        code = pytest_here([file], watch, limit=300)
        seen.stop()
        data = seen.get_data()
        here = [path for path in data.measured_files() if Path(path).is_relative_to(folder)]
        lines = {str(Path(path).relative_to(folder)): data.contexts_by_lineno(path) for path in here}
        Path("told.json").write_text(json.dumps({"seconds": watch.seconds, "lines": lines}))
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code  # all of them slow

    return job


def learn(slots: Sequence[Slot], root: Path, kept: Path, sources: Sequence[str], files: Sequence[str]) -> Known:
    """The clean run of every test file; known ones are read from `kept`. Exits if a test fails on the clean source."""
    known, failed = Known(), []
    kept.mkdir(parents=True, exist_ok=True)
    common = [(root / path).read_bytes() for path in sorted(map(str, (root / "src").rglob("*.py")))]
    common += [path.read_bytes() for name in SHARED if (path := root / "tests" / name).exists()]
    base = hashlib.sha256(b"\0".join([repr(sorted(sources)).encode(), *common])).hexdigest()

    def jobs() -> Iterator[Callable[[Slot], None]]:
        for file in files:
            digest = hashlib.sha256(base.encode() + (root / file).read_bytes()).hexdigest()[:16]
            store = kept / f"{file.replace('/', '.')}-{digest}.json"
            if store.exists():
                known.add(json.loads(store.read_text()))
                continue

            def start(slot: Slot, file: str = file, store: Path = store) -> None:
                def finish(code: int | None) -> None:
                    if code:
                        print((slot.folder / "output.txt").read_text()[-3000:])
                    if code != 0:
                        failed.append(file)
                        return
                    for old in kept.glob(f"{file.replace('/', '.')}-*.json"):
                        old.unlink()
                    shutil.move(slot.folder / "told.json", store)
                    known.add(json.loads(store.read_text()))

                slot.start(clean(file, sources), finish, limit=3600)

            yield start

    run_all(slots, jobs())
    if failed:
        sys.exit(f"These fail on the source as it is, so nothing can be learnt from them: {', '.join(failed)}")
    return known


@dataclass
class Outcome:
    change: Change
    tests: Sequence[str]
    by: str = ""  # what noticed; empty if it survived


def attempt(
    slots: Sequence[Slot],
    root: Path,
    known: Known,
    chosen: Sequence[Change],
    budget: float,
    tell: Callable[[Outcome], None],
) -> None:
    """Every change in turn, in the copies, with its tests; `tell` gets what came out, as soon as it is known."""

    def jobs() -> Iterator[Callable[[Slot], None]]:
        for change in chosen:
            tests = known.tests(change, budget)
            if not tests:
                tell(Outcome(change, tests))
                continue

            def start(slot: Slot, change: Change = change, tests: Sequence[str] = tests) -> None:
                source = (root / change.path).read_bytes()
                (slot.folder / change.path).write_bytes(change.apply(source))
                (slot.folder / "by.txt").unlink(missing_ok=True)

                def job(folder: Path) -> int:
                    watch = Watch(tests)
                    files = dict.fromkeys(test.partition("::")[0] for test in tests)
                    code = pytest_here([*files], watch, 20 + 10 * max(known.seconds[test] for test in tests))
                    Path("by.txt").write_text(watch.failed or ("" if code == 0 else f"pytest's exit status {code}"))
                    return code

                def finish(code: int | None) -> None:
                    (slot.folder / change.path).write_bytes(source)
                    said = slot.folder / "by.txt"
                    # The package that cannot be imported is noticed too; but no test at all is a mistake of ours.
                    if (
                        code is not None
                        and code >= 0
                        and (code == pytest.ExitCode.NO_TESTS_COLLECTED or not said.exists())
                    ):
                        raise RuntimeError(
                            f"the tests of {change} did not run:\n{(slot.folder / 'output.txt').read_text()}"
                        )
                    by = said.read_text() if said.exists() else f"a crash or no end (exit status {code})"
                    tell(Outcome(change, tests, by))

                slot.start(job, finish, limit=10 * budget + 60)

            yield start

    run_all(slots, jobs())


def equivalents(
    path: Path, candidates: Sequence[Change], texts: Mapping[str, bytes]
) -> dict[tuple[str, str, str], str]:
    """(file, was, now) -> why it changes nothing. An entry that no change of its file makes any longer is refused."""
    entries = yaml.safe_load(path.read_text()) or []
    known = {(x["file"], x["was"].strip(), x["now"].strip()): x["why"] for x in entries}
    possible = {(c.path, *c.was_and_now(texts[c.path])) for c in candidates if c.path in {k[0] for k in known}}
    stale = [key for key in known if key[0] in texts and key not in possible]
    if stale:
        sys.exit("\n".join(f"{path.name}: {file} has no change of `{was}` to `{now}`" for file, was, now in stale))
    return known


def describe(x: Outcome, source: bytes) -> str:
    """The two lines, what ran, and how to see it again."""
    files = Counter(test.partition("::")[0] for test in x.tests)
    ran = ", ".join(f"{n} of {file}" for file, n in files.items()) or "none: no test runs the line"
    lines = x.change.diff(source).partition("\n@@")[2].partition("\n")[2]
    again = f"make mutants ARGS='--only {x.change.path}:{x.change.line}'"
    return f"{lines}\n  tests that ran: {ran}\n  again: {again}\n"


def below(root: Path, names: Sequence[str], pattern: str) -> list[str]:
    """Files and what folders hold, relative to the root."""
    there = [root / name for name in names if (root / name).exists()]
    found = {file for path in there for file in ([path] if path.is_file() else path.rglob(pattern))}
    return sorted(str(file.relative_to(root)) for file in found)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT, kept: Path = KEPT) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description="Which small changes of the source do the tests miss?")
    parser.add_argument("--sample", type=int, default=100, help="how many changes; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", action="append", metavar="PATH[:LINE]", help="of this file, folder or line alone")
    parser.add_argument("--tests", action="append", metavar="PATH", help="with these tests alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one change")
    options = parser.parse_args(arguments)

    sources = below(root, [f"src/fedloom/{name}" for name in SOURCES], "*.py")
    texts = {path: (root / path).read_bytes() for path in sources}
    everything = [change for path, text in texts.items() for change in changes(path, text)]
    known = equivalents(root / "tests/mutants/equivalent.yaml", everything, texts)
    candidates = everything
    if options.only:
        places = [place.rstrip("/").partition(":") for place in options.only]
        candidates = [
            change
            for change in everything
            if any(Path(change.path).is_relative_to(p) and (not n or change.line == int(n)) for p, _, n in places)
        ]
    count = min(options.sample or len(candidates), len(candidates))
    chosen = random.Random(options.seed).sample(candidates, count)
    files = below(root, options.tests or [f"tests/{name}" for name in TESTS], "test_*.py")
    counts: Counter[str] = Counter()

    def tell(x: Outcome) -> None:
        source = texts[x.change.path]
        key = (x.change.path, *x.change.was_and_now(source))
        kind = ("wrong" if key in known else "noticed") if x.by else ("named" if key in known else "survived")
        counts[kind] += 1
        if kind == "wrong":
            print(f"Named as changing nothing, but {x.by} noticed:\n{describe(x, source)}", flush=True)
        elif kind == "survived":
            print(describe(x, source), flush=True)
        if counts.total() % 25 == 0:
            print(f"{counts.total()} of {count}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        slots = [Slot(root, Path(folder, str(i))) for i in range(options.processes)]
        learnt = learn(slots, root, kept, sources, files)
        print(f"{count} of {len(candidates)} changes, seed {options.seed}", flush=True)
        attempt(slots, root, learnt, chosen, options.seconds, tell)
    share = counts["survived"] / max(count, 1)
    print(
        f"{count} changes: {counts['noticed'] + counts['wrong']} noticed, {counts['named']} named as changing nothing, "
        f"{counts['survived']} survived ({share:.1%}; at most {FEW:.0%} may)"
    )
    return int(share > FEW or counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
