"""What a search for the learning rate found: an interval, a best value with its spread, and the curves."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from theodolite.core.files import html_path, plain, write_whole
from theodolite.lr_finder.legs import Curve

SHARE = 0.1
"""Of the greatest progress: what a rate must make to be in the interval."""


@dataclass(frozen=True, eq=False)
class LrRange:
    """Learning rates between which training goes forward. Made by `find_lr`.

    A rate stands for those of all groups, whose ratios are kept: it is `factor` times what was given.
    """

    name: str
    """What was trained, …"""
    optimizer: str
    """… by what, …"""
    steps: int
    """… for so many steps at each rate."""
    curves: tuple[Curve, ...]
    """One for each seed."""
    base: float
    """The rate that the groups' own stand for: the plan's, or the highest of them."""
    groups: Mapping[str, float]
    """The learning rates as they were given, by group."""
    low: float | None
    """The lowest rate that makes a tenth of the greatest progress, for every seed; None if none does."""
    high: float | None
    """The highest rate below the first that raises the loss, the lowest of all seeds."""
    best: float | None
    """Where the loss after these steps is lowest: the geometric mean over seeds."""
    spread: tuple[float, float] | None
    """The lowest and the highest best rate of a seed."""
    found: bool
    """Are both ends inside of what was tried?"""
    status: str
    """If not, why, and what to do."""

    @property
    def factor(self) -> float | None:
        """What to multiply the given learning rates by to have the best ones."""
        return None if self.best is None else self.best / self.base

    @property
    def rates(self) -> dict[str, float]:
        """The best learning rate of each group; empty where there is none."""
        factor = self.factor
        return {} if factor is None else {group: lr * factor for group, lr in self.groups.items()}

    def holds(self, rate: float) -> bool:
        """Does a rate lie in the interval?"""
        return self.low is not None and self.high is not None and self.low <= rate <= self.high

    def to_json(self) -> str:
        """Everything, as JSON."""
        facts = {"lr_range": self.name, **plain(self), "factor": self.factor, "rates": self.rates}
        return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the page, and the same as JSON beside it (`lr.html`, `lr.json`)."""
        from theodolite.lr_finder.page import page

        path = html_path(path, kind="learning-rate range")
        as_page, as_data = page(self), self.to_json()
        write_whole(path, as_page)
        write_whole(path.with_suffix(".json"), as_data)
        return path

    @property
    def sentence(self) -> str:
        """The interval in words."""
        if self.low is None or self.high is None or self.best is None or self.spread is None:
            return f"No learning rate for {self.name} with {self.optimizer}: {self.status}"
        seeds = len(self.curves)
        said = f" ({self.spread[0]:.2g} to {self.spread[1]:.2g} over {seeds} seeds)" if seeds > 1 else ""
        return (
            f"{self.name} with {self.optimizer}: learning rates from {self.low:.2g} to {self.high:.2g}, "
            f"best {self.best:.2g}{said}"
        )

    def __str__(self) -> str:
        start = statistics.fmean(curve.start for curve in self.curves)
        lines = [self.sentence, f"loss after {self.steps} steps at one rate, from {start:.4g}:"]
        lines += [
            f"  {rate:>9.2e}  {'diverges' if math.isinf(mean) else format(mean, '8.4g')}  {mark}".rstrip()
            for rate, mean, mark in self._rows()
        ]
        if self.low is not None:
            lines.append(self.status)
        return "\n".join(lines)

    def _rows(self) -> list[tuple[float, float, str]]:
        """For every rate that all seeds tried: the mean loss after it, and whether it is in the interval."""
        by_seed = [{leg.rate: leg.loss for leg in curve.legs} for curve in self.curves]
        shared = sorted(set.intersection(*(set(losses) for losses in by_seed)))
        return [
            (
                rate,
                statistics.fmean(losses[rate] for losses in by_seed),
                "in the interval" if self.holds(rate) else "",
            )
            for rate in shared
        ]


def read_off(
    name: str,
    optimizer: str,
    steps: int,
    curves: Sequence[Curve],
    base: float,
    groups: Mapping[str, float],
) -> LrRange:
    """The interval that all seeds agree on, or the reason why there is none."""
    known = LrRange(
        name, optimizer, steps, tuple(curves), base, dict(groups), None, None, None, None, False, ""
    )
    first, last = (sorted({leg.rate for leg in curves[0].legs})[at] for at in (0, -1))
    if any(curve.high is None for curve in curves):
        return dataclasses.replace(
            known,
            status=f"already the lowest rate, {first:.2g}, raises the loss. Try lower ones (low=…)",
        )
    if not all(curve.falls for curve in curves):
        num = sum(not curve.falls for curve in curves)
        whom = "" if num == len(curves) == 1 else f" for {num} of {len(curves)} seeds"
        return dataclasses.replace(
            known,
            status=f"the loss never falls by more than its noise{whom}. Take more steps (steps=…), larger "
            "batches, or look at the data and the loss",
        )
    bests = [curve.best for curve in curves]
    low = max(curve.lowest(SHARE) for curve in curves)
    high = min(curve.high for curve in curves if curve.high is not None)
    if low > high:
        return dataclasses.replace(
            known,
            status=f"the seeds do not agree: one needs {low:.2g}, another does not bear {high:.2g}. Take "
            "more steps (steps=…)",
        )
    open_below, open_above = low == first, not all(curve.risen for curve in curves)
    status = "both ends found"
    if open_above:
        status = f"open above: not even {last:.2g} raises the loss. Try higher rates (high=…)"
    elif open_below:
        status = f"open below: already {first:.2g} makes a tenth of the progress. Try lower rates (low=…)"
    return dataclasses.replace(
        known,
        low=low,
        high=high,
        best=min(max(statistics.geometric_mean(bests), low), high),
        spread=(min(bests), max(bests)),
        found=not open_below and not open_above,
        status=status,
    )
