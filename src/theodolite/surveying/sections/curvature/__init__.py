"""Is the start in the Goldilocks zone, which steps are safe, and what is the curvature made of?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.present.figure import FAINT, Figure, Panel, frame, guide, line
from theodolite.present.text import counted
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.density import Density, density
from theodolite.probes.curvature.eigenvalues import eigenvalues
from theodolite.probes.curvature.operator import Operator, hessian
from theodolite.probes.curvature.sampling import mean_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.curvature_setup import HALVES, CurvatureSetup, find_setup
from theodolite.surveying.finding import Check, Finding, Level, rounded, with_minus
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.sections.curvature.zone import ZONE, explore, in_zone, log_axis, without_softmax
from theodolite.surveying.short_training import STEPS, wake
from theodolite.surveying.trials import PlannedRates, planned_rates

SHARPNESS = Check(
    "TH302",
    "Sharpness and the learning rate",
    "A step overshoots if the loss curves too much: gradient descent diverges beyond 2/λ_max, AdamW beyond "
    "38 divided by the preconditioned sharpness, where each coordinate is divided by the size of its "
    "gradient. Training survives this with a warm-up, or by a jump that discards the initialisation. "
    "Sharpness depends on the size of the network: what is safe for a small one need not be for a large "
    "one.",
)
PARTS = Check(
    "TH303",
    "What the curvature is made of",
    "The Hessian is G + S. The Gauss–Newton part G is the curvature of the loss as a function of the logits, "
    "and is never negative; S is the curvature of the logits themselves. Methods that build on G "
    "(Gauss–Newton, K-FAC, natural gradient, Sophia-G) ignore S. If S is large, their step is not what they "
    "assume.",
)
DOMINANT = 2.0
"""S dominates if it is this many times as large as G."""
LEAST = 0.1
"""Of an eigenvalue: below this the density is only the tail of the smoothing."""
ERRORS = UseError, RuntimeError
"""RuntimeError of autograd, and of memory."""
BETA, EPS = 0.9, 1e-8
"""Of AdamW."""
ADAM_EDGE = 2 * (1 + BETA) / (1 - BETA)
"""38: with a fixed preconditioner P, steps of size η diverge on a quadratic loss if the largest eigenvalue of
`P^{-1/2} H P^{-1/2}` is above 38/η (Cohen et al., Adaptive gradient methods at the edge of stability)."""
BATCHES = 8
"""Batches for P. With one alone some entries of P are tiny by chance and dominate the result."""
RTOL = 0.01
MORE = 2
"""Further eigenvalues to compute, so that a poor start does not miss the first."""


@dataclass(frozen=True)
class SpectrumEnds:
    """The two ends of a spectrum."""

    largest: float
    smallest: float
    errors: tuple[float, float]
    converged: bool


@dataclass(frozen=True)
class Edges:
    """Largest stable learning rates by the initial curvature."""

    ends: SpectrumEnds
    """Of the Hessian."""
    preconditioned: float
    """The largest eigenvalue of `P^{-1/2} H P^{-1/2}`."""
    first: float
    """AdamW's first step overshoots beyond this."""
    converged: bool
    """Have all eigenvalues converged, to a hundredth?"""
    idle: tuple[str, ...] = ()
    """Tensors without a gradient at the start. If there are any, `preconditioned` is measured after a few
    steps: their curvature, divided by a gradient of zero, would bound the learning rate by Adam's eps."""

    @property
    def descent(self) -> float:
        """Of gradient descent, `2/λ_max`."""
        return _over(2.0, self.ends.largest)

    @property
    def settled(self) -> float:
        """Of AdamW after some batches: 38 over its preconditioned sharpness."""
        return _over(ADAM_EDGE, self.preconditioned)


