"""Sections of a survey: one module each in `sections/`, found by listing that package."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from theodolite.anatomy import UnclassifiedError
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.surveying.budget import TooLong
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding
from theodolite.surveying.trials import Unplannable, Untried

ROLES = Check(
    "TH107",
    "A rule for every parameter",
    "Learning rate, weight decay and initialisation at a larger size follow from a tensor's role: whether it "
    "reads or writes the width, multiplies, or is added. Without a role, a tensor would be scaled by guess, "
    "and one wrong tensor is enough to move the optimal learning rate.",
)
PLANNABLE = Check(
    "TH204",
    "A plan for every tensor",
    "A plan absorbs the multiplier of every layer into its initialisation, learning rate and weight decay, "
    "and leaves the forward pass unchanged. It must know which tensors end a branch, which tensor at base "
    "size each one corresponds to, and where a tied embedding is read out. It does not guess.",
)
CRASHED = Check(
    "TH001",
    "A check that could not be made",
    "A check that did not run has neither passed nor failed, so it says nothing about the network. The other "
    "sections are not affected.",
)


@dataclass(frozen=True)
class Section:
    """A group of checks. A module in `sections/` defines one as `section`; its name is the module's."""

    title: str
    order: int
    """Sections run, and are reported, from the lowest number to the highest."""
    examine: Callable[[SurveyContext], Iterable[Finding]]
    measures: bool = False
    """Does it measure on data or weights? Then it is skipped if these are not finite (TH108)."""

    def run(self, context: SurveyContext) -> Iterator[Finding]:
        """Its findings. What stops it becomes the last one."""
        return attempt(self.examine(context))


def find_sections() -> dict[str, Section]:
    """All sections by name, in order.

    >>> list(find_sections())[:3]
    ['anatomy', 'growth', 'norms']
    """
    from theodolite.surveying import sections as folder

    found: dict[str, Section] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        section = importlib.import_module(f"{folder.__name__}.{module.name}").section
        if not isinstance(section, Section):
            raise TypeError(f"{folder.__name__}.{module.name}.section is {section!r}, not a Section")
        found[module.name] = section
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


class Unmeasured(Exception):
    """A check that cannot be made. Its finding is the last one of the section."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.sentence)
        self.finding = finding


@contextlib.contextmanager
def measuring(
    check: Check,
    errors: type[Exception] | tuple[type[Exception], ...] = UseError,
    *,
    missing: Sequence[Check] = (),
) -> Iterator[None]:
    """Report an error inside the block as a note of this check. `missing` names the checks lost with it."""
    try:
        yield
    except (UnclassifiedError, Untried):
        raise
    except errors as error:
        codes = " and ".join(one.code for one in missing)
        lost = f" {codes} {'is' if len(missing) == 1 else 'are'} missing too." if missing else ""
        remedy = (
            "Survey the network at a smaller size, or with --deep, which may take longer."
            if isinstance(error, TooLong)
            else "Fix what the message names, or skip the section."
        )
        sentence = f"This could not be measured: {reason(error)}.{lost}"
        raise Unmeasured(check.finding("note", sentence, remedy=remedy)) from error


def reason(error: Exception) -> str:
    """An error in one line, without a full stop; its type is named unless the caller can fix it."""
    text = " ".join(str(error).split()) if isinstance(error, UseError) else in_one_line(error)
    return text.rstrip(".")


def attempt(findings: Iterable[Finding]) -> Iterator[Finding]:
    """These findings. What stops them becomes the last one."""
    try:
        yield from findings
    except UnclassifiedError as error:
        yield ROLES.finding(
            "fail",
            f"The network could not be dissected. {reason(error)}.",
            title="Parameters outside any rule",
            remedy="State the tensor's role, as the message says: Workload(…, roles={pattern: role}), or on "
            "the command line --role pattern=role. Until then, findings that need the anatomy are missing.",
        )
    except Unplannable as error:
        yield PLANNABLE.finding(
            "fail",
            f"No plan can be made for this network. {reason(error)}.",
            title="Tensors that a plan cannot scale",
            remedy="Change what the message names. Until then, the checks that train under a plan are "
            "missing.",
        )
    except Untried as error:
        yield PLANNABLE.finding(
            "note",
            f"No small network could be trained: {reason(error)}. "
            "The checks that train under a plan are missing.",
            remedy="Survey the network at a smaller size, or with --deep, which allows larger networks.",
        )
    except Unmeasured as stopped:
        yield stopped.finding


def crashed(title: str, error: Exception) -> Finding:
    """TH001: a section that failed."""
    return CRASHED.finding(
        "error",
        f"The section “{title}” failed: {in_one_line(error)}",
        remedy="Please report it, together with the model's code, unless the message points to your model.",
    )
