"""The loop of rounds: the whole of a federated run, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.core.context import State, new_secret
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import headline, measure, trained_records, unmeasured
from fedloom.federation.rounds.observers import OBSERVERS, stopped
from fedloom.federation.rounds.round import Advance, Progress, Round, with_server
from fedloom.federation.rounds.server import server_init
from fedloom.federation.rounds.worker import Executor
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import NOTHING
from fedloom.training.flat import integer_buffers


def initial_state(built: Built) -> State:
    """The state of a run before its first round."""
    layout = built.layout
    server = server_init(built.method, layout, layout.flatten(built.module).detach(), integer_buffers(built.module))
    return {"round": 0, "server": server, "clients": {}, "early": None, "stopped": False}


def status(state: State) -> str:
    """How a run that is over ended: finished, stopped by an observer (see `observers.stopped`), or in vain."""
    return NOTHING if state.get("idle", 0) == state["round"] > 0 else stopped(state) or "finished"


def run_rounds(
    built: Built,
    executor: Executor,
    folder: RunFolder,
    state: State,
    progress: Progress,
    advance: Advance | None = None,
    show: Callable[[State], None] = lambda state: None,
) -> State:
    """Run from the round after `state` to the last one, with checkpoints. Returns the last state.

    The observers begin, and the initial model is measured. Then, until the last round or until an observer stops the
    run: `advance` (None: `with_server`) trains and aggregates, models are measured, `show` gets the states of which
    pictures are kept on the way, the observers look at the round, its line is written, and the state is saved.
    """
    recipe, evaluation = built.recipe, built.recipe.evaluation
    observers = [kind(built, folder) for kind in OBSERVERS]
    for observer in observers:
        state = observer.begin(state)
    rounds = min(recipe.training.rounds, *(observer.last for observer in observers))
    secret = new_secret() if built.deployed else None
    if state["round"] == 0:
        _measure_start(built, executor, folder, state, progress)
    while state["round"] < rounds and not stopped(state):
        now = Round(built, state["round"] + 1, progress, secret=secret, before=state)
        last = now.number == rounds
        state, now.members = (advance or with_server)(built, executor, state, now)
        with now.ledger.phase("evaluate"):
            now.metrics = trained_records(built, now.done)
            if last or now.number % evaluation.every == 0:
                now.metrics += measure(built, executor, state, evaluation.in_full(now.number, rounds), now.record)
            if not last and evaluation.pictured(now.number):
                show(state)
        for observer in observers:
            state = observer.after(state, now)
        line = now.line
        folder.write_round(line, now.ledger.bytes)
        if last or stopped(state) or now.number % recipe.runtime.checkpoint_every == 0:
            folder.save(state)
        progress.round(now.number, headline(built, line))
    return state


def _measure_start(built: Built, executor: Executor, folder: RunFolder, state: State, progress: Progress) -> None:
    """Measure the initial model, and write what is known before the first round."""
    start = Round(built, 0, progress)
    for why in unmeasured(built):
        start.log("not measured", {"why": why})
    start.metrics = measure(built, executor, state, record=start.record)
    folder.write_round(start.line, start.ledger.bytes)
    folder.save(state)
