"""Is the start in the Goldilocks zone, which steps are safe, and what is the curvature made of?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from theodolite.core.errors import UseError
from theodolite.present.figure import FAINT, Figure, Panel, frame, guide, line
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.density import Density
from theodolite.probes.curvature.sampling import mean_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.curvature_setup import CurvatureSetup, find_setup
from theodolite.surveying.finding import Check, Finding, Level, rounded, with_minus
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.sections.curvature.edges import Edges, SpectrumEnds, find_edges, find_spectrum
from theodolite.surveying.sections.curvature.zone import ZONE, explore, in_zone, log_ticks, without_softmax
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
"""S dominates if it is so many times as large as G."""
PLACES = 600
"""At which the density is drawn."""
LEAST = 0.1
"""Of an eigenvalue: below this the density is only the tail of the smoothing."""
ERRORS = UseError, RuntimeError
"""RuntimeError of autograd, and of memory."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH301, TH302 and TH303."""
    with measuring(ZONE, ERRORS, missing=(SHARPNESS, PARTS)):
        setup = find_setup(context)
        if setup.is_cross_entropy:
            zones = explore(setup)
            start = zones.temperature.start
            yield in_zone(setup, zones)
        else:
            start = measure_start(setup)
            yield without_softmax(setup, start)
    with measuring(SHARPNESS, ERRORS, missing=(PARTS,)):
        ends, spectrum = find_spectrum(setup)
        yield step_size(setup, find_edges(setup, ends), planned_rates(context))
    with measuring(PARTS, ERRORS):
        yield parts(setup, start, ends, spectrum)


def measure_start(setup: CurvatureSetup) -> Curvature:
    """The curvature at the start alone."""
    return curvature(setup.model, setup.workload.loss, setup.batch, **setup.options)


def step_size(setup: CurvatureSetup, edges: Edges, rates: PlannedRates) -> Finding:
    """TH302: are the planned learning rates below the edges?"""
    overshoots, leaves = rates.first > edges.first, rates.highest > edges.settled
    level: Level = "warn" if overshoots and leaves else "note" if overshoots or leaves else "ok"
    planned = f"{rates.first:.2g}"
    if rates.highest > rates.first:
        planned += f", rising to {rates.highest:.2g},"
    judged = {
        (False, False): "is below both edges",
        (True, False): "makes the first step overshoot",
        (False, True): "is safe for the first step, but too large for later ones",
        (True, True): "is beyond both edges",
    }
    said = (
        f"At {setup.where} AdamW with a learning rate of {planned} {judged[overshoots, leaves]}: the first "
        f"step {_beyond('overshoots', edges.first)}, later ones {_beyond('diverge', edges.settled)}. "
        f"Gradient descent {_beyond('diverges', edges.descent)} (2/λ_max)."
    )
    if not edges.converged:
        said += " Not all eigenvalues have converged, so the edges may be lower."
    safe = min(edges.first, edges.settled)
    remedy = (
        f"Begin with a learning rate below {safe:.1g}, or warm up from there: the sharpness falls while the "
        "learning rate rises. If the start is outside its zone (TH301), fix that first."
    )
    if overshoots and not leaves:
        remedy = f"Warm up over a few steps from below {edges.first:.1g}."
    elif leaves and not overshoots:
        remedy = (
            f"Watch the loss when the learning rate passes {edges.settled:.1g}. If it jumps, warm up for "
            "longer, or choose a lower learning rate."
        )
    ends = edges.ends
    return SHARPNESS.finding(
        level,
        said,
        title="" if level == "ok" else "A learning rate beyond the edge of stability at the start",
        remedy="" if level == "ok" else remedy,
        numbers=setup.setting
        | {
            "learning rate": rates.highest,
            "λ_max": f"{ends.largest:.4g} ± {ends.errors[0]:.1g}",
            "2/λ_max, edge of gradient descent": edges.descent,
            "AdamW's own sharpness": edges.preconditioned,
            "edge of AdamW": edges.settled,
            "edge of its first step": edges.first,
            "converged": edges.converged,
        },
    )


