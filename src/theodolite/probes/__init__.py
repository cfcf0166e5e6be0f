"""Measurements on a network that leave it as it was."""
