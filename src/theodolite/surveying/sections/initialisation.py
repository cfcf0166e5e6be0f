"""Does the initialisation already know about depth?"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.anatomy import dissect
from theodolite.anatomy.names import canonical_parameters, starred_name
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.figure import Figure, Panel, power_law, signed
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.wording import counted, listed

SMALLEST_WIDTH = 64
"""Narrow enough to build in no time; a matrix this wide still gives its std to about a percent."""
MOST_PARAMETERS = 250_000_000
"""Of one trial network: a gigabyte in float32."""
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
    def finite(self) -> bool:
        """Are all initial values finite?"""
        return all(map(math.isfinite, self.rms))

    @property
    def zero(self) -> bool:
        """Do they start at zero at every depth, of at least two?"""
        return len(self.rms) > 1 and not any(self.rms)

    @property
    def points(self) -> list[tuple[int, float]]:
        """Numbers of blocks and sizes, as far as they have a logarithm."""
        return [(count, value) for count, value in zip(self.blocks, self.rms, strict=True) if value > 0]

    @property
    def slope(self) -> float:
        """The exponent p in rms ∝ L^p, by least squares on logarithms; nan without two depths."""
        if len(self.points) < 2 or not self.finite:
            return math.nan
        logs = [(math.log(count), math.log(value)) for count, value in self.points]
        mean_x = sum(x for x, _ in logs) / len(logs)
        mean_y = sum(y for _, y in logs) / len(logs)
        spread = sum((x - mean_x) ** 2 for x, _ in logs)
        return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def examine(site: Site) -> Iterator[Finding]:
    """TH104."""
    if site.anatomy.num_blocks and site.anatomy.grown_blocks != site.anatomy.num_blocks:
        try:
            width, ends = measure(site)
        except UseError as error:
            yield _unmeasured(error)
        else:
            yield depth_counted(ends, width)


def depth_counted(ends: Sequence[Ends], width: int) -> Finding:
    """TH104: the initial size of what ends each branch, against depth."""
    title = "Depth in the initialisation"
    broken = [one for one in ends if not one.finite]
    silent = [one for one in ends if one.zero]
    sloped = [one for one in ends if not math.isnan(one.slope)]
    lone = [one for one in ends if one not in (*broken, *silent, *sloped)]
    falling = [one for one in sloped if one.slope < -FLAT]
    rising = [one for one in sloped if one.slope > FLAT]
    level: Level = "ok"
    remedy = ""
    said = []
    if broken:
        level, title = "fail", "Initial values that are not finite"
        said.append(f"{_start(broken)} with values that are not finite.")
        remedy = "Mend the initialisation: such a network gives no loss, at some depths if not here."
    elif falling:
        level, title = "warn", "Depth counted twice in the initialisation"
        one = min(falling, key=lambda one: one.slope)
        (few, first), *_, (many, last) = one.points
        said.append(
            f"The deeper the network, the smaller {_start(falling)}: std {first:.3g} with "
            f"{counted(few, 'block')}, {last:.3g} with {many}, as L to the "
            f"{signed(one.slope)}{_law(one.slope)}. A rule that scales with depth would count it again."
        )
        remedy = (
            "Initialise them like the other matrices of their block, without a factor in L; or train under "
            "th.plan, which starts from the value at the base depth, so that depth counts once."
        )
    elif rising:
        level, title = "warn", "Branches that start larger with depth"
        one = max(rising, key=lambda one: one.slope)
        said.append(
            f"The deeper the network, the larger {_start(rising)}, as L to the {signed(one.slope)}: the sum "
            "of the branches grows faster than their number."
        )
        remedy = "Initialise what ends a branch independently of depth."
    elif sloped:
        one = max(sloped, key=lambda one: abs(one.slope))
        said.append(
            f"What ends a branch starts at the same size from {one.points[0][0]} to {one.points[-1][0]} "
            f"blocks (steepest slope {signed(one.slope)}): depth is not in the initialisation yet."
        )
    elif not silent:
        level = "note"
        remedy = "Compare the initialisation of what ends a branch between two depths yourself."
    if silent:
        so = "" if sloped or broken else ": there is no depth in the initialisation"
        said.append(f"{_names(silent)} {'is' if len(silent) == 1 else 'are'} zero at every depth{so}.")
    if lone:
        said.append(f"{_names(lone)} could be measured at one depth only.")
    evidence = Evidence(rows=tuple(_rows(ends)), figures=(_figure(sloped, width),) if sloped else ())
    return Finding("TH104", level, title, " ".join(said), why=WHY, remedy=remedy, evidence=evidence)


def measure(site: Site) -> tuple[int, list[Ends]]:
    """Build real models at growing depth: their width, and what ends their branches."""
    problem: UseError | None = None
    for width, depths in _trials(site):
        try:
            return width, _ends(site, width, depths)
        except UseError as error:
            problem = error
    raise problem or UseError("there is no size to try")


def _trials(site: Site) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Widths to try, the narrowest first unless there is time, each with depths a factor of two apart."""
    halvings = [site.size.width >> k for k in range(10) if site.size.width % (1 << k) == 0]
    widths = [width for width in halvings if width >= SMALLEST_WIDTH] or [site.size.width]
    for num in (3 + site.deep, 2):
        for start in (2, site.size.depth):
            for width in widths if site.deep else reversed(widths):
                yield width, tuple(start << k for k in range(num))


