"""XTrace: a trace from test vectors that serve twice, once to find the large eigenvalues, once to sample.

With test vectors Ω and `Q` an orthonormal basis of `HΩ`, the trace inside the span of Q is known exactly, and
only what is left needs sampling. For each test vector in turn the others give Q and it alone the sample, so
that no sample depends on its own Q; the answer is the mean over all of them (Epperly, Tropp, Webber, XTrace:
Making the most of every sample in stochastic trace estimation, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.probes.curvature.estimate import Estimate
from theodolite.probes.curvature.products import Products
from theodolite.probes.curvature.sampling import mean_of


class XTrace:
    """Test vectors, their products and the basis, all as rows; grows by more test vectors."""

    def __init__(self, products: Products) -> None:
        self._products = products
        empty = torch.empty(0, products.size, dtype=products.dtype, device=products.device)
        self._tests, self._basis, self._images = empty, empty, empty
        self._upper = torch.zeros(0, 0, dtype=torch.float64)
        """R, with `HΩ = Q R`."""

    @property
    def num(self) -> int:
        """How many test vectors there are."""
        return len(self._tests)

    def add(self, tests: Tensor, images: Tensor) -> None:
        """More test vectors, with their products `HΩ`; makes as many products again, with their basis."""
        before, num = len(self._basis), len(tests)
        rest = images
        known = torch.zeros(before, num, dtype=torch.float64)
        for _ in range(2):  # once leaves rounding errors behind
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
        """The trace, with the standard error of its samples or, if more, what their second half changed.

        Samples share their Q, so where Ω has about as many vectors as there are large eigenvalues, all of
        them can be off alike, and agree. More vectors then change the value by more than the samples tell.
        """
        found = self._of_first(self.num)
        if found.exact:
            return found
        return Estimate(found.value, max(found.error, abs(found.value - self._of_first(self.num // 2).value)))

    @property
    def foretold(self) -> float:
        """The standard error of the samples alone."""
        return self._of_first(self.num).error

    def _of_first(self, num: int) -> Estimate:
        """From the first so many test vectors.

        With `M = QᵀHQ`, `W = QᵀΩ`, s the direction of Q that the i-th test vector alone has brought in, and
        `u = (I − ssᵀ) w`, the i-th sample is `Tr M − sᵀMs + wᵀr − 2uᵀr + uᵀMu`.
        """
        upper = self._upper[:num, :num]
        inside = _small(self._basis[:num], self._images[:num])
        inside = (inside + inside.mT) / 2
        spread = upper.diagonal().abs()
        if bool(spread.min() <= torch.finfo(self._basis.dtype).eps * spread.max()):
            # The last products lie in the span of the others: all of the operator's range is caught.
            return Estimate(float(inside.trace()), 0.0)
        tests = _small(self._basis[:num], self._tests[:num])
        own = torch.linalg.solve_triangular(upper.mT, torch.eye(num).to(upper), upper=False)
        own = own / own.norm(dim=0)
        kept = tests - own * (own * tests).sum(0)
        samples = (
            inside.trace()
            - (own * (inside @ own)).sum(0)
            + (tests * upper).sum(0)
            - 2 * (kept * upper).sum(0)
            + (kept * (inside @ kept)).sum(0)
        )
        return mean_of(samples)


def _small(rows: Tensor, others: Tensor) -> Tensor:
    return (rows @ others.mT).double().cpu()
