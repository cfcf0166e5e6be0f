"""Is the start a good place: does it lie in the Goldilocks zone, how large a step is safe, what curves it?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from theodolite.anatomy import UnclassifiedError
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.density import Density
from theodolite.probes.curvature.sampling import mean_of
from theodolite.surveying.budget import TooLong
from theodolite.surveying.curvature_setup import Spot, find_spot
from theodolite.surveying.edges import Edges, Ends, Rates, find_edges, find_spectrum, planned_rates
from theodolite.surveying.finding import Evidence, Finding, Level
from theodolite.surveying.section import Section
from theodolite.surveying.sections.curvature.curves import density_figure
from theodolite.surveying.sections.curvature.zone_finding import INSIDE, WHY_ZONE, in_zone, without_softmax
from theodolite.surveying.sections.curvature.zones import explore
from theodolite.surveying.sections.plan import untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import Untried
from theodolite.surveying.wording import plain, with_minus

TITLES = {
    "TH301": INSIDE,
    "TH302": "Sharpness and the learning rate",
    "TH303": "What the curvature is made of",
}
WHY = {
    "TH301": WHY_ZONE,
    "TH302": "A step goes wrong where the loss curves more than it can bear: gradient descent beyond "
    "2/λ_max, AdamW beyond 38 over the sharpness that is left when each coordinate is divided by the size "
    "of its gradient. Training survives that by a warm-up, or by a jump that throws the start away. "
    "Sharpness depends on the size of the network: what is safe at a small one need not be at a large one.",
    "TH303": "The Hessian is G + S: G, Gauss–Newton, is the curvature of the loss of the logits and never "
    "negative; S is that of the logits themselves. Methods that build on G (Gauss–Newton, K-FAC, natural "
    "gradient, Sophia-G) do not see S. Where S is large their step is not the one that they think it is.",
}
DOMINANT = 2.0
"""S dominates where it is so many times as large as G."""


def examine(site: Site) -> Iterator[Finding]:
    """TH301, TH302 and TH303."""
    code = "TH301"
    try:
        spot = find_spot(site)
        if spot.is_cross_entropy:
            zones = explore(spot)
            start = zones.temperature.start
            yield in_zone(spot, zones)
        else:
            start = measure_start(spot)
            yield without_softmax(spot, start)
        code = "TH302"
        ends, spectrum = find_spectrum(spot)
        yield step_size(spot, find_edges(spot, ends), planned_rates(site))
        code = "TH303"
        yield parts(spot, start, ends, spectrum)
    except UnclassifiedError:
        raise
    except Untried as error:
        yield untried(error)
    except (UseError, RuntimeError) as error:  # of autograd, and of memory
        yield unmeasured(code, error)


def measure_start(spot: Spot) -> Curvature:
    """The curvature at the start alone."""
    return curvature(
        spot.model,
        spot.workload.loss,
        spot.batch,
        directions=spot.directions,
        parameters=spot.parameters,
        seed=spot.site.seed,
    )


def step_size(spot: Spot, edges: Edges, rates: Rates) -> Finding:
    """TH302: are the planned steps smaller than the curvature of the start allows?"""
    overshoots, leaves = rates.first > edges.first, rates.highest > edges.settled
    level: Level = "warn" if overshoots and leaves else "note" if overshoots or leaves else "ok"
    title = TITLES["TH302"] if level == "ok" else "A learning rate beyond the edge of the start"
    planned = f"{rates.first:.2g}"
    if rates.highest > rates.first:
        planned += f", which rises to {rates.highest:.2g},"
    judged = {
        (False, False): "is below both edges",
        (True, False): "makes the first step overshoot",
        (False, True): "is safe for the first step, and beyond what later ones bear",
        (True, True): "is beyond both edges",
    }
    said = (
        f"At {spot.where} AdamW with a learning rate of {planned} {judged[overshoots, leaves]}: its first "
        f"step overshoots {_from(edges.first)}, later ones diverge {_from(edges.settled)}. Gradient descent "
        f"diverges {_from(edges.descent)} (2/λ_max)."
    )
    if not edges.converged:
        said += " Not all eigenvalues have converged, so that the edges may be lower."
    safe = min(edges.first, edges.settled)
    remedy = (
        f"Begin with a learning rate below {safe:.1g}, or warm up from there: the sharpness falls while the "
        "learning rate rises. If the start is outside its zone (TH301), mend that first."
    )
    if overshoots and not leaves:
        remedy = f"Warm up over a few steps from below {edges.first:.1g}."
    elif leaves and not overshoots:
        remedy = (
            f"Watch the loss where the learning rate passes {edges.settled:.1g}. If it jumps, warm up for "
            "longer, or choose a lower learning rate."
        )
    ends = edges.ends
    numbers = spot.ground | {
        "learning rate": rates.highest,
        "λ_max": f"{ends.largest:.4g} ± {ends.errors[0]:.1g}",
        "2/λ_max, edge of gradient descent": edges.descent,
        "AdamW's own sharpness": edges.preconditioned,
        "edge of AdamW": edges.settled,
        "edge of its first step": edges.first,
        "converged": edges.converged,
    }
    return Finding(
        "TH302",
        level,
        title,
        said,
        why=WHY["TH302"],
        remedy="" if level == "ok" else remedy,
        evidence=Evidence(numbers),
    )


def parts(spot: Spot, start: Curvature, ends: Ends, spectrum: Density) -> Finding:
    """TH303: how much of the curvature is Gauss–Newton's, and how much of it is negative?"""
    gauss_newton, residual = start.gauss_newton.frobenius, start.residual.frobenius
    share = start.residual_share
    linear = spot.is_of_logits and gauss_newton.value == 0 and spot.is_linear
    is_judged = spot.is_of_logits and not linear
    dominant = is_judged and residual.value > DOMINANT * gauss_newton.value
    below = mean_of((spectrum.weights * (spectrum.nodes < 0)).sum(1))
    ratio = abs(ends.smallest / ends.largest) if ends.largest else math.nan
    lowest, highest = (with_minus(plain(end)) for end in (ends.smallest, ends.largest))
    said = f"At {spot.where} the "
    if not spot.is_of_logits:
        said += (
            "loss takes all that the network returns, or calls it by itself, so that the curvature cannot be "
            "split into the Gauss–Newton part G and the residual part S."
        )
    elif linear:
        said += (
            "loss is linear in the output, so that the Gauss–Newton part G is zero by definition, whatever "
            "the network does: all curvature is the residual part S, that of the output."
        )
    else:
        said += (
            f"residual part S has {100 * share:.0f} % of the curvature of the start, the Gauss–Newton part G "
            f"{100 * (1 - share):.0f} %."
        )
    said += f" Eigenvalues reach from {lowest} to {highest}"
    said += f": down {ratio:.2g} times as far as up." if ends.smallest < 0 < ends.largest else "."
    split = {
        "‖G‖": str(gauss_newton),
        "‖S‖": str(residual),
        "excess of G": with_minus(start.gauss_newton.t),
        "excess of S": with_minus(start.residual.t),
    }
    numbers = spot.ground | (split if spot.is_of_logits else {})
    numbers |= {
        "|λ_min/λ_max|": ratio,
        "eigenvalues below zero": str(below) if math.isfinite(below.error) else f"{below.value:.3g}",
        "negative trace to positive": spectrum.k_hn().value,
    }
    return Finding(
        "TH303",
        "note" if dominant else "ok",
        "Curvature that Gauss–Newton does not see" if dominant else TITLES["TH303"],
        said,
        why=WHY["TH303"],
        remedy="Warm up, or damp, methods that build on G; first-order methods need nothing. S falls as the "
        "network learns, since it is weighted by what the network gets wrong."
        if dominant
        else "",
        evidence=Evidence(numbers, figures=(density_figure(spectrum, ends),)),
    )


def unmeasured(code: str, error: Exception) -> Finding:
    """What could not be measured, from this code on."""
    missing = [other for other in TITLES if other > code]
    also = f" So {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing too." * bool(missing)
    mend = (
        "Survey the network at a smaller size, or with --deep, which may take longer."
        if isinstance(error, TooLong)
        else "Mend what the message names, or leave the section out: skip=['curvature']."
    )
    return Finding(
        code,
        "note",
        TITLES[code],
        f"The curvature could not be measured: {_words(error)}.{also}",
        why=WHY[code],
        remedy=mend,
    )


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()) if isinstance(error, UseError) else in_one_line(error)
    return text.rstrip(".")


def _from(edge: float) -> str:
    return f"from {edge:.2g} on" if math.isfinite(edge) else "at no learning rate"


section = Section("Curvature", 72, examine, measures=True)
