"""Exports for torchtitan: an `OptimizersContainer.Config` with a regular expression for each group.

Schema of commit b5bcd76 (August 2026): patterns are searched in the names of parameters, the first that
matches has a parameter, each must match one, and every trained parameter needs one. Options are those of the
optimizer's class: Adam, AdamW or DistMuon, whose factors are torch's and √(rows/columns). DistMuon takes one
group, so that all matrices need the same learning rate there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import theodolite
from theodolite.anatomy.names import starred
from theodolite.core.errors import UseError
from theodolite.optimizers.muon import SCALES
from theodolite.planning.exporting.exported import Content, Format
from theodolite.planning.exporting.muon_steps import (
    Seen,
    Step,
    describe,
    is_muon,
    is_stack,
    not_trained_by,
    stack_seen,
    step_for,
)
from theodolite.planning.exporting.python_file import (
    ATTACH,
    PLAIN,
    comment,
    eps_note,
    grouped,
    literal,
    notes_of_init,
    patterns,
    plain,
)
from theodolite.planning.rows import PlanRow

WHO = "torchtitan"
ADJUST = {"original": "original", "match_rms_adamw": "rms", "spectral_unclamped": "spectral"}
"""By adjust_lr_fn of DistMuon: the name of its scale here."""
WRAPPER = r"(?:_checkpoint_wrapped_module\.)?"


def _seen(row: PlanRow, scale: str) -> list[Seen]:
    factor = SCALES[scale]
    if is_stack(row):
        return stack_seen(row, factor)
    fan_out, fan_in = row.shape
    return [Seen(1, fan_in, fan_out, factor(fan_in, fan_out))]


def _muon_steps(rows: Sequence[PlanRow]) -> tuple[str, list[Step]]:
    """The `adjust_lr_fn` with which all matrices have one learning rate, and their steps; else refuse."""
    for adjust, scale in ADJUST.items():
        steps = [step_for(row, _seen(row, scale)) for row in rows]
        if len({(f"{one.lr:.9e}", f"{one.weight_decay:.9e}") for one in steps}) == 1:
            return adjust, steps
    steps = [step_for(row, _seen(row, "original")) for row in rows]
    other = next(
        place
        for place, one in enumerate(steps)
        if f"{one.lr:.9e}" != f"{steps[0].lr:.9e}"
        or f"{one.weight_decay:.9e}" != f"{steps[0].weight_decay:.9e}"
    )
    raise UseError(
        f"torchtitan's DistMuon takes one learning rate and decay for all matrices, and {rows[0].name} needs "
        f"lr {steps[0].lr:.6g}, decay {steps[0].weight_decay:.6g}, {rows[other].name} lr "
        f"{steps[other].lr:.6g}, decay {steps[other].weight_decay:.6g}. Plan with adamw for torchtitan, or "
        "export for torch"
    )


def _write(content: Content) -> tuple[str, Sequence[str]]:
    content.refuse_rules(WHO, lambda rule: rule == "adamw" or is_muon(rule), "adamw and the rules of Muon")
    muons = [row for row in content.trained if is_muon(row.rule)]
    if odd := [row for row in muons if len(row.shape) != 2 and not is_stack(row)]:
        raise not_trained_by(WHO, odd, "DistMuon takes matrices and stacks of them")
    notes = list(content.notes)
    muon: dict[str, Any] = {}
    if muons:
        adjust, steps = _muon_steps(muons)
        muon = _muon_kwargs(content, muons, adjust, steps[0])
        notes += _muon_notes(muons, steps, muon["eps"])

    def options(row: PlanRow) -> dict[str, Any]:
        if is_muon(row.rule):
            return muon
        taken = content.take(WHO, row.rule, {"betas": (0.9, 0.999)})
        return {"lr": row.lr, "betas": taken["betas"], "eps": row.eps, "weight_decay": row.weight_decay}

    grouping = grouped(content, options)
    notes += _notes(content)
    configs = []
    for name, kwargs in grouping.groups.items():
        rows = [content.rows[member] for member in grouping.members(name)]
        kind = "DistMuon" if is_muon(rows[0].rule) else "AdamW"
        configs.append(_config(name, kind, _regex(rows, content), kwargs))
    return _file(content, notes, configs, bool(muons)), notes


def _muon_kwargs(content: Content, muons: Sequence[PlanRow], adjust: str, step: Step) -> dict[str, Any]:
    known = {"momentum": 0.95, "nesterov": True, "steps": 5}
    options = content.take("DistMuon", muons[0].rule, known)
    return {
        "lr": step.lr,
        "weight_decay": step.weight_decay,
        "momentum": options["momentum"],
        "nesterov": options["nesterov"],
        "ns_steps": options["steps"],
        "eps": min(row.eps for row in muons),
        "adjust_lr_fn": adjust,
        "fused": False,
        "foreach": False,
    }


def _muon_notes(muons: Sequence[PlanRow], steps: Sequence[Step], eps: float) -> list[str]:
    notes = [
        "DistMuon needs to know how its matrices are distributed: optimizer_config(dist_muon=…) takes its "
        "bucket_configs and compute_sharding_by_fqn, as torchtitan/models/kimi_k2_7 makes them.",
        *eps_note("DistMuon", muons, eps, "takes one eps, set to"),
    ]
    inexact = [row for row, one in zip(muons, steps, strict=True) if not one.exact]
    if inexact:
        notes.append(
            f"{patterns(inexact)}: the plan orthogonalises {describe(inexact[0])} apart, and DistMuon one "
            "matrix (blocks of rows of one size: see its BlockShard). The size of the step is the same, not "
            "its direction."
        )
    return notes


def _notes(content: Content) -> list[str]:
    notes = notes_of_init(content, draws=False)
    if left := [row for row in content.rows.values() if not row.trained]:
        notes.append(
            f"{patterns(left)}: not trained by the plan, so that no pattern matches. torchtitan refuses such "
            "parameters unless they are frozen: requires_grad_(False)."
        )
    if content.draws:
        notes.append(
            "Initial values are not in this file: set them in the model's param_init, or draw them by "
            "plan.initialize(model). Export for torch or yaml to see them."
        )
    notes.append(
        "torchtitan compares names only, and refuses a pattern that matches no parameter. Under pipeline "
        "parallelism it does so on every stage, where a pattern without a parameter has to be taken out."
    )
    return notes


def _regex(rows: Sequence[PlanRow], content: Content) -> list[str]:
    """Regular expressions for the names of a group, which match no other name of the model."""
    total: dict[str, int] = {}
    for row in content.rows.values():
        pattern = starred(row.name, steps=True)
        total[pattern] = total.get(pattern, 0) + 1
    mine: dict[str, list[str]] = {}
    for row in rows:
        mine.setdefault(starred(row.name, steps=True), []).append(row.name)
    found = []
    for pattern, names in mine.items():
        if len(names) == total[pattern]:
            found.append(_wrapped(pattern.split("."), r"\d+"))
        elif pattern.split(".").count("*") == 1:
            place = pattern.split(".").index("*")
            numbers = "|".join(name.split(".")[place] for name in names)
            found.append(_wrapped(pattern.split("."), f"(?:{numbers})"))
        else:
            found += [_wrapped(name.split("."), "") for name in names]
    return found


def _wrapped(steps: Sequence[str], number: str) -> str:
    """A dotted path as a regular expression; a numbered layer may be wrapped for checkpointing."""
    text = ""
    for step in steps[:-1]:
        is_number = step == "*" or step.isdecimal()
        text += (number if step == "*" else re.escape(step)) + r"\." + WRAPPER * is_number
    text += number if steps[-1] == "*" else re.escape(steps[-1])
    return text.replace('"', r"\x22")


def _config(name: str, kind: str, regex: Sequence[str], kwargs: Any) -> str:
    first, *rest = regex
    lines = [f'r"^(?:{first}"', *(f'r"|{one}"' for one in rest), 'r")$"']
    pattern = "(\n" + "".join(f"                    {line}\n" for line in lines) + "                )"
    if not rest:
        pattern = f'r"^{first}$"'
    return (
        f"            ParamGroupConfig(  # {name}\n                pattern={pattern},\n"
        f'                optimizer_name="{kind}",\n'
        f"                optimizer_kwargs={literal(kwargs)},\n            ),\n"
    )


def _file(content: Content, notes: Sequence[str], configs: Sequence[str], has_muon: bool) -> str:
    head = [
        f'"""{plain(content.title)}, for torchtitan.',
        "",
        f"Written by theodolite {theodolite.__version__}; it needs torchtitan and not theodolite.",
        "In a config registry of torchtitan:",
        "",
        f"    config.optimizer = optimizer_config({'dist_muon={...}' if has_muon else ''})",
        '"""',
        "",
        *(["import re", "", "import torch"] if content.multipliers else []),
        "from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig",
        "",
        *comment(notes),
    ]
    parts = ["\n".join(head)]
    if content.multipliers:
        parts += [f"MULTIPLIERS = {literal(content.multipliers)}  # of the inputs of these modules"]
        parts += [PLAIN.strip("\n"), ATTACH.strip("\n")]
    extra = '\n        optimizer_factory_kwargs_by_name={"DistMuon": dist_muon},' if has_muon else ""
    parts.append(
        f'def optimizer_config({"dist_muon, " if has_muon else ""}implementation="fused"):\n'
        '    """The parameter groups of the plan."""\n'
        "    return OptimizersContainer.Config(\n        implementation=implementation,\n"
        f"        param_groups=[\n{''.join(configs)}        ],{extra}\n    )"
    )
    return "\n\n\n".join(parts) + "\n"


FORMATS = (Format("torchtitan", "torchtitan, commit b5bcd76", (".py",), _write),)
