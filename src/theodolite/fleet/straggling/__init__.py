"""Stragglers: what waiting for the slowest worker costs, and what coding the work would save."""
