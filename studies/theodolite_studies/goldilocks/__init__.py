"""The Goldilocks zone in inhomogeneous networks: the paper's figures, its claims, and what it left open.

References:
    Revisiting the Goldilocks zone in inhomogeneous networks, 2025.
"""
