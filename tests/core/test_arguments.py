"""Checks of arguments."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite import UseError
from theodolite.core import arguments


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 11])
def test_what_is_no_integer_in_the_range_is_refused_by_name_and_value(value: object) -> None:
    with pytest.raises(UseError, match=r"^steps is .*give an integer, at least 0, at most 10$"):
        arguments.whole("steps", value, least=0, most=10)


def test_integers_of_numpy_are_integers() -> None:
    assert arguments.whole("steps", np.int64(3)) == 3
    assert type(arguments.whole("steps", np.int64(3))) is int


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), float("inf"), True, "0.1", 10**400])
def test_what_is_no_positive_number_is_refused(value: object) -> None:
    with pytest.raises(UseError, match=r"^lr is "):
        arguments.positive("lr", value)


def test_bounds_are_allowed_values() -> None:
    assert arguments.number("beta", 0, least=0, most=1) == 0
    assert arguments.number("beta", 1, least=0, most=1) == 1
    with pytest.raises(UseError, match="from 0 to 1"):
        arguments.number("beta", 1.01, least=0, most=1)


def test_a_choice_has_the_type_of_the_choices() -> None:
    assert arguments.one_of("depth", 1, (1, 2)) == 1
    with pytest.raises(UseError, match="It is one of 1, 2"):
        arguments.one_of("depth", True, (1, 2))


@pytest.mark.parametrize("value", [0, True, [], [0, 0], [-1], ["a"], "3", 1.5])
def test_what_names_no_seeds_is_refused(value: object) -> None:
    with pytest.raises(UseError, match=r"^seeds is "):
        arguments.seeds("seeds", value)


def test_a_very_long_value_does_not_fill_the_screen() -> None:
    with pytest.raises(UseError) as refused:
        arguments.whole("steps", "x" * 10_000)
    assert len(str(refused.value)) < 300
