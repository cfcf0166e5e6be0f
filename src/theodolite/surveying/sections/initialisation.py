"""Does the initialisation already depend on depth?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from theodolite.anatomy import dissect
from theodolite.anatomy.names import canonical_parameters, starred_name
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.figure import Figure, power_law
from theodolite.present.text import counted, listed, signed
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.trials import trial_widths

MOST_PARAMETERS = 250_000_000
"""Of one trial network: a gigabyte in float32."""
FLAT = 0.2
"""A log–log slope below this counts as zero: noise changes it by a few hundredths."""
DEPTH = Check(
    "TH104",
    "Depth in the initialisation",
    "GPT-2 divides the std of the projections that end its residual branches by √(2L). Rules for depth "
    "already give each of L branches the weight 1/L. Together, depth counts twice: the branches fade, the "
    "deep network starts as a shallow one, and what was tuned at small depth does not carry over.",
)


@dataclass(frozen=True)
class BranchEnds:
    """The initial size of tensors that end a branch, in networks of growing depth."""

    pattern: str
    blocks: tuple[int, ...]
    rms: tuple[float, ...]
    """For each depth, the geometric mean over the blocks. A std, as weights start around zero."""

    @property
    def finite(self) -> bool:
        """Are all initial values finite?"""
        return all(map(math.isfinite, self.rms))

    @property
    def zero(self) -> bool:
        """Are they zero at every depth, of at least two?"""
        return len(self.rms) > 1 and not any(self.rms)

    @property
    def points(self) -> list[tuple[int, float]]:
        """Numbers of blocks and sizes that are not zero."""
        return [(count, value) for count, value in zip(self.blocks, self.rms, strict=True) if value > 0]

    @property
    def slope(self) -> float:
        """The exponent p in rms ∝ L^p, by least squares on logarithms; nan without two depths."""
        if len(self.points) < 2 or not self.finite:
            return math.nan
        counts, values = zip(*self.points, strict=True)
        return statistics.linear_regression([*map(math.log, counts)], [*map(math.log, values)]).slope


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH104."""
    if context.anatomy.num_blocks and context.anatomy.grown_blocks != context.anatomy.num_blocks:
        with measuring(DEPTH):
            width, ends = measure(context)
        yield depth_counted(ends, width)


def depth_counted(ends: Sequence[BranchEnds], width: int) -> Finding:
    """TH104: the initial size of the tensors that end a branch, against depth."""
    broken = [one for one in ends if not one.finite]
    silent = [one for one in ends if one.zero]
    sloped = [one for one in ends if not math.isnan(one.slope)]
    lone = [one for one in ends if one not in (*broken, *silent, *sloped)]
    falling = [one for one in sloped if one.slope < -FLAT]
    rising = [one for one in sloped if one.slope > FLAT]
    level: Level = "ok"
    title = remedy = ""
    said = []
    if broken:
        level, title = "fail", "Initial values that are not finite"
        said.append(f"The initial values of {_names(broken)} are not finite.")
        remedy = "Fix the initialisation: at some depths such a network has no finite loss."
    elif falling:
        level, title = "warn", "Depth counted twice in the initialisation"
        one = min(falling, key=lambda one: one.slope)
        (few, first), *_, (many, last) = one.points
        said.append(
            f"The initial std of {_names(falling)} falls with depth: {first:.3g} with "
            f"{counted(few, 'block')}, {last:.3g} with {many}, as L to the power "
            f"{signed(one.slope)}{_law(one.slope)}. A rule that scales with depth would count it again."
        )
        remedy = (
            "Initialise them like the other matrices of their block, without a factor of L; or train under "
            "th.plan, which starts from the value at the base depth, so that depth counts once."
        )
    elif rising:
        level, title = "warn", "Branches that start larger with depth"
        one = max(rising, key=lambda one: one.slope)
        said.append(
            f"The initial std of {_names(rising)} grows with depth, as L to the power {signed(one.slope)}: "
            "the sum of the branches grows faster than their number."
        )
        remedy = "Initialise the tensors that end a branch independently of depth."
    elif sloped:
        one = max(sloped, key=lambda one: abs(one.slope))
        said.append(
            f"The initial std of the tensors that end a branch does not depend on depth, from "
            f"{one.points[0][0]} to {one.points[-1][0]} blocks (steepest slope {signed(one.slope)})."
        )
    elif not silent:
        level = "note"
        remedy = "Compare the initialisation of the tensors that end a branch between two depths yourself."
    if silent:
        so = "" if sloped or broken else ": the initialisation does not depend on depth"
        said.append(f"{_names(silent)} {'is' if len(silent) == 1 else 'are'} zero at every depth{so}.")
    if lone:
        said.append(f"{_names(lone)} could be measured at one depth only.")
    return DEPTH.finding(
        level,
        " ".join(said),
        title=title,
        remedy=remedy,
        rows=list(_rows(ends)),
        figures=[_figure(sloped, width)] if sloped else (),
    )


