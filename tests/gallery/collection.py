"""All exhibits: those in the list `EXHIBITS` of every module in this folder."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

from .exhibit import Exhibit


@cache
def _all() -> tuple[Exhibit, ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = [
        exhibit
        for file in files
        if re.search(r"^EXHIBITS\b", file.read_text(encoding="utf-8"), re.MULTILINE)
        for exhibit in importlib.import_module(f".{file.stem}", __package__).EXHIBITS
    ]
    names = [one.name for one in found]
    assert len(set(names)) == len(names), f"a name is there twice: {sorted(names)}"
    return tuple(found)


def exhibits() -> list[Exhibit]:
    """All of them, file by file."""
    return list(_all())
