"""`fedloom data`: look at data sets without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import RecipeError

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

data = typer.Typer(help="Look at data sets without training.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A data set, for example scenes.", autocompletion=complete.dataset)
]
Parameters = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Its parameters, for example count=20 setting=weak.")
]


@data.command()
def preview(
    name: NameArgument,
    out: Annotated[Path, shared.out_option("The picture to write.", metavar="FILE.png", dir_okay=False)],
    parameters: Parameters = None,
    count: Annotated[int, typer.Option(min=1, help="How many examples.")] = 6,
    split: Annotated[Literal["train", "test"], typer.Option(help="Which examples.")] = "train",
    seed: Annotated[int, typer.Option(min=0, help="The data set's seed.")] = 0,
    augmented: Annotated[bool, typer.Option("--augmented", help="As training sees them.")] = False,
) -> None:
    """Draw some examples of a data set with all their labels."""
    dataset = build(name, parameters or (), seed)
    from fedloom.data.canvas import save
    from fedloom.data.preview import sheet

    save(sheet(dataset, count, split, seed if augmented else None), out)
    typer.echo(f"{dataset.name}: {len(dataset.train)} train, {len(dataset.test)} test; {out}")


@data.command()
def check(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A data set of files: nyud, nyud-labeled or pascal-context.")
    ],
    root: Annotated[Path, typer.Option(help="The folder that holds it.", file_okay=False)],
    limit: Annotated[int, typer.Option(min=0, help="How many images of each part to read; 0 for all.")] = 100,
    as_json: shared.Json = False,
) -> None:
    """Check counts, sizes and labels of a data set of files; exit code 2 where a run could not use it."""
    from fedloom.data.check import check as look

    report = look(name, str(root), limit or None)
    shared.answer({"usable": report.usable, **vars(report)}, as_json, report.text())
    if not report.usable:
        raise typer.Exit(2)


@data.command()
def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, for example eurosat; a new folder's name.")],
    out: Annotated[Path, shared.out_option("The folder to hold it.", metavar="ROOT", file_okay=False)],
    source: Annotated[
        Path | None, typer.Option(help="A folder of classes to take it from.", file_okay=False, exists=True)
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(min=0.01, max=0.99, help="The test part's share, for data without a test part.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Shrink images to this shorter side.")] = None,
) -> None:
    """Make the folders ROOT/NAME/{train,test}/CLASS that class-folders reads, downloading through torchvision."""
    from fedloom.data.download import prepare as make

    counts = make(name, out, source, test_fraction, size)
    typer.echo(f"{name}: {counts['train']} train, {counts['test']} test; {out / name}")


def build(name: str, parameters: list[str] | tuple[str, ...], seed: int = 0) -> Dataset:
    """The named data set with `key.path=value` parameters, checked as a recipe's data section is."""
    from pydantic import ValidationError

    from fedloom.core.settings.problems import explain
    from fedloom.core.settings.section import strict
    from fedloom.core.settings.yaml import parse
    from fedloom.federation.recipes.schema import DataSection

    section: dict[str, Any] = {"name": name}
    for change in parameters:
        path, equals, text = change.partition("=")
        *above, last = path.strip().split(".")
        if not equals or not all([*above, last]):
            raise RecipeError(f"{change!r}: expected key=value, for example count=20")
        level = section
        for key in above:
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                raise RecipeError(f"{change!r}: {key} is not a section")
        level[last] = parse(text, f"parameter {change!r}")
    try:
        checked = strict(DataSection, section)
    except ValidationError as error:
        lines = [f"{path}: {message}" for path, message in explain(error, DataSection)]
        raise RecipeError("\n".join([f"data set {name!r}:", *lines])) from None
    from fedloom.data.registry import loaded

    return loaded(checked.entry, seed, checked.arguments)
