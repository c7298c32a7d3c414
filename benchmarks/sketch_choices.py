"""Measure how many of the three most similar peers a sketch still finds, on the updates of real runs.

The packaged recipe dfmtl-digits with 30 and with 100 peers, each with two of the tasks of the embedded digits, for 15
rounds. The updates of some rounds are recorded, and each peer's three most similar ones by the cosine of whole updates
are compared with those by sketches (bfloat16, as peers send them):

  strict  share of the exact three that the sketch finds too
  0.01    share of those found whose exact cosine is at most 0.01 below that of the third best
  bound   the same with Sketch.error(0.05), which is what is promised for 95 % of pairs
  recipe  strict, for the recipe's own similarity: half of it is the overlap of tasks, which is no sketch

Means over rounds and seeds of the sketch; "worst" is the round with the smallest strict share. The dense kinds, slower
by hundreds of times, are looked at in the first and last round with one seed. `--quick`: 12 peers and two rounds.
`--out DIR` writes sketch-choices.csv there, one line for every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _common import arguments, machine, write_table
from sketch import TOP, best

SIZES = (256, 1024, 2048, 4096)
SEEDS = {"count": 4, "rademacher": 1, "gaussian": 1}
ROUNDS = (1, 2, 3, 5, 10, 15)
FIELDS = ("peers", "round", "kind", "m", "strict", "0.01", "bound", "recipe")


def updates(n: int, rounds: tuple[int, ...]) -> tuple[dict[int, Any], Any]:
    """Updates over the encoder's parameters (N x d) of some rounds, and task overlaps (N x N), of one run."""
    import torch

    from fedloom import peers, run
    from fedloom.engines.api import Engine
    from fedloom.federation.rounds.messages import blank

    class Recorder(Engine):
        """Runs as usual, and keeps what local training sends."""

        def __init__(self) -> None:
            self.rows: dict[int, dict[str, Any]] = {r: {} for r in rounds}

        @contextmanager
        def start(self, built: Any, folder: Any) -> Iterator[Any]:
            self.built = built
            with super().start(built, folder) as (self.executor, advance):
                yield self, advance

        def run(self, jobs: Any, **options: Any) -> Iterator[Any]:
            shared = self.built.method.shared_part(self.built.layout)
            for done in self.executor.run(jobs, **options):
                if jobs[0].round in self.rows and hasattr(done, "payload"):
                    like = blank(shared, self.built.federation, done.payload.rows, torch.zeros(1, shared.d))
                    update = self.built.method.codec.unpack(done.payload.packed, like)[0]
                    self.rows[jobs[0].round][done.client] = shared.take(update, peers.shared_columns(shared)).clone()
                yield done

    recorder = Recorder()
    changes = [f"partition.clients={n}", f"training.rounds={max(rounds)}", f"evaluation.every={max(rounds)}"]
    run("dfmtl-digits", overrides=changes, engine=recorder)
    tasks = {
        name: {t: w for t, (_, w) in client.tasks.items()} for name, client in recorder.built.federation.clients.items()
    }
    kept = {r: torch.stack([rows[name] for name in sorted(rows)]) for r, rows in recorder.rows.items()}
    return kept, peers.overlap(peers.task_weights(tasks))


def shares(X: Any, overlap: Any, m: int, kind: Any, seed: int) -> dict[str, float]:
    """Return what one sketch keeps of the choices by N updates."""
    import torch

    from fedloom.peers import Sketch, combined, gradient

    def recipe(cosines: Any) -> Any:
        return best(combined({"overlap": overlap, "gradient": (cosines + 1) / 2}, {"overlap": 0.5, "gradient": 0.5}))

    sketch = Sketch(m, seed, kind)
    exact, found = gradient(X, scale="cosine"), gradient(sketch(X).bfloat16(), scale="cosine")
    chosen = best(found)
    third = exact.clone().fill_diagonal_(-torch.inf).sort(1, descending=True).values[:, TOP - 1 : TOP]
    near = {"0.01": 0.01, "bound": sketch.error(0.05)}
    return {
        "strict": float((chosen & best(exact)).sum() / chosen.sum()),
        **{name: float((chosen & (exact >= third - far)).sum() / chosen.sum()) for name, far in near.items()},
        "recipe": float((recipe(found) & recipe(exact)).sum() / chosen.sum()),
    }


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def main() -> None:
    options = arguments(__doc__, out="write every round's shares as CSV into this folder")
    import torch

    torch.set_num_threads(1)
    print(f"{machine()}\n")
    lines: list[dict[str, Any]] = []
    for n in (12,) if options.quick else (30, 100):
        recorded, overlap = updates(n, ROUNDS[:2] if options.quick else ROUNDS)
        d = next(iter(recorded.values())).shape[1]
        print(f"{n} peers, d = {d:,}; by chance {TOP / (n - 1):.3f}")
        print("kind            m  bytes/exact  strict  worst   0.01  bound  recipe")
        for kind, seeds in SEEDS.items():
            for m in SIZES:
                rows = []
                for r in sorted(recorded) if seeds > 1 else (min(recorded), max(recorded)):
                    each = [shares(recorded[r], overlap, m, kind, seed) for seed in range(seeds)]
                    about = {"peers": n, "round": r, "kind": kind, "m": m}
                    rows.append({**about, **{name: round(mean(each, name), 4) for name in FIELDS[4:]}})
                lines += rows
                s = {name: mean(rows, name) for name in FIELDS[4:]}
                print(
                    f"{kind:<10} {m:>6} {2 * m / (4 * d):>12.3f} {s['strict']:>7.3f} "
                    f"{min(row['strict'] for row in rows):>6.3f} {s['0.01']:>6.3f} {s['bound']:>6.3f} "
                    f"{s['recipe']:>7.3f}",
                    flush=True,
                )
    if options.out:
        write_table(options.out / "sketch-choices.csv", FIELDS, lines)


if __name__ == "__main__":
    main()
