"""All exhibits: those in the list `EXHIBITS` of every module in this folder, which is a family."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

from .exhibit import Exhibit


@cache
def families() -> dict[str, list[Exhibit]]:
    """By family."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    found: dict[str, list[Exhibit]] = {
        file.stem.replace("_", " "): importlib.import_module(f".{file.stem}", __package__).EXHIBITS
        for file in files
        if re.search(r"^EXHIBITS\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    names = [one.name for family in found.values() for one in family]
    assert len(set(names)) == len(names), f"a name is there twice: {sorted(names)}"
    return found


def exhibits() -> list[Exhibit]:
    """All of them."""
    return [one for family in families().values() for one in family]
