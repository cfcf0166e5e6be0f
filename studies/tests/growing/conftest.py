"""Fits of the growing study take few draws and starts here."""

import dataclasses

import pytest

from theodolite.fits.laws import depth_recursion
from theodolite_studies.growing import envelope


def with_few_starts(steps, loss):
    law = depth_recursion(steps, loss)
    return dataclasses.replace(law, starts=law.starts[::7])


@pytest.fixture(autouse=True)
def few_draws_and_starts(monkeypatch):
    """Of the fits and their intervals: what is decided here is clear."""
    monkeypatch.setattr(envelope, "DRAWS", 20)
    monkeypatch.setattr(envelope, "depth_recursion", with_few_starts)
