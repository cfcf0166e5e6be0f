"""`python -m tests.gallery`: hold dissect and plan against the truth about every network of the gallery.

It prints for each whether roles and branches are right, how many modules were measured, and the slopes that
are farthest from 0. With --write it writes docs/gallery.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import theodolite
from theodolite import UseError, Workload
from theodolite.workloads import OutputLoss

from .collection import exhibits, families
from .exhibit import Exhibit
from .measuring import Slope, Tell, over_depth, over_width, wrong_roles

PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"


@dataclass
class Result:
    """What was found about one exhibit."""

    exhibit: Exhibit
    family: str
    wrong: list[str] = field(default_factory=list)
    """What dissect got wrong."""
    failed: str = ""
    """Why there is no plan, if there is none."""
    width: list[Slope] = field(default_factory=list)
    depth: list[Slope] = field(default_factory=list)
    surveyed: str = "–"
    """Seconds of a survey, or why there are none."""

    @property
    def right(self) -> bool:
        """Are roles, branches and all slopes right?"""
        slopes = [*self.width, *self.depth]
        return not self.wrong and not self.failed and bool(slopes) and all(one.right for one in slopes)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.gallery", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="one exhibit")
    parser.add_argument(
        "--survey", action="store_true", help="survey each network too, and say how long it took"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pairs = [(family, one) for family, some in families().items() for one in some]
    if chosen.only:
        pairs = [(family, one) for family, one in pairs if one.name == chosen.only]
        if not pairs or chosen.write:
            parser.error("--only takes the name of one exhibit, and goes without --write")
    results = []
    for result in _examined(pairs, chosen.survey, chosen.workers):
        results.append(result)
        print(*_report(result), sep="\n", flush=True)
    print(_count(results))
    if chosen.write:
        command = " ".join(["python -m tests.gallery", *arguments])
        PAGE.write_text(page(results, command), encoding="utf-8")
    return 0 if all(one.right for one in results) else 1


def _examined(pairs: Sequence[tuple[str, Exhibit]], survey: bool, workers: int) -> Iterator[Result]:
    """The results in the order of the exhibits."""
    if workers == 1:
        for done, (family, exhibit) in enumerate(pairs, start=1):
            tell = _progress(f"{done}/{len(pairs)} ")
            result = examine(exhibit, family, survey=survey, tell=tell)
            tell("")
            yield result
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        found = pool.map(_examine_named, [one.name for _, one in pairs], [survey] * len(pairs))
        for (family, exhibit), rest in zip(pairs, found, strict=True):
            yield Result(exhibit, family, *rest)


def _examine_named(name: str, survey: bool) -> tuple[Any, ...]:
    """What is found about an exhibit, in a process of its own."""
    torch.set_num_threads(1)
    exhibit = next(one for one in exhibits() if one.name == name)
    found = examine(exhibit, "", survey=survey, tell=lambda _: None)
    return found.wrong, found.failed, found.width, found.depth, found.surveyed


def examine(exhibit: Exhibit, family: str, *, survey: bool, tell: Tell) -> Result:
    """Roles, slopes and, if asked for, a survey."""
    result = Result(exhibit, family)
    tell(f"{exhibit.name}: roles")
    try:
        result.wrong = wrong_roles(exhibit)
        result.width = over_width(exhibit, tell=tell)
        result.depth = over_depth(exhibit, tell=tell)
    except Exception as error:  # one exhibit that fails is a result
        result.failed = f"{type(error).__name__}: {error}"
    if survey:
        tell(f"{exhibit.name}: survey")
        result.surveyed = _survey(exhibit)
    return result


def page(results: Sequence[Result], command: str) -> str:
    """docs/gallery.md."""
    rows = [
        f"| {one.exhibit.name} | {one.family} | {_dissected(one)} | {'no' if one.failed else 'yes'} "
        f"| {_worst(one.width)} | {_worst(one.depth)} | {one.surveyed} | {one.exhibit.shows} |"
        for one in results
    ]
    reasons = [
        f"| {one.exhibit.name} | `{pattern}` | {reason} |"
        for one in results
        for pattern, reason in one.exhibit.exceptions.items()
    ]
    wrong = [f"- {one.exhibit.name}: {fault}" for one in results for fault in _faults(one)]
    return "\n".join(
        [
            HEAD.format(command=command, count=_count(results)),
            "| model | family | dissect | plan | over width | over depth | survey, s | why it is here |",
            "|---|---|---|---|---:|---:|---:|---|",
            *rows,
            *(["", "## What is wrong", "", *wrong] if wrong else []),
            *(
                ["", REASONS, "", "| model | modules | reason |", "|---|---|---|", *reasons]
                if reasons
                else []
            ),
            "",
        ]
    )


HEAD = """# Gallery

