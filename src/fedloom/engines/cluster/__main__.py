"""One process of a run whose folder exists: `torchrun ... -m fedloom.engines.cluster RUN_FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.engines import cluster
from fedloom.engines.cluster.launch import ERROR_FILE, join
from fedloom.federation.rounds.progress import Printed, Progress


class Log(Printed, Progress):
    """Progress that prints events, for the log."""


def main() -> None:
    """Join a run. A UserError is no reason for torchrun to start again, so it is reported to the starting process."""
    try:
        join(Path(sys.argv[1]), progress=Log())
    except UserError as error:
        if ERROR_FILE not in os.environ:
            sys.exit(f"error: {error}")
        if cluster.rank() == 0:
            Path(os.environ[ERROR_FILE]).write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    main()
