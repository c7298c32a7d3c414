"""Mathematics that several stages and rules share: Gram matrices, conflict-averse updates, class prototypes."""
