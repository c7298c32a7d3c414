"""Many processes on one or many machines, started by torchrun: the engine `cluster`."""
