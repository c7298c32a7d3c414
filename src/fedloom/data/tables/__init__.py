"""Tables of sites: columns become inputs and labels of tasks, and sites become clients."""
