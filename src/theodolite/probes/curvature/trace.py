"""The trace and the Frobenius norm of an operator, to a tolerance that one asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.estimate import Estimate
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.products import Products, Progress, require_at_least
from theodolite.probes.curvature.replicas import on_all_ranks
from theodolite.probes.curvature.sampling import mean_of, root_of
from theodolite.probes.curvature.xtrace import XTrace

RTOL = 0.01
MOST_PRODUCTS = 2000
PILOT = 10
"""Test vectors from which it is foretold how many each way would need."""
MOST_BYTES = 1 << 31
"""Of vectors that XTrace may keep: three for each test vector."""
AT_ONCE = 1 << 26
"""Entries of a block of vectors."""
FAR = 10**9
"""More products than anybody makes."""

Method = Literal["exact", "hutchinson", "xtrace"]


@dataclass(frozen=True)
class Trace(Estimate):
    """The trace of an operator with its standard error, and what came with it."""

    frobenius: Estimate
    """`‖H‖_F`, from the same products."""
    method: Method
    converged: bool
    products: int
    status: str

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.method}; {self.status}"


@exclusive()
@on_all_ranks
def trace(
    measured: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    rtol: float = RTOL,
    atol: float = 0.0,
    most_products: int = MOST_PRODUCTS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """The trace of a Hessian, or of any symmetric operator, from products with random vectors.

    Args:
        measured: an operator, or a model with its loss and batch, whose Hessian is meant.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        rtol, atol: it stops when one standard error is at most `max(rtol·|trace|, atol)`.
        most_products: stop here, converged or not.
        parameters: patterns of names, as in `hessian`.
        temperature: the loss is taken of logits/temperature.
        seed: of the test vectors.
        progress: is told which share of the work is done, as far as can be foretold.

    With vectors ω of random signs `E[ωᵀHω] = Tr H` (Hutchinson), with variance `2(‖H‖_F² − Σ_i H_ii²)`: to
    one per cent that takes about `2·10⁴/t²` products, `t = Tr H/‖H‖_F`. XTrace takes the large eigenvalues
    out of the sampling, at two products for each sample. After a pilot, and again whenever the number of test
    vectors has doubled, the way goes on that is foretold to need fewer products. Where P products are fewer
    still, the diagonal is summed.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = trace(model, nn.functional.mse_loss, batch)
    >>> print(found)
    10 (exact), exact; 2 products
    >>> found.frobenius  # √(1² + 9²)
    Estimate(value=9.055385138137417, error=0.0)
    """
    operator = operator_of(measured, loss, batch, parameters=parameters, temperature=temperature)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise UseError(f"{name} is {value!r}: it has to be at least 0")
    require_at_least(1, most_products=most_products)
    if rtol == 0 and atol == 0:
        raise UseError("rtol and atol are both 0: an estimate by sampling has an error. Give one of them")
    products = Products(operator)
    if operator.size <= min(2 * PILOT, most_products):
        return _exact(products)
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
        if progress:
            progress(min(1.0, (allowed / error) ** 2) if error else 1.0)
        if error <= allowed or left <= 0:
            break
        plain = _foretold(samples.num, found["hutchinson"].error, allowed)
        if samples.num == PILOT and deflated is None and min(plain, left, room) >= PILOT:
            deflated = XTrace(products)
            deflated.add(tests, images)
            found["xtrace"] = deflated.estimate()
            continue
        vectors = _foretold(deflated.num, deflated.foretold, allowed) if deflated else 0
        fits = deflated is not None and deflated.num + vectors <= room
        if operator.size <= min(plain, 2 * vectors if fits else plain, left):
            return _exact(products)
        if deflated and fits and 2 * vectors < plain and left >= 2:
            deflated.add(*samples.draw(min(vectors, deflated.num, left // 2)))
            found["xtrace"] = deflated.estimate()
        else:
            deflated = None
            samples.draw_and_forget(min(plain, samples.num, left))
        found["hutchinson"] = samples.trace
    return Trace(
        value,
        error,
        samples.frobenius,
        method,
        converged=error <= allowed,
        products=products.num,
        status=_status(found[method], allowed, products.num, rtol),
    )


class _Samples:
    """Test vectors of random signs, and what a product with each of them tells."""

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
        """So many more test vectors and their products, as rows."""
        tests = self._products.signs(num, self._generator)
        images = self._products.of_rows(tests)
        self._forms += (tests * images).sum(1).tolist()
        self._squares += _squares(images).tolist()
        self._products.refuse_nonsense(*self._forms[-num:], *self._squares[-num:])
        return tests, images

    def draw_and_forget(self, num: int) -> None:
        """So many more, a few at a time."""
        at_once = max(1, AT_ONCE // self._products.size)
        for done in range(0, num, at_once):
            self.draw(min(at_once, num - done))


def _exact(products: Products) -> Trace:
    """From all columns of the operator."""
    value, square = 0.0, 0.0
    at_once = max(1, AT_ONCE // products.size)
    for first in range(0, products.size, at_once):
        last = min(first + at_once, products.size)
        units = torch.zeros(last - first, products.size, dtype=products.dtype, device=products.device)
        units[range(last - first), range(first, last)] = 1
        images = products.of_rows(units)
        value += float((units * images).sum(dtype=torch.float64))
        square += float(_squares(images).sum())
        products.refuse_nonsense(value, square)
    frobenius = Estimate(math.sqrt(square), 0.0)
    return Trace(value, 0.0, frobenius, "exact", True, products.num, f"{products.num} products")


def _squares(images: Tensor) -> Tensor:
    # In float64: squares of very small or very large numbers are neither 0 nor infinite there.
    return torch.linalg.vector_norm(images, dim=1, dtype=torch.float64).square()


def _foretold(num: int, error: float, allowed: float) -> int:
    """How many more test vectors bring the error down to what is allowed, if it falls as their root.

    As many again if it is there already, and the answer has not settled yet.
    """
    if allowed == 0:
        return FAR
    return math.ceil(min(num * ((error / allowed) ** 2 - 1), FAR)) if error > allowed else num


def _status(found: Estimate, allowed: float, products: int, rtol: float) -> str:
    if found.error <= allowed:
        return f"{products} products"
    if found.low < 0 < found.high:
        return (
            f"not converged after {products} products: the trace cannot be told from 0, so no share of it "
            f"can be reached. Say with atol=… which error will do; one standard error is {found.error:.3g}"
        )
    return (
        f"not converged after {products} products: one standard error is "
        f"{found.error / abs(found.value):.2g} of the trace, and {rtol:g} was asked for. Raise "
        f"most_products to about {products * (found.error / allowed) ** 2:.0f}, or rtol"
    )
