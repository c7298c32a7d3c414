"""Learning without a server: peers that train, exchange letters, and mix each other's models."""
