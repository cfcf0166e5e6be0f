"""The public face of the library: docs/reference.md lists it, and is what this file makes of the code.

A change of a public name, of an argument or of a first sentence is seen in the diff of that page, which
`python -m tests.test_reference` writes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import theodolite as th

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Reference

Everything that is public, with the first sentence of its documentation; `help(name)` has the rest.
Results (marked †) print, show themselves in notebooks, and have `to_dict()`, `to_json()` and `save(path)`,
whose suffix chooses .json, .html or, where it is a table, .csv. Those marked ‡ are read back by `load(path)`.
"""


def generated() -> str:
    """The page."""
    names = [name for name in th.__all__ if not isinstance(getattr(th, name), ModuleType)]
    modules = [name for name in th.__all__ if isinstance(getattr(th, name), ModuleType)]
    parts = [HEAD, "## `theodolite`\n", *(entry(name, getattr(th, name)) for name in names)]
    for name in sorted(modules):
        module = getattr(th, name)
        parts += [f"\n## `theodolite.{name}`\n", f"{sentence(module)}\n"]
        parts += [entry(one, getattr(module, one)) for one in module.__all__]
    return "\n".join(parts) + "\n"


def entry(name: str, value: Any) -> str:
    """One public name: how it is called, what it is, and what a class has."""
    if isinstance(value, type):
        return f"- `{name}`{mark(value)}: {sentence(value)}{members(value)}"
    if inspect.isroutine(value):
        return f"- `{name}{parameters(value)}`: {sentence(value)}"
    return f"- `{name}`"


def parameters(function: Any) -> str:
    """Names of the parameters, with a * where they become keywords."""
    shown: list[str] = []
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in shown and one.VAR_POSITIONAL not in kinds:
            shown.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(f"{stars}{one.name}{'=…' if one.default is not one.empty else ''}")
    return f"({', '.join(shown)})"


def mark(value: type) -> str:
    """Is it a result, and can it be loaded?"""
    from theodolite.present.result import Result

    return "" if not issubclass(value, Result) else " ‡" if value.loads else " †"


def members(value: type) -> str:
    """What a class of ours has, beyond what all results have."""
    from theodolite.present.result import Result

    ours = [base for base in value.__mro__ if base.__module__.startswith("theodolite") and base is not Result]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    # By name: torch writes `step` into a class again when it makes the first optimizer of it.
    others = sorted({name for base in ours for name in vars(base)})
    names = dict.fromkeys([*(one.name for one in fields), *others])
    found = []
    for name in names:
        if name.startswith("_") or (issubclass(value, Result) and hasattr(Result, name)):
            continue
        one = inspect.getattr_static(value, name, None)
        if isinstance(one, staticmethod | classmethod):
            one = one.__func__
        called = parameters(one) if inspect.isfunction(one) else ""
        found.append(f"`{name}{re.sub(r'^[(](self|cls)(, )?', '(', called)}`")
    return f" Has {', '.join(found)}." if found else ""


def sentence(value: Any) -> str:
    """The first sentence of the documentation."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return (re.match(r".*?[.?!](?=\s|$)", text) or [text])[0]


def all_public() -> Iterator[tuple[str, Any]]:
    """Every public name with its value."""
    for name in th.__all__:
        value = getattr(th, name)
        yield name, value
        if isinstance(value, ModuleType):
            yield from ((f"{name}.{one}", getattr(value, one)) for one in value.__all__)


def test_the_page_lists_the_public_face_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == generated(), "python -m tests.test_reference writes it again"


def test_every_public_name_says_what_it_is() -> None:
    documented = [
        (name, one) for name, one in all_public() if isinstance(one, type) or inspect.isroutine(one)
    ]
    assert [name for name, one in documented if not sentence(one)] == []


def test_no_public_class_name_stands_for_two_things() -> None:
    package = Path(th.__file__).parent
    found: dict[str, list[str]] = {}
    for file in package.rglob("*.py"):
        for name in re.findall(r"^class ([A-Z]\w*)", file.read_text(encoding="utf-8"), re.M):
            found.setdefault(name, []).append(str(file.relative_to(package)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


if __name__ == "__main__":
    importlib.import_module("theodolite.present.result")
    PAGE.write_text(generated(), encoding="utf-8")