Networks of many families, each written from its definition in `tests/gallery/`, with known answers: the role
of every tensor and the number of residual branches. Under a plan, every module should learn by the same
amount at every size. The gallery tests that Theodolite gets both right; look here for an architecture like
yours.

Each network is planned with `theodolite.plan` from its smallest size, built, and trained for three steps.
Forward hooks, independent of Theodolite, measure how much the output of each module has changed on a fixed
batch. The slope of log₂ RMS(change) against log₂ width is 0 in theory; a slope within ±0.15 counts as right.
Over depth it is measured for modules outside of the repeated blocks, for the last block and for the
network's output. The table shows the slope that is farthest from 0, averaged over three seeds.

Sizes, learning rates, initial scales and batches of each network were chosen so that finite-size effects
stay below this limit. At other widths, with fresh random batches or with branches that start large, many
slopes are larger, and become smaller with each doubling. So the table shows that no tensor is planned
wrongly. It does not measure how soon a network reaches its limit.

<!-- no-run -->
```console
$ {command}
```

{count}
"""
REASONS = """## Slopes that are not 0 for a reason

These modules are measured but not judged."""


def _report(result: Result) -> Iterator[str]:
    worst = f"{_worst(result.width)} over width, {_worst(result.depth)} over depth"
    said = "right" if result.right else "WRONG"
    survey = "" if result.surveyed == "–" else f", survey {result.surveyed} s"
    modules = f"{len(result.width)} modules"
    yield f"{said}  {result.exhibit.name}: dissect {_dissected(result)}, {modules}, {worst}{survey}"
    yield from (f"       {fault}" for fault in _faults(result))


def _faults(result: Result) -> Iterator[str]:
    yield from result.wrong
    if result.failed:
        yield result.failed
    for over, slopes in (("width", result.width), ("depth", result.depth)):
        for one in slopes:
            if not one.right:
                yield f"{one.module or 'the output'}: slope {one.slope:+.2f} ± {one.error:.2f} over {over}"


def _dissected(result: Result) -> str:
    return (
        f"{len(result.wrong)} wrong"
        if result.wrong
        else "no"
        if result.failed and not result.width
        else "right"
    )


def _worst(slopes: Iterable[Slope]) -> str:
    judged = [one.slope for one in slopes if one.reason is None]
    if any(math.isnan(slope) for slope in judged):
        return "nan"
    return f"{max(judged, key=abs):+.2f}".replace("-", "−") if judged else "–"


def _count(results: Sequence[Result]) -> str:
    return f"{sum(one.right for one in results)} of {len(results)} are right."


def _survey(exhibit: Exhibit) -> str:
    workload = Workload(
        exhibit.name,
        exhibit.build,
        lambda seed, step: exhibit.batch(1000 * seed + step),
        OutputLoss(exhibit.loss),
        size=exhibit.base,
    )
    started = time.perf_counter()
    try:
        theodolite.survey(workload, roles=dict(exhibit.hints) or None)
    except UseError as error:
        return f"refused: {error}"
    return f"{time.perf_counter() - started:.0f}"


def _progress(prefix: str) -> Tell:
    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{prefix + text if text else ''}", end="", file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
