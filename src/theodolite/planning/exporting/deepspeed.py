"""Exports for DeepSpeed: `use_muon` on every parameter, and its MuonWithAuxAdam with the planned groups.

Schema of version 0.19.8. The optimizer section of DeepSpeed's JSON has one learning rate for Muon and one for
Adam, and marks parameters by their names again, whatever was marked before. So the file makes the optimizer,
and its `CONFIG` has no such section. The factor of its Muon is √max(1, rows/columns) of the last two
dimensions; its eps, steps and Nesterov's form are fixed. `muon_num_heads` of a tensor is a number of blocks
of rows of one size that are matrices by themselves. It fails on kernels of convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from theodolite.planning.exporting.exported import Content, Format
from theodolite.planning.exporting.muon_steps import (
    JORDAN,
    Seen,
    describe,
    is_muon,
    is_stack,
    not_trained_by,
    split_sizes,
    stack_seen,
    step_for,
)
from theodolite.planning.exporting.python_file import (
    eps_note,
    grouped,
    notes_of_init,
    patterns,
    python_file,
)
from theodolite.planning.rows import PlanRow

WHO = "DeepSpeed"
EPS = 1e-7
"""Of its Newton–Schulz."""


def _seen(row: PlanRow) -> list[Seen] | None:
    """The matrices that DeepSpeed sees in a tensor; None if they have nothing to do with the planned ones."""
    if len(row.shape) == 2:
        fan_out, fan_in = row.shape
        if count := _equal_blocks(row):
            return [Seen(1, fan_in, fan_out // count, JORDAN(fan_in, fan_out // count))] * count
        return [Seen(1, fan_in, fan_out, JORDAN(fan_in, fan_out))]
    if is_stack(row):
        return stack_seen(row, JORDAN)
    return None


def _equal_blocks(row: PlanRow) -> int | None:
    """The number of blocks of rows, if they have one size and follow each other."""
    sizes = split_sizes(row)
    return len(sizes) if sizes and len(set(sizes)) == 1 else None


def _options(content: Content, row: PlanRow) -> dict[str, Any]:
    if not is_muon(row.rule):
        betas = content.take(WHO, row.rule, {"betas": (0.9, 0.999)})["betas"]
        made = {"lr": row.lr, "betas": betas, "eps": row.eps, "weight_decay": row.weight_decay}
        return {"use_muon": False, **made} if _has_muon(content) else made
    options = content.take("DeepSpeed's Muon", row.rule, {"momentum": 0.95, "nesterov": True, "steps": 5})
    for option, fixed in (("nesterov", True), ("steps", 5)):
        if options[option] != fixed:
            others = {name: usual for name, usual in options.items() if name != option}
            content.take(f"DeepSpeed's Muon, where it is always {fixed}", row.rule, others)
    seen = _seen(row)
    assert seen is not None
    step = step_for(row, seen)
    made = {"lr": step.lr, "momentum": options["momentum"], "weight_decay": step.weight_decay}
    if count := _equal_blocks(row):
        made["muon_num_heads"] = count
    return {"use_muon": True, **made}


def _has_muon(content: Content) -> bool:
    return any(map(is_muon, content.rules))


def _write(content: Content) -> tuple[str, Sequence[str]]:
    content.refuse_rules(WHO, lambda rule: rule == "adamw" or is_muon(rule), "adamw and the rules of Muon")
    muons = [row for row in content.trained if is_muon(row.rule)]
    if odd := [row for row in muons if _seen(row) is None]:
        raise not_trained_by(WHO, odd, "it takes matrices and stacks of them")
    grouping = grouped(content, lambda row: _options(content, row))
    notes = [*content.notes, *_notes(muons), *notes_of_init(content)]
    body = _MUON if muons else _ADAMW
    if content.multipliers:
        body = body.replace("    return make(", "    attach(model)\n    return make(")
    use = [
        "model = initialize(model)",
        "engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=CONFIG)",
    ]
    module = "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"
    text = python_file(
        content,
        who=WHO,
        use="\n".join(use if content.draws else use[1:]),
        notes=notes,
        grouping=grouping,
        body=body,
        imports=[module] if muons else [],
    )
    return text, notes


def _notes(muons: Sequence[PlanRow]) -> list[str]:
    if not muons:
        return []
    notes = [
        "DeepSpeed 0.19.6 and older orthogonalise under ZeRO only, and add the gradient itself without it. "
        "CONFIG has stage 2.",
        "gradient_clipping must stay 0 in the config, where it is 1 by default: ZeRO clips after Muon has "
        f"orthogonalised, and the norm of all updates is about {_norm(muons):.3g} whatever the gradients.",
        'Do not name an optimizer of type Muon in the config: DeepSpeed then marks parameters by "embed" and '
        '"lm_head" in their names, whatever make_optimizer has marked.',
        *eps_note("DeepSpeed", muons, EPS, "has Muon's eps fixed at"),
    ]
    steps = [(row, step_for(row, _seen(row) or [])) for row in muons]
    if adjusted := [row for row, step in steps if step.exact and not math.isclose(step.lr, row.lr)]:
        notes.append(
            "DeepSpeed's Muon multiplies by √max(1, rows/columns) of the last two dimensions. Learning rates "
            f"and decays of {patterns(adjusted)} are adjusted for it, so that the step is the planned one."
        )
    if inexact := [row for row, step in steps if not step.exact]:
        notes.append(
            f"{patterns(inexact)}: the plan orthogonalises {describe(inexact[0])} apart, and DeepSpeed one "
            "matrix, as muon_num_heads is for blocks of one size. The learning rate makes the size of the "
            "step the same, not its direction."
        )
    if cut := [row for row in muons if _equal_blocks(row)]:
        notes.append(
            f"{patterns(cut)}: muon_num_heads is set, so that ZeRO orthogonalises {describe(cut[0])} apart. "
            "Without ZeRO, and before 0.19.8, DeepSpeed takes no notice of it and sees one matrix."
        )
    if stacks := [row for row in muons if len(row.shape) == 3]:
        notes.append(f"{patterns(stacks)}: is_expert_group is set, which DeepSpeed takes for a stack.")
    return notes


def _norm(muons: Sequence[PlanRow]) -> float:
    """The norm of all updates of Muon together, as ZeRO sees them before the learning rate."""
    seen = [one for row in muons for one in _seen(row) or []]
    return math.sqrt(sum(one.count * one.factor**2 * min(one.fan_in, one.fan_out) for one in seen))


_CONFIG = """
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # yours
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 by default
}
"""

_ADAMW = f'''
{_CONFIG.strip()}


def param_groups(model):
    """The parameter groups, also for model_parameters= of deepspeed.initialize."""
    return _groups(model)


def make_optimizer(model):
    """torch's AdamW with the planned groups."""
    make = torch.optim.AdamW
    return make(param_groups(model))
'''

_MUON = f'''
{_CONFIG.strip()}


def mark(model):
    """Say of every parameter whether Muon trains it: ZeRO reads the attribute."""
    for tensor, row in named(model).values():
        group = GROUPS.get(TENSORS[row][2], {{}})
        tensor.use_muon = group.get("use_muon", False)
        tensor.muon_num_heads = group.get("muon_num_heads")
        if tensor.use_muon and tensor.ndim == 3:
            tensor.is_expert_group = True
    return model


def param_groups(model):
    """The parameter groups for MuonWithAuxAdam."""
    return _groups(mark(model))


def make_optimizer(model):
    """DeepSpeed's Muon beside Adam with the planned groups."""
    make = MuonWithAuxAdam
    return make(param_groups(model))
'''

FORMATS = (Format("deepspeed", "DeepSpeed 0.19.8", (".py",), _write),)
