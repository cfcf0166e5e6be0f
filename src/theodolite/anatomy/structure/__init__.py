"""What a recorded forward pass shows: uses of parameters, residual branches, norms, factors."""
