"""One process of a run that `fedloom run` started: `python -m fedloom.runtime.cluster RUN_FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedloom.errors import UserError
from fedloom.runtime.cluster.launch import ERROR_FILE
from fedloom.runtime.cluster.session import join


def main() -> None:
    """Join; a mistake that the user can mend is no reason to start again, so it is left to who started this."""
    try:
        join(Path(sys.argv[1]))
    except UserError as error:
        if os.environ["RANK"] == "0":
            Path(os.environ[ERROR_FILE]).write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    main()
