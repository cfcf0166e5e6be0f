"""Depth against width: Levine's line."""

import numpy as np
import pytest
from scipy import optimize

from theodolite import UseError, fits

from .worlds import noisy, shaped


def product_grid():
    return map(np.ravel, np.meshgrid([64, 96, 128, 192, 256, 384, 512], [2, 4, 8, 12, 16, 24]))


def test_a_product_of_widths_and_depths_gives_the_line_back():
    width, depth = product_grid()
    fit = fits.allocation(width=width, depth=depth, loss=shaped(width, depth), draws=20)
    assert fit["b"].value == pytest.approx(0.08, rel=0.05)
    assert fit["a"].value == pytest.approx(4.0, rel=0.03)
    assert fit["c"].value == pytest.approx(12)


def test_the_best_shape_of_a_size_is_what_a_search_over_depths_finds():
    width, depth = product_grid()
    fit = fits.allocation(width=width, depth=depth, loss=shaped(width, depth), draws=20)
    best = optimize.minimize_scalar(
        lambda depth: shaped(np.sqrt(1e7 / 12 / depth), depth), bounds=(1, 60), method="bounded"
    ).x
    shape = fit.optimal(parameters=1e7)
    assert shape["depth"].value == pytest.approx(best, rel=0.05)
    assert 12 * shape["depth"].value * shape["width"].value ** 2 == pytest.approx(1e7, rel=1e-6)


def test_levines_own_constants_give_the_shapes_of_their_table():
    # A law with which GPT-3's size has its best depth near 80.
    depth = np.array([6, 12, 18, 24, 36, 48])
    width, depth = map(np.ravel, np.meshgrid(np.geomspace(64, 8192, 12), depth))
    loss = shaped(width, depth, a=5.039, b=0.0555)
    shape = fits.allocation(width=width, depth=depth, loss=loss, draws=20).optimal(parameters=175e9)
    assert shape["depth"].value == pytest.approx(80, rel=0.05)


def test_the_line_is_that_of_least_squares_in_log_depth():
    width, depth = product_grid()
    fit = fits.allocation(width=width, depth=depth, loss=noisy(shaped(width, depth), 0.001, 0), draws=20)
    found = np.array([row["depth"] for row in fit.optima])
    sizes = np.array([row["parameters"] for row in fit.optima])

    def off(line):
        roots = [
            optimize.brentq(lambda d, n=n: 12 * d * np.exp(2 * (line[0] + line[1] * d)) - n, 1e-3, 1e3)
            for n in sizes
        ]
        return np.log(roots) - np.log(found)

    best = optimize.least_squares(off, [4.0, 0.08]).x
    assert [fit["a"].value, fit["b"].value] == pytest.approx(best, rel=1e-4)


def test_equal_sizes_in_several_shapes_do_as_well():
    sizes, depth = map(np.ravel, np.meshgrid(np.geomspace(3e5, 3e7, 6), [2, 4, 8, 12, 16, 24]))
    width = np.sqrt(sizes / 12 / depth)
    fit = fits.allocation(width=width, depth=depth, loss=shaped(width, depth), draws=20)
    assert fit["b"].value == pytest.approx(0.08, rel=0.06)


def test_intervals_hold_the_truth_more_often_than_not_and_open_with_the_noise():
    width, depth = product_grid()
    inside, lengths = 0, []
    for seed in range(20):
        loss = noisy(shaped(width, depth), 0.001, seed)
        fit = fits.allocation(width=width, depth=depth, loss=loss, draws=200, seed=seed)
        inside += fit["b"].low <= 0.08 <= fit["b"].high
        lengths.append(fit["b"].high - fit["b"].low)
    assert inside >= 15
    loud = fits.allocation(width=width, depth=depth, loss=noisy(shaped(width, depth), 0.006, 0), draws=200)
    assert loud["b"].high - loud["b"].low > 2 * np.median(lengths)
    assert any("do not determine b" in line for line in loud.warnings)


def test_given_parameters_count_instead_of_a_transformers():
    width, depth = product_grid()
    fit = fits.allocation(
        width=width, depth=depth, loss=shaped(width, depth), parameters=8 * depth * width**2, draws=20
    )
    assert fit["c"].value == pytest.approx(8)


@pytest.mark.parametrize(
    "widths, depths, words",
    [
        ([64, 128, 256], [2, 4], "three are needed"),
        ([64, 65, 66], [2, 40, 800], "same number of parameters"),
        ([64, 128, 256, 512, 1024], [2, 3, 4], "Run deeper"),
    ],
)
def test_shapes_that_cannot_tell_are_refused_with_a_remedy(widths, depths, words):
    width, depth = map(np.ravel, np.meshgrid(widths, depths))
    with pytest.raises(UseError, match=words):
        fits.allocation(width=width, depth=depth, loss=shaped(width, depth))
