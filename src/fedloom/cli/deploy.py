"""Exported models and deployments: `fedloom export`, `merge`, `predict`, `audit`, `doctor` and `flower`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom._version import __version__
from fedloom.cli import shared
from fedloom.cli.data import Rename, renamed
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError, printable, writing
from fedloom.core.lazy import need
from fedloom.core.machine import cores, free_memory

TOLD = 50
"""The largest number of predictions on images to print."""
flower = typer.Typer(
    name="flower", help="Deploy with Flower: write an app, start a demo, check a deployment.", no_args_is_help=True
)


def export(
    run: Annotated[Path, argument("The folder of a finished run.", "RUN")],
    out: Annotated[Path | None, shared.out_folder("The folder to write.", default="export in the run")] = None,
    client: Annotated[str | None, option("Export the model of this client, with its tasks.", "ID")] = None,
    task: Annotated[str | None, option("Export only this task's head and decoder.", "T")] = None,
    licence: Annotated[str, option("The licence that the card names.", "ID", name="--license")] = "unknown",
    hub: Annotated[
        bool, flag("--hub-format", "Write a Hugging Face model repository: config.json, results in the card.")
    ] = False,
) -> None:
    """Write a model of a finished run to a new folder: weights (safetensors), a model card, and the loading code."""
    from fedloom.experiments.export import bundle

    typer.echo(f"{bundle.export(run, out or run / 'export', client, task, licence, hub)}")


def merge(
    models: Annotated[list[Path], argument("Folders that `fedloom export` wrote.", "EXPORT...")],
    base: Annotated[
        Path, option("The model that all of them started from, or a run that started from it.", "EXPORT|RUN")
    ],
    out: Annotated[Path, shared.out_folder("The folder to write.")],
    rule: Annotated[
        str, option("mean, emr, or an add-on that combines updates: ties, consensus, ...", "NAME[={...}]")
    ] = "mean",
    scale: Annotated[float, option("The factor of the merged task vector.", min=0)] = 1.0,
) -> None:
    """Merge exported models into one by their task vectors: their changes since a common start."""
    from fedloom.experiments.export.merge import merge as merged

    for folder in merged(models, base, out, rule, scale):
        typer.echo(f"{folder}")


def predict(
    model: Annotated[
        Path, argument("A folder that `fedloom export` wrote; for tables, also the folder of a run.", "RUN|EXPORT")
    ],
    files: Annotated[list[Path], argument("One table; or images, volumes, .npy arrays, folders of these.", "FILE...")],
    out: Annotated[
        Path | None, shared.out_file("The table or picture to write.", default="predictions.csv or .png")
    ] = None,
    client: Annotated[str | None, option("Predict every row with this client's model (only for a run).", "ID")] = None,
    keep: Annotated[
        str | None, option("Copy these columns of the table, such as patient_id, to the output.", "NAME,...")
    ] = None,
    rename: Rename = None,
    as_json: shared.Json = False,
) -> None:
    """Predict the rows of a table, or images and arrays; write a CSV file with probabilities, a picture, and maps.

    Maps (masks, depth, ...) have the size of the images. Each task has a folder of them beside the picture. The exit
    code is 1 if some files could not be read; these are left out.
    """
    from fedloom.data.tables.read import is_table
    from fedloom.experiments.export.bundle import ABOUT, Bundle

    absent = next((path for path in files if not path.exists()), None)
    bundle = Bundle.read(model) if (model / ABOUT).is_file() else None
    takes_rows = bundle is None or bundle.about.table is not None or bundle.words is not None
    of_rows = is_table(files[0]) and (takes_rows or not files[0].is_dir())  # a folder of images may have a table beside
    file = out or Path("predictions.csv" if of_rows else "predictions.png")
    inputs = [one for path in files for one in (path, *path.glob("*")) if one.exists()]
    if file.exists() and any(one.samefile(file) for one in inputs):
        raise UserError(f"predict: {file} is an input and would be overwritten: choose another file with --out")
    if of_rows:
        if len(files) > 1:
            raise UserError(f"predict: {len(files)} files found, expected one table")
        if absent is not None:
            raise UserError(f"predict: {absent} does not exist: expected a table")
        from fedloom.experiments.export.predict import of_table

        predictions = of_table(model, files[0], client, bundle, shared.listed(keep) or (), renamed(rename))
        with writing(file, "csv"):
            predictions.to_csv(file, index=False)
        shared.answer({"table": file, "rows": len(predictions), "columns": [*predictions.columns]}, as_json, f"{file}")
        return
    if keep is not None:
        raise UserError("--keep is only for tables: the predictions of other files name the file")
    if rename is not None:
        raise UserError("--rename is only for tables: leave it out")
    if client is not None:
        raise UserError("--client is only for a run on tables: for images, run `fedloom export RUN --client ID` first")
    from fedloom.experiments.export.predict import of_files

    if absent is not None:
        raise UserError(f"predict: {absent} does not exist: expected images")
    answers = of_files(bundle or Bundle.read(model), files, file)
    known = [(name, words) for name, words in answers.words if words]
    rows = [{"image": name, **words} for name, words in known]
    told = [printable(f"{name}: {', '.join(map(' '.join, words.items()))}", "\n") for name, words in known]
    if len(told) > TOLD:
        told[TOLD:] = [f"... and {len(told) - TOLD} more"]
    written = {"picture": answers.picture, "table": answers.table, "maps": answers.maps}
    found = {"images": rows, **written, "unread": answers.unread}
    shown = [f"{path}" for path in (answers.table, *answers.folders, answers.picture) if path is not None]
    shared.answer(found, as_json, *told, *shown)
    if answers.unread:
        raise typer.Exit(1)


@flower.command()
def new(
    recipe: shared.RecipeArgument,
    out: Annotated[Path, shared.out_folder("The folder to write, new or empty.", "DIR")],
    changes: shared.Changes = None,
    publisher: Annotated[str, option("The publisher's name in Flower.")] = "fedloom",
) -> None:
    """Write a complete Flower app. `flwr run DIR` then runs the recipe on the nodes of a SuperLink."""
    from fedloom.engines.flower.deployment import new as write

    for path in write(out, recipe, changes or (), publisher):
        typer.echo(path)
        if path.name == "recipe.yaml":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            typer.echo(f"  sha256 {digest}: put it under `recipes` in the terms of a node.yaml")


@flower.command()
def demo(
    out: Annotated[Path | None, shared.out_folder("Keep all files in this new folder.", "DIR")] = None,
    rounds: Annotated[int, option("The number of rounds.", min=1)] = 3,
) -> None:
    """Start a server and three sites with TLS and keys on this machine, train, print the table, and stop them all."""
    need("flwr", "flower")
    from fedloom.engines.flower.deployment import demo as run

    typer.echo(run(out, rounds, lambda text: typer.echo(text, err=True)))


@flower.command()
def provision(
    file: Annotated[Path, argument("A file with the recipe, the address of the server, and the sites.", "SITES.yaml")],
    out: Annotated[Path, shared.out_folder("The folder to write, new or empty.", "DIR")],
) -> None:
    """Write a start kit for the server and one per site: keys, certificate, terms, and a script that starts it."""
    need("flwr", "flower")
    from fedloom.engines.flower.deployment import provision as write

    for folder in write(file, out):
        typer.echo(f"{folder}: {folder / 'start.sh'}")


@flower.command()
def check(
    app: Annotated[Path, argument("The folder of an app.", "DIR", file_okay=False, exists=True)],
    superlink: Annotated[str | None, option("The SuperLink to check, as HOST:PORT.")] = None,
    root_certificates: Annotated[
        Path | None, option("The certificate of the certificate authority that the nodes use.", dir_okay=False)
    ] = None,
    key: Annotated[Path | None, option("This node's private key.", dir_okay=False)] = None,
    home: Annotated[Path | None, option("This node's folder, with node.yaml.", file_okay=False)] = None,
    as_json: shared.Json = False,
) -> None:
    """Check versions, data, keys, certificates, clocks and ports, and say what a run uses and sends of this site.

    The exit code is 1 if a check fails.
    """
    from fedloom.engines.flower.check import findings

    checks = list(findings(app, superlink, root_certificates, key, home))
    marks = {True: typer.style("ok   ", fg="green"), False: typer.style("WRONG", fg="red")}
    rows = [{"what": what, "good": good, "found": text} for what, good, text in checks]
    shared.answer(rows, as_json, *(f"{marks[good]} {what}: {text}" for what, good, text in checks))
    raise typer.Exit(0 if all(good for _, good, _ in checks) else 1)


def audit(
    file: Annotated[Path, argument("The audit.jsonl of a run with nodes, or of a node's home.", "FILE")],
    kept: Annotated[
        str | None, option("A hash that this command printed earlier; the file must still contain it.", "HASH")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Check the hash chain of an audit file, and print its lines. The exit code is 2 if a line was changed or removed.

    To detect that the last lines are missing or the file was replaced, pass a hash that you stored elsewhere (--kept).
    """
    from fedloom.federation.runs.track import START, verified

    lines = verified(file, kept)
    last = lines[-1]["hash"] if lines else START
    known = ("number", "at", "what", "before", "hash")
    about = [", ".join(f"{k} {_cell(v)}" for k, v in line.items() if k not in known) for line in lines]
    rows = [{"at": line["at"], "what": line["what"], "about": text} for line, text in zip(lines, about, strict=True)]
    summary = f"{len(lines)} lines, each as it was written; the last one has hash {last}"
    shared.answer({"lines": lines, "last": last}, as_json, *([shared.table_of(rows)] if rows else []), summary)


