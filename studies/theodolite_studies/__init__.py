"""Claims of the papers, run again: a grid of runs, what came out of it, and figures drawn from that alone."""
