"""A cluster of processes of this machine, which run many recipes one after another (see test_cluster.py).

They are children that have torch already, with the variables that torchrun would set; torchrun itself is tried each
night.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.engines import processes

Cases = Mapping[str, Sequence[str]]


def start(out: Path, cases: Cases, ranks: int) -> None:
    """Run cases with so many processes, each in OUT/name; an error in one is written to OUT/name.error."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    members = [
        processes.start(take_part, out, dict(cases), {**place, "RANK": str(k), "LOCAL_RANK": str(k)}, daemon=True)
        for k in range(ranks)
    ]
    for member in members:
        member.join(900)
    assert [member.exitcode for member in members] == [0] * ranks


def take_part(out: Path, cases: Cases, place: Mapping[str, str]) -> None:
    """Run one process of the cluster."""
    import torch

    from fedloom.engines.cluster import launch
    from fedloom.engines.cluster.comm import Comm
    from fedloom.errors import UserError
    from tests_support import load_recipe

    os.environ.update(place)
    torch.set_num_threads(1)
    comm = Comm.join()
    for name, changes in cases.items():
        try:
            launch.take_part(comm, out / name, load_recipe(*changes[1:], recipe=changes[0]))
        except UserError as error:
            if comm.rank == 0:
                (out / f"{name}.error").write_text(str(error))
    comm.leave()
