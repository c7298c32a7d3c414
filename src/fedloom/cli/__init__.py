"""The command line: reads arguments, calls the rooms below, prints."""

import sys


def main() -> None:
    """Run the app. Ctrl-C while it loads ends it without a traceback, as it does later."""
    try:
        from fedloom.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
