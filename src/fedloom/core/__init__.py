"""The nouns of every round: the layout of a model, the matrix of updates, the context of a call."""
