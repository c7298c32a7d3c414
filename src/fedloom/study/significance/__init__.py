"""The room of tests: paired tests of methods over seeds or clients, and ranks over tasks; above the tables."""
