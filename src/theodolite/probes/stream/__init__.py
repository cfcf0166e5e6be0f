"""The residual stream: how large it is after each branch, at the start and during training."""
