"""Fourier features: rows of weights over a cyclic axis, as frequencies and phases.

Networks that learn a cyclic task, such as addition modulo p or the hour of a day, write each row of their
first weight as waves:

    θ[j] = mean + Σ_k α_k cos(2π k j/p + φ_k),    k = 1 … ⌊p/2⌋

A trained neuron usually has one frequency. If it squares or rectifies the sum of two inputs, its output row
has this frequency with the phase ψ = 2φ; `D = 2φ − ψ` is its misalignment.

The energy of a frequency is `A_k² = p/2·α_k²`, that of its cosine and its sine together. The concentration of
a row is the inverse participation ratio `Σ A_k⁴/(Σ A_k²)²`: 1 for one frequency, 1/m for m equal ones. The
mean is no frequency. With cosine and sine apart, the ratio would depend on the phase, and be as low as 1/2
for one frequency.

If p is even, frequency p/2 (Nyquist's) alternates in sign. It has a cosine and no sine, so it has no phase;
its energy is `p·α²`, and a random row has half as much energy there as elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from theodolite.core.arguments import number as checked_number
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.figure import Figure, Panel, bars, frame, guide
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, number
from theodolite.probes.features.cyclic import both_rows, rows_of, waves, wrapped_angle

ORDERS = (1, 2, 4)
"""Orders of the moments of phases: squared neurons give the right logits if those of order 2 and 4 vanish."""
SHOWN = 30
"""Most frequencies in the text."""


@dataclass(frozen=True)
class FrequencyGroup:
    """The rows of one frequency."""

    frequency: int
    rows: int
    energy: float
    """Their share of the energy of all rows, at all frequencies."""
    concentration: float
    """The mean over these rows."""
    symmetry: tuple[float, ...]
    """`|mean exp(irφ)|` for r in `ORDERS`: 0 if phases are spread evenly; nan for Nyquist's frequency."""
    chance: float
    """The mean of that for as many random phases."""
    alignment: float
    """The mean cos D over rows whose output has this frequency too; nan without any."""


