"""What growing found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theodolite.growing.grown import Grown, Stage


def table(grown: Grown) -> str:
    """Each block with the points it was chosen from, and what is certified."""
    parts = [_headline(grown)]
    parts += [_stage(number, stage) for number, stage in enumerate(grown.stages, 1)]
    if grown.certificate is not None:
        parts.append(f"{_about(grown)}\n{grown.certificate}")
    return "\n\n".join(parts)


def _headline(grown: Grown) -> str:
    """The result in two sentences."""
    estimate, choose, certify = grown.units
    sample = f"{estimate} units to estimate, {choose} to choose, {certify} to certify"
    if not grown.blocks:
        return f"no block was inserted; {sample}"
    number = f"{len(grown.blocks)} block{'s' if len(grown.blocks) > 1 else ''}"
    before, after = grown.before, grown.after
    return (
        f"{number} inserted; {sample}\n"
        f"mean loss   estimate {before.estimate:.5g} → {after.estimate:.5g}, choose {before.choose:.5g} → "
        f"{after.choose:.5g}, certify {before.certify:.5g} → {after.certify:.5g}"
    )


def _stage(number: int, stage: Stage) -> str:
    found = stage.signal
    lines = [
        f"block {number}: {len(found.above)} of {len(found.points)} points have a gain above their noise",
    ]
    width = max((len(one.point.name) for one in stage.contenders), default=0) + 2
    if stage.contenders:
        head = ("slope", "±", "step", "predicted", "fell by", "of train")
        lines.append(f"  {'tried at':<{max(width, 10)}}" + "".join(f"{name:>11}" for name in head))
    for one in stage.contenders:
        cells = (
            one.slope,
            one.error,
            one.jump.length,
            one.jump.predicted,
            one.jump.gain,
            one.train_gain,
        )
        mark = " ←" if one is stage.chosen else ""
        lines.append(
            f"  {one.point.name:<{max(width, 10)}}" + "".join(f"{cell:>11.3g}" for cell in cells) + mark
        )
    lines += [f"  note: {note}" for note in found.notes]
    if stage.chosen is None:
        lines.append(f"  no block: {stage.why}")
        return "\n".join(lines)
    lines.append(f"  {stage.chosen.point.name}, a copy of {stage.chosen.point.like}: {stage.chosen.jump}")
    if stage.proof is not None:
        lines.append(f"  before the jump outputs differ by {stage.proof.outputs:.1e}, {stage.proof.dtype}")
    if stage.certificate is not None:
        lines.append(f"  {str(stage.certificate).splitlines()[0]}")
    return "\n".join(lines)


def _about(grown: Grown) -> str:
    if len(grown.blocks) == 1:
        return f"The network with {grown.blocks[0]} against the one without:"
    return f"The network with all {len(grown.blocks)} blocks against the one without:"
