"""One round and a whole run of a server with its clients: broadcast, train, aggregate, evaluate, checkpoint."""
