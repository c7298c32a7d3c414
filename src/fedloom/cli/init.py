"""`fedloom init`: five questions, and a recipe for one's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import UserError

Answer = TypeVar("Answer", str, int)


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
