"""The command line: reads arguments, calls the rooms below, prints."""

from fedloom.cli.app import main as main
