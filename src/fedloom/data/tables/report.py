"""What a table holds at each site: rows, labels and missing shares, without counts of few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedloom.data.tables.preprocessing import Label
from fedloom.data.tables.read import column_of, read
from fedloom.data.tables.table import labelled, labels_of, sites_of

Row = dict[str, Any]


def counts(about: Mapping[str, Any], minimum: int) -> tuple[list[Row], list[Row]]:
    """Return a row for each site and one for each column of a table; `about` is a recipe's section of it.

    Counts of fewer than `minimum` rows, and shares of them, are "<minimum".
    """
    frame, where, site = read(about["path"], about["site"])
    missing = about["missing"] or ()
    tasks = {name: Label.model_validate(dict(label)) for name, label in about["tasks"].items()}
    labels = labels_of(frame, tasks, missing, where)
    which, names = sites_of(frame, site, where)
    few = f"<{minimum}"

    def shown(count: int, share: str = "") -> str:
        if 0 < count < minimum:
            return few
        return f"{count:,}{share}"

    sites = []
    for number, name in enumerate(names):
        here = which == number
        row: Row = {"site": name, "rows": shown(int(here.sum()))}
        for task, label in tasks.items():
            y = labels[task][here]
            y = y[labelled(y)]
            if label.kind == "regression":
                share = f", mean {y.mean():.4g}" if len(y) >= minimum else ""
            else:
                sizes = np.bincount(y, minlength=len(label.classes))
                told = [
                    f"{each} {few if 0 < n < minimum else f'{n / max(len(y), 1):.0%}'}"
                    for each, n in zip(label.classes[:5], sizes, strict=False)
                ]
                share = f", {', '.join(told[1:] if len(label.classes) == 2 else told)}" if len(y) >= minimum else ""
            row[task] = shown(len(y), share)
        sites.append(row)
    columns = []
    sizes = np.bincount(which, minlength=len(names))
    for name, kind in about["inputs"].items():
        absent = ~column_of(frame, name, missing, where).present
        lost = np.bincount(which[absent], minlength=len(names))
        parts = np.where((lost > 0) & (lost < minimum), np.nan, lost / np.maximum(sizes, 1))
        most = int(np.nanargmax(parts)) if not np.isnan(parts).all() else 0
        columns.append(
            {
                "column": name,
                "kind": kind if isinstance(kind, str) else "category",
                "missing": few if 0 < lost.sum() < minimum else f"{lost.sum() / len(frame):.1%}",
                "most missing at": f"{names[most]} {parts[most]:.0%}" if np.nan_to_num(parts[most]) > 0 else "",
            }
        )
    return sites, columns
