"""The density of a spectrum, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.criteria import eigenvalue_ratio, negative_to_positive
from theodolite.probes.curvature.estimate import Estimate
from theodolite.probes.curvature.lanczos import quadrature
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.products import Products, Progress, require_at_least
from theodolite.probes.curvature.replicas import on_all_ranks
from theodolite.probes.curvature.sampling import mean_of, root_of

PROBES = 8
STEPS = 64
MOST_BYTES = 1 << 32
"""Of vectors that are kept for probes that go on side by side; one probe at a time may take more."""


@dataclass(frozen=True)
class Density:
    """Eigenvalues as a distribution: nodes with weights, for each of several random probes.

    Each probe is an unbiased draw of the whole distribution: for a polynomial f of degree up to
    2·steps − 1 the mean of `Σ_i w_i f(θ_i)` over probes is `Tr f(H)/P`.
    """

    nodes: Tensor
    """θ, (probes, steps), float64, ascending."""
    weights: Tensor
    """w, (probes, steps), each row sums to 1."""
    size: int
    """P, the number of eigenvalues."""
    products: int

    @property
    def smallest(self) -> float:
        """The smallest node, never below the smallest eigenvalue."""
        return float(self.nodes.min())

    @property
    def largest(self) -> float:
        """The largest node, never above the largest eigenvalue."""
        return float(self.nodes.max())

    @property
    def width(self) -> float:
        """A hundredth of the range of the nodes: how far an eigenvalue is smeared unless one says so."""
        return max((self.largest - self.smallest) / 100, 1e-6 * abs(self.largest), 1e-300)

    @property
    def trace(self) -> Estimate:
        """`Tr H`, the first moment."""
        return mean_of(self.size * (self.weights * self.nodes).sum(1))

    @property
    def frobenius(self) -> Estimate:
        """`‖H‖_F`, from the second moment."""
        return root_of(mean_of(self.size * (self.weights * self.nodes.square()).sum(1)))

    @property
    def r_e(self) -> Estimate:
        """`|λ_min/λ_max|` of the extreme nodes of all probes; its error is the spread between probes."""
        spread = mean_of(eigenvalue_ratio(self.nodes, self.weights))
        return Estimate(abs(self.smallest / self.largest) if self.largest else math.nan, spread.error)

    def k_hn(self, n: float = 1.0) -> Estimate:
        """`K_Hn = Σ_{λ<0} |λw|ⁿ / Σ_{λ>0} (λw)ⁿ`: the negative part of the spectrum to the positive.

        With n = 1 it is the ratio of two parts of the trace. With n > 1 it counts nodes, not eigenvalues, and
        depends on `steps`.
        """
        return mean_of(negative_to_positive(self.nodes, self.weights, n))

    def grid(self, num: int = 1000) -> Tensor:
        """Places from below the smallest node to above the largest, where all of the density is."""
        return torch.linspace(
            self.smallest - 5 * self.width, self.largest + 5 * self.width, num, dtype=torch.float64
        )

    def values(self, grid: Tensor, width: float | None = None) -> Tensor:
        """The density at the places of `grid`, each eigenvalue smeared to a normal curve of this width."""
        return self._smeared(grid, width).mean(0)

    def errors(self, grid: Tensor, width: float | None = None) -> Tensor:
        """The standard error of `values`, from the spread between probes."""
        return self._smeared(grid, width).std(0) / math.sqrt(len(self.nodes))

    def cumulative(self, grid: Tensor) -> Tensor:
        """The share of eigenvalues that are at most as large as each place of `grid`."""
        places = grid.to(self.nodes)
        return torch.stack(
            [
                torch.cat([row.new_zeros(1), weight.cumsum(0)])[torch.searchsorted(row, places, right=True)]
                for row, weight in zip(self.nodes, self.weights, strict=True)
            ]
        ).mean(0)

    def __str__(self) -> str:
        return (
            f"{self.size:,} eigenvalues between {self.smallest:.4g} and {self.largest:.4g} "
            f"({len(self.nodes)} probes of {self.nodes.shape[1]} steps, {self.products} products)\n"
            f"trace {self.trace}, Frobenius norm {self.frobenius}\n"
            f"r_e {self.r_e}, K_H1 {self.k_hn()}"
        )

    def _smeared(self, grid: Tensor, width: float | None) -> Tensor:
        width = self.width if width is None else width
        if not width > 0:
            raise UseError(f"width is {width!r}: it has to be above 0")
        distances = (grid.to(self.nodes)[None, :, None] - self.nodes[:, None, :]) / width
        curves = torch.exp(-0.5 * distances.square()) / (width * math.sqrt(2 * math.pi))
        return (curves * self.weights[:, None, :]).sum(2)


@exclusive()
@on_all_ranks
def density(
    measured: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    probes: int = PROBES,
    steps: int = STEPS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The density of the eigenvalues of a Hessian, or of any symmetric operator.

    Args:
        measured: an operator, or a model with its loss and batch, whose Hessian is meant.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        probes: random vectors; the noise falls with the square root of their number.
        steps: of Lanczos from each of them, which set how fine the density can be told. `steps` vectors of
            length P are kept.
        parameters: patterns of names, as in `hessian`.
        temperature: the loss is taken of logits/temperature.
        seed: of the probes.
        progress: is told which share of the `probes·steps` products is done.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = density(model, nn.functional.mse_loss, batch)  # eigenvalues 1 and 9
    >>> found.cumulative(torch.tensor([0.0, 5.0, 10.0]))
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)

    References:
        Ghorbani, Krishnan, Xiao, An investigation into neural net optimization via Hessian eigenvalue
        density, 2019.
    """
    operator = operator_of(measured, loss, batch, parameters=parameters, temperature=temperature)
    require_at_least(1, probes=probes, steps=steps)
    products = Products(operator)
    steps = min(steps, operator.size)
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[Tensor, Tensor]] = []
    together = min(probes, _together(products, steps))
    basis = torch.empty(together, steps, operator.size, dtype=products.dtype, device=products.device)
    for done in range(0, probes, together):
        starts = products.signs(min(together, probes - done), generator)

        def report(share: float, before: int = done, num: int = len(starts)) -> None:
            if progress:
                progress((before + share * num) / probes)

        found.append(quadrature(products, starts, basis[: len(starts)], report))
    nodes, weights = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return Density(nodes, weights, operator.size, products.num)


def _together(products: Products, steps: int) -> int:
    """How many probes go on side by side: on a GPU a block of products takes little longer than one."""
    if products.device.type == "cpu":
        return 1
    return max(1, MOST_BYTES // (steps * products.size * products.dtype.itemsize))
