"""The run folder: writing it while a run goes on, reading it afterwards, and trackers beside it."""
