"""Which frequency each neuron will learn, from its initial weights.

The network is `logits = W_out (W_in (e_x + e_y))²`, with a cross-entropy over all pairs (x, y) modulo p.
While the logits are small, the softmax is uniform, and each frequency k of each neuron moves by itself. Its
row of `W_in` has the amplitude α and the phase φ there, its column of `W_out` has β and ψ, and `D = 2φ − ψ`.
The gradient flow of the mean loss is

    α' = (2/p) αβ cos D    β' = (1/p) α² cos D    φ' = −(2/p) β sin D    ψ' = (1/p) (α²/β) sin D

the ascent of `½ α²β cos D`. It blows up after a finite time T, and the frequency that does so first is the
neuron's.

The flow conserves `C = α² − 2β²` and `S = α²β sin D`. So `u = β²` moves by itself, `u' = ±(2/p) √Q(u)` with
`Q(u) = (C + 2u)² u − S²`: first downwards to the largest root e₁ of Q if `cos D < 0`, then upwards for good.
With the roots e of Q and Carlson's integral `R_F(x, y, z) = ½ ∫₀^∞ ds/√((s + x)(s + y)(s + z))`

    T = (p/2)·R_F(u − e₁, u − e₂, u − e₃)                                               if cos D ≥ 0
    T = (p/2)·(2 R_F(0, e₁ − e₂, e₁ − e₃) − R_F(u − e₁, u − e₂, u − e₃))                else

so nothing is integrated numerically. The frequency p/2 of an even p has one degree of freedom where others
have two: D is 0 or π, and T is half of the above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, number
from theodolite.probes.features.cyclic import both_rows, waves, wrapped_angle

RULES = {
    "time": "the first to blow up",
    "start": "largest α²β cos D",
    "amplitude": "largest α",
    "misalignment": "least |D|",
}
"""By name, ways to predict the winner: the flow, and simple ones."""

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FourierWinners(Result):
    """The frequency that each neuron is predicted to learn. Made by `fourier_winners`."""

    kind: ClassVar[str] = "winning frequencies"
    loads: ClassVar[bool] = True

    length: int
    """p."""
    times: Tensor
    """T, (neurons, ⌊p/2⌋): when each frequency blows up by itself, in units of learning rate × steps."""
    amplitude: Tensor
    """α, of the same shape."""
    out_amplitude: Tensor
    """β."""
    misalignment: Tensor
    """D, from −π to π."""

    @property
    def frequency(self) -> Tensor:
        """The winner of each neuron, 1 to ⌊p/2⌋: the frequency with the smallest T; 0 without one."""
        return self.by("time")

    @property
    def time(self) -> Tensor:
        """When it blows up."""
        return self.times.min(1).values

    @property
    def lead(self) -> Tensor:
        """The second smallest T over the smallest: the winner of a neuron is doubtful where it is near 1."""
        first = self.times.sort(1).values
        return first[:, 1] / first[:, 0] if first.shape[1] > 1 else torch.full_like(first[:, 0], torch.inf)

    def by(self, rule: str) -> Tensor:
        """The winner of each neuron by a rule: `time`, `start`, `amplitude` or `misalignment`.

        0 for a neuron none of whose frequencies grows.
        """
        if rule not in RULES:
            raise UseError(f"rule is {rule!r}: it is one of {', '.join(RULES)}")
        scores = {
            "time": lambda: -self.times,
            "start": lambda: self.amplitude.square() * self.out_amplitude * torch.cos(self.misalignment),
            "amplitude": lambda: self.amplitude,
            "misalignment": lambda: -self.misalignment.abs(),
        }
        return torch.where(self.time.isfinite(), scores[rule]().argmax(1) + 1, 0)

    def right(self, frequency: Any) -> dict[str, float]:
        """The share of neurons whose winner each rule predicted, given the frequencies after training.

        Args:
            frequency: of each neuron, as in the result of `fourier`; neurons with 0 are left out.
        """
        frequency = torch.as_tensor(frequency, device=self.times.device)
        if frequency.shape != self.times.shape[:1]:
            raise UseError(
                f"frequency has the shape {tuple(frequency.shape)}: give one for each of the "
                f"{counted(len(self.times), 'neuron')}"
            )
        known = frequency > 0
        return {rule: float((self.by(rule) == frequency)[known].double().mean()) for rule in RULES}

    def blocks(self) -> Iterator[Block]:
        """The times, and how often simple rules say the same."""
        grows = self.time.isfinite()
        if bool(grows.any()):
            yield self._said(grows)
            if few := int((~grows).sum()):
                yield f"In {counted(few, 'more neuron')} no frequency grows."
        else:
            yield "No neuron grows: the weights in w_in are zero, or opposed to those in w_out."
        yield self.table()

    def table(self) -> Table:
        """One row for each rule: for how many neurons it gives the same winner as the flow."""
        agree = {rule: (self.by(rule) == self.frequency) & self.time.isfinite() for rule in RULES}
        rows = [(words, int(agree[rule].sum())) for rule, words in RULES.items()]
        return Table((Column("rule"), Column("the same winner, neurons")), rows)

    def _said(self, grows: Tensor) -> str:
        times, num = self.time[grows], self.length // 2
        said = (
            f"{counted(len(times), 'neuron')}, {num} {'frequency' if num == 1 else 'frequencies'}: the "
            f"winner blows up at lr × steps = {number(float(times.median()), 4)} in the median "
            f"({number(float(times.min()), 4)} to {number(float(times.max()), 4)})"
        )
        if num == 1:
            return f"{said}."
        lead = number(float(self.lead[grows].median()))
        return f"{said}, the next frequency {lead} times as late."


@exclusive()
def fourier_winners(w_in: Any, w_out: Any, *, axis: int = -1, out_axis: int = 0) -> FourierWinners:
    """The frequency that each neuron of a small modular-addition network will learn, and when.

    It is exact for squared neurons in the limit of small weights and of gradient flow, that is small steps of
    SGD on all pairs. Adam takes other paths; there it is a guess.

    Args:
        w_in, w_out: the initial weights, as in `fourier`.
        axis, out_axis: their cyclic axes.

    The neuron below has two frequencies; the second is smaller and better aligned, and loses.

    >>> angle = 2 * math.pi * torch.arange(5) / 5
    >>> w_in = 0.02 * torch.cos(angle + 0.5) + 0.01 * torch.cos(2 * angle)
    >>> w_out = 0.02 * torch.cos(angle) + 0.01 * torch.cos(2 * angle)
    >>> found = fourier_winners(w_in[None], w_out[:, None])
    >>> found.frequency, found.by("misalignment")
    (tensor([1]), tensor([2]))
    """
    rows, answer = both_rows(w_in, w_out, axis, out_axis)
    length = rows.shape[1]
    (alpha, phi, _), (beta, psi, _) = waves(rows), waves(answer)
    misalignment = wrapped_angle(2 * phi - psi)
    times = torch.from_numpy(blow_up_times(alpha.numpy(), beta.numpy(), misalignment.numpy(), length))
    if length % 2 == 0:
        times[:, -1] /= 2
    return FourierWinners(length, times, alpha, beta, misalignment)


def blow_up_times(alpha: Array, beta: Array, misalignment: Array, length: int) -> Array:
    """T for amplitudes α, β ≥ 0 and misalignments D, elementwise; infinite where nothing grows.

    Aligned neurons with `α² = 2β²` follow `β' = 2β²/p`, with `T = p/(2β)`:

    >>> one = np.ones(1)
    >>> blow_up_times(math.sqrt(2) * one, one, 0 * one, 10)
    array([5.])
    """
    from scipy.special import elliprf  # takes a second to import

    size = np.hypot(alpha, beta)
    nothing = size == 0
    unit = np.where(nothing, 1.0, size)
    v, u, cosine = np.square(alpha / unit), np.square(beta / unit), np.cos(misalignment)
    first, others = _roots(v, u, np.sin(misalignment))
    with np.errstate(all="ignore"):
        smallest = np.maximum(v + first, 0.0).astype(complex)
        onward = elliprf(smallest, *np.moveaxis(v[..., None] + others, -1, 0)).real
        apart = np.moveaxis(others - first[..., None], -1, 0)
        whole_way = elliprf(np.zeros_like(smallest), *apart).real
        found = np.where(cosine >= 0, onward, 2 * whole_way - onward)
        # The roots of Q are (u − e) = half of those found, and R_F is homogeneous of degree −1/2.
        times: Array = length / math.sqrt(2) * found / unit
    stuck = (cosine < 0) & (np.abs(np.sin(misalignment)) < 1e-12) & (v <= 2 * u)  # runs into α = 0
    return np.where(nothing | stuck | (v == 0) | np.isnan(times), np.inf, times)


def _roots(v: Array, u: Array, sine: Array) -> tuple[Array, NDArray[np.complex128]]:
    """The smallest real x with `Q(u − (v + x)/2) = 0`, and the two other roots.

    Written in v = α² and u = β², they are those of `x²(x + v − 2u) + 2v²u sin²D`. If sin D is small, two of
    them are ± a small number, which is lost where the roots of Q itself are computed.
    """
    squared, constant = v - 2 * u, 2 * v * v * u * np.square(sine)
    companion = np.zeros((*v.shape, 3, 3))
    companion[..., 1, 0] = companion[..., 2, 1] = 1
    companion[..., 0, 2], companion[..., 2, 2] = -constant, -squared
    roots = np.linalg.eigvals(companion).astype(complex)
    is_real = np.abs(roots.imag) <= 1e-7 * np.abs(roots)
    place = np.where(is_real, roots.real, np.inf).argmin(-1)[..., None]
    first = np.take_along_axis(roots, place, -1)[..., 0].real
    return first, np.concatenate([np.take_along_axis(roots, (place + k) % 3, -1) for k in (1, 2)], -1)
