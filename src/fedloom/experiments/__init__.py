"""Work that needs models again: running the cells of a grid, pretraining, and questions to the models of finished
runs.
"""
