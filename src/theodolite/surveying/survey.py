"""`survey`: run every section on one workload, and collect the findings."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

import theodolite
from theodolite.anatomy import Anatomy, UnclassifiedError
from theodolite.anatomy.part import Role
from theodolite.core.building import one_thread, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import plain, read_dataclass
from theodolite.core.progress import Progress, silent
from theodolite.core.size import Size
from theodolite.optimizers.horizon import UNCHANGED, Horizon
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import LEVELS, Finding, Level
from theodolite.surveying.not_finite import find_not_finite
from theodolite.surveying.section import Section, crashed, find_sections
from theodolite.surveying.trials import Untried
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up


@dataclass(frozen=True)
class Survey(Result):
    """What was found, about what, with which versions, in how many seconds. Made by `survey`."""

    kind: ClassVar[str] = "survey"
    loads: ClassVar[bool] = True

    workload: str
    size: Size
    seed: int
    deep: bool
    date: str
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    """By section, in the order in which they ran."""
    findings: tuple[Finding, ...]
    anatomy: Anatomy | None
    """None if the network could not be dissected."""

    def at(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    @property
    def ranked(self) -> tuple[Finding, ...]:
        """The findings, most serious first."""
        return tuple(sorted(self.findings, key=lambda finding: -LEVELS.index(finding.level)))

    @property
    def verdict(self) -> str:
        """One sentence: can this be scaled?"""
        fails, warns, notes = self.at("fail"), self.at("warn"), self.at("note")
        errors = self.at("error")
        made = len(self.findings) - len(errors)
        missing = f" {counted(len(errors), 'check')} could not be made." if errors else ""
        if fails:
            return f"{self.workload} cannot be scaled as it is: {_named(fails)}.{missing}"
        if warns:
            return f"{self.workload} should be fixed before it is scaled: {_named(warns)}.{missing}"
        if errors and not made:
            return f"Nothing is known about {self.workload}:{missing}"
        if not made:
            return f"Nothing is known about {self.workload}: none of these sections has a check for it."
        known = f"; read {counted(len(notes), 'note')} first" if notes else ""
        return f"{self.workload} can be scaled: {counted(made, 'check')} found no problem{known}.{missing}"

    title = verdict

    @property
    def facts(self) -> str:
        """What was surveyed, in one line."""
        said = f"{self.workload} at {self.size} (width × depth)"
        if self.anatomy is not None:
            said += f" · {self.anatomy.num_parameters:,} parameters in {len(self.anatomy)} tensors"
        return said

    def blocks(self) -> Iterator[Block]:
        """The verdict, then every finding, most serious first, each with its remedy."""
        yield f"{self.verdict}\n{self.facts}"
        rows: list[tuple[str, str, str]] = []
        for finding in self.ranked:
            rows.append((finding.level, finding.code, finding.sentence))
            if finding.remedy and finding.level != "ok":
                rows.append(("", "", f"→ {finding.remedy}"))
        yield Table(("level", "code", "finding"), rows)

    def table(self) -> Table:
        """One row for each finding."""
        columns = ("section", "code", "level", "title", "sentence", "remedy")
        return Table(columns, [[getattr(one, name) for name in columns] for one in self.findings])

    def page(self) -> str:
        """The survey's own page: findings with evidence, and a drawing of the network."""
        from theodolite.surveying.page import page  # jinja2 and plotly are slow to import

        return page(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values, and the verdict."""
        return plain(dataclasses.replace(self, findings=(), anatomy=None)) | {
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "anatomy": None if self.anatomy is None else self.anatomy.to_dict(),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The survey from what `to_dict` gave."""
        facts = {key: value for key, value in content.items() if key != "verdict"}
        findings, anatomy = facts.get("findings"), facts.get("anatomy")
        if not isinstance(findings, list):
            raise UseError("the survey has no list of findings")
        bare: Self = read_dataclass(cls, {**facts, "findings": [], "anatomy": None}, "the survey")
        return dataclasses.replace(
            bare,
            findings=tuple(map(Finding.from_dict, findings)),
            anatomy=None if anatomy is None else Anatomy.from_dict(anatomy),
        )


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
    to: Size | None = None,
    horizon: Horizon | str = UNCHANGED,
    progress: Progress | None = None,
) -> Survey:
    """Survey a workload: can this network be scaled, and what should be fixed first?

    Args:
        workload: a Workload, or its name: `"gpt-sotu"`, `"file.py:name"`, `"hf:config.json"`,
            `"diffusers:config.json"`.
        size: the size to survey; the workload's own by default.
        only: names of the sections to run; all by default.
        skip: names of the sections to leave out.
        deep: spend minutes instead of seconds, for better answers.
        seed: of the batch and of every model that is built.
        roles: roles of tensors that `dissect` cannot classify, by name pattern.
        to: the size that it will be scaled to, with batch and tokens, if you know it (TH210).
        horizon: the rule for batch and tokens that you will plan with.
        progress: called with a title and the fraction done.

    A section that crashes becomes a finding (TH001) without effect on the verdict; the others still run. An
    error in the workload or in the arguments raises UseError. Random number generators keep their states.

    >>> import theodolite as th
    >>> th.survey("mlp-mixture", only=["norms"]).findings[0].code
    'TH102'
    """
    chosen = _choose(find_sections(), only, skip)
    if not isinstance(workload, Workload | str):
        raise UseError(
            f"a survey takes a Workload or the name of one, not {type(workload).__name__}: "
            "theodolite.Workload(name, build, batch, loss)"
        )
    workload = look_up(workload) if isinstance(workload, str) else workload
    context = SurveyContext(workload, workload.size if size is None else size, seed, deep, roles, to, horizon)
    tell = progress or silent
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    # On a busy machine several threads wait for each other.
    threads = contextlib.nullcontext() if deep else one_thread()
    with untouched_randomness(seed), threads:
        tell("Workload", 0.0)
        sound = context.check()
        for done, (name, section) in enumerate(chosen.items(), start=1):
            tell(section.title, done / (len(chosen) + 1))
            started = time.perf_counter()
            with untouched_randomness(seed):
                for finding in _examine(section, context, sound):
                    # What stops several sections is reported once, by the first of them.
                    if all(finding != dataclasses.replace(said, section="") for said in findings):
                        findings.append(dataclasses.replace(finding, section=name))
            seconds[name] = time.perf_counter() - started
        anatomy = _anatomy(context)
    tell("Done", 1.0)
    return Survey(
        workload=workload.name,
        size=context.size,
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


def _examine(section: Section, context: SurveyContext, sound: bool) -> Iterator[Finding]:
    """The section's findings; what stops it becomes the last of them."""
    try:
        if section.measures or not sound:
            with contextlib.suppress(Untried, UnclassifiedError):  # too large to be tried
                if bad := context.once(find_not_finite):
                    yield bad
                    if section.measures:
                        return
        yield from section.run(context)
    except UseError:
        raise
    except Exception as error:
        yield crashed(section.title, error)


def _anatomy(context: SurveyContext) -> Anatomy | None:
    try:
        return context.anatomy
    except Exception as error:  # already a finding of the section that asked
        if isinstance(error, UseError) and not isinstance(error, UnclassifiedError):
            raise
        return None


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
