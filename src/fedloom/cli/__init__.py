"""The room of the command line: it reads what a person types, calls the rooms below, and prints; nothing needs it."""

from fedloom.cli.app import main as main
