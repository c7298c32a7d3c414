"""What every round works with: the layout of a model, the matrix of updates, the context of a call."""