def parts(setup: CurvatureSetup, start: Curvature, ends: SpectrumEnds, spectrum: Density) -> Finding:
    """TH303: how much of the curvature is Gauss–Newton's, and how much is negative?"""
    gauss_newton, residual = start.gauss_newton.frobenius, start.residual.frobenius
    share = start.residual_share
    linear = setup.is_of_logits and gauss_newton.value == 0 and setup.is_linear
    is_judged = setup.is_of_logits and not linear
    dominant = is_judged and residual.value > DOMINANT * gauss_newton.value
    below = mean_of((spectrum.weights * (spectrum.nodes < 0)).sum(1))
    ratio = abs(ends.smallest / ends.largest) if ends.largest else math.nan
    lowest, highest = (with_minus(rounded(end)) for end in (ends.smallest, ends.largest))
    said = f"At {setup.where} "
    if not setup.is_of_logits:
        said += (
            "the loss takes the whole output of the network, or calls the network itself, so the curvature "
            "cannot be split into the Gauss–Newton part G and the residual part S."
        )
    elif linear:
        said += (
            "the loss is linear in the output, so the Gauss–Newton part G is zero by definition: all "
            "curvature is the residual part S, that of the output."
        )
    else:
        said += (
            f"the residual part S is {100 * share:.0f} % of the curvature at the start, the Gauss–Newton "
            f"part G {100 * (1 - share):.0f} %."
        )
    said += f" Eigenvalues range from {lowest} to {highest}"
    said += f", a ratio of {ratio:.2g} in size." if ends.smallest < 0 < ends.largest else "."
    split = {
        "‖G‖": str(gauss_newton),
        "‖S‖": str(residual),
        "excess of G": with_minus(start.gauss_newton.t),
        "excess of S": with_minus(start.residual.t),
    }
    numbers = setup.setting | (split if setup.is_of_logits else {})
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
        figures=[density_figure(spectrum, ends)],
    )


def density_figure(spectrum: Density, ends: SpectrumEnds) -> Figure:
    """How many eigenvalues there are of which size, down to a single one."""
    grid = spectrum.grid(PLACES)
    # Scaled so that a single eigenvalue has height 1.
    values = spectrum.size * spectrum.values(grid) * spectrum.width * math.sqrt(2 * math.pi)
    shown = values.clamp(min=LEAST)
    top = math.log10(float(shown.max())) + 0.3
    layout = frame(height=260)
    layout["xaxis"] |= {"title": {"text": "eigenvalue", "standoff": 6}, "nticks": 9}
    layout["yaxis"] |= {
        "type": "log",
        "title": {"text": "eigenvalues", "standoff": 6},
        "range": [math.log10(LEAST), top],
        **log_ticks(math.log10(LEAST), top),
    }
    layout["shapes"] = [guide(x=0.0)]
    hover = "%{x:.3g}: %{y:.3g}"
    drawn = line(grid.tolist(), shown.tolist(), hover=hover, fill="tozeroy", fillcolor=FAINT)
    negative = float((spectrum.weights * (spectrum.nodes < 0)).sum(1).mean())
    return Figure(
        caption=f"Density of the Hessian's {spectrum.size:,} eigenvalues: about how many lie at each place, "
        f"smoothed with a width of {spectrum.width:.2g}. Peaks apart from the bulk are outliers.",
        alt=f"Eigenvalues from {ends.smallest:.3g} to {ends.largest:.3g}, most of them near zero, "
        f"{100 * negative:.0f} % of them below it",
        panels=(Panel("Spectrum of the Hessian", (drawn,), layout),),
    )


def _beyond(verb: str, edge: float) -> str:
    return f"{verb} from {edge:.2g}" if math.isfinite(edge) else f"never {verb}"


section = Section("Curvature", 72, examine, measures=True)