class Preconditioned(Operator):
    """`P^{-1/2} H P^{-1/2}` for a diagonal P, (P,): its eigenvalues are those of `P⁻¹H`."""

    def __init__(self, inner: Operator, diagonal: Tensor) -> None:
        self._inner, self._root = inner, diagonal.rsqrt()
        self.names, self.shapes, self.size = inner.names, inner.shapes, inner.size
        self.dtype, self.device = inner.dtype, inner.device
        self.products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:  # type: ignore[override]
        root = self._root if vector.ndim == 1 else self._root[:, None]
        self.products += 1 if vector.ndim == 1 else vector.shape[1]
        return root * (self._inner @ (root * vector))


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH301, TH302 and TH303."""
    with measuring(ZONE, ERRORS, missing=(SHARPNESS, PARTS)):
        setup = find_setup(context)
        if setup.is_cross_entropy:
            temperature, scale = explore(setup)
            start = temperature.start
            yield in_zone(setup, temperature, scale)
        else:
            start = curvature(setup.model, setup.workload.loss, setup.batch, **setup.options)
            yield without_softmax(setup, start)
    with measuring(SHARPNESS, ERRORS, missing=(PARTS,)):
        ends, spectrum = find_spectrum(setup)
        yield step_size(setup, find_edges(setup, ends), planned_rates(context))
    with measuring(PARTS, ERRORS):
        yield parts(setup, start, ends, spectrum)


def step_size(setup: CurvatureSetup, edges: Edges, rates: PlannedRates) -> Finding:
    """TH302: are the planned learning rates below the edges?"""
    verdicts: dict[tuple[bool, bool], tuple[Level, str, str]] = {
        (False, False): ("ok", "is below both edges", ""),
        (True, False): (
            "note",
            "makes the first step overshoot",
            f"Warm up over a few steps from below {edges.first:.1g}.",
        ),
        (False, True): (
            "note",
            "is safe for the first step, but too large for later ones",
            f"Watch the loss when the learning rate passes {edges.settled:.1g}. If it jumps, warm up for "
            "longer, or choose a lower learning rate.",
        ),
        (True, True): (
            "warn",
            "is beyond both edges",
            f"Begin with a learning rate below {min(edges.first, edges.settled):.1g}, or warm up from there: "
            "the sharpness falls while the learning rate rises. If the start is outside its zone (TH301), "
            "fix that first.",
        ),
    }
    level, judged, remedy = verdicts[rates.first > edges.first, rates.highest > edges.settled]
    planned = f"{rates.first:.2g}"
    if rates.highest > rates.first:
        planned += f", rising to {rates.highest:.2g},"
    said = (
        f"{setup.where} AdamW with a learning rate of {planned} {judged}: the first step "
        f"{_beyond('overshoots', edges.first)}, later ones {_beyond('diverge', edges.settled)}. "
        f"Gradient descent {_beyond('diverges', edges.descent)} (2/λ_max). That holds while the curvature "
        "stays as it was measured: beyond an edge the loss can jump to where it is flatter, and fall again."
    )
    if edges.idle:
        said += (
            f" The edge of later steps is that after {STEPS} of them, because at the start "
            f"{counted(len(edges.idle), 'tensor')} {'has' if len(edges.idle) == 1 else 'have'} no gradient."
        )
    if not edges.converged:
        said += " Not all eigenvalues have converged, so the edges may be lower."
    return SHARPNESS.finding(
        level,
        said,
        title="" if level == "ok" else "A learning rate beyond the edge of stability at the start",
        remedy=remedy,
        numbers=setup.setting
        | {
            "learning rate": rates.highest,
            "λ_max": f"{edges.ends.largest:.4g} ± {edges.ends.errors[0]:.1g}",
            "2/λ_max, edge of gradient descent": edges.descent,
            "AdamW's own sharpness": edges.preconditioned,
            "edge of AdamW": edges.settled,
            "edge of its first step": edges.first,
            "converged": edges.converged,
        }
        | ({"tensors without a gradient": len(edges.idle), "steps of AdamW": STEPS} if edges.idle else {}),
    )


def parts(setup: CurvatureSetup, start: Curvature, ends: SpectrumEnds, spectrum: Density) -> Finding:
    """TH303: how much of the curvature is Gauss–Newton's, and how much is negative?"""
    gauss_newton, residual = start.gauss_newton.frobenius, start.residual.frobenius
    share = start.residual_share
    below = mean_of((spectrum.weights * (spectrum.nodes < 0)).sum(1))
    ratio = abs(ends.smallest / ends.largest) if ends.largest else math.nan
    dominant = False
    numbers = setup.setting
    if not setup.is_of_logits:
        said = (
            "the loss takes the whole output of the network, or calls the network itself, so the curvature "
            "cannot be split into the Gauss–Newton part G and the residual part S."
        )
    else:
        numbers |= {
            "‖G‖": str(gauss_newton),
            "‖S‖": str(residual),
            "excess of G": with_minus(start.gauss_newton.t),
            "excess of S": with_minus(start.residual.t),
        }
        if gauss_newton.value == 0 and setup.is_linear:
            said = (
                "the loss is linear in the output, so the Gauss–Newton part G is zero by definition: all "
                "curvature is the residual part S, that of the output."
            )
        else:
            dominant = residual.value > DOMINANT * gauss_newton.value
            said = (
                f"the residual part S is {100 * share:.0f} % of the curvature at the start, the "
                f"Gauss–Newton part G {100 * (1 - share):.0f} %."
            )
    lowest, highest = (with_minus(rounded(end)) for end in (ends.smallest, ends.largest))
    said = f"{setup.where} {said} Eigenvalues range from {lowest} to {highest}"
    said += f", a ratio of {ratio:.2g} in size." if ends.smallest < 0 < ends.largest else "."
    numbers |= {
        "|λ_min/λ_max|": ratio,
        "eigenvalues below zero": str(below) if math.isfinite(below.error) else f"{below.value:.3g}",
        "negative trace to positive": spectrum.k_hn().value,
    }
    remedy = (
        "Warm up, or damp, methods that build on G; first-order methods need nothing. S falls as the network "
        "learns, because it is weighted by the errors."
    )
    return PARTS.finding(
        "note" if dominant else "ok",
        said,
        title="Curvature that Gauss–Newton ignores" if dominant else "",
        remedy=remedy if dominant else "",
        numbers=numbers,
        figures=[_density_figure(spectrum, ends, below.value)],
    )


