"""Plans and parameter groups in the words of the trainers that people use.

A format is a `Format` in the tuple `FORMATS` of a module in this folder.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from theodolite.core import arguments
from theodolite.core.optional import find_by_name
from theodolite.planning.exporting.exported import Content, Exportable, Exported, Format
from theodolite.planning.exporting.names import renamed

__all__ = ["Exported", "Format", "Exportable", "export", "find_formats"]


@functools.cache
def find_formats() -> Mapping[str, Format]:
    """Every format there is, by name."""
    return find_by_name("theodolite.planning.exporting", "FORMATS")


def export(source: Exportable, format: str, *, names: Mapping[str, str] | None = None) -> Exported:
    """A plan or parameter groups as a text for another program.

    Args:
        source: a plan, or parameter groups.
        format: `torch`, `huggingface`, `torchtitan`, `deepspeed`, `dion`, `megatron`, `csv`, `markdown` or
            `yaml`.
        names: what the tensors are called there, by patterns of their names here. A star stands for the same
            text on both sides, and the first rule that matches applies. Each tensor needs a rule, and each
            rule a tensor.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(64, 1), base=th.Size(32, 1), lr=2**-8)
    >>> made = export(plan, "csv", names={"readout.*": "lm_head.*", "*": "*"})
    >>> made.text.splitlines()[-1][:43]
    'lm_head.weight,256x64,output,adamw,0.001953'
    """
    known = find_formats()
    made = known[arguments.one_of("format", format, tuple(known))]
    new = renamed(source.rows, source.multipliers, names)
    trained = [row for row in source.rows.values() if row.trained]
    rules = sorted(dict.fromkeys(row.rule for row in trained), key=lambda rule: rule != source.optimizer_name)
    options = {
        rule: dict(source.options if rule == source.optimizer_name else source.vector_options)
        for rule in rules
    }
    decay = getattr(source, "weight_decay", 0.0) or max((row.weight_decay for row in trained), default=0.0)
    content = Content(source.title, new.rows, new.multipliers, options, source.lr, decay, new.notes)
    text, notes = made.write(content)
    return Exported(format, made.suffixes, text, tuple(dict.fromkeys((*new.notes, *notes))))
