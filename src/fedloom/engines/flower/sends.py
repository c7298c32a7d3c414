"""Sentences about what a run uses and sends of a site; they follow from the recipe, the method and the site's terms.

Each comes with the names of the fields of messages that it covers, as nodes encode them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fedloom.core.codecs import Raw, by_block
from fedloom.core.errors import UserError, first_of
from fedloom.core.grouping import grouped
from fedloom.data.dataset import Dataset
from fedloom.data.tables.table import OwnTable
from fedloom.engines.flower.nodes import NodeConfig, about, build_at, fitted_of
from fedloom.engines.flower.terms import SitePolicy, withheld
from fedloom.engines.flower.wire import RefusedError
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import method_of
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.messages import blank, nothing, rows_of
from fedloom.federation.rounds.seen import label_counts
from fedloom.methods.method import EXTRAS
from fedloom.models.signal import sized
from fedloom.models.tasks.labels import Classification
from fedloom.models.tasks.task import Task, as_plain
from fedloom.training.flat import integer_buffers

Sentences = Iterator[tuple[str, str, str]]
"""(use, sends, refuses or stays; fields, separated by spaces; a sentence)."""


def sentences(
    recipe: Recipe, config: NodeConfig, dataset: Dataset, client: BuiltClient, own: OwnTable | None
) -> Sentences:
    """Yield what a run does with a site's own data; `own` is its table, where statistics of it are sent."""
    method, hidden = method_of(recipe), withheld(config.terms, recipe.privacy, True)
    counted = "examples" not in hidden and method.counts_examples
    report = about(client, dataset, counted, None if own is None else own.report)
    tasks = [task for task, _ in client.tasks.values()]
    about_tasks, rounds = ", ".join(map(_settings, tasks)), recipe.training.rounds
    yield "use", "", f"train and measure a model of {about_tasks} with {method.name}, in at most {rounds} rounds"
    joins = (
        f"its name {client.id}, public keys, versions of fedloom and torch, what it withholds",
        "the names, loss weights and these settings of its tasks",
        f"its domain {client.domain}" if client.domain else "",
        f"the names of the classes of {first_of(report.digests)}, or their checksum" if report.digests else "",
        f"the kind and size of its inputs ({sized(report.input_shape, report.signal)})" if own is None else "",
        "a checksum of its list of words" if report.signal is not None and report.signal.digest else "",
        f"the exact numbers of examples: {sizes(client)}" if counted else "which of train, val and test have examples",
    )
    named = "client key signature versions withheld tasks weights domain classes digests"
    yield "sends", f"{named} input_shape signal sizes counted", f"when it joins, {'; '.join(filter(None, joins))}"
    if own is not None:
        columns, private = first_of([*own.report.sent, *own.report.shares]), recipe.privacy
        what = "counts (also of missing cells), means, squared deviations; of a category, its texts with their counts"
        if private is not None:
            who = "this node" if private.trust == "local" else "the server"
            what = f"the share with a value, sums of values and of squares, to which {who} adds noise"
        read, least = "the names, kinds and listed values of its table's columns", own.report.minimum
        rows = f"of {columns} in training rows, as far as at least {least} rows make up a number"
        yield "sends", "table", f"when it joins, {read}; {rows}, {what}"
    try:
        fitted = None if own is None else fitted_of(recipe, {client.id: report})
        built = build_at(recipe, config, tuple(tasks), fitted)
    except (UserError, RuntimeError) as error:
        yield "sends", "", f"in rounds, what cannot be said before the run: {error}"
        return
    try:
        (config.terms or SitePolicy()).agree_to(built, recipe.runtime.flower.nodes)
    except RefusedError as error:
        yield "refuses", "", f"each training and evaluation of this run: {error}"
    yield from _trained(built, client, hidden, counted, own is not None)
    models = " and ".join(name for name in recipe.evaluation.models if name in (*built.models, "trained"))
    names = [*dict.fromkeys(name for task in tasks for name in task.metrics), *["loss"][: "losses" not in hidden]]
    every = "round" if recipe.evaluation.every == 1 else f"{recipe.evaluation.every} rounds and the last"
    measured = f"scores of {models} models on its {sizes(client, recipe.evaluation.splits)} examples"
    scores = (
        "no scores" if "scores" in hidden else f"at the start and after each {every}, {measured} ({first_of(names, 9)})"
    )
    yield "sends", "withheld" if "scores" in hidden else "scores", scores
    replies = "its run and round, or why the node refuses, such as the term that forbids it, or the type of an error"
    yield "sends", "format run round layout tree bfloat16 error again", f"in each message, {replies}"
    for text in label_counts(built):
        yield "sends", "", text
    part = method.private_part(built.layout)
    kept = f", the {part.d:,} parameters of {first_of(part.names)}" if part.blocks else ""
    codes = f", unless the recipe's own code does otherwise ({first_of(built.origins)})" if built.origins else ""
    yield "stays", "", f"rows, single labels, predictions of its own examples, states of optimisers{kept}{codes}"


