"""Which case a row of the table shows."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from theodolite_studies.framework.verdict import Case, settled

NAN = Case("nan", np.array([math.nan, 0.1, 0.2]))
GOOD = Case("good", np.array([0.10, 0.11, 0.12]))
WIDE = Case("wide", np.array([0.0, 1.0, 8.0]))
"""The largest mean of all, and nothing follows from it."""
BAD = Case("bad", np.array([2.00, 2.01, 2.02]))
WORSE = Case("worse", np.array([2.40, 2.41, 2.42]))
NEVER = Case("never", np.array([math.inf, 2.0, 2.0]))


@pytest.mark.parametrize(
    ("cases", "verdict", "shown"),
    [
        ([GOOD, NAN], "unclear", "? ± ? (nan, 1 of 2 hold)"),
        ([GOOD, NAN, WIDE], "unclear", "? ± ? (nan, 1 of 3 hold)"),
        ([GOOD, WIDE], "unclear", "3.00 ± 2.52 (wide, 1 of 2 hold)"),
        ([GOOD, NAN, BAD, WIDE], "fails", "2.01 ± 6e-03 (bad, 1 of 4 hold)"),
        ([NAN, BAD, WORSE], "fails", "2.41 ± 6e-03 (worse, 0 of 3 hold)"),
        ([NAN, WORSE, NEVER], "fails", "∞ ± ? (never, 0 of 3 hold)"),
    ],
)
@pytest.mark.parametrize("below", [True, False])
def test_the_case_that_decided_is_shown_in_whatever_order(
    cases: list[Case], verdict: str, shown: str, below: bool
) -> None:
    if not below:  # the same, upside down
        cases = [Case(case.where, -case.values) for case in cases]
        shown = shown if shown[0] == "?" else f"-{shown}"
    for order in permutations(cases):
        found = settled("c", "p", "t", order, limit=1.0 if below else -1.0, below=below)
        assert (found.verdict, found.here) == (verdict, shown)
