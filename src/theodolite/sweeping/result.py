"""A Sweep: what was run, where each size has its optimum, and what that says about transfer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.core.errors import UseError
from theodolite.core.files import plain
from theodolite.core.size import Size
from theodolite.present.figure import Figure
from theodolite.sweeping.curves import Row
from theodolite.sweeping.families import Best, Family, analyse, bests
from theodolite.sweeping.found import of_the_best
from theodolite.sweeping.sentences import movement_sentence
from theodolite.sweeping.table import bests_table, family_table

if TYPE_CHECKING:
    from theodolite.fleet.driver import RunReport

ALWAYS = frozenset({"size", "seed", "optimizer", "parameterization"})
"""Axes of every sweep, which have a place of their own in it."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """Runs over sizes and a swept quantity, and what they say. Made by `theodolite.sweep` or `Sweep.read`."""

    workload: str
    base: Size
    over: str
    """The swept quantity: the learning rate, if nothing else was said."""
    spec: Mapping[str, Any]
    """What all runs share, and the names of the axes."""
    rows: tuple[Row, ...]
    """Of the ledger, one for each run."""
    families: tuple[Family, ...]
    """One for each optimizer, parameterization and combination of further axes."""
    bests: tuple[Best, ...] = ()
    """By size, the best of all axes together; none where the swept quantity is the only one."""
    report: RunReport | None = None
    """What was run now; None where nothing was."""

    @staticmethod
    def read(folder: str | Path, *, over: str = "lr") -> Sweep:
        """What the ledger in a folder holds, without running anything."""
        from theodolite.fleet.ledger import Ledger

        with Ledger.read(folder) as ledger:
            return Sweep.of(ledger.rows(), ledger.spec, over=over)

    @staticmethod
    def of(
        rows: Sequence[Row], spec: Mapping[str, Any], *, over: str = "lr", report: RunReport | None = None
    ) -> Sweep:
        """The sweep that the rows and the spec of a ledger describe."""
        if spec.get("study") != "sweep":
            raise UseError("this ledger is not that of a sweep: it was made by something else")
        if over not in set(spec["axes"]) - ALWAYS:
            known = ", ".join(sorted(set(spec["axes"]) - ALWAYS))
            raise UseError(f"over is {over!r}, which is no axis of this sweep: it has {known}")
        axes = [name for name in spec["axes"] if name not in ALWAYS and name != over]
        base = Size(*spec["base"])
        chosen = of_the_best(rows, base, axes) if spec["search"] else rows
        families = analyse(chosen, base=base, over=over, axes=axes) if chosen else ()
        return Sweep(
            workload=spec["workload"],
            base=base,
            over=over,
            spec=spec,
            rows=tuple(rows),
            families=families,
            bests=bests(families) if axes else (),
            report=report,
        )

    @property
    def verdict(self) -> str:
        """One sentence: does the optimum stay where it is?"""
        return movement_sentence(self.families, f"{self.over} of {self.workload}", str(self.base))

    def figures(self) -> tuple[Figure, ...]:
        """Loss against the swept quantity, one curve for each size."""
        from theodolite.sweeping.pictures import figures

        return figures(self.families)

    def to_json(self) -> str:
        """The spec and all that was found, as JSON; a number that is not finite is null."""
        found = {"sweep": self.spec, "over": self.over, "verdict": self.verdict}
        tables = {"families": self.families, "bests": self.bests}
        return json.dumps(plain({**found, **tables}), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained page, and the same as JSON beside it (`sweep.html`, `sweep.json`)."""
        from theodolite.core.files import html_path, write_whole
        from theodolite.sweeping.page import page

        path = html_path(path, kind="sweep")
        write_whole(path, page(self.workload, self.verdict, self.families, self.bests))
        write_whole(path.with_suffix(".json"), self.to_json())
        return path

    def __str__(self) -> str:
        if not self.families:
            return f"Sweep of {self.workload}: no run has a result yet."
        tables = [family_table(family) for family in self.families]
        return "\n\n".join([*tables, bests_table(self.bests)] if self.bests else tables)
