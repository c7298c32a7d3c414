"""Statistics: paired tests of methods over seeds or clients, and ranks over tasks."""
