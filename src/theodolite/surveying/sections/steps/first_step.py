"""The first step of AdamW at any learning rate: what the loss does along it, and what was foretold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame
from theodolite.probes.curvature.axes import Axes
from theodolite.probes.curvature.landscape import losses
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.sharpness import sharpness
from theodolite.probes.steps.direction import norm
from theodolite.probes.steps.radius import Radius, radius
from theodolite.probes.steps.update import optimizer_step
from theodolite.surveying.curvature_setup import Spot

PER_OCTAVE, OCTAVES_BELOW, OCTAVES_ABOVE = 2, 6, 6
"""Where the loss is looked at, around the planned learning rate."""
NOISE = 1e-5
"""Of the loss: by less it has not risen."""


@dataclass(frozen=True)
class FirstStep:
    """The loss along the first step of AdamW. Without decay the step is proportional to the learning rate."""

    rate: float
    """The planned peak learning rate, …"""
    first: float
    """… and the one that the first step is made with."""
    length: float
    """Of the step at the planned rate."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """After one step at each of them."""
    start: float
    slope: float
    """`g·u`, where u is the step for a learning rate of 1, …"""
    bend: float
    """… and `uᵀHu`."""
    radius: Radius | None
    """Along the step; None where the loss is no cross-entropy."""
    sharpness: float | None
    """λ_max, where there was time."""

    @property
    def ghost(self) -> float:
        """The learning rate whose step is as long as the radius; infinite where the radius is."""
        return math.inf if self.radius is None or self.radius.r == 0 else self.rate / self.radius.r

    @property
    def quadratic(self) -> float:
        """The learning rate at which a parabola is back at the loss it began with, `−2 g·u / uᵀHu`."""
        return max(0.0, -2 * self.slope) / self.bend if self.bend > 0 else math.inf

    @cached_property
    def above(self) -> float:
        """The learning rate at which the loss is first above its start, between those looked at by a line.

        Infinite where it is not above at any of them.
        """
        before, less = 0.0, self.start
        for rate, loss in zip(self.rates, self.losses, strict=True):
            if not loss <= self.start + NOISE * abs(self.start):
                if not math.isfinite(loss) or less >= self.start:
                    return rate
                return before + (rate - before) * (self.start - less) / (loss - less)
            before, less = rate, loss
        return math.inf

    def loss_at(self, rate: float) -> float:
        """After one step at a rate that was looked at, or at 0."""
        return self.start if rate == 0 else self.losses[self.rates.index(rate)]

    def raises(self, rate: float) -> bool:
        """Is the loss after one step at this rate above its start? What is not finite is."""
        return not self.loss_at(rate) <= self.start + NOISE * abs(self.start)


def take_first_step(spot: Spot, rate: float, first: float) -> FirstStep:
    """Measure along AdamW's first step, at the start of training, on the spot's batch."""
    spot.spend(2)
    if not 0 < rate < math.inf or not 0 <= first < math.inf:
        raise UseError(f"the planned learning rates are {first:g} at first and {rate:g} at most")
    step = _step(spot, rate)
    objective = Objective(spot.model, spot.workload.loss, spot.batch, parameters=spot.parameters)
    exponents = range(-PER_OCTAVE * OCTAVES_BELOW, PER_OCTAVE * OCTAVES_ABOVE + 1)
    rates = sorted({*(rate * 2.0 ** (exponent / PER_OCTAVE) for exponent in exponents), first} - {0.0})
    line = Axes("checkpoints", ({name: tensor / rate for name, tensor in step.items()},), ("step",))
    values = losses(objective, line, torch.tensor([0.0, *rates], dtype=torch.float64)[:, None])
    unit = torch.cat([step[name].flatten() for name in spot.hessian.names]) / rate
    slope, bend = float(spot.hessian.gradient @ unit), float(unit @ (spot.hessian @ unit))
    if not (math.isfinite(slope) and math.isfinite(bend)):
        raise UseError(f"slope and curvature along the first step are {slope:g} and {bend:g}: not finite")
    found = None
    if spot.is_cross_entropy:
        found = radius(spot.model, spot.workload.loss, spot.batch, step, parameters=spot.parameters)
    return FirstStep(
        rate=rate,
        first=first,
        length=norm(step),
        rates=tuple(rates),
        losses=tuple(values[1:].tolist()),
        start=float(values[0]),
        slope=slope,
        bend=bend,
        radius=found,
        sharpness=sharpness(spot.hessian).value if spot.site.deep else None,
    )


def step_figure(taken: FirstStep) -> Figure:
    """The loss after one step against the learning rate, with what was foretold."""
    finite = [
        (rate, loss) for rate, loss in zip(taken.rates, taken.losses, strict=True) if math.isfinite(loss)
    ]
    marks = {"planned": taken.rate, "ρ_a": taken.ghost, "parabola": taken.quadratic, "rises": taken.above}
    marks = {name: rate for name, rate in marks.items() if taken.rates[0] <= rate <= taken.rates[-1]}
    layout = frame(height=260)
    layout["xaxis"] |= {
        "type": "log",
        "range": [math.log10(taken.rates[0]), math.log10(taken.rates[-1])],
        "title": {"text": "learning rate", "standoff": 6},
        "exponentformat": "power",
        "dtick": 1,
    }
    # What is far above the start would flatten all that is worth seeing.
    least = min([loss for _, loss in finite] + [taken.start])
    span = max(taken.start - least, 0.05 * abs(taken.start))
    layout["yaxis"] |= {
        "title": {"text": "loss", "standoff": 6},
        "nticks": 6,
        "range": [least - 0.15 * span, taken.start + 1.5 * span],
    }
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": taken.start, "y1": taken.start}
        | {"line": {"color": FAINT, "width": 1}},
        *(
            {"type": "line", "x0": rate, "x1": rate, "yref": "paper", "y0": 0, "y1": 1}
            | {"line": {"color": QUIET, "width": 1, "dash": "dot"}}
            for rate in marks.values()
        ),
    ]
    layout["annotations"] = [
        {
            "x": math.log10(rate),
            "yref": "paper",
            "y": 0.98 - 0.1 * place,
            "text": name,
            "showarrow": False,
            "xanchor": "left",
            "font": {"size": 12, "color": QUIET},
        }
        for place, (name, rate) in enumerate(marks.items())
    ]
    data = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [rate for rate, _ in finite],
        "y": [loss for _, loss in finite],
        "line": {"color": ACCENT, "width": 2},
        "marker": {"color": ACCENT, "size": 4},
        "hovertemplate": "lr %{x:.2e}: %{y:.4g}<extra></extra>",
    }
    said = ", ".join(f"{name} {rate:.2g}" for name, rate in marks.items())
    return Figure(
        caption="Loss after the first step of AdamW against its learning rate, on one batch. Dotted: the "
        "planned peak rate; the rate whose step is as long as the ghost radius (ρ_a); where the parabola of "
        "slope and curvature is back at the start; where the loss really rises above it.",
        alt=f"The loss starts at {taken.start:.3g} and falls to {least:.3g} at best; {said}",
        panels=(Panel("Loss after the first step", (data,), layout),),
    )


def _step(spot: Spot, rate: float) -> dict[str, Tensor]:
    """AdamW's first update at this rate, without decay."""
    tensors = dict(canonical_parameters(spot.model))
    trained = {name: tensors[name] for name in spot.parameters}
    kept = {name: tensor.grad for name, tensor in tensors.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=rate, weight_decay=0.0)
    try:
        for tensor in tensors.values():
            tensor.grad = None
        with untouched_randomness(spot.site.seed), torch.enable_grad():
            spot.workload.evaluate(spot.model, spot.batch).backward()
        return optimizer_step(optimizer, spot.model)
    finally:
        for name, tensor in tensors.items():
            tensor.grad = kept[name]
