"""What the data cannot tell is said, and nothing is said where they can."""

import numpy as np
import pytest

from theodolite import fits
from theodolite.fits.estimating import interval_warnings
from theodolite.fits.laws import POWER

from .worlds import grid, noisy, surface


def said(fit):
    return " ".join(fit.warnings)


def test_sound_data_raise_no_doubt():
    n, d = grid()
    assert (
        fits.chinchilla(parameters=n, tokens=d, loss=noisy(surface(n, d), 0.003, 0), draws=40).warnings == ()
    )


@pytest.mark.parametrize("share", [0, 0.003])
def test_tokens_in_step_with_parameters_cannot_tell_their_exponents_apart(share):
    n = np.logspace(7, 10, 24)
    fit = fits.chinchilla(parameters=n, tokens=20 * n, loss=noisy(surface(n, 20 * n), share, 0), draws=20)
    assert "can be traded against one another" in said(fit)
    assert "vary separately" in said(fit)


def test_noise_as_large_as_the_effect_leaves_the_exponent_open():
    x = np.logspace(6, 9, 12)
    fit = fits.power(x=x, loss=noisy(5 + 100 * x**-0.4, 0.01, 1), draws=60)
    assert "The data do not determine α" in said(fit)
    assert "Do not extrapolate" in said(fit)


def test_less_than_a_decade_is_said():
    x = np.linspace(1e8, 6e8, 9)
    fit = fits.power(x=x, loss=2 + 300 * x**-0.3, draws=20)
    assert "x spans a factor of 6 only" in said(fit)


def test_three_sizes_are_said_to_be_few():
    x = np.repeat([1e7, 1e8, 1e9], 4)
    fit = fits.power(x=x, loss=noisy(2 + 300 * x**-0.3, 0.002, 0), draws=20)
    assert "only 3 different values of x" in said(fit)


def test_a_loss_that_does_not_depend_on_an_input_is_said():
    n, d = grid()
    fit = fits.chinchilla(parameters=n, tokens=d, loss=1.8 + 480 * n**-0.35, draws=20)
    assert "β" in said(fit) or "term of B" in said(fit)
    assert fit["alpha"].value == pytest.approx(0.35, rel=1e-3)


def test_an_offset_that_is_not_seen_is_said():
    x = np.logspace(6, 9, 12)
    fit = fits.power(x=x, loss=20 * x**-0.1, draws=20)
    assert "No irreducible loss is seen" in said(fit)
    assert fit["alpha"].value == pytest.approx(0.1, rel=1e-3)


def test_an_exponential_is_said_to_lie_beyond_the_power_laws():
    depth = np.arange(1, 25)
    fit = fits.depth_expansion(depth=depth, loss=2 + 0.8 * np.exp(-0.3 * depth), draws=20)
    assert "ended on a bound of s" in said(fit) or "do not determine s" in said(fit)
    assert fit["s"].value < 1.05


def test_an_interval_that_does_not_hold_its_value_is_said():
    found = {name: fits.FitEstimate(0.5, 0.4, 0.6, 0.05) for name in ("A", "E")}
    assert interval_warnings(POWER, found | {"alpha": fits.FitEstimate(0.5, 0.4, 0.6, 0.05)}) == []
    (line,) = interval_warnings(POWER, found | {"alpha": fits.FitEstimate(0.3, 0.4, 0.6, 0.05)})
    assert "The interval of α, 0.4 to 0.6, does not hold its value (0.3)" in line
