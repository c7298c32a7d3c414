"""Work that needs models again: running the cells of a grid, pretraining, questions to the models of finished runs."""
