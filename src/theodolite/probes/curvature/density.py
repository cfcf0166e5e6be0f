"""The density of a spectrum, by stochastic Lanczos quadrature, and the eigenvalues outside its bulk.

From a start vector v a fixed number of Lanczos steps gives a quadrature rule: with T the tridiagonal matrix,
θ its eigenvalues and s its eigenvectors, `vᵀ f(H) v = Σ_i s²_{1i} f(θ_i)` for every polynomial f of degree up
to 2·steps − 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, part, share
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.eigenvalues import MOST_PRODUCTS, eigenvalues
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.sampling import Estimate, Products, mean_of, ratio_of, root_of

MOST_BYTES = 1 << 32
"""Memory for the vectors of probes that run side by side; a single probe may take more."""

OUTLIER_PROBES, OUTLIER_STEPS = 4, 32
WINDOW = 8
"""Steps below a gap that it is compared with."""
WIDE = 5.0
"""A gap this many times as wide as those below it ends the bulk. Of random symmetric matrices without any
outlier one in a hundred has such a gap at size 200, and none of a hundred at size 500."""
LEAST_STEP = 0.01
"""A gap of less than `WIDE` times this does not count, however dense the bulk is."""


@dataclass(frozen=True)
class Density(Result):
    """Eigenvalues as a distribution: nodes with weights, for each of several random probes.

    Each probe is an unbiased sample of the whole distribution: for a polynomial f of degree up to
    2·steps − 1 the mean of `Σ_i w_i f(θ_i)` over probes is `Tr f(H)/P`.
    """

    kind: ClassVar[str] = "spectral density"
    loads: ClassVar[bool] = True

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
        """The default smoothing width: a hundredth of the range of the nodes."""
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
        """`|λ_min/λ_max|` of the extreme nodes of all probes, with the standard error between probes."""
        there = self.weights > 0
        low = self.nodes.masked_fill(~there, torch.inf).amin(-1)
        high = self.nodes.masked_fill(~there, -torch.inf).amax(-1)
        ratio = abs(self.smallest / self.largest) if self.largest else math.nan
        return Estimate(ratio, mean_of((low / high).abs()).error)

    def k_hn(self, n: float = 1.0) -> Estimate:
        """`K_Hn = Σ_{λ<0} |λw|ⁿ / Σ_{λ>0} (λw)ⁿ`: the ratio of the negative to the positive spectrum.

        With n = 1 it is the ratio of two parts of the trace. With any other n it depends on the nodes, and so
        on `steps`: compare networks at the same number of steps. Both sums are means over the probes, as the
        mean of the ratios of single probes is too high.
        """
        terms = (self.nodes * self.weights).abs().pow(positive("n", n))
        return ratio_of((terms * (self.nodes < 0)).sum(-1), (terms * (self.nodes > 0)).sum(-1))

    def grid(self, num: int = 1000) -> Tensor:
        """Places from below the smallest node to above the largest, which cover all of the density."""
        air = 5 * self.width
        return torch.linspace(self.smallest - air, self.largest + air, num, dtype=torch.float64)

    def values(self, grid: Tensor, width: float | None = None) -> Tensor:
        """The density on a grid, each eigenvalue smoothed to a normal curve of this width."""
        return self._smoothed(grid, width).mean(0)

    def errors(self, grid: Tensor, width: float | None = None) -> Tensor:
        """The standard error of `values`, from the spread between probes."""
        return self._smoothed(grid, width).std(0) / math.sqrt(len(self.nodes))

    def cumulative(self, grid: Tensor) -> Tensor:
        """The share of eigenvalues up to each place of a grid."""
        places = grid.to(self.nodes)
        rows = [
            torch.cat([row.new_zeros(1), weight.cumsum(0)])[torch.searchsorted(row, places, right=True)]
            for row, weight in zip(self.nodes, self.weights, strict=True)
        ]
        return torch.stack(rows).mean(0)

    def blocks(self) -> Iterator[Block]:
        """The range of the spectrum, its moments and ratios."""
        yield (
            f"{self.size:,} eigenvalues between {self.smallest:.4g} and {self.largest:.4g} "
            f"({len(self.nodes)} probes of {self.nodes.shape[1]} steps, {self.products} products)\n"
            f"trace {self.trace}, Frobenius norm {self.frobenius}\n"
            f"r_e {self.r_e}, K_H1 {self.k_hn()}"
        )

    def _smoothed(self, grid: Tensor, width: float | None) -> Tensor:
        width = self.width if width is None else positive("width", width)
        distances = (grid.to(self.nodes)[None, :, None] - self.nodes[:, None, :]) / width
        curves = torch.exp(-0.5 * distances.square()) / (width * math.sqrt(2 * math.pi))
        return (curves * self.weights[:, None, :]).sum(2)


@exclusive()
@on_all_ranks
def density(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    probes: int = 8,
    steps: int = 64,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The density of the eigenvalues of a Hessian, or of any symmetric operator.

    Args:
        model, loss, batch, parameters, temperature: as in `hessian`; or an operator alone.
        probes: the number of random vectors; the noise falls with its square root.
        steps: Lanczos steps from each of them, which set the resolution. `steps` vectors of length P are
            kept in memory.
        seed: seed of the probes.
        progress: called with the fraction of the `probes·steps` products that is done.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = density(model, nn.functional.mse_loss, batch)  # eigenvalues 1 and 9
    >>> found.cumulative(torch.tensor([0.0, 5.0, 10.0]))
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)

    References:
        Ghorbani, Krishnan, Xiao, An investigation into neural net optimization via Hessian eigenvalue
        density, 2019.
    """
    operator = operator_of(model, loss, batch, parameters=parameters, temperature=temperature)
    whole("probes", probes, least=1)
    steps = min(whole("steps", steps, least=1), operator.size)
    products = Products(operator)
    generator = torch.Generator().manual_seed(seed)
    together = min(probes, _probes_at_once(products, steps))
    basis = torch.empty(together, steps, operator.size, dtype=products.dtype, device=products.device)
    found: list[tuple[Tensor, Tensor]] = []
    for done in range(0, probes, together):
        starts = products.signs(min(together, probes - done), generator)
        report = share(progress, "spectral density", done / probes, (done + len(starts)) / probes)
        found.append(_quadrature(products, starts, basis[: len(starts)], report))
    nodes, weights = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return Density(nodes, weights, operator.size, products.num)


