"""A whole Flower app in a folder, from a recipe: nothing is downloaded, and the app is complete."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from fedloom._version import __version__
from fedloom.core.errors import RecipeError, check_empty, naming
from fedloom.federation.recipes.loader import dump, load

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "1.0.0"
description = "fedloom recipe {recipe} as a Flower app"
license = "Apache-2.0"
# Install these on the server and on every node yourself: Flower need not, and should not, do it at run time.
dependencies = ["fedloom[flower]>={version}"]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
# The run folder on the server. Where there is a run in it already, it is resumed.
folder = "{folder}"
# Changes of the recipe, for the server and all nodes, such as "training.rounds=5; seed=1".
changes = ""
"""

_APP = '''\
"""{about}"""

from pathlib import Path

from fedloom.engines.flower import {kind}

app = {kind}(Path(__file__).with_name("recipe.yaml"))
'''
_ABOUT = {
    "client_app": "The app of every node: it trains on the node's own data and has the client's state in its folder.",
    "server_app": "The app of the server: rounds, aggregation, checkpoints. It sees payloads and scores, and no data.",
}

_README = """\
# {project}

The recipe `{package}/recipe.yaml` as a Flower app, written by `fedloom flower new`.

1. `pip install 'fedloom[flower]'` on the server and on every node, with the same versions.
2. A folder for each node, say `/var/fedloom/site-a`, with a `node.yaml`:

   ```yaml
   client: site-a
   # Without `data` the node takes this client's share of the recipe's own data.
   data: {{name: arrays, path: /data/site-a.npz, labels: {{grade: y}}}}
   terms:
     code: none     # no code that a recipe names; or packages with checksums: {{mine: 3f0c...}}
     changes: []    # no --run-config changes; or globs of keys: [training.rounds, seed]
     # Accept this recipe.yaml alone:
     # recipes: [{digest}]
   ```

   The node checks these terms on the text of the recipe, before it imports or builds anything, and its `audit.jsonl`
   has the text of every recipe that it accepted.

   With data at the nodes the recipe says `data: nodes`, `partition: nodes` and, in `runtime.flower.nodes`, how many
   nodes to wait for.
3. Start a SuperLink, and on every node `flower-supernode ... --node-config 'home="/var/fedloom/site-a"'`.
4. `fedloom flower check . --superlink HOST:PORT --root-certificates ca.crt`
5. `flwr run . CONNECTION --stream`; run it again after a crash, and it goes on from the last round. docs/flower.md of
   fedloom has a systemd unit that does both.

The run folder on the server is `{folder}` (`folder` in pyproject.toml or in `--run-config`), below the folder where
the SuperLink was started. Set FLWR_TELEMETRY_ENABLED=0 for every Flower command: it reports to its makers otherwise.
"""


def new(folder: Path, recipe: str, changes: Sequence[str] = (), publisher: str = "fedloom") -> list[Path]:
    """Write the app of a recipe into a new folder; returns its files. Raises UserError if the folder is not empty."""
    check_empty(folder)
    checked = load(recipe, [*changes, "runtime.engine=flower"])
    if checked.training.stacked:
        raise RecipeError("training.stacked: each node trains one client, so clients cannot be stacked")
    package = re.sub(r"\W", "_", folder.resolve().name.lower())
    package = package if package.isidentifier() else f"app_{package}"
    text = dump(checked)
    names = {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "project": package.replace("_", "-"),
        "package": package,
        "recipe": checked.name,
        "publisher": publisher,
        "version": __version__,
        "folder": f"runs/{checked.name}",
    }
    texts = {
        "pyproject.toml": _PYPROJECT.format(**names),
        "README.md": _README.format(**names),
        f"{package}/__init__.py": "",
        **{f"{package}/{kind}.py": _APP.format(about=about, kind=kind) for kind, about in _ABOUT.items()},
        f"{package}/recipe.yaml": text,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path):
            path.write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]