def _cell(value: object) -> str:
    """Return a value as it is shown in a table: of a text of several lines, such as a recipe, their number."""
    text = str(value)
    lines = text.count("\n")
    return f"{lines} lines (--json prints them)" if lines else text


def doctor(as_json: shared.Json = False) -> None:
    """Print what is installed and usable here: torch, GPUs, communication of processes, extras, memory, disk."""
    rows = [dict(zip(("what", "state", "details"), entry, strict=True)) for entry in (*machine(), *extras())]
    shared.answer(rows, as_json)
    if any(row["state"] not in ("ok", "absent") for row in rows):
        raise typer.Exit(1)


def machine() -> Iterator[tuple[str, str, str]]:
    """Yield (what, state, details) of this machine and its torch; the state is ok, absent or a problem."""
    yield "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    yield "fedloom", "ok", __version__
    yield "cores", "ok", f"{cores()}; keep runtime.workers x runtime.threads within them"
    if (free := free_memory()) is not None:
        yield "free memory", "ok" if free > 1 << 30 else "below 1 GiB", f"{free / 2**30:.1f} GiB"
    yield "free disk", "ok", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB in this folder"
    try:
        import torch
    except (ImportError, OSError) as error:
        yield "torch", "does not load", str(error)
        return
    threads = f"{torch.get_num_threads()} threads, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    yield "torch", "ok", f"{torch.__version__}, built for CUDA {torch.version.cuda}, {threads}"
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        yield f"cuda:{i}", "ok", f"{torch.cuda.get_device_name(i)}, {free >> 30} of {total >> 30} GiB free"
    if not torch.cuda.device_count():
        yield "CUDA", "absent", "no GPU or driver answers"
    yield "processes", rendezvous() or "ok", "what runtime.engine=cluster needs: gloo on the loopback device"


def rendezvous() -> str | None:
    """Return why a process group of gloo cannot be made on the loopback device, or None."""
    from torch import distributed

    dist: Any = distributed  # its type stubs leave out what is used here
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
        dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    except (AttributeError, RuntimeError, OSError) as error:
        return f"{str(error).splitlines()[0]}; has this machine's name an address? (try GLOO_SOCKET_IFNAME=lo)"
    return None


def extras() -> Iterator[tuple[str, str, str]]:
    """Yield optional dependencies by extra, as the package declares them."""
    by_extra: dict[str, list[str]] = {}
    for line in () if _version("fedloom") == "absent" else metadata.requires("fedloom") or ():
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "fedloom" and match[2] not in ("test", "docs"):
            by_extra.setdefault(match[2], []).append(match[1])
    for extra, packages in by_extra.items():
        have = {name: _version(name) for name in packages}
        details = ", ".join(f"{name} {version}" for name, version in have.items())
        yield f"fedloom[{extra}]", "absent" if "absent" in have.values() else "ok", details


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