@dataclass(frozen=True, eq=False)
class Fourier(Result):
    """Rows over a cyclic axis as waves. Made by `fourier`. All tensors have one entry for each row."""

    kind: ClassVar[str] = "Fourier features"
    loads: ClassVar[bool] = True

    length: int
    """p, of the axis."""
    above: float
    """A row with a concentration above this counts as having one frequency."""
    frequency: Tensor
    """The frequency of the largest energy, 1 to ⌊p/2⌋; 0 for a row that is constant."""
    amplitude: Tensor
    """α at this frequency."""
    phase: Tensor
    """φ at this frequency, from −π to π; nan where there is none."""
    concentration: Tensor
    """The inverse participation ratio over frequencies; nan for a constant row."""
    mean_share: Tensor
    """The mean's share of the sum of squares; nan for a row of zeros."""
    energy: Tensor
    """The sum of squares without the mean."""
    output: Fourier | None = None
    """The same of the output's rows."""
    misalignment: Tensor | None = None
    """D, from −π to π, where input and output have the same frequency and phases; nan elsewhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "frequency", self.frequency.long())  # a file has floats

    @property
    def num_frequencies(self) -> int:
        """⌊p/2⌋, how many there are."""
        return self.length // 2

    @property
    def concentrated(self) -> Tensor:
        """Which rows have one frequency."""
        return self.concentration > self.above

    @property
    def random_concentration(self) -> float:
        """The mean concentration of random normal rows: `2/(K + 1)` for K frequencies and odd p."""
        weights = [1.0] * ((self.length - 1) // 2) + [0.5] * (self.length % 2 == 0)
        total = sum(weights)
        return sum(one * (one + 1) for one in weights) / (total * (total + 1))

    @property
    def same(self) -> Tensor:
        """Which rows have one frequency that is also the output's."""
        if self.output is None:
            raise UseError("there is no output to compare with: call fourier(w_in, w_out)")
        return self.concentrated & (self.frequency == self.output.frequency)

    @property
    def alignment(self) -> float:
        """The mean cos D over rows of one frequency: 1 is aligned, 0 random; nan without any."""
        if self.misalignment is None:
            return math.nan
        return _mean(torch.cos(self.misalignment[self.concentrated]))

    @property
    def counts(self) -> Tensor:
        """How many rows of one frequency each frequency has, 1 to ⌊p/2⌋."""
        return torch.bincount(self.frequency[self.concentrated], minlength=self.num_frequencies + 1)[1:]

    @property
    def evenness(self) -> float:
        """How evenly frequencies are used: the exponential of the entropy of `counts` over their number.

        1 if all have equally many rows, 1/K if one has all; nan without rows of one frequency.
        """
        shares = self.counts.double() / self.counts.sum()
        return math.exp(float(torch.special.entr(shares).sum())) / self.num_frequencies

    def symmetry(self, order: int) -> float:
        """`|mean exp(i·order·φ)|` over that of random phases, a mean over the groups of at least two rows.

        1 for random phases and 0 for even ones; nan without such a group.
        """
        ratios = [
            _moment(self.phase[own], order) / _chance(int(own.sum()))
            for frequency in range(1, self.num_frequencies + 1)
            if int((own := self._group(frequency)).sum()) > 1 and 2 * frequency != self.length
        ]
        return math.fsum(ratios) / len(ratios) if ratios else math.nan

    def groups(self) -> tuple[FrequencyGroup, ...]:
        """The rows of one frequency by their frequency, those that have any."""
        found = []
        for frequency in (self.counts.nonzero().flatten() + 1).tolist():
            own = self._group(frequency)
            found.append(
                FrequencyGroup(
                    frequency,
                    int(own.sum()),
                    float(self.energy[own].sum() / self.energy.sum()),
                    _mean(self.concentration[own]),
                    tuple(_moment(self.phase[own], order) for order in ORDERS),
                    math.nan if 2 * frequency == self.length else _chance(int(own.sum())),
                    math.nan if self.misalignment is None else _mean(torch.cos(self.misalignment[own])),
                )
            )
        return tuple(found)

    def blocks(self) -> Iterator[Block]:
        """A summary, a table by frequency, and a figure."""
        yield "\n".join(self._said())
        rows = self.table()
        if len(rows.rows) > SHOWN:
            most = sorted(sorted(rows.rows, key=lambda row: -row[2])[:SHOWN])
            yield f"The {SHOWN} frequencies of the largest energy, of {len(rows.rows)} that rows have:"
            rows = Table(rows.columns, most)
        if rows.rows:
            yield rows
        yield self.figure()

    def table(self) -> Table:
        """One row for each frequency that rows have."""
        short = "{:.2f}".format
        columns = [
            Column("frequency"),
            Column("rows"),
            Column("energy", _percent),
            Column("concentration", short),
        ]
        columns += [Column(f"|⟨e^{'' if order == 1 else order}iφ⟩|", _shown) for order in ORDERS]
        columns += [Column("by chance", _shown), Column("cos D", _shown)]
        rows = [
            (one.frequency, one.rows, one.energy, one.concentration, *one.symmetry, one.chance, one.alignment)
            for one in self.groups()
        ]
        return Table(columns, rows)

    def figure(self) -> Figure:
        """Histograms of concentration and misalignment, and rows by frequency."""
        known = self.concentration[~self.concentration.isnan()]
        panels = [
            _histogram("Concentration", known, (0.0, 1.0), guides=(self.random_concentration, self.above)),
            _by_frequency(self.counts.tolist()),
        ]
        if self.misalignment is not None:
            chosen = self.misalignment[self.concentrated]
            panels.append(
                _histogram("Misalignment D", chosen[~chosen.isnan()], (-math.pi, math.pi), guides=(0.0,))
            )
        caption = (
            f"Rows over a cyclic axis of length {self.length}. Concentration: 1 for one frequency; dotted: "
            "random rows, and the value above which a row counts as having one frequency."
        )
        return Figure(caption, " ".join(self._said()), tuple(panels))

    def _said(self) -> list[str]:
        rows, single = len(self.frequency), int(self.concentrated.sum())
        here = self.concentration[~self.concentration.isnan()]
        lines = [
            f"{counted(rows, 'row')} over a cyclic axis of length {self.length}: {single} of {rows} have one "
            f"frequency, a concentration above {self.above:g}; the mean is {number(_mean(here))}, that of "
            f"random rows {number(self.random_concentration)}."
        ]
        if constant := int((self.frequency == 0).sum()):
            lines.append(f"{counted(constant, 'row')} of them {'is' if constant == 1 else 'are'} constant.")
        if single:
            counts = self.counts
            lines.append(
                f"{int((counts > 0).sum())} of {self.num_frequencies} frequencies have such rows, "
                f"{int(counts.min())} to {int(counts.max())} each; evenness {number(self.evenness, 2)}."
            )
        if self.output is not None and single:
            lines.append(
                f"The output has the same frequency in {int(self.same.sum())} of {single}; there the mean "
                f"cos D is {number(self.alignment)}: 1 is aligned, 0 random."
            )
        if self.length % 2 == 0:
            lines.append(
                f"The length is even: frequency {self.length // 2} alternates in sign and has no phase."
            )
        return lines

    def _group(self, frequency: int) -> Tensor:
        return self.concentrated & (self.frequency == frequency)


