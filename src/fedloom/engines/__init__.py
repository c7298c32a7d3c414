"""How a run is executed: in one process, over the processes of a cluster, over Flower, or among peers."""
