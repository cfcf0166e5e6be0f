"""Does the initialisation already know about depth?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.anatomy import dissect
from theodolite.anatomy.folding import fold
from theodolite.anatomy.names import canonical_parameters
from theodolite.errors import UseError
from theodolite.report.figures import Figure, Panel, power_law, signed
from theodolite.size import Size
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site

SMALLEST_WIDTH = 64
"""Narrow enough to build in no time; a matrix this wide still gives its std to about a percent."""
FLAT = 0.2
"""A log–log slope nearer to zero than this is none: noise in the stds moves it by a few hundredths."""
WHY = (
    "GPT-2 divides the std of the projections that end its residual branches by √(2L). Rules that scale "
    "with depth weigh each of L branches by 1/L themselves. Together the depth is counted twice: the "
    "branches fade, the deep network starts as a shallow one, and what was tuned at small depth does not "
    "carry over."
)


@dataclass(frozen=True)
class Ends:
    """The size at which tensors that end a branch start, in networks of growing depth."""

    pattern: str
    blocks: tuple[int, ...]
    rms: tuple[float, ...]
    """For each depth, the geometric mean over the blocks; a std, as weights start around zero."""

    @property
    def slope(self) -> float:
        """The exponent p in rms ∝ L^p, by least squares on logarithms."""
        logs = [
            (math.log(count), math.log(value)) for count, value in zip(self.blocks, self.rms, strict=True)
        ]
        mean_x = sum(x for x, _ in logs) / len(logs)
        mean_y = sum(y for _, y in logs) / len(logs)
        spread = sum((x - mean_x) ** 2 for x, _ in logs)
        return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def examine(site: Site) -> Iterator[Finding]:
    """TH104."""
    if site.anatomy.num_blocks and site.anatomy.grown_blocks != site.anatomy.num_blocks:
        width, ends, silent = measure(site)
        yield depth_counted(ends, silent, width)


def depth_counted(ends: Sequence[Ends], silent: Sequence[str], width: int) -> Finding:
    """TH104: the initial size of what ends each branch, against depth."""
    title = "Depth in the initialisation"
    falling = [one for one in ends if one.slope < -FLAT]
    rising = [one for one in ends if one.slope > FLAT]
    level: Level = "ok"
    remedy = ""
    if falling:
        level, title = "warn", "Depth counted twice in the initialisation"
        one = min(falling, key=lambda one: one.slope)
        sentence = (
            f"The deeper the network, the smaller {_start(falling)}: std {one.rms[0]:.3g} with "
            f"{one.blocks[0]} blocks, {one.rms[-1]:.3g} with {one.blocks[-1]}, as L to the "
            f"{signed(one.slope)}{_law(one.slope)}. A plan that scales with depth would count it again."
        )
        remedy = (
            "Initialise them like the other matrices of their block, without a factor in L, and let the plan "
            "weigh the branches; or keep the factor, and scale width only."
        )
    elif rising:
        level, title = "warn", "Branches that start larger with depth"
        one = max(rising, key=lambda one: one.slope)
        sentence = (
            f"The deeper the network, the larger {_start(rising)}, as L to the {signed(one.slope)}: the sum "
            "of the branches grows faster than their number."
        )
        remedy = "Initialise what ends a branch independently of depth."
    elif ends:
        one = max(ends, key=lambda one: abs(one.slope))
        sentence = (
            f"What ends a branch starts at the same size from {one.blocks[0]} to {one.blocks[-1]} blocks "
            f"(steepest slope {signed(one.slope)}): depth is not in the initialisation yet."
        )
    else:
        sentence = (
            f"{_names(silent)} {_are(silent)} zero at every depth: there is no depth in the initialisation."
        )
    if silent and ends:
        sentence += f" {_names(silent)} {_are(silent)} zero at every depth."
    evidence = Evidence(
        rows=tuple(_row(one) for one in ends),
        figures=(_figure(ends, width),) if ends else (),
    )
    return Finding("TH104", level, title, sentence, why=WHY, remedy=remedy, evidence=evidence)


def measure(site: Site) -> tuple[int, list[Ends], list[str]]:
    """Build real models at growing depth: their width, what ends their branches, and what starts at zero."""
    width, depths = _trial_sizes(site)
    found: dict[str, dict[int, list[float]]] = {}
    for depth in depths:
        model = site.build(Size(width, depth))
        anatomy = dissect(model, site.inputs, roles=site.roles)
        tensors = dict(canonical_parameters(model))
        for one in fold(part for part in anatomy.values() if part.ends_branch and part.role != "bias"):
            for part in one.parts:
                rms = tensors[part.name].detach().double().square().mean().sqrt().item()
                found.setdefault(one.pattern, {}).setdefault(anatomy.num_blocks, []).append(rms)
    ends, silent = [], []
    for kind, by_blocks in found.items():
        live = {count: mean for count, values in by_blocks.items() if (mean := _geometric_mean(values)) > 0}
        if len(live) > 1:
            ends.append(Ends(kind, tuple(live), tuple(live.values())))
        else:
            silent.append(kind)
    return width, ends, silent


def _trial_sizes(site: Site) -> tuple[int, tuple[int, ...]]:
    """The narrowest halving of the width that can be built, and depths a factor of two apart."""
    halvings = [site.size.width >> k for k in range(10) if site.size.width % (1 << k) == 0]
    widths = sorted(width for width in halvings if width >= SMALLEST_WIDTH) or [site.size.width]
    if site.deep:
        widths = [site.size.width]
    for start in (2, site.size.depth):
        depths = tuple(start << k for k in range(4 if site.deep else 3))
        for width in widths:
            if all(_can_be_built(site, Size(width, depth)) for depth in (depths[0], depths[-1])):
                return width, depths
    return site.size.width, tuple(site.size.depth << k for k in range(2))


def _can_be_built(site: Site, size: Size) -> bool:
    try:
        site.build(size, device="meta")
    except UseError:
        return False
    return True


def _geometric_mean(values: Sequence[float]) -> float:
    live = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, live)) / len(live)) if live else 0.0


def _law(slope: float) -> str:
    for exponent, law in ((-0.5, "1/√L"), (-1.0, "1/L")):
        if abs(slope - exponent) < 0.1:
            return f" ({law})"
    return ""


def _row(one: Ends) -> Mapping[str, Value]:
    stds = {f"L = {count}": rms for count, rms in zip(one.blocks, one.rms, strict=True)}
    return {"tensor": one.pattern, **stds, "slope": one.slope}


def _figure(ends: Sequence[Ends], width: int) -> Figure:
    values = [rms for one in ends for rms in one.rms]
    bounds = (min(values) / 1.6, max(values) * 1.6)
    return Figure(
        caption="Initial std of the tensors that end a branch, against the number of blocks L, on "
        f"logarithmic axes; models of width {width}. Dotted: what a plan for depth expects to find.",
        alt="; ".join(
            f"{one.pattern}: std {one.rms[0]:.3g} at {one.blocks[0]} blocks, {one.rms[-1]:.3g} at "
            f"{one.blocks[-1]}, slope {signed(one.slope)}"
            for one in ends
        ),
        panels=tuple(_panel(one, bounds) for one in ends),
    )


def _panel(one: Ends, bounds: tuple[float, float]) -> Panel:
    return power_law(one.pattern, one.blocks, one.rms, x_title="blocks", slope=one.slope, y_range=bounds)


def _start(ends: Sequence[Ends]) -> str:
    return f"{_names([one.pattern for one in ends])} {'starts' if len(ends) == 1 else 'start'}"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _names(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


section = Section("Initialisation", 40, examine)
