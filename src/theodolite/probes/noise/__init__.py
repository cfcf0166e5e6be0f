"""How noisy the gradient of a batch is, and from which batch size on larger batches stop saving steps."""
