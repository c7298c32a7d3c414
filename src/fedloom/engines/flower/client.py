"""A ClientApp of Flower, from a recipe."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.core.errors import RecipeError, UserError
from fedloom.core.lazy import need
from fedloom.core.untrusted import plain, shown
from fedloom.engines.flower.node import Bench, Node
from fedloom.engines.flower.nodes import NodeConfig
from fedloom.engines.flower.terms import Offer, SitePolicy
from fedloom.engines.flower.wire import RefusedError, decode, encode, head_of, signed
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.built import Built
from fedloom.federation.runs.audit import FILE as AUDIT
from fedloom.federation.runs.audit import Audit
from fedloom.methods.method import Method

Answer = Callable[[Node, Mapping[str, Any], Any], tuple[Any, Mapping[str, float]]]


def client_app(recipe: Recipe | Path | str, method: Method | None = None, built: Built | None = None) -> Any:
    """Return a ClientApp whose nodes train as a recipe (a file, a packaged name, a Recipe) says.

    `home` in the node's config is the folder for its files, which may hold node.yaml; `client` there is its name, if
    node.yaml does not give it. `method` replaces the recipe's method; `built` is the recipe already built.

    A node reads its own terms first, then the text of the recipe and of the run's changes. Only what it agrees to is
    resolved, built or imported.
    """
    app = need("flwr.clientapp", "flower").ClientApp()
    offers: dict[str, Offer] = {}
    benches: dict[str, Bench] = {}
    audits: dict[Path, Audit] = {}
    if built is not None:
        offers[""], benches[""] = Offer.of(built.recipe), Bench(built.recipe, built)

    def bench_of(changes: str) -> Bench:
        if changes not in benches:
            whole = offers[changes].resolved()
            benches[changes] = Bench(whole if method is None else whole.holding(method=(method, method.name)))
        return benches[changes]

    def answer(what: Answer) -> Callable[[Any, Any], Any]:
        def handle(message: Any, context: Any) -> Any:
            flwr = need("flwr.app", "flower")
            audit: Audit | None = None
            try:
                home = home_of(context.node_config)
                audit = audits.setdefault(home, Audit(home / AUDIT))
                config = config_of(home, context.node_config)
                changes = str(context.run_config.get("changes", ""))
                if changes not in offers:
                    offers[changes] = Offer.of(recipe, changes)
                accept(offers[changes], config.terms, audit)
                digests = dict(context.state["fedloom"]) if "fedloom" in context.state else {}
                node = Node(home, config, bench_of(changes), audit, digests)
                head = head_of(message.content)
                tree, numbers = what(node, head, decode(message.content))
                context.state["fedloom"] = flwr.ConfigRecord(digests)
                about: dict[str, Any] = {k: head[k] for k in ("run", "round", "layout") if k in head}
                if "nonce" in head:
                    about |= signed(node.home, str(head["nonce"]), node.client)
                    about["withheld"] = " ".join(sorted(node.withheld))
                content = encode(tree, {**about, "client": node.client, "fedloom": __version__}, numbers)
            except (RecipeError, RefusedError) as error:
                if audit is not None:
                    audit.note("refuse", why=plain(str(error), 500))
                content = encode(None, {"error": str(error)})
            except UserError as error:
                content = encode(None, {"error": str(error), "again": True})
            except Exception as error:
                traceback.print_exc()  # for the node's operator; the server learns what happened, not where
                content = encode(None, {"error": f"{type(error).__name__}: {error}", "again": True})
            return flwr.Message(content, reply_to=message)

        return handle

    app.query("hello")(answer(_hello))
    app.query("export")(answer(Node.export))
    app.train("fedloom")(answer(Node.train))
    app.train("peer")(answer(Node.peer))
    app.evaluate("fedloom")(answer(Node.evaluate))
    return app


def accept(offer: Offer, terms: SitePolicy | None, audit: Audit) -> None:
    """Agree to a run by its text, and write the text down once. Raises RefusedError for a run that may not be."""
    (terms or SitePolicy()).agree_to_offer(offer)
    about = {"sha256": offer.sha256, "changes": [*offer.changes]}
    if not any(line["what"] == "recipe" and all(line.get(k) == v for k, v in about.items()) for line in audit.lines()):
        audit.note("recipe", **about, text=offer.text)


def _hello(node: Node, head: Mapping[str, Any], tree: Any) -> tuple[Any, Mapping[str, float]]:
    mine = recipe_hash(node.bench.recipe)
    if head.get("recipe") != mine:
        raise RefusedError(f"recipe: the server's recipe has hash {shown(head.get('recipe'))}, this node's has {mine}")
    report = node.hello()
    node.audit.note("join", recipe=mine)
    return None if report is None else report.model_dump(mode="json"), {}


def home_of(config: Mapping[str, Any]) -> Path:
    """Return the folder that a node config names. Raises RecipeError if it names none."""
    if not config.get("home"):
        raise RecipeError("node config: home is missing, expected the folder for this node's files")
    return Path(str(config["home"])).expanduser()


def config_of(home: Path, config: Mapping[str, Any]) -> NodeConfig:
    """Read node.yaml in a node's home; without it, use the node config. Raises RecipeError for no client."""
    file = home / "node.yaml"
    if file.is_file():
        return NodeConfig.read(file)
    if not config.get("client"):
        raise RecipeError(f"node config: client is missing, and {file} does not exist, which could name it")
    return NodeConfig(client=str(config["client"]), device=str(config.get("device", "cpu")))
