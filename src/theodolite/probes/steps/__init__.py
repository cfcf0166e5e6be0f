"""Measurements along a step: the step an optimizer would make, and how far it may go."""
