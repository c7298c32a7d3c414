"""`fedloom pretrain`: an encoder's weights to start from, by centralised training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.shared import Changes, Json, Quiet, RecipeArgument, answer, out_option


def pretrain(
    recipe: RecipeArgument,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over all train examples.")],
    out: Annotated[Path, out_option("The file to write.", metavar="FILE.safetensors", dir_okay=False)],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a recipe's model on all of its data in one place, and write the encoder for `model.weights` to load."""
    from fedloom.federation.recipes import load

    checked = load(recipe, changes or ())
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from fedloom.experiments.pretrain import pretrain as train

    torch.set_num_threads(checked.runtime.threads)
    console = Console(stderr=True)
    saved = 0
    console.quiet = quiet or not console.is_terminal  # an older rich ends with a line, disabled or not
    with Progress(console=console, disable=console.quiet) as bars:
        bar = bars.add_task("epochs", total=epochs)

        def tell(epoch: int, loss: float) -> None:
            nonlocal saved
            saved = epoch
            text = f"epoch {epoch}/{epochs}  loss {loss:.4g}"
            bars.update(bar, completed=epoch, description=text)
            if not quiet and not console.is_terminal:
                typer.echo(f"{text}  saved", err=True)

        try:
            done = train(checked, epochs, out, tell)
        except KeyboardInterrupt:
            kept = f"{out} holds epoch {saved} of {epochs}" if saved else "nothing was written yet"
            typer.echo(f"interrupted; {kept}", err=True)
            raise typer.Exit(130) from None
    after = f"after epoch {done.epochs} of {epochs}, on all test examples"
    answer(done, as_json, done.table(), after, f"its encoder: {out}; use it with model.weights={out}")
