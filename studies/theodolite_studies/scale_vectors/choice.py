"""In which cell of its grid an arm is judged, and how often the rule errs where there is nothing to find.

The rule was changed after the runs. The first (`left_out`) chose a cell for every seed by the other seeds, so
that no seed had a say in the choice it was judged by. But where cells of an arm tie, seeds change cells in
concert: they are no longer independent, and Student's t counts them as if they were. `erring` measures it.
"""

# D draws, S seeds, C cells

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from theodolite_studies.framework.paired import LEVEL

Floats = NDArray[np.float64]
Rule = Callable[[Floats], Floats]
"""From losses (…, seeds, cells) to those by which an arm is judged (…, seeds)."""
DRAWS = 4000


def best_cell(losses: Floats) -> NDArray[np.int_]:
    """From (…, seeds, cells) to the cell with the lowest mean, among those in which the fewest runs diverged.

    >>> int(best_cell(np.array([[np.inf, np.inf, 0.1], [3.0, 2.0, np.inf], [3.0, 2.0, np.inf]])))
    1
    """
    ended = np.isfinite(losses)
    means = np.where(ended, losses, 0.0).sum(-2) / np.maximum(ended.sum(-2), 1)
    fewest = ended.sum(-2) == ended.sum(-2).max(-1, keepdims=True)
    return np.asarray(np.argmin(np.where(fewest, means, np.inf), -1))


def one_cell(losses: Floats) -> Floats:
    """The losses in the cell that is best by the mean over all seeds.

    >>> one_cell(np.array([[0.5, 2.0], [3.0, 2.0], [3.0, 2.1]]))
    array([2. , 2. , 2.1])
    """
    best = best_cell(losses)
    return np.asarray(np.take_along_axis(losses, best[..., None, None], -1)[..., 0])


def left_out(losses: Floats) -> Floats:
    """The first rule: the loss of each seed in the cell that is best by the mean over the other seeds.

    >>> left_out(np.array([[0.5, 2.0], [3.0, 2.0], [3.0, 2.0]]))
    array([2., 3., 3.])
    """
    found = []
    for seed in range(losses.shape[-2]):
        best = best_cell(np.delete(losses, seed, -2))
        found.append(np.take_along_axis(losses[..., seed, :], best[..., None], -1)[..., 0])
    return np.stack(found, -1)


def erring(rule: Rule, first: Sequence[float], second: Sequence[float], *, seeds: int = 8) -> float:
    """How often two arms that are alike at their best are told apart, by simulation.

    Args:
        rule: by which both are judged.
        first: means of the cells of one arm, in standard deviations of a run, above its best cell.
        second: those of the other.
        seeds: of both. Runs are independent and normal, which is the worst case: what cells of a seed have in
            common does not move the choice.
    """
    generator = np.random.default_rng(0)
    judged = [
        rule(np.array(means) + generator.normal(size=(DRAWS, seeds, len(means)))) for means in (first, second)
    ]
    differences_DS = judged[0] - judged[1]
    errors_D = differences_DS.std(1, ddof=1) / np.sqrt(seeds)
    limit = stats.t.ppf((1 + LEVEL) / 2, seeds - 1)
    return float((np.abs(differences_DS.mean(1)) > limit * errors_D).mean())


def errors(rule: Rule) -> tuple[float, float, float]:
    """Where one of six cells is best in both arms, where all tie in both, and where all tie in one."""
    distinct, tied = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0), (0.0,) * 6
    return erring(rule, distinct, distinct), erring(rule, tied, tied), erring(rule, tied, distinct)
