"""Tasks: the losses, heads and metrics of one task."""
