"""Studies: read run folders and compare them; grids of runs and their tables. Free of torch."""
