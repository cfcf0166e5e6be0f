"""Eigenvalues outside the bulk of a spectrum, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.density import Density, density
from theodolite.probes.curvature.eigenvalues import MOST_PRODUCTS, eigenvalues
from theodolite.probes.curvature.estimate import Estimate
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.products import Progress, require_at_least
from theodolite.probes.curvature.replicas import on_all_ranks
from theodolite.probes.curvature.sampling import mean_of

MOST = 20
TOLERANCE = 1e-3
WINDOW = 8
"""Steps below a gap that it is compared with."""
WIDE = 5.0
"""A gap this many times as wide as those below it ends the bulk. Of random symmetric matrices without any
outlier one in a hundred has such a gap at size 200, and none of a hundred at size 500."""
LEAST_STEP = 0.01
"""A gap of less than `WIDE` times this share does not count, however dense the bulk is."""
PROBES, STEPS = 4, 32


@dataclass(frozen=True)
class Outliers:
    """Eigenvalues that stand apart from the bulk, above and below."""

    above: Tensor
    """Those above the bulk, from the largest down, float64."""
    below: Tensor
    """Those below the bulk, from the smallest up."""
    bulk: tuple[float, float]
    """The smallest and the largest eigenvalue of the bulk."""
    gaps: tuple[float, float]
    """How wide the gap below and above the bulk is, in steps of the bulk's edge; where there are no outliers
    the widest that was seen."""
    by_density: Estimate
    """How many eigenvalues lie outside the bulk by the weight of the density there. Well above `num` if
    an eigenvalue occurs several times, of which Lanczos sees one."""
    converged: bool
    products: int
    status: str

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.above) + len(self.below)

    def __str__(self) -> str:
        low, high = self.bulk
        return (
            f"{len(self.above)} above and {len(self.below)} below a bulk from {low:.4g} to {high:.4g}; "
            f"{self.status}"
        )


@exclusive()
@on_all_ranks
def outliers(
    measured: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    most: int = MOST,
    most_products: int = MOST_PRODUCTS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Outliers:
    """Count the eigenvalues of a Hessian, or of any symmetric operator, that lie clearly outside its bulk.

    Args:
        measured: an operator, or a model with its loss and batch, whose Hessian is meant.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        most: how many are looked for at each end.
        most_products: of the search for eigenvalues; stop here, converged or not.
        parameters: patterns of names, as in `hessian`.
        temperature: the loss is taken of logits/temperature.
        seed: of the random vectors.
        progress: is told which share of the work is done.

    Distances `d_i = |λ_i − c|` are taken from the median c of the density. The outliers end at the last i
    whose step `log(d_i/d_{i+1})` is five times as wide as the mean of the eight steps below it. A power law
    `d_i ∝ i^−a` has no such step, and the edge of a random matrix hardly ever.

    In classifiers those above are about as many as classes, or one fewer, and the bulk depends on the width
    (Sagun et al., Empirical analysis of the Hessian of over-parametrized neural networks, 2017).
    """
    operator = operator_of(measured, loss, batch, parameters=parameters, temperature=temperature)
    require_at_least(1, most=most)
    ends = min(most + WINDOW + 1, operator.size // 2)
    if ends < WINDOW + 2:
        raise UseError(
            f"the operator has {operator.size} eigenvalues, too few to tell a bulk from outliers: at least "
            f"{2 * (WINDOW + 2)} are needed"
        )
    spectrum = density(
        operator,
        probes=PROBES,
        steps=STEPS,
        seed=seed,
        progress=None if progress is None else lambda share: progress(share / 2),
    )
    found = eigenvalues(
        operator,
        k=ends,
        which="ends",
        tolerance=TOLERANCE,
        most_products=max(most_products, 2 * ends),
        seed=seed,
        progress=None if progress is None else lambda share: progress(0.5 + share / 2),
    )
    centre = _median(spectrum)
    high, low = found.values[:ends], found.values[ends:].flip(0)
    num_above, gap_above = _last_wide_gap(high - centre)
    num_below, gap_below = _last_wide_gap(centre - low)
    return Outliers(
        high[:num_above],
        low[:num_below],
        (float(low[num_below]), float(high[num_above])),
        (gap_below, gap_above),
        _outside(spectrum, _between(low, num_below), _between(high, num_above)),
        found.converged,
        spectrum.products + found.products,
        found.status,
    )


def _last_wide_gap(distances: Tensor) -> tuple[int, float]:
    """How many lie above the last wide gap, and how wide that is; of no wide gap 0, and the widest."""
    distances = distances.clamp(min=1e-6 * float(distances[0].clamp(min=1e-300)))
    steps = (distances[:-1] / distances[1:]).log()
    usual = steps.unfold(0, WINDOW, 1).mean(1)[1:].clamp(min=LEAST_STEP)
    widths = steps[: len(usual)] / usual
    wide = (widths >= WIDE).nonzero()
    if len(wide) == 0:
        return 0, float(widths.max())
    last = int(wide[-1])
    return last + 1, float(widths[last])


def _median(spectrum: Density) -> float:
    nodes, order = spectrum.nodes.flatten().sort()
    share = spectrum.weights.flatten()[order].cumsum(0) / len(spectrum.nodes)
    return float(nodes[int((share < 0.5).sum())])


def _between(values: Tensor, num: int) -> float | None:
    """The middle of the gap after so many values."""
    return None if num == 0 else float(values[num - 1] + values[num]) / 2


def _outside(spectrum: Density, low: float | None, high: float | None) -> Estimate:
    """The number of eigenvalues below `low` and above `high`."""
    there = torch.zeros_like(spectrum.nodes, dtype=torch.bool)
    if low is not None:
        there |= spectrum.nodes < low
    if high is not None:
        there |= spectrum.nodes > high
    return mean_of(spectrum.size * (spectrum.weights * there).sum(1))
