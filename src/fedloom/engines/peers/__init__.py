"""Learning without a server: peers that train, exchange messages, and mix each other's models."""
