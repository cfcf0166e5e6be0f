"""The coordinate check: do a network's values keep their size when it grows?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.anatomy import dissect
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.planning.parameterization import (
    PARAMETERIZATIONS,
    Parameterization,
    plan_for,
    with_zero_readout,
)
from theodolite.planning.repeating import lone_branches
from theodolite.probes.scaling.first_steps import Track, follow
from theodolite.probes.scaling.slopes import AXES, Slope, fit_slopes, worst_first
from theodolite.workloads import Workload


@dataclass(frozen=True)
class Coordinates:
    """How large values are against width and depth. Made by `coordinates`."""

    parameterization: Parameterization
    optimizer: str
    lr: float
    base: Size
    steps: int
    tracks: tuple[Track, ...]
    """One for each size and seed."""

    @property
    def slopes(self) -> tuple[Slope, ...]:
        """Of every quantity along every axis, after the last step."""
        return self.slopes_after(self.steps)

    def slopes_after(self, step: int) -> tuple[Slope, ...]:
        """The same after another step; 0 is before training."""
        return fit_slopes(self.tracks, step=step)

    def bent(self, tolerance: float = 0.1) -> tuple[Slope, ...]:
        """The slopes beyond ±tolerance of what they should be, worst first; each prints what it means.

        Only what `Slope.judged` names is judged.
        """
        return worst_first(slope for slope in self.slopes if slope.judged and not slope.within(tolerance))

    def flat(self, tolerance: float = 0.1) -> bool:
        """Is every slope within ±tolerance of what it should be?"""
        return not self.bent(tolerance)

    def __str__(self) -> str:
        """A table: slopes and intervals after the last step; "–" where none is expected."""
        start = (
            f"{self.parameterization}, {self.optimizer}, lr {self.lr:.4g} at {self.base}: slopes after "
            f"{self.steps} steps, {len({track.seed for track in self.tracks})} seeds"
        )
        wide = max(20, *(len(slope.quantity) for slope in self.slopes))
        rows = [f"{'quantity':<{wide}} {'axis':<5} {'slope':>6}  {'95 % interval':<16} {'expected':>8}"]
        for slope in self.slopes:
            interval = f"{slope.low:+.2f} to {slope.high:+.2f}" if math.isfinite(slope.low) else ""
            value = f"{slope.value:+.2f}" if math.isfinite(slope.value) else "diverged"
            expected = f"{slope.expected:g}" if slope.judged else "–"
            rows.append(f"{slope.quantity:<{wide}} {slope.axis:<5} {value:>6}  {interval:<16} {expected:>8}")
        return "\n".join([start, "", *rows])


@exclusive()
def coordinates(
    workload: Workload,
    sizes: Sequence[Size],
    *,
    base: Size,
    lr: float,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    parameterization: Parameterization = "plan",
    steps: int = 10,
    seeds: Sequence[int] = (0, 1, 2),
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
    **planning: Any,
) -> Coordinates:
    """Train a network of several sizes for a few steps, and see which values grow or vanish with the size.

    With the right parameterization the stream, and how far stream and logits move in a step, are the same at
    every width and depth, and each of L branches is 1/L of that. The readout starts at zero, so that the
    logits only hold what was learnt; one that is the embedding too, or is divided by its own norm, starts as
    it does.

    Args:
        workload: the network, its data and its loss.
        sizes: at least two. Those of equal depth are compared along the width, and the other way round.
        base: the size at which `lr` is right.
        lr: learning rate at base size.
        optimizer: as in `theodolite.plan`, which `weight_decay` and `planning` (eps, roles, …) go to as well.
        weight_decay: at base size.
        parameterization: `plan`, or `standard`: the network's own initialisation at each size and the plain
            optimizer with one learning rate for all.
        steps: how many to train.
        seeds: one run for each: of the initialisation and of the batches.
        device: where to train.
        progress: called with a line and the part that is done.

    >>> import theodolite as th
    >>> sizes = [th.Size(width, 2) for width in (32, 64, 128)]
    >>> mlp = th.workload("mlp-mixture")
    >>> planned = coordinates(mlp, sizes, base=sizes[0], lr=2**-7, steps=4)
    >>> standard = coordinates(mlp, sizes, base=sizes[0], lr=2**-7, steps=4, parameterization="standard")
    >>> planned.flat(0.2), standard.flat(0.2)
    (True, False)

    References:
        Yang et al., Tensor Programs V, 2022, appendix D.
    """
    sizes = list(dict.fromkeys(sizes))
    _check(sizes, seeds, steps, parameterization)
    inputs = workload.draw(seeds[0], 0)[0]
    needed = [*sizes, *([base] if parameterization == "plan" else [])]
    anatomies = dict(planning.pop("anatomies", {}))
    for size in needed:
        if size not in anatomies:
            anatomies[size] = dissect(workload.build, inputs, size=size, roles=planning.get("roles"))
    tracks: list[Track] = []
    for size in sizes:
        made = plan_for(
            workload.build,
            inputs,
            size,
            parameterization=parameterization,
            base=base,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            anatomies=anatomies,
            **planning,
        )
        made = with_zero_readout(made)
        lone = lone_branches(anatomies[size], [anatomies[one] for one in sizes if one.depth != size.depth])
        for seed in seeds:
            if progress is not None:
                progress(f"{workload.name} {size}, seed {seed}", len(tracks) / len(sizes) / len(seeds))
            tracks.append(follow(workload, made, seed=seed, steps=steps, device=device, lone=lone))
    return Coordinates(parameterization, made.optimizer_name, lr, base, steps, tuple(tracks))


def _check(sizes: Sequence[Size], seeds: Sequence[int], steps: int, parameterization: str) -> None:
    for size in sizes:
        if not isinstance(size, Size):
            raise UseError(f"sizes holds {size!r}: give Sizes, for example [Size(64, 4), Size(256, 4)]")
    if not any(len({_other(size, axis) for size in sizes}) < len(sizes) for axis in AXES):
        raise UseError(
            f"sizes are {', '.join(map(str, sizes))}: give at least two of equal depth, to compare widths, "
            "or two of equal width, to compare depths"
        )
    if not seeds:
        raise UseError("seeds is empty: give at least one; with three, slopes have intervals")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UseError(f"steps is {steps!r}: it has to be a whole number of at least 1")
    if parameterization not in PARAMETERIZATIONS:
        raise UseError(f"parameterization is {parameterization!r}: it is {' or '.join(PARAMETERIZATIONS)}")


def _other(size: Size, axis: str) -> int:
    return size.depth if axis == "width" else size.width
