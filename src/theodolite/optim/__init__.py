"""Optimizers that no well-kept library has right, and the one object that holds several."""
