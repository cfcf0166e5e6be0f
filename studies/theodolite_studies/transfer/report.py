"""What the transfer study found, from its ledger or its summary: claims, tables, figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.size import Size
from theodolite.present.text import signed
from theodolite.sweeping import Family, Optimum, OptimumDrift, analyse
from theodolite.sweeping.curves import Row
from theodolite.sweeping.figures import draw
from theodolite.sweeping.transfer import ALONG
from theodolite_studies.transfer.study import BARE, FULL, SMALL, Setting, read_rows

MOST = 1.0
"""Octaves by which the optimum of a plan may move."""
DEEP_ENOUGH = 8
"""By how much deeper a network without norms must be for a claim about depth."""
BARE_NETWORKS = (BARE, "gpt-none")
PAPER = {
    ("muon-kimi", "plan", "width"): "2^-7 from 128 to 1024",
    ("muon-kimi", "standard", "width"): "2^-6 to 2^-8",
    ("muon-kimi", "plan", "depth"): "2^-7 from 4 to 64",
    ("muon-kimi", "standard", "depth"): "2^-7 from 4 to 64",
    ("bare", "plan", "depth"): "trains to 256",
    ("bare", "standard", "depth"): "fails at 256",
}
"""Figure 1 and tables 8 to 13, which have Muon-Kimi alone, over the range that is run here."""


@dataclass(frozen=True)
class Claim:
    """One thing that is claimed, and what was seen."""

    claim: str
    paper: str
    here: str
    holds: bool


def report(path: str | Path) -> str:
    """Draw a figure for each network and optimizer beside the file or in the folder, and give the tables."""
    path = Path(path).expanduser()
    rows = read_rows(path)
    if not rows:
        raise UseError(f"{path} holds no runs yet: run the study first")
    setting = setting_of(rows)
    found = list(claims(rows, setting))
    lines = [table(found), "", f"{sum(claim.holds for claim in found)} of {len(found)} claims hold."]
    for workload, families in by_network(rows, setting).items():
        for family in families:
            lines += ["", f"{workload}: {family}"]
    return "\n".join([*lines, "", f"Figures: {', '.join(drawn(rows, setting, path))}"])


def setting_of(rows: Sequence[Row]) -> Setting:
    """The setting whose networks the rows are of."""
    return SMALL if any(row["workload"] in SMALL.workloads for row in rows) else FULL


def by_network(rows: Sequence[Row], setting: Setting) -> Mapping[str, tuple[Family, ...]]:
    """What the rows say, by workload."""
    names = dict.fromkeys(row["workload"] for row in rows)
    return {
        name: analyse([row for row in rows if row["workload"] == name], base=setting.base) for name in names
    }


def claims(rows: Sequence[Row], setting: Setting) -> Iterator[Claim]:
    """What was claimed before anything was run, as far as there are runs to tell."""
    for workload, families in by_network(rows, setting).items():
        pairs: dict[str, dict[str, Family]] = {}
        for family in families:
            pairs.setdefault(family.optimizer, {})[family.parameterization] = family
        for pair in pairs.values():
            if "plan" not in pair or "standard" not in pair:
                continue
            if workload in BARE_NETWORKS:
                yield from _without_norms(pair["plan"], pair["standard"])
            else:
                yield from _with_norms(pair["plan"], pair["standard"])


def _with_norms(plan: Family, standard: Family) -> Iterator[Claim]:
    name = plan.optimizer
    for along in ALONG:
        mine, other = plan.drift(along), standard.drift(along)
        if mine is None or other is None:
            continue
        yield Claim(
            f"{name}, {along}: the plan's optimum moves at most one octave",
            PAPER.get((name, "plan", along), "–"),
            _moved(mine, plan),
            mine.movement <= MOST and not mine.bounded,
        )
        yield Claim(
            f"{name}, {along}: the standard one's moves more, beyond noise",
            PAPER.get((name, "standard", along), "–"),
            _moved(other, standard),
            other.movement > mine.movement and _apart(mine, other),
        )
    if plan.changes:
        worst = max(plan.changes, key=lambda change: change.change)
        yield Claim(
            f"{name}: wider and deeper is never worse under the plan",
            "lower loss throughout" if name == "muon-kimi" else "–",
            f"at worst {signed(worst.change, 3)}, {worst.smaller} to {worst.larger}",
            plan.never_worse,
        )


def _apart(one: OptimumDrift, other: OptimumDrift) -> bool:
    """Do the intervals of two drifts leave each other alone? Those that are not known do not."""
    if not (one.interval.known and other.interval.known):
        return False
    return one.interval.high < other.interval.low or other.interval.high < one.interval.low


def _without_norms(plan: Family, standard: Family) -> Iterator[Claim]:
    """Depth without norms: at which learning rates the deepest network still trains, and how well."""
    name, (first, last) = plan.optimizer, _ends(plan)
    if last.depth < DEEP_ENOUGH * first.depth:
        return
    yield Claim(
        f"{name} without norms: under the plan deeper is never worse, with the base's learning rate",
        PAPER["bare", "plan", "depth"],
        f"{_loss(plan.optimum(first))} at {first}, {_loss(plan.optimum(last))} at {last}",
        plan.never_worse and math.isfinite(plan.optimum(last).loss),
    )
    lost = next((each for each in standard.transfers if each.size == last), None)
    fails = lost is None or not math.isfinite(lost.loss) or lost.lost > 0.1 * abs(lost.loss)
    own = standard.optimum(last)
    if not math.isfinite(own.loss):
        tried = next(curve.values for curve in standard.curves if curve.size == last)
        seen = f"diverged from 2^{math.log2(tried[0]):.0f} to 2^{math.log2(tried[-1]):.0f}, at {last}"
    else:
        there = f"{lost.loss:.3f}" if lost is not None and math.isfinite(lost.loss) else "diverged"
        seen = f"{there}; its own best {own.loss:.3f}, at {last}"
    yield Claim(
        f"{name} without norms: the standard one fails at the base's learning rate when deep",
        PAPER["bare", "standard", "depth"],
        seen,
        fails,
    )


def _ends(family: Family) -> tuple[Size, Size]:
    sizes = sorted(optimum.size for optimum in family.optima)
    return sizes[0], sizes[-1]


def _loss(optimum: Optimum) -> str:
    return f"{optimum.loss:.3f}" if math.isfinite(optimum.loss) else "diverged"


def _moved(drift: OptimumDrift, family: Family) -> str:
    """How far, and between which optima."""
    sizes = sorted(size for size in drift.sizes)
    first, last = (math.log2(family.optimum(size).value) for size in (sizes[0], sizes[-1]))
    least = "at least " if drift.bounded else ""
    return f"{least}{drift.movement:.2f} octaves, 2^{first:.2f} to 2^{last:.2f}"


def table(found: Sequence[Claim]) -> str:
    """claim | paper | here | holds."""
    cells = [("claim", "paper", "here", "holds")]
    cells += [(each.claim, each.paper, each.here, "yes" if each.holds else "no") for each in found]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
        for row in cells
    )


def drawn(rows: Sequence[Row], setting: Setting, path: Path) -> list[str]:
    """The names of the figures, which were written."""
    folder = path if path.is_dir() else path.parent
    stem = "transfer" if path.is_dir() else path.stem
    names = []
    for workload, families in by_network(rows, setting).items():
        for optimizer in dict.fromkeys(family.optimizer for family in families):
            mine = [row for row in rows if (row["workload"], row["optimizer"]) == (workload, optimizer)]
            bare = "-bare" if workload in BARE_NETWORKS else ""
            file = folder / f"{stem}-{optimizer}{bare}.svg"
            title = f"{optimizer}{', no norms' if bare else ''}: held-out loss against log2 of the base lr"
            write_whole(file, draw(mine, base=setting.base, optimizer=optimizer, title=title))
            names.append(file.name)
    return names
