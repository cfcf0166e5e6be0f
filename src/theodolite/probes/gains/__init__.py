"""What the optimizer does to gains and other vectors: decay, preconditioning, amplification."""
