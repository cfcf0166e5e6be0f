"""Exports for microsoft/dion: parameter groups with an `algorithm`, and `split_sizes` for blocks of rows.

Schema of commit 0a059a4 (August 2026). dion's Muon sums gradients where the plan averages them, which only
matters for eps: the same matrix, divided by 1 − momentum, is compared with it. Parameters of one shape in one
group are stacked, and `flatten` flattens the stack: each kernel has a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theodolite.optimizers.muon import SCALES
from theodolite.planning.exporting.exported import Content, Format
from theodolite.planning.exporting.muon_steps import (
    Seen,
    describe,
    flat,
    is_flat,
    is_muon,
    is_stack,
    not_trained_by,
    scale_of,
    split_sizes,
    stack_seen,
    step_for,
)
from theodolite.planning.exporting.python_file import grouped, notes_of_init, patterns, python_file
from theodolite.planning.rows import PlanRow

WHO = "dion"
ADJUST = {"none": None, "original": None, "rms": "rms_norm", "spectral": "spectral_norm"}
BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99)}


def _muon_group(content: Content, row: PlanRow) -> dict[str, Any]:
    options = content.take("dion's Muon", row.rule, {"momentum": 0.95, "nesterov": True, "steps": 5})
    adjust = ADJUST[scale_of(row.rule)]
    layout, seen = _seen(row, adjust)
    step = step_for(row, seen)
    return {
        "algorithm": "muon",
        "lr": step.lr,
        "weight_decay": step.weight_decay,
        "mu": options["momentum"],
        "nesterov": options["nesterov"],
        "epsilon": float(f"{row.eps / (1 - options['momentum']):.12g}"),
        "adjust_lr": adjust,
        **layout,
    }


def _seen(row: PlanRow, adjust: str | None) -> tuple[dict[str, Any], list[Seen]]:
    """How dion is told about the layout of a tensor, and the matrices that it then sees."""
    names = {"rms_norm": "rms", "spectral_norm": "spectral", None: "none"}
    factor = SCALES[names[adjust]]
    fan_out, fan_in = flat(row)
    if sizes := split_sizes(row):
        return {"split_sizes": sizes}, [Seen(1, fan_in, size, factor(fan_in, size)) for size in sizes]
    if is_stack(row):
        return {}, stack_seen(row, factor)
    flatten = {"flatten": True} if len(row.shape) > 2 else {}
    return flatten, [Seen(1, fan_in, fan_out, factor(fan_in, fan_out))]


def _options(content: Content, row: PlanRow) -> dict[str, Any]:
    if is_muon(row.rule):
        return _muon_group(content, row)
    betas = content.take(WHO, row.rule, {"betas": BETAS[row.rule]})["betas"]
    made = {"algorithm": row.rule, "lr": row.lr, "weight_decay": row.weight_decay}
    made |= {"beta1": betas[0], "beta2": betas[1]}
    return {**made, "epsilon": row.eps} if row.rule == "adamw" else made


def _write(content: Content) -> tuple[str, Sequence[str]]:
    content.refuse_rules(
        WHO, lambda rule: rule in BETAS or is_muon(rule), "adamw, lion and the rules of Muon"
    )
    muons = [row for row in content.trained if is_muon(row.rule)]
    odd = [row for row in muons if not (is_flat(row) or is_stack(row) or len(row.shape) == 2)]
    if odd:
        raise not_trained_by(
            WHO, odd, "it flattens dimensions behind the first, or takes a stack of matrices"
        )
    grouping = grouped(content, lambda row: _options(content, row))
    notes = [*content.notes, *_notes(muons), *notes_of_init(content)]
    use = [
        *["model = initialize(model)"] * content.draws,
        *["torch._dynamo.config.recompile_limit = 100"] * bool(muons),
        "optimizer = make_optimizer(model, distributed_mesh=mesh)",
    ]
    body = _BODY
    if content.multipliers:
        body = body.replace("    return Muon", "    attach(model)\n    return Muon")
    return (
        python_file(
            content,
            who=WHO,
            use="\n".join(use),
            notes=notes,
            grouping=grouping,
            body=body,
            imports=["from dion import Muon"],
        ),
        notes,
    )


def _notes(muons: Sequence[PlanRow]) -> list[str]:
    if not muons:
        return []
    notes = [
        "dion orthogonalises by 5 steps of Polar Express in bfloat16 (make_optimizer(model, "
        "use_polar_express=False): of another iteration), the plan by 5 of Jordan's: singular values of the "
        "update are nearer to 1. It rounds momenta to bfloat16 before, for any iteration.",
        "dion compiles its iteration for each shape of matrix, and torch fails at the ninth unless "
        "torch._dynamo.config.recompile_limit is raised, as dion's train.py does.",
    ]
    if kernels := [row for row in muons if len(row.shape) > 2 and not is_stack(row)]:
        notes.append(
            f"{patterns(kernels)}: param_groups gives each kernel a group of its own, as dion "
            "orthogonalises the kernels of one shape in a group as one matrix. It flattens shards of kernels "
            "wrongly too: leave kernels whole under FSDP."
        )
    if adjusted := [row for row in muons if scale_of(row.rule) == "original" and row.fan_out > row.fan_in]:
        notes.append(
            "dion has no factor √max(1, out/in): it is in the learning rates and decays of "
            f"{patterns(adjusted)}."
        )
    inexact = [row for row in muons if not step_for(row, _seen(row, ADJUST[scale_of(row.rule)])[1]).exact]
    if inexact:
        notes.append(
            f"{patterns(inexact)}: the plan orthogonalises {describe(inexact[0])} apart, and dion one "
            "matrix, as split_sizes takes neither these blocks nor scales of their own. The learning rate "
            "makes the size of the step the same, not its direction."
        )
    return notes


_BODY = '''
def param_groups(model):
    """The parameter groups for dion's optimizers; each kernel has a group of its own."""
    found = []
    for group in _groups(model):
        parts = [[one] for one in group["params"]] if group.get("flatten") else [group["params"]]
        found += [{**group, "params": part} for part in parts]
    return found


def make_optimizer(model, distributed_mesh=None, **options):
    """dion's Muon with the planned groups."""
    return Muon(param_groups(model), distributed_mesh=distributed_mesh, **options)
'''

FORMATS = (Format("dion", "Muon of microsoft/dion, commit 0a059a4", (".py",), _write),)
