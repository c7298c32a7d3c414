"""How alike tasks are, by six measures."""