def _ends(site: Site, width: int, depths: Sequence[int]) -> list[Ends]:
    """What ends the branches of networks of this width; UseError if they are too large or do not work."""
    largest = Size(width, max(depths))
    count = sum(tensor.numel() for tensor in site.build_hollow(largest).parameters())
    if count > MOST_PARAMETERS:
        raise UseError(f"a trial network of {largest} has {count:,} parameters, over {MOST_PARAMETERS:,}")
    names: dict[object, list[str]] = {}
    sizes: dict[object, dict[int, list[float]]] = {}
    for depth in depths:
        model = site.build(Size(width, depth))
        tensors = dict(canonical_parameters(model))
        # A pattern may be for tensors that only a deeper network has.
        known = {
            pattern: role for pattern, role in (site.roles or {}).items() if fnmatch.filter(tensors, pattern)
        }
        anatomy = dissect(model, site.inputs, roles=known)
        for part in anatomy.values():
            if part.ends_branch and part.trained and part.role != "bias":
                # The same at every depth, whatever numbers the blocks have.
                starred = tuple("*" if piece.isdigit() else piece for piece in part.name.split("."))
                key = starred, part.role, part.op
                rms = tensors[part.name].detach().double().square().mean().sqrt().item()
                names.setdefault(key, []).append(part.name)
                sizes.setdefault(key, {}).setdefault(anatomy.num_blocks, []).append(rms)
    return [
        Ends(starred_name(names[key]), tuple(by_blocks), tuple(map(_geometric_mean, by_blocks.values())))
        for key, by_blocks in sizes.items()
    ]


def _geometric_mean(values: Sequence[float]) -> float:
    """Of those that are not zero; nan if one is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    live = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, live)) / len(live)) if live else 0.0


def _unmeasured(error: UseError) -> Finding:
    return Finding(
        "TH104",
        "note",
        "Depth in the initialisation",
        f"The initialisation could not be compared between depths: {' '.join(str(error).split())}.",
        why=WHY,
        remedy="Survey the network at a smaller width.",
    )


def _law(slope: float) -> str:
    for exponent, law in ((-0.5, "1/√L"), (-1.0, "1/L")):
        if abs(slope - exponent) < 0.1:
            return f" ({law})"
    return ""


def _rows(ends: Sequence[Ends]) -> Iterator[Mapping[str, Value]]:
    counts = sorted({count for one in ends for count in one.blocks})
    for one in ends:
        at = dict(zip(one.blocks, one.rms, strict=True))
        stds = {f"L = {count}": at.get(count) for count in counts}
        yield {"tensor": one.pattern, **stds, "slope": None if math.isnan(one.slope) else one.slope}


def _figure(ends: Sequence[Ends], width: int) -> Figure:
    values = [rms for one in ends for _, rms in one.points]
    bounds = (min(values) / 1.6, max(values) * 1.6)
    return Figure(
        caption="Initial std of the tensors that end a branch, against the number of blocks L, on "
        f"logarithmic axes; models of width {width}. Dotted: what a plan for depth expects to find.",
        alt="; ".join(map(_in_words, ends)),
        panels=tuple(_panel(one, bounds) for one in ends),
    )


def _in_words(one: Ends) -> str:
    (few, first), *_, (many, last) = one.points
    return (
        f"{one.pattern}: std {first:.3g} at {counted(few, 'block')}, {last:.3g} at {many}, "
        f"slope {signed(one.slope)}"
    )


def _panel(one: Ends, bounds: tuple[float, float]) -> Panel:
    blocks, rms = zip(*one.points, strict=True)
    return power_law(one.pattern, blocks, rms, x_title="blocks", slope=one.slope, y_range=bounds)


def _start(ends: Sequence[Ends]) -> str:
    return f"{_names(ends)} {'starts' if len(ends) == 1 else 'start'}"


def _names(ends: Sequence[Ends]) -> str:
    return listed([one.pattern for one in ends])


section = Section("Initialisation", 40, examine)