@exclusive()
def fourier(
    w_in: Any, w_out: Any = None, *, axis: int = -1, out_axis: int = 0, above: float = 0.5
) -> Fourier:
    """Frequency, phase and concentration of rows over a cyclic axis; with `w_out`, how the output answers.

    Args:
        w_in: weights with one row for each neuron: a tensor or an array of any real type, such as the weight
            of an `nn.Linear` that reads one-hot inputs. For the table of an embedding, whose rows are
            positions, give `axis=0`: one row for each feature. All axes but this one count the rows.
        w_out: the weights that read these neurons, with the same cyclic axis, such as the weight of the
            `nn.Linear` behind the activation.
        axis: the cyclic axis of `w_in`.
        out_axis: the cyclic axis of `w_out`; the first of an `nn.Linear`.
        above: a row with a larger concentration counts as having one frequency.

    All is computed in float64 on the CPU; nothing is changed.

    >>> angle = 2 * math.pi * torch.arange(7) / 7
    >>> found = fourier(torch.stack([torch.cos(2 * angle + 1.0), torch.cos(angle) + torch.cos(3 * angle)]))
    >>> [round(one, 4) for one in found.concentration.tolist()]
    [1.0, 0.5]
    >>> found.frequency[0], round(found.phase[0].item(), 4)
    (tensor(2), 1.0)
    >>> fourier(torch.ones(4, 2))
    Traceback (most recent call last):
    theodolite.UseError: the cyclic axis of w_in (axis -1 of 4×2) has length 2: give at least 3

    References:
        On the mechanism and dynamics of modular addition: Fourier features, lottery ticket, and
        grokking, 2026.
    """
    checked_number("above", above, least=0, most=1)
    if w_out is None:
        return _decoded(rows_of("w_in", w_in, axis), above)
    rows, answer = both_rows(w_in, w_out, axis, out_axis)
    found = _decoded(rows, above)
    output = _decoded(answer, above)
    misalignment = torch.where(
        found.frequency == output.frequency, wrapped_angle(2 * found.phase - output.phase), torch.nan
    )
    return Fourier(**{**vars(found), "output": output, "misalignment": misalignment})


def _decoded(rows: Tensor, above: float) -> Fourier:
    """What is known of each row."""
    largest = rows.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)  # squares of small numbers must not vanish
    scaled = rows / scale
    amplitude, phase, energy = waves(scaled)
    total = energy.sum(1)
    eps = torch.finfo(rows.dtype).eps
    constant = total <= rows.shape[1] * (4 * eps) ** 2  # what rounding leaves of it
    shares = energy / torch.where(constant, torch.inf, total)[:, None]
    strongest = energy.argmax(1, keepdim=True)
    squares = rows.shape[1] * scaled.mean(1).square()
    nothing = torch.tensor(torch.nan, dtype=rows.dtype)
    has_phase = ~constant & (2 * (strongest[:, 0] + 1) != rows.shape[1])
    zero = torch.zeros_like(total)
    return Fourier(
        length=rows.shape[1],
        above=float(above),
        frequency=torch.where(constant, 0, strongest[:, 0] + 1),
        amplitude=torch.where(constant, zero, amplitude.gather(1, strongest)[:, 0] * scale[:, 0]),
        phase=torch.where(has_phase, phase.gather(1, strongest)[:, 0], nothing),
        concentration=torch.where(constant, nothing, shares.square().sum(1)),
        mean_share=torch.where(largest[:, 0] > 0, squares / (squares + total), nothing),
        energy=torch.where(constant, zero, total * scale[:, 0].square()),
    )


def _mean(values: Tensor) -> float:
    """Of the values that are numbers; nan without any."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else math.nan


def _moment(phases: Tensor, order: int) -> float:
    return float(torch.polar(torch.ones_like(phases), order * phases).mean().abs())


def _chance(num: int) -> float:
    """The mean of `|mean exp(iφ)|` over random phases: exact for one and for many, 2 % low for two."""
    return 1.0 if num == 1 else math.sqrt(math.pi / (4 * num))


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _histogram(title: str, values: Tensor, ends: tuple[float, float], *, guides: Sequence[float]) -> Panel:
    num = 25
    counts, edges = np.histogram(values.numpy(), bins=num, range=ends)
    middles = (edges[:-1] + edges[1:]) / 2
    layout = frame(height=200, x=title, y="rows")
    layout["xaxis"] |= {"range": list(ends)}
    layout |= {"bargap": 0.05, "shapes": [guide(x=place) for place in guides]}
    return Panel(title, (bars(middles.tolist(), counts.tolist(), hover="%{x:.2f}: %{y}"),), layout)


def _by_frequency(counts: Sequence[int]) -> Panel:
    layout = frame(height=200, x="frequency", y="rows") | {"bargap": 0.1}
    found = bars(range(1, len(counts) + 1), list(counts), hover="frequency %{x}: %{y}")
    return Panel("Rows of one frequency", (found,), layout)
