"""The records of depth expansion as arrays."""

import pytest

from theodolite_studies.depth_expansion.grid import Regimes, slopes
from theodolite_studies.depth_expansion.study import STUDY

from .made_up import made_up


def test_slopes_are_those_the_records_are_made_of():
    """And a norm that follows the loss alone has no slope in depth when the loss is held."""

    def norm(one):
        return one["points"]["pool"]["train"]["norm"]

    def loss(one):
        return one["train_loss"]

    records = made_up(
        train=lambda n, w: 3 * n**-0.5 * w**0.25 * (1 + 1 / (n * w)) ** 2, loss=lambda n, w: 1 + 1 / (n * w)
    )
    (grid,) = Regimes.of(records).grids
    found = slopes(grid, norm, loss)
    assert found["depth"] == pytest.approx([-0.5] * 3)
    assert found["width"] == pytest.approx([0.25] * 3)
    assert found["given 0"] == pytest.approx([2.0] * 3)
    assert found["explained"] == pytest.approx([1.0] * 3)


def test_a_depth_without_all_widths_is_left_out():
    records = [one for one in made_up() if (one["depth"], one["width"]) not in ((2, 8), (4, 8))]
    (grid,) = Regimes.of(records).grids
    assert grid.depths == [1, 8]
    assert len(STUDY.decide(records)) == 20  # nothing can come early between two depths
