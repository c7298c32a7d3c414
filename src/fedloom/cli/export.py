"""`fedloom export`, `merge` and `predict`: models to take away, made into one, and what one says about images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import shared


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    out: Annotated[
        Path | None,
        shared.out_option("The folder to write.", show_default="export in the run", file_okay=False),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="The model that this client uses, with its tasks.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="T", help="With this task's head and decoder only.")] = None,
    licence: Annotated[
        str, typer.Option("--license", metavar="ID", help="The licence that the card names.")
    ] = "unknown",
    hub: Annotated[
        bool,
        typer.Option("--hub-format", help="As a model repository of Hugging Face: config.json, results in the card."),
    ] = False,
) -> None:
    """Write a model of a finished run to a folder of its own: weights (safetensors), a card, what loads it."""
    from fedloom.experiments.export import bundle

    typer.echo(f"{bundle.export(run, out or run / 'export', client, task, licence, hub)}")


def merge(
    models: Annotated[list[Path], typer.Argument(metavar="EXPORT...", help="Folders that `fedloom export` wrote.")],
    base: Annotated[
        Path,
        typer.Option(metavar="EXPORT|RUN", help="What all began with: a model, or a run whose starting model it is."),
    ],
    out: Annotated[Path, shared.out_option("The folder to write.", file_okay=False)],
    rule: Annotated[
        str,
        typer.Option(metavar="NAME[={...}]", help="mean, emr, or an add-on that combines rows: ties, consensus, ..."),
    ] = "mean",
    scale: Annotated[float, typer.Option(min=0, help="A factor of the merged task vector.")] = 1.0,
) -> None:
    """Merge exported models into one, by what each has learned since they began alike (task vectors)."""
    from fedloom.experiments.export.merge import merge as merged

    for folder in merged(models, base, out, rule, scale):
        typer.echo(f"{folder}")


def predict(
    model: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder that `fedloom export` wrote.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, of any size.")],
    out: Annotated[Path, shared.out_option("The picture to write.", dir_okay=False)] = Path("predictions.png"),
    as_json: shared.Json = False,
) -> None:
    """Say what an exported model makes of images: one picture with a column for each task, and classes as text."""
    from fedloom.data.canvas import save
    from fedloom.experiments.export.bundle import Bundle

    texts, picture = Bundle.read(model).predict(images)
    save(picture, out)
    said = [(file, words) for file, words in zip(images, texts, strict=True) if words]
    lines = [f"{file}: " + ", ".join(f"{task} {text}" for task, text in words.items()) for file, words in said]
    rows = [{"image": file, **words} for file, words in said]
    shared.answer({"images": rows, "picture": out}, as_json, *lines, f"{out}")
