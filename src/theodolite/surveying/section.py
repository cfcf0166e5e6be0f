"""The sections of a survey: one file each in `sections/`, found by looking there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from theodolite.surveying.finding import Finding
from theodolite.surveying.site import Site


@dataclass(frozen=True)
class Section:
    """A file in `sections/` holds one of these under the name `section`; the file's name is the section's."""

    title: str
    order: int
    """Sections are examined and reported from the lowest number to the highest."""
    examine: Callable[[Site], Iterable[Finding]]
    measures: bool = False
    """Does it measure on data or on weights? Then numbers that are not finite stop it (TH108)."""


def find_sections() -> dict[str, Section]:
    """Every section there is, by name, in order.

    >>> list(find_sections())
    ['anatomy', 'growth', 'norms', 'decay', 'gains', 'initialisation', 'stream', 'plan', 'coordinates',
     'spectral', 'curvature', 'transfer', 'steps', 'depth', 'schedule']
    """
    from theodolite.surveying import sections as folder

    found: dict[str, Section] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        section = importlib.import_module(f"{folder.__name__}.{module.name}").section
        if not isinstance(section, Section):
            raise TypeError(f"{folder.__name__}.{module.name}.section is {section!r}, not a Section")
        found[module.name] = section
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))
