"""When to use a method or an add-on: one sentence per group, which its page and the index of methods begin with."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Methods and add-ons of one purpose."""

    title: str
    when: str
    names: tuple[str, ...]


def _group(title: str, when: str, names: str) -> Group:
    return Group(title, when, (*names.split(),))


GROUPS = (
    _group(
        "References",
        "Use it as a row of every table: a method that does not beat it is not worth its cost.",
        "local separate centralised simple constant",
    ),
    _group(
        "One model for all clients",
        "Use it where several clients have the same tasks and one model may serve all of them. Start with "
        "[fedavg](fedavg.md); the others change the steps of clients or server, for clients whose data differ.",
        "fedavg fedprox fednova scaffold feddyn fedopt fedacg moon ntk-fedavg",
    ),
    _group(
        "Clients from different domains",
        "Use it where clients share a task, but their inputs come from different cameras, hospitals or styles.",
        "fedbn fedga fdse f2dc feature-modules domain-weights heal",
    ),
    _group(
        "Clients whose models differ",
        "Use it where clients have models of different shapes, and share predictions on a small public set instead.",
        "fedmd",
    ),
    _group(
        "Clients that label only some classes",
        "Use it where each site labels some of the organs or classes only, and the model is to know all of them.",
        "condistfl",
    ),
    _group(
        "Personal models",
        "Use it where clients have different tasks, or must keep a model or some layers of their own.",
        "fedper fedrep fedbabu fedsta ditto pfedme fedamp fedmtl fedhca2 fedbone fedpmt across-tasks",
    ),
    _group(
        "Clusters of clients",
        "Use it where clients fall into groups that nobody knows beforehand, and one model per group fits better.",
        "ifca rr-cluster cfl matfl fedsoft fedspd fedmerge",
    ),
    _group(
        "Prototypes of classes",
        "Use it for classification, where single clients have few examples of some classes.",
        "fedproto fpl fedtgp fedsa fedrcl",
    ),
    _group(
        "Task vectors and model merging",
        "Use it where a client trains several tasks from one pretrained model, and the updates of tasks are merged.",
        "matu by-task ties dare consensus iso-c tsv-m wudi fedrpca",
    ),
    _group(
        "Conflicts between updates",
        "Use it where updates of different tasks point against each other: the run page shows their cosines.",
        "pcgrad gradvac cagrad config min-norm famo upgrad dualproj aligned-mtl imtl-g fairgrad",
    ),
    _group(
        "Sparse updates, and what explains their gain",
        "Use it to send and apply fewer coordinates, or as the control that such a gain is compared with.",
        "feddea server-step support-mean activated-dimensions",
    ),
    _group(
        "Low-rank adapters",
        "Use it with `model.lora`, where clients train low-rank adapters of a frozen encoder.",
        "fedsa-lora fedex-lora flora",
    ),
    _group(
        "Without a server",
        "Use it to simulate peers in one place, or with the section `peers`, which runs them "
        "[without a server](../../peers.md).",
        "dpsgd dfmtl colnet sheaf-fmtl staleness plateau",
    ),
    _group(
        "Hostile clients",
        "Use it where some clients may send wrong updates on purpose: "
        "[hostile clients](../../robust.md) says which rule to choose.",
        "krum multi-krum mda nnm rfa centred-clip clip trimmed-mean median",
    ),
)


def group_of(name: str) -> Group:
    """Return the group that has a method or an add-on."""
    return next(group for group in GROUPS if name in group.names)