def sizes(client: BuiltClient, splits: Sequence[str] = ("train", "val", "test")) -> str:
    """Return in words how many examples a client has in some splits."""
    return ", ".join(f"{len(client.part(split)):,} {split}" for split in splits)


def _settings(task: Task) -> str:
    """Return in words what a report says about a task, beside its weight and what is empty."""
    said = {key: value for key, value in as_plain(task).items() if key not in ("name", "weight") and value}
    return f"{task.name} ({', '.join(f'{key} {value}' for key, value in said.items())})"


def _trained(built: Built, client: BuiltClient, hidden: Collection[str], counted: bool, vague: bool) -> Sentences:
    """Yield what a client sends after training; `vague`: inputs depend on other sites' tables, too."""
    method, section, peers = built.method, built.recipe.privacy, built.recipe.peers
    rows = rows_of(built, [client.id])
    counts = by_block(blank(built.shared, built.federation, rows, nothing(len(rows), built.shared.d)), 1)
    parts = [f"{role}{f' of {task}' * bool(task)} {n:,}" for (role, task), n in counts.items()]
    more = built.federation.unified and not method.turn.by_task and any(role == "head" for role, _ in counts)
    others = " and heads of other sites' tasks, if any" if more else ""
    codec = "" if isinstance(method.codec, Raw) else f", packed by {type(method.codec).__name__}"
    noise = "; no differential privacy"
    if section is not None and built.terms is not None:
        cost = f"noise multiplier {section.noise:g}" if section.bound is None else f"epsilon at most {section.bound:g}"
        who = "the server adds to the sum of all sites, not to this update"
        if section.trust == "local":
            who = f"this node adds, after scaling the update to a length of at most {section.clip:g}"
        noise = f"; differential privacy ({cost}, delta {section.delta:g}) by noise that {who}"
    classes = first_of([name for name, (task, _) in client.tasks.items() if isinstance(task.known, Classification)])
    pooled, total = method.buffers != "local", f"{'about ' * vague}{sum(counts.values()):,}"
    extras = {name: EXTRAS.get(name.rstrip("0123456789"), f"{name}, unknown to fedloom") for name in method.extras}
    exact, floats, integers = "exact" if counted else "no", built.shared_buffers.d, integer_buffers(built.module)
    update = f"how training changed {total} parameters" if peers is None else f"{total} parameters, or how they changed"
    sent = {
        "packed": f"{update} ({first_of(parts, 9)}){others}{codec}{noise}" if counts else "no parameters",
        **{f"extra.{name}": text.format(classes) for name, text in sorted(extras.items())},
        **{f"side.{name}": f"a {name} vector over these parameters" for name in method.auxiliary},
        "support": "which parameters training changed" * method.wants_support,
        "buffers": f"{floats:,} running means and variances of features" * (pooled and floats > 0),
        "integers": f"counters of batches{', as received' * ('examples' in hidden)}" * (pooled and bool(integers)),
        f"n tasks{' steps examples' * counted}": f"{exact} numbers of training examples and steps",
        "loss": "" if "losses" in hidden else "the losses of training",
        "seconds waiting finite": "the seconds of training, and whether it failed",
    }
    for text, names in grouped((text, name) for name, text in sent.items() if text).items():
        yield "sends", " ".join(names), f"after each training, {text}"
    whom, carried = "the server, which sees it as it is sent: there is no secure aggregation", ""
    if peers is not None:
        signals = first_of(peers.similarity.signals if peers.judges else ["none"])
        whom = f"other sites, with requests, loss weights and signals to judge it by ({signals}), through the server"
        whom, carried = f"{whom}, which sees it and hears how models were mixed", "peer_messages records events up down"
    yield "sends", carried, f"this goes to {whom}"