def find_spectrum(setup: CurvatureSetup) -> tuple[SpectrumEnds, Density]:
    """The ends and the density. Of the two estimates of an end, the farther one is right."""
    effort = setup.effort
    setup.spend(effort.eigenvalues + effort.probes * effort.steps)
    options: dict[str, Any] = {"seed": setup.context.seed, "progress": lambda *_: setup.spend(0)}
    found = eigenvalues(setup.hessian, which="ends", rtol=RTOL, most_products=effort.eigenvalues, **options)
    spectrum = density(setup.hessian, probes=effort.probes, steps=effort.steps, **options)
    ends = SpectrumEnds(
        max(float(found.values[0]), spectrum.largest),
        min(float(found.values[-1]), spectrum.smallest),
        errors=(float(found.errors[0]), float(found.errors[-1])),
        converged=found.converged,
    )
    return ends, spectrum


def find_edges(setup: CurvatureSetup, ends: SpectrumEnds) -> Edges:
    """The edges of gradient descent and of AdamW."""
    setup.spend(1 + BATCHES + setup.effort.eigenvalues)
    slope = setup.hessian.gradient
    step = slope / (slope.abs() + EPS)
    bend = float(step @ (setup.hessian @ step))
    moment = _second_moment(setup)
    idle = _idle(setup, moment)
    later = _awake(setup) if idle else setup
    found = eigenvalues(
        Preconditioned(later.hessian, (_second_moment(later) if idle else moment).sqrt() + EPS),
        k=min(1 + MORE, setup.hessian.size),
        rtol=RTOL,
        most_products=setup.effort.eigenvalues,
        seed=setup.context.seed,
        progress=lambda *_: setup.spend(0),
    )
    first = _over(2 * float(slope @ step), bend)
    return Edges(ends, float(found.values[0]), first, ends.converged and found.converged, idle)


def _idle(setup: CurvatureSetup, moment: Tensor) -> tuple[str, ...]:
    """Names of the tensors whose gradient is zero in all of `moment`, (P,)."""
    operator = setup.hessian
    parts = moment.split([math.prod(operator.shapes[name]) for name in operator.names])
    return tuple(name for name, part in zip(operator.names, parts, strict=True) if not part.any())


def _awake(setup: CurvatureSetup) -> CurvatureSetup:
    """The same network after a few steps."""
    setup.spend(BATCHES)
    model = wake(setup.context, setup.size).model
    if any(parameter.dtype in HALVES for parameter in model.parameters()):
        model = copy.deepcopy(model).float()
    return replace(setup, model=model)


def _second_moment(setup: CurvatureSetup) -> Tensor:
    """The mean square of the gradient over a few batches, (P,): Adam's after as many steps."""
    total = torch.zeros_like(setup.hessian.gradient)
    for step in range(BATCHES):
        batch = setup.batch if step == 0 else setup.draw(step)
        found = hessian(setup.model, setup.workload.loss, batch, parameters=setup.parameters)
        try:
            total += found.gradient.square()
        except UseError as error:
            raise UseError(f"batch({setup.context.seed}, {step}): {error}") from error
    return total / BATCHES


def _density_figure(spectrum: Density, ends: SpectrumEnds, negative: float) -> Figure:
    """How many eigenvalues there are of which size, down to a single one."""
    grid = spectrum.grid(600)
    # Scaled so that a single eigenvalue has height 1.
    values = spectrum.size * spectrum.values(grid) * spectrum.width * math.sqrt(2 * math.pi)
    shown = values.clamp(min=LEAST)
    layout = frame(height=260, x="eigenvalue", y="eigenvalues")
    layout["xaxis"] |= {"nticks": 9}
    layout["yaxis"] |= log_axis(math.log10(LEAST), math.log10(float(shown.max())) + 0.3)
    layout["shapes"] = [guide(x=0.0)]
    hover = "%{x:.3g}: %{y:.3g}"
    drawn = line(grid.tolist(), shown.tolist(), hover=hover, fill="tozeroy", fillcolor=FAINT)
    return Figure(
        caption=f"Density of the Hessian's {spectrum.size:,} eigenvalues: about how many lie at each place, "
        f"smoothed with a width of {spectrum.width:.2g}. Peaks apart from the bulk are outliers.",
        alt=f"Eigenvalues from {ends.smallest:.3g} to {ends.largest:.3g}, most of them near zero, "
        f"{100 * negative:.0f} % of them below it",
        panels=(Panel("Spectrum of the Hessian", (drawn,), layout),),
    )


def _over(bound: float, sharpness: float) -> float:
    if not (math.isfinite(bound) and math.isfinite(sharpness)):
        raise UseError(f"the curvature along a step is not finite ({sharpness:g}), so no edge is known")
    return bound / sharpness if sharpness > 0 else math.inf


def _beyond(verb: str, edge: float) -> str:
    return f"{verb} from {edge:.2g}" if math.isfinite(edge) else f"never {verb}"


section = Section("Curvature", 72, examine, measures=True)
