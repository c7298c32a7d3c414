"""Where jobs run: in this process or a pool, among peers, in a cluster, or at Flower's nodes."""
