"""A notebook: its functions and classes reach worker processes, a cell may run twice, a result shows itself."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

CELLS = [
    """
import torch
from torch import nn
import fedloom as fl

x = torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.body(x).relu())

def focal(outputs, labels):
    loss = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss

def error(outputs, labels):
    return (outputs.argmax(1) != labels).float().mean()
""",
    """
clients = {"ann": fl.Client(train=(x[:40], y[:40])), "bob": fl.Client(train=(x[40:70], y[40:70]))}
tasks = {"sign": fl.task(classes=2, loss=focal, metrics={"error": (error, "min")})}
fed = fl.Federation(clients, tasks, test=(x[70:], y[70:]))
result = fl.run(fed, model=Net(), rounds=2, steps=2, workers=WORKERS)
result
""",
    "fl.Result(result.folder, '').run.rows()[-1]['value'], result.table()",
]


def executed(tmp_path: Path, *workers: int) -> tuple[list[str], str]:
    """Return what the last cell says after each run of the second one, with so many workers; and the first result's
    page.
    """
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nbclient and ipykernel are not here")
    import nbformat
    from nbclient import NotebookClient

    cells = [CELLS[0], *(text for n in workers for text in (CELLS[1].replace("WORKERS", str(n)), CELLS[2]))]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = [json.dumps(cell.outputs[-1]["data"]["text/plain"]) for cell in book.cells[2::2]]
    pages = [out["data"]["text/html"] for out in book.cells[1].outputs if "text/html" in out.get("data", {})]
    return told, pages[-1]


@pytest.mark.slow
def test_a_cell_may_run_twice_its_result_shows_itself_and_its_functions_reach_worker_processes(tmp_path: Path) -> None:
    told, page = executed(tmp_path, 1, 2, 2)
    assert told[0] == told[1] == told[2]
    assert "<table>" in page
    assert "error" in page
