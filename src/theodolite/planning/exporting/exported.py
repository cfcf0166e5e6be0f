"""`Exported`: a plan or parameter groups in the words of another program, as a text that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Protocol

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.planning.rows import PlanRow
from theodolite.present.result import Block, Html, Result, writable


class Exportable(Protocol):
    """What can be exported: a plan, or parameter groups."""

    @property
    def title(self) -> str:
        """One line that says what it is."""

    @property
    def rows(self) -> Mapping[str, PlanRow]:
        """By the name of a tensor, how it starts and is trained."""

    @property
    def optimizer_name(self) -> str:
        """The rule of the matrices, or of everything."""

    @property
    def lr(self) -> float:
        """The learning rate that all others are relative to."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Further options of the optimizer."""

    @property
    def vector_options(self) -> Mapping[str, Any]:
        """Further options of the optimizer of the vectors."""

    @property
    def multipliers(self) -> Mapping[str, float]:
        """By module: what its input is multiplied by."""


@dataclass(frozen=True)
class Content:
    """What is written: a source under the trainer's names."""

    title: str
    rows: Mapping[str, PlanRow]
    multipliers: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]]
    """By rule."""
    lr: float
    """That others are relative to."""
    weight_decay: float
    """That others are relative to."""
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> list[PlanRow]:
        """The rows of the tensors that are trained."""
        return [row for row in self.rows.values() if row.trained]

    @property
    def rules(self) -> list[str]:
        """The rules that occur, that of the matrices first."""
        found = dict.fromkeys(row.rule for row in self.trained)
        return [rule for rule in self.options if rule in found]

    @property
    def draws(self) -> bool:
        """Are there initial values to draw? Parameter groups leave them as they are."""
        return any(row.init.kind != "kept" for row in self.trained)

    def refuse_rules(self, who: str, known: Callable[[str], bool], they: str) -> None:
        """Refuse a rule that a format has no words for; `they` lists what it has."""
        for rule in self.rules:
            if not known(rule):
                raise UseError(
                    f"{who} has no optimizer for the rule {rule}: it can be given {they}. The formats csv, "
                    "markdown and yaml hold every rule"
                )

    def take(self, who: str, rule: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a rule with their usual values; refuse those that a format has no words for."""
        given = self.options[rule]
        for option, value in given.items():
            if option not in known:
                raise UseError(
                    f"the option {option}={value!r} of {rule} has no counterpart in {who}, which takes "
                    f"{', '.join(known) or 'none'}. Leave it out of the options, or export for torch"
                )
        return {option: given.get(option, usual) for option, usual in known.items()}


Write = Callable[[Content], tuple[str, Sequence[str]]]
"""The text for a trainer, and what to know about it."""


@dataclass(frozen=True)
class Format:
    """A program that plans can be exported for."""

    name: str
    trainer: str
    """In words: `DeepSpeed 0.19`."""
    suffixes: tuple[str, ...]
    write: Write


@dataclass(frozen=True)
class Exported(Result):
    """A plan in the words of another program. Made by `Plan.export` and `Groups.export`.

    As a string it is the text of the file, and nothing else.
    """

    kind: ClassVar[str] = "export"
    loads: ClassVar[bool] = True

    format: str
    suffixes: tuple[str, ...]
    """Of files that may hold it."""
    text: str
    notes: tuple[str, ...] = ()
    """What the other program does otherwise, and what was assumed; comments of the text say the same."""

    @property
    def title(self) -> str:
        """The format."""
        return f"Export: {self.format}"

    def blocks(self) -> Iterator[Block]:
        """The notes and the text."""
        yield from self.notes
        yield Html(f"<pre>{escape(self.text)}</pre>")

    def __str__(self) -> str:
        return self.text.removesuffix("\n")

    def save(self, path: str | Path) -> Path:
        """Write the text to a file, whose suffix must be one of the format's."""
        path = writable(path, self.kind, self.suffixes)
        write_whole(path, self.text)
        return path


def many(names: Iterable[str], most: int = 4) -> str:
    """A few names, and how many more there are.

    >>> many(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