def measure(context: SurveyContext) -> tuple[int, list[BranchEnds]]:
    """Build models of growing depth: their width, and the tensors that end their branches."""
    for width, depths in _trials(context):
        try:
            return width, _ends(context, width, depths)
        except UseError as error:
            problem = error
    raise problem


def _trials(context: SurveyContext) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Widths to try, each with depths a factor of two apart; the narrowest first unless deep."""
    widths = trial_widths(context.size.width)[:: -1 if context.deep else 1]
    for num, start, width in product((3 + context.deep, 2), (2, context.size.depth), widths):
        yield width, tuple(start << k for k in range(num))


def _ends(context: SurveyContext, width: int, depths: Sequence[int]) -> list[BranchEnds]:
    """The tensors that end the branches; UseError if the networks are too large or do not work."""
    largest = Size(width, max(depths))
    count = context.num_parameters(largest)
    if count > MOST_PARAMETERS:
        raise UseError(f"a trial network of {largest} has {count:,} parameters, over {MOST_PARAMETERS:,}")
    names: dict[object, list[str]] = {}
    sizes: dict[object, dict[int, list[float]]] = {}
    for depth in depths:
        model = context.build(Size(width, depth))
        tensors = dict(canonical_parameters(model))
        anatomy = dissect(model, context.inputs, roles=context.roles_among(tensors))
        for part in anatomy.values():
            if part.ends_branch and part.trained and part.role != "bias":
                # The same at every depth, whatever numbers the blocks have.
                starred = tuple("*" if piece.isdigit() else piece for piece in part.name.split("."))
                key = starred, part.role, part.op
                rms = tensors[part.name].detach().double().square().mean().sqrt().item()
                names.setdefault(key, []).append(part.name)
                sizes.setdefault(key, {}).setdefault(anatomy.num_blocks, []).append(rms)
    return [
        BranchEnds(
            starred_name(names[key]), tuple(by_blocks), tuple(map(_geometric_mean, by_blocks.values()))
        )
        for key, by_blocks in sizes.items()
    ]


def _geometric_mean(values: Sequence[float]) -> float:
    """Of the values that are not zero; nan if one is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    live = [value for value in values if value > 0]
    return statistics.geometric_mean(live) if live else 0.0


def _law(slope: float) -> str:
    for exponent, law in ((-0.5, "1/√L"), (-1.0, "1/L")):
        if abs(slope - exponent) < 0.1:
            return f" ({law})"
    return ""


def _rows(ends: Sequence[BranchEnds]) -> Iterator[dict[str, Value]]:
    counts = sorted({count for one in ends for count in one.blocks})
    for one in ends:
        at = dict(zip(one.blocks, one.rms, strict=True))
        stds = {f"L = {count}": at.get(count) for count in counts}
        yield {"tensor": one.pattern, **stds, "slope": None if math.isnan(one.slope) else one.slope}


def _figure(ends: Sequence[BranchEnds], width: int) -> Figure:
    values = [rms for one in ends for _, rms in one.points]
    bounds = (min(values) / 1.6, max(values) * 1.6)
    panels, words = [], []
    for one in ends:
        blocks, rms = zip(*one.points, strict=True)
        panels.append(power_law(one.pattern, blocks, rms, x_title="blocks", slope=one.slope, y_range=bounds))
        words.append(
            f"{one.pattern}: std {rms[0]:.3g} at {counted(blocks[0], 'block')}, {rms[-1]:.3g} at "
            f"{blocks[-1]}, slope {signed(one.slope)}"
        )
    return Figure(
        caption="Initial std of the tensors that end a branch, against the number of blocks L, on "
        f"logarithmic axes. Models of width {width}. Dotted: what a plan for depth expects.",
        alt="; ".join(words),
        panels=tuple(panels),
    )


def _names(ends: Sequence[BranchEnds]) -> str:
    return listed([one.pattern for one in ends])


section = Section("Initialisation", 40, examine)
