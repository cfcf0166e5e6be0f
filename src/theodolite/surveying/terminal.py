"""Findings for a terminal, with rich."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from theodolite.surveying import Finding, Survey

STYLES = {
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold blue",
    "error": "bold magenta",
    "ok": "green",
}


def view(survey: Survey) -> RenderableType:
    """The verdict, then every finding, the gravest first; a remedy under each that has one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in survey.ranked:
        table.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.code, "dim"), _body(finding))
    facts = f"{survey.workload} at {survey.size} (width × depth)"
    if survey.anatomy is not None:
        facts += f" · {survey.anatomy.num_parameters:,} parameters in {len(survey.anatomy)} tensors"
    return Group(Text(survey.verdict, "bold"), Text(facts, "dim"), Text(), table)


def text(survey: Survey, width: int = 100) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(view(survey))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _body(finding: Finding) -> RenderableType:
    sentence = Text(finding.sentence)
    if not finding.remedy or finding.level == "ok":
        return sentence
    return Group(sentence, Text(f"→ {finding.remedy}", "dim"))