def _probes_at_once(products: Products, steps: int) -> int:
    """On a GPU a block of products takes little longer than one."""
    if products.device.type == "cpu":
        return 1
    return max(1, MOST_BYTES // (steps * products.size * products.dtype.itemsize))


def _quadrature(
    products: Products, starts: Tensor, basis: Tensor, report: Callable[[float], None]
) -> tuple[Tensor, Tensor]:
    """Nodes θ and weights `s²_{1i}` for each start vector, a row of `starts`: (b, steps), float64.

    `basis` (b, steps, P) is overwritten with the Lanczos vectors. If a space becomes invariant before the
    last step, the remaining nodes repeat one that is there, with weight 0.
    """
    diagonal, beside = _tridiagonal(products, starts, basis, report)
    nodes, weights = torch.empty_like(diagonal), torch.zeros_like(diagonal)
    for row, (own, couplings) in enumerate(zip(diagonal, beside, strict=True)):
        num = next(iter((couplings == 0).nonzero().flatten().tolist()), len(couplings)) + 1
        matrix = torch.diag(own[:num]) + torch.diag(couplings[: num - 1], -1)  # eigh reads the lower triangle
        values, vectors = torch.linalg.eigh(matrix)
        nodes[row] = values[-1]
        nodes[row, :num], weights[row, :num] = values, vectors[0].square()
    return nodes, weights


def _tridiagonal(
    products: Products, starts: Tensor, basis: Tensor, report: Callable[[float], None]
) -> tuple[Tensor, Tensor]:
    """The diagonal (b, steps) and off-diagonal (b, steps − 1) of T; 0 where a space is invariant."""
    num, steps, _ = basis.shape
    diagonal = torch.zeros(num, steps, dtype=torch.float64)
    beside = torch.zeros(num, steps - 1, dtype=torch.float64)
    torch.mul(starts, 1 / _lengths(starts)[:, None], out=basis[:, 0])
    for step in range(steps):
        vector = basis[:, step]
        product = products.of_rows(vector)
        if step:
            coupling = beside[:, step - 1, None].to(product)
            product = torch.addcmul(product, coupling, basis[:, step - 1], value=-1)
        else:
            product = product.clone()
        alpha = (vector * product).sum(1)
        product.addcmul_(alpha[:, None], vector, value=-1)
        removed = _orthogonalise(product, basis[:, : step + 1])
        # The orthogonalisation corrects the rounding of α.
        diagonal[:, step] = alpha.double().cpu() + removed[:, -1].double().cpu()
        products.require_finite(*diagonal[:, step].tolist())
        report((step + 1) / steps)
        if step + 1 == steps:
            break
        beta = _lengths(product)
        if bool((removed.norm(dim=1) > 0.1 * beta).any()):
            _orthogonalise(product, basis[:, : step + 1])
            beta = _lengths(product)
        scale = diagonal.abs().amax(1).maximum(beside.abs().amax(1)).to(beta)
        # An invariant space continues with zero vectors, which change nothing, beside those that are not.
        spent = beta <= torch.finfo(product.dtype).eps * scale
        if bool(spent.all()):
            break
        beside[:, step] = beta.masked_fill(spent, 0.0).double().cpu()
        torch.mul(product, (1 / beta).masked_fill(spent, 0.0)[:, None], out=basis[:, step + 1])
    return diagonal, beside


def _orthogonalise(vectors: Tensor, basis: Tensor) -> Tensor:
    """Remove, in place, the components of each vector (b, P) along its basis (b, m, P); returns them."""
    coefficients = torch.bmm(basis, vectors[:, :, None])
    vectors[:, None].baddbmm_(coefficients.mT, basis, alpha=-1)
    return coefficients[:, :, 0]


def _lengths(vectors: Tensor) -> Tensor:
    # torch's sum is pairwise, its norm is not: wrong by 0.1 % for 2e7 entries in float32.
    return vectors.square().sum(1).sqrt()


@dataclass(frozen=True)
class Outliers(Result):
    """Eigenvalues above and below the bulk of a spectrum."""

    kind: ClassVar[str] = "spectral outliers"
    loads: ClassVar[bool] = True

    above: Tensor
    """Those above the bulk, from the largest down, float64."""
    below: Tensor
    """Those below the bulk, from the smallest up."""
    bulk: tuple[float, float]
    """The smallest and the largest eigenvalue of the bulk."""
    gaps: tuple[float, float]
    """The width of the gap below and above the bulk, in steps at the edge of the bulk; without outliers
    the widest gap that was seen."""
    by_density: Estimate
    """The number of eigenvalues outside the bulk by the weight of the density there. Well above `num` if
    an eigenvalue is repeated, of which Lanczos sees one copy."""
    converged: bool
    products: int
    status: str

    @property
    def num(self) -> int:
        """The number of outliers."""
        return len(self.above) + len(self.below)

    def blocks(self) -> Iterator[Block]:
        """One line."""
        low, high = self.bulk
        yield (
            f"{len(self.above)} above and {len(self.below)} below a bulk from {low:.4g} to {high:.4g}; "
            f"{self.status}"
        )


@exclusive()
@on_all_ranks
def outliers(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    most: int = 20,
    most_products: int = MOST_PRODUCTS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Outliers:
    """Count the eigenvalues of a Hessian, or of any symmetric operator, that lie clearly outside its bulk.

    Args:
        model, loss, batch, parameters, temperature: as in `hessian`; or an operator alone.
        most: the largest number that is looked for at each end.
        most_products: stop the search for eigenvalues here, converged or not.
        seed: seed of the random vectors.
        progress: called with the fraction of the work that is done.

    Distances `d_i = |λ_i − c|` are taken from the median c of the density. The outliers end at the last i
    whose step `log(d_i/d_{i+1})` is five times as wide as the mean of the eight steps below it. A power law
    `d_i ∝ i^−a` has no such step, and the edge of a random matrix hardly ever.

    Classifiers have about as many above the bulk as classes, or one fewer, and the bulk depends on the width
    (Sagun et al., Empirical analysis of the Hessian of over-parametrized neural networks, 2017).
    """
    operator = operator_of(model, loss, batch, parameters=parameters, temperature=temperature)
    ends = min(whole("most", most, least=1) + WINDOW + 1, operator.size // 2)
    if ends < WINDOW + 2:
        raise UseError(
            f"the operator has {operator.size} eigenvalues, too few to tell a bulk from outliers: at least "
            f"{2 * (WINDOW + 2)} are needed"
        )
    half = part(progress, 0.0, 0.5)
    spectrum = density(operator, probes=OUTLIER_PROBES, steps=OUTLIER_STEPS, seed=seed, progress=half)
    found = eigenvalues(
        operator,
        k=ends,
        which="ends",
        rtol=1e-3,
        most_products=max(most_products, 2 * ends),
        seed=seed,
        progress=part(progress, 0.5, 1.0),
    )
    nodes, order = spectrum.nodes.flatten().sort()
    below = spectrum.weights.flatten()[order].cumsum(0) / len(spectrum.nodes)
    median = nodes[int((below < 0.5).sum())]
    outside = torch.zeros_like(spectrum.nodes, dtype=torch.bool)
    sides = []
    for sign, values in ((-1, found.values[ends:].flip(0)), (1, found.values[:ends])):
        num, gap = _last_wide_gap(sign * (values - median))
        if num:  # beyond the middle of the gap
            outside |= sign * spectrum.nodes > sign * (values[num - 1] + values[num]) / 2
        sides.append((values[:num], float(values[num]), gap))
    (low, bulk_low, gap_low), (high, bulk_high, gap_high) = sides
    return Outliers(
        above=high,
        below=low,
        bulk=(bulk_low, bulk_high),
        gaps=(gap_low, gap_high),
        by_density=mean_of(spectrum.size * (spectrum.weights * outside).sum(1)),
        converged=found.converged,
        products=spectrum.products + found.products,
        status=found.status,
    )


def _last_wide_gap(distances: Tensor) -> tuple[int, float]:
    """The number of values above the last wide gap, and its width; without one 0, and the widest."""
    distances = distances.clamp(min=1e-6 * float(distances[0].clamp(min=1e-300)))
    steps = (distances[:-1] / distances[1:]).log()
    usual = steps.unfold(0, WINDOW, 1).mean(1)[1:].clamp(min=LEAST_STEP)
    widths = steps[: len(usual)] / usual
    wide = (widths >= WIDE).nonzero()
    if len(wide) == 0:
        return 0, float(widths.max())
    last = int(wide[-1])
    return last + 1, float(widths[last])
