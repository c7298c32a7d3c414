"""`fedloom init`: questions, and a recipe for one's own data. `fedloom data`: look at data sets without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import RecipeError, UserError

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

Answer = TypeVar("Answer", str, int)
data = typer.Typer(name="data", help="Look at data sets without training.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A data set, for example scenes.", autocompletion=complete.dataset)
]
Parameters = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Its parameters, for example count=20 setting=weak.")
]


def init(
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="A folder of images, an .npz archive or a .csv file.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The columns to predict, a task each; not for folders.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="N|NAME", help="How many clients, or the column that says whose a row is.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="How they train.", autocompletion=complete.method)] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often they send updates.")] = None,
    out: Annotated[Path, shared.out_option("The recipe to write.", metavar="FILE.yaml", dir_okay=False)] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe for your own data; what no option says is asked."""
    from fedloom.core.settings.yaml import to_yaml
    from fedloom.federation.recipes.draft import draft, look
    from fedloom.federation.recipes.json_schema import SHIPPED
    from fedloom.federation.recipes.loader import EDITORS, load

    if out.exists():
        raise UserError(f"{out} is there already: name another file with --out")
    path = Path(_ask(None if data is None else str(data), "Your data: a folder of images, an .npz or a .csv file", ""))
    found = look(path)
    wanted: list[str] = []
    if found.columns:
        guess = next((name for name in found.columns if name.startswith(("y", "label", "class"))), found.columns[-1])
        text = _ask(labels, f"What to predict, of {', '.join(found.columns)}", guess)
        wanted = [name.strip() for name in text.split(",") if name.strip()]
    elif labels is not None:
        raise UserError("--labels: the classes of a folder of images are its folders, so there is nothing to name")
    which = "How many clients for each of its domains" if found.groups else "How many clients hold it"
    or_column = ", or the column that says whose a row is" if found.columns else ""
    held = _ask(clients, which + or_column, "1" if found.groups else "5")
    chosen = _ask(method, "Which method (see `fedloom methods`)", "fedavg")
    recipe = draft(found, out.stem, wanted, held, chosen, _ask(rounds, "How many rounds", 20))
    load(recipe)
    shared.put(f"{EDITORS}{SHIPPED}\n{to_yaml(recipe)}", out)
    typer.echo(f"look at it: fedloom show {out}\ntrain:      fedloom run {out}", err=True)


def _ask(given: Answer | None, question: str, guess: Answer) -> Answer:
    """The answer that an option gave, else what is typed."""
    if given is not None:
        return given
    answer: Answer = typer.prompt(question, default=guess or None, type=type(guess))
    return answer


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


def build(name: str, parameters: list[str] | tuple[str, ...], seed: int = 0) -> Dataset:
    """The named data set with `key.path=value` parameters, checked as a recipe's data section is."""
    from pydantic import ValidationError

    from fedloom.core.settings.problems import explain
    from fedloom.core.settings.section import strict
    from fedloom.federation.recipes.loader import changed
    from fedloom.federation.recipes.schema import DataSection

    try:
        checked = strict(DataSection, changed(f"data set {name!r}", {"name": name}, parameters))
    except ValidationError as error:
        lines = [f"{path}: {message}" for path, message in explain(error, DataSection)]
        raise RecipeError("\n".join([f"data set {name!r}:", *lines])) from None
    from fedloom.data.combine import loaded

    return loaded(checked.entry, seed, checked.arguments)
