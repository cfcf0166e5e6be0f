"""Does the principal flow follow gradient descent where the gradient flow does not?"""
