"""Is the parameterization that the workload's own optimizer has right, where the workload names it?"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.core.errors import UseError
from theodolite.planning.factory import check_pure
from theodolite.surveying.auditing.audit import audited_sizes, held_against_rules, read_at
from theodolite.surveying.auditing.verdicts import DECAY, MULTIPLIER, START, STEP
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding
from theodolite.surveying.section import Section, measuring


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH206, TH207, TH208 and TH209, by reading alone; none if the workload names no optimizer."""
    make = context.workload.optimizer
    if make is None:
        return
    _ = context.anatomy
    with measuring(STEP, UseError, missing=(START, DECAY, MULTIPLIER)):
        check_pure(make, context.workload.build, context.size)
        sizes = audited_sizes(context)
        readings = {size: read_at(context, make, size) for size in sizes.all}
        found = held_against_rules(context, make, sizes, readings)
    yield from found.findings


section = Section("Own parameterization", 55, examine, measures=True)
