"""The room of what single papers look at in the records of a run; its numbers as tables, and their pictures."""
