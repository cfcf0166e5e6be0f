"""Conduct a survey: every section over one workload, into one Survey."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import theodolite
from theodolite.anatomy import Anatomy, UnclassifiedError
from theodolite.anatomy.part import Role
from theodolite.core.building import one_thread, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress
from theodolite.core.size import Size
from theodolite.surveying import not_finite
from theodolite.surveying.finding import LEVELS, Finding, Level
from theodolite.surveying.section import Section, find_sections
from theodolite.surveying.site import Site
from theodolite.surveying.stopped import crashed, unruled
from theodolite.surveying.trials import Untried
from theodolite.surveying.usable import check_usable
from theodolite.surveying.wording import counted
from theodolite.workloads import Workload

"""Called with what is being looked at and the fraction that is done."""


@dataclass(frozen=True)
class Survey:
    """What was found, about what, with which versions, in how many seconds."""

    workload: str
    size: Size
    seed: int
    deep: bool
    date: str
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    """By section, in the order in which they were examined."""
    findings: tuple[Finding, ...]
    anatomy: Anatomy | None
    """None where the network could not be dissected."""

    def at(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    @property
    def ranked(self) -> tuple[Finding, ...]:
        """The findings, the gravest first, otherwise as they came."""
        return tuple(sorted(self.findings, key=lambda finding: -LEVELS.index(finding.level)))

    @property
    def verdict(self) -> str:
        """One sentence: may this be scaled?"""
        fails, warns, notes = self.at("fail"), self.at("warn"), self.at("note")
        errors = self.at("error")
        made = len(self.findings) - len(errors)
        missing = f" {counted(len(errors), 'check')} could not be made." if errors else ""
        seen = f"as far as {counted(made, 'check')} can see"
        if fails:
            return f"{self.workload} cannot be scaled as it is: {_named(fails)}.{missing}"
        if warns:
            return f"{self.workload} is not yet fit to be scaled: {_named(warns)}.{missing}"
        if errors and not made:
            return f"Nothing is known of {self.workload}:{missing}"
        known = f", with {counted(len(notes), 'thing')} to know first" if notes else ""
        return f"{self.workload} is fit to be scaled, {seen}{known}.{missing}"

    def to_json(self) -> str:
        """Everything, as JSON."""
        facts: dict[str, Any] = {
            "workload": self.workload,
            "size": dataclasses.asdict(self.size),
            "seed": self.seed,
            "deep": self.deep,
            "date": self.date,
            "versions": dict(self.versions),
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "anatomy": json.loads(self.anatomy.to_json()) if self.anatomy is not None else None,
        }
        return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the page, and the same as JSON beside it (`survey.html`, `survey.json`)."""
        from theodolite.core.files import html_path, write_whole
        from theodolite.surveying.page import page

        path = html_path(path)
        as_page, as_data = page(self), self.to_json()
        write_whole(path, as_page)
        write_whole(path.with_suffix(".json"), as_data)
        return path

    def __str__(self) -> str:
        from theodolite.surveying.terminal import text

        return text(self)


@exclusive()
def survey(
    workload: Workload | str,
    *,
    size: Size | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    deep: bool = False,
    seed: int = 0,
    roles: Mapping[str, Role] | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Survey a workload: is this network fit to be scaled, and what is wrong with it?

    Args:
        workload: a Workload, or what names one: `"gpt-sotu"`, `"file.py:name"`, `"hf:config.json"`.
        size: the size to survey; the workload's own if None.
        only: names of the sections to examine; all if None.
        skip: names of the sections to leave out.
        deep: spend minutes where seconds would give a rougher answer.
        seed: of the batch and of every model that is built.
        roles: what `dissect` is to take tensors for that it cannot classify, by pattern of their names.
        progress: called with a title and the fraction done.

    A section that crashes becomes a finding (TH001) that the verdict does not rest on, and the others go on.
    What is wrong with the workload itself, or with what is asked of it, raises UseError. No random number
    generator is moved.
    """
    chosen = _choose(find_sections(), only, skip)
    workload = _resolve(workload)
    site = Site(workload, workload.size if size is None else size, seed, deep, roles)
    tell = progress or (lambda title, done: None)
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    threads = (
        contextlib.nullcontext() if deep else one_thread()
    )  # on a busy machine several wait for each other
    with untouched_randomness(seed), threads:
        tell("Workload", 0.0)
        sound = check_usable(site)
        for done, (name, section) in enumerate(chosen.items(), start=1):
            tell(section.title, done / (len(chosen) + 1))
            started = time.perf_counter()
            with untouched_randomness(seed):
                for finding in _examine(section, site, sound):
                    # What stops several sections is said once, by the first of them.
                    if all(finding != dataclasses.replace(said, section="") for said in findings):
                        findings.append(dataclasses.replace(finding, section=name))
            seconds[name] = time.perf_counter() - started
        anatomy = _anatomy(site)
    tell("Done", 1.0)
    return Survey(
        workload=workload.name,
        size=site.size,
        seed=seed,
        deep=deep,
        date=datetime.datetime.now().astimezone().date().isoformat(),
        versions={
            "theodolite": theodolite.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        seconds=seconds,
        findings=tuple(findings),
        anatomy=anatomy,
    )


def _examine(section: Section, site: Site, sound: bool) -> Iterator[Finding]:
    """The section's findings; what stops it becomes the last of them."""
    try:
        if section.measures or not sound:
            with contextlib.suppress(Untried):  # too large to be tried: nothing is known then
                if not site.start.finite:
                    yield not_finite.finding(site, site.start)
                    if section.measures:
                        return
        yield from section.examine(site)
    except UnclassifiedError as error:
        yield unruled(error)
    except UseError:
        raise
    except Exception as error:
        yield crashed(section.title, error)


def _anatomy(site: Site) -> Anatomy | None:
    try:
        return site.anatomy
    except UnclassifiedError:
        return None
    except UseError:
        raise
    except Exception:  # already a finding of the section that asked
        return None


def _resolve(workload: Workload | str) -> Workload:
    if isinstance(workload, str):
        from theodolite.workloads import workload as look_up

        return look_up(workload)
    if not isinstance(workload, Workload):
        raise UseError(
            f"a survey takes a Workload or the name of one, not {type(workload).__name__}: "
            "theodolite.Workload(name, build, batch, loss)"
        )
    return workload


def _choose(
    known: Mapping[str, Section], only: Iterable[str] | None, skip: Iterable[str] | None
) -> dict[str, Section]:
    wanted = list(known) if only is None else _names(only)
    unwanted = [] if skip is None else _names(skip)
    for name in (*wanted, *unwanted):
        if name not in known:
            raise UseError(f"there is no section {name!r}; the sections are {', '.join(known)}")
    chosen = {name: section for name, section in known.items() if name in wanted and name not in unwanted}
    if not chosen:
        raise UseError(f"no section is left to examine; the sections are {', '.join(known)}")
    return chosen


def _names(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _named(findings: Iterable[Finding]) -> str:
    titles = [f"{finding.title[0].lower()}{finding.title[1:]} ({finding.code})" for finding in findings]
    return ", ".join(dict.fromkeys(titles))
