"""The trace and the Frobenius norm of an operator, to a given tolerance.

XTrace uses each test vector twice: to find the large eigenvalues, and to sample. With test vectors Ω and `Q`
an orthonormal basis of `HΩ`, the trace inside the span of Q is known exactly, and only the rest needs
sampling. For each test vector in turn the others give Q and it gives the sample, so that no sample depends on
its own Q; the result is the mean over all of them (Epperly, Tropp, Webber, XTrace: Making the most of every
sample in stochastic trace estimation, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from theodolite.core.arguments import number, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, share
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.sampling import Estimate, Products, mean_of, root_of

PILOT = 10
"""Test vectors from which the cost of each method is predicted."""
MOST_BYTES = 1 << 31
"""Memory for the vectors of XTrace: three for each test vector."""
AT_ONCE = 1 << 26
"""Entries of a block of vectors."""
FAR = 10**9
"""More products than anybody makes."""

Method = Literal["exact", "hutchinson", "xtrace"]


@dataclass(frozen=True)
class Trace(Result, Estimate):
    """The trace of an operator with its standard error."""

    kind: ClassVar[str] = "trace"
    loads: ClassVar[bool] = True

    frobenius: Estimate
    """`‖H‖_F`, from the same products."""
    method: Method
    converged: bool
    products: int
    status: str

    def blocks(self) -> Iterator[Block]:
        """One line."""
        yield f"{Estimate.__str__(self)}, {self.method}; {self.status}"


@exclusive()
@on_all_ranks
def trace(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    rtol: float = 0.01,
    atol: float = 0.0,
    most_products: int = 2000,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """The trace of a Hessian, or of any symmetric operator, from products with random vectors.

    Args:
        model, loss, batch, parameters, temperature: as in `hessian`; or an operator alone.
        rtol, atol: stop when one standard error is at most `max(rtol·|trace|, atol)`.
        most_products: stop here, converged or not.
        seed: seed of the test vectors.
        progress: called with the fraction of the predicted work that is done.

    With vectors ω of random signs `E[ωᵀHω] = Tr H` (Hutchinson), with variance `2(‖H‖_F² − Σ_i H_ii²)`: for
    one per cent that takes about `2·10⁴/t²` products, `t = Tr H/‖H‖_F`. XTrace removes the large eigenvalues
    from the sampling, at two products for each sample. After a pilot, and whenever the number of test vectors
    has doubled, the method with the lower predicted cost continues. If P products are fewer still, the
    diagonal is summed.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = trace(model, nn.functional.mse_loss, batch)
    >>> print(found)
    10 (exact), exact; 2 products
    >>> found.frobenius  # √(1² + 9²)
    Estimate(value=9.055385138137417, error=0.0)
    """
    operator = operator_of(model, loss, batch, parameters=parameters, temperature=temperature)
    number("rtol", rtol, least=0)
    number("atol", atol, least=0)
    whole("most_products", most_products, least=1)
    if rtol == 0 and atol == 0:
        raise UseError("rtol and atol are both 0, and an estimate by sampling has an error. Give one of them")
    products = Products(operator)
    if operator.size <= min(2 * PILOT, most_products):
        return _exact(products)
    report = share(progress, "trace")
    samples = _Samples(products, seed)
    tests, images = samples.draw(min(PILOT, most_products))
    found: dict[Method, Estimate] = {"hutchinson": samples.trace}
    deflated: XTrace | None = None
    room = min(MOST_BYTES // (3 * operator.size * products.dtype.itemsize), operator.size)
    while True:
        method = min(found, key=lambda name: found[name].error)
        value, error = found[method].value, found[method].error
        allowed = max(rtol * abs(value), atol)
        left = most_products - products.num
        report(min(1.0, (allowed / error) ** 2) if error else 1.0)
        if error <= allowed or left <= 0:
            break
        plain = _predicted(samples.num, found["hutchinson"].error, allowed)
        if samples.num == PILOT and deflated is None and min(plain, left, room) >= PILOT:
            deflated = XTrace(products)
            deflated.add(tests, images)
            found["xtrace"] = deflated.estimate()
            continue
        vectors = _predicted(deflated.num, deflated.of_first().error, allowed) if deflated else 0
        fits = deflated is not None and deflated.num + vectors <= room
        if operator.size <= min(plain, 2 * vectors if fits else plain, left):
            return _exact(products)
        if deflated and fits and 2 * vectors < plain and left >= 2:
            deflated.add(*samples.draw(min(vectors, deflated.num, left // 2)))
            found["xtrace"] = deflated.estimate()
        else:
            deflated, num = None, min(plain, samples.num, left)
            for done in range(0, num, at_once := _at_once(operator.size)):
                samples.draw(min(at_once, num - done))
        found["hutchinson"] = samples.trace
    status = _status(found[method], allowed, products.num, rtol)
    return Trace(value, error, samples.frobenius, method, error <= allowed, products.num, status)


class _Samples:
    """Test vectors of random signs, and the quadratic forms and norms of their products."""

    def __init__(self, products: Products, seed: int) -> None:
        self._products, self._generator = products, torch.Generator().manual_seed(seed)
        self._forms: list[float] = []
        self._squares: list[float] = []

    @property
    def num(self) -> int:
        return len(self._forms)

    @property
    def trace(self) -> Estimate:
        """From `ωᵀHω`."""
        return mean_of(torch.tensor(self._forms, dtype=torch.float64))

    @property
    def frobenius(self) -> Estimate:
        """From `‖Hω‖²`, whose mean is `‖H‖_F²`."""
        return root_of(mean_of(torch.tensor(self._squares, dtype=torch.float64)))

    def draw(self, num: int) -> tuple[Tensor, Tensor]:
        """Draw `num` more test vectors; returns them and their products as rows."""
        tests = self._products.signs(num, self._generator)
        images = self._products.of_rows(tests)
        self._forms += (tests * images).sum(1).tolist()
        self._squares += _squares(images).tolist()
        self._products.require_finite(*self._forms[-num:], *self._squares[-num:])
        return tests, images


class XTrace:
    """Test vectors, their products and the basis, all as rows."""

    def __init__(self, products: Products) -> None:
        self._products = products
        empty = torch.empty(0, products.size, dtype=products.dtype, device=products.device)
        self._tests, self._basis, self._images = empty, empty, empty
        self._upper = torch.zeros(0, 0, dtype=torch.float64)
        """R, with `HΩ = Q R`."""

    @property
    def num(self) -> int:
        """The number of test vectors."""
        return len(self._tests)

    def add(self, tests: Tensor, images: Tensor) -> None:
        """Add test vectors with their products `HΩ`; makes as many products again, with their basis."""
        before, num = len(self._basis), len(tests)
        rest = images
        known = torch.zeros(before, num, dtype=torch.float64)
        for _ in range(2):  # the second time removes the rounding errors of the first
            part = self._basis @ rest.mT
            rest = rest - part.mT @ self._basis
            known += part.double().cpu()
        orthonormal, upper = torch.linalg.qr(rest.mT)
        self._basis = torch.cat([self._basis, orthonormal.mT])
        self._images = torch.cat([self._images, self._products.of_rows(orthonormal.mT)])
        self._tests = torch.cat([self._tests, tests])
        wider = torch.zeros(before + num, before + num, dtype=torch.float64)
        wider[:before, :before] = self._upper
        wider[:before, before:], wider[before:, before:] = known, upper.double().cpu()
        self._upper = wider

    def estimate(self) -> Estimate:
        """The trace, with the standard error of the samples or, if larger, the change by their second half.

        Samples share their Q. Where Ω has about as many vectors as there are large eigenvalues, all samples
        can have the same error and still agree; more vectors then change the value by more than that.
        """
        found = self.of_first()
        if found.exact:
            return found
        return Estimate(found.value, max(found.error, abs(found.value - self.of_first(self.num // 2).value)))

    def of_first(self, num: int | None = None) -> Estimate:
        """The mean and standard error of the samples from the first `num` test vectors, or from all.

        With `M = QᵀHQ`, `W = QᵀΩ`, s the direction of Q that the i-th test vector alone has brought in, and
        `u = (I − ssᵀ) w`, the i-th sample is `Tr M − sᵀMs + wᵀr − 2uᵀr + uᵀMu`.
        """
        num = self.num if num is None else num
        upper = self._upper[:num, :num]
        inside = (self._basis[:num] @ self._images[:num].mT).double().cpu()
        inside = (inside + inside.mT) / 2
        spread = upper.diagonal().abs()
        if bool(spread.min() <= torch.finfo(self._basis.dtype).eps * spread.max()):
            # The last products lie in the span of the others, so Q spans the whole range of the operator.
            return Estimate(float(inside.trace()), 0.0)
        tests = (self._basis[:num] @ self._tests[:num].mT).double().cpu()
        own = torch.linalg.solve_triangular(upper.mT, torch.eye(num).to(upper), upper=False)
        own = own / own.norm(dim=0)
        kept = tests - own * (own * tests).sum(0)
        return mean_of(
            inside.trace()
            - (own * (inside @ own)).sum(0)
            + (tests * upper).sum(0)
            - 2 * (kept * upper).sum(0)
            + (kept * (inside @ kept)).sum(0)
        )


def _exact(products: Products) -> Trace:
    """From all columns of the operator."""
    value, square = 0.0, 0.0
    for first in range(0, products.size, at_once := _at_once(products.size)):
        num = min(at_once, products.size - first)
        units = torch.zeros(num, products.size, dtype=products.dtype, device=products.device)
        units[:, first:].fill_diagonal_(1)
        images = products.of_rows(units)
        value += float((units * images).sum(dtype=torch.float64))
        square += float(_squares(images).sum())
        products.require_finite(value, square)
    frobenius = Estimate(math.sqrt(square), 0.0)
    return Trace(value, 0.0, frobenius, "exact", True, products.num, f"{products.num} products")


def _at_once(size: int) -> int:
    """Vectors of this size in a block."""
    return max(1, AT_ONCE // size)


def _squares(images: Tensor) -> Tensor:
    # In float64, in which squares do not under- or overflow.
    return torch.linalg.vector_norm(images, dim=1, dtype=torch.float64).square()


def _predicted(num: int, error: float, allowed: float) -> int:
    """How many more test vectors bring the error down to `allowed`, if it falls as their square root.

    As many again if it is there already but the result has not settled.
    """
    if allowed == 0:
        return FAR
    return math.ceil(min(num * ((error / allowed) ** 2 - 1), FAR)) if error > allowed else num


def _status(found: Estimate, allowed: float, products: int, rtol: float) -> str:
    if found.error <= allowed:
        return f"{products} products"
    if found.low < 0 < found.high:
        return (
            f"not converged after {products} products: the trace cannot be told from 0, so rtol cannot be "
            f"reached. Give the error that is allowed with atol=…; one standard error is {found.error:.3g}"
        )
    return (
        f"not converged after {products} products: the relative standard error is "
        f"{found.error / abs(found.value):.2g}, above rtol {rtol:g}. Raise most_products to about "
        f"{products * (found.error / allowed) ** 2:.0f}, or rtol"
    )
