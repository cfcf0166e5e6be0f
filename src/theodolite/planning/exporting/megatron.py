"""Exports for Megatron-LM: config overrides by parameter, with multipliers of lr and weight decay.

Schema of Megatron Core 0.20 (commit d98e8a6): `get_megatron_optimizer(config, chunks, config_overrides)`
takes a dict from `ParamKey` to overrides (`max_lr`, `min_lr`, `wd_mult`, `eps`), by which its scheduler sets
rates and decays. Its Muon trains what has two dimensions and is neither an embedding nor the output layer,
unless the attribute `use_muon` is false. Muon's own settings hold for all matrices. Shapes are not compared,
as tensor parallelism cuts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from theodolite.core.errors import UseError
from theodolite.optimizers.muon import SCALES
from theodolite.planning.exporting.exported import Content, Format
from theodolite.planning.exporting.muon_steps import (
    JORDAN,
    Seen,
    Step,
    describe,
    is_muon,
    not_trained_by,
    planned_matrices,
    scale_of,
    step_for,
)
from theodolite.planning.exporting.python_file import (
    Grouping,
    folded,
    grouped,
    literal,
    notes_of_init,
    patterns,
    python_file,
    table,
)
from theodolite.planning.rows import PlanRow

WHO = "megatron.core"
MODES = {
    "none": ("shape_scaling", 1.0, JORDAN),
    "original": ("shape_scaling", 1.0, JORDAN),
    "rms": ("spectral", 0.2, SCALES["rms"]),
    "spectral": ("unit_rms_norm", 1.0, SCALES["spectral"]),
}
"""By the scale of a rule: muon_scale_mode, muon_extra_scale_factor, and their product as a function."""


def _step(row: PlanRow) -> Step:
    if not is_muon(row.rule):
        return Step(row.lr, row.weight_decay, True)
    factor = MODES[scale_of(row.rule)][2]
    if _is_qkv(row):
        planned = planned_matrices(row)
        return step_for(row, [replace(one, factor=factor(one.fan_in, one.fan_out)) for one in planned])
    fan_out, fan_in = row.shape
    return step_for(row, [Seen(1, fan_in, fan_out, factor(fan_in, fan_out))])


def _is_qkv(row: PlanRow) -> bool:
    """Does Megatron split it? It goes by the name."""
    return "linear_qkv.weight" in row.name


def _write(content: Content) -> tuple[str, Sequence[str]]:
    content.refuse_rules(WHO, lambda rule: rule == "adamw" or is_muon(rule), "adamw and the rules of Muon")
    muons = [row for row in content.trained if is_muon(row.rule)]
    if odd := [row for row in muons if len(row.shape) != 2]:
        raise not_trained_by("Megatron", odd, "it takes tensors of two dimensions, and others by Adam")
    if not content.lr and (moved := [row for row in content.trained if row.lr]):
        raise UseError(
            "Megatron's learning rates are multiples of the plan's, which is 0, and that of "
            f"{moved[0].name} is {moved[0].lr:.6g}. Give the plan a learning rate"
        )

    def options(row: PlanRow) -> dict[str, Any]:
        step = _step(row)
        made: dict[str, Any] = {
            "lr_mult": step.lr / content.lr if content.lr else 1.0,
            "wd_mult": step.weight_decay / content.weight_decay if content.weight_decay else 1.0,
        }
        return {**made, "use_muon": True} if is_muon(row.rule) else {**made, "eps": row.eps}

    grouping = grouped(content, options)
    config = _config(content, muons)
    notes = [*content.notes, *_notes(content, muons, grouping), *notes_of_init(content, draws=False)]
    if content.draws:
        notes.append(
            "Nothing here draws the initial values in TENSORS, as each rank holds shards: set init_method of "
            "the TransformerConfig, or draw them by plan.initialize(model) of theodolite before sharding."
        )
    lines = [f"{literal(name)}: {literal(value)}" for name, value in config.items()]
    body = f"# For OptimizerConfig\n{table('CONFIG', lines)}\n\n\n{_BODY.strip()}"
    use = [
        "config = OptimizerConfig(**CONFIG, min_lr=0.0, bf16=True, ...)",
        "mark(model)  # before it is wrapped for data parallelism",
        "optimizer = get_megatron_optimizer(config, [model], config_overrides=config_overrides(min_lr=0.0))",
    ]
    text = python_file(
        content,
        who=WHO,
        use="\n".join(use),
        notes=notes,
        grouping=grouping,
        body=body,
        imports=["from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate"],
        checks_shapes=False,
    )
    return text, notes


def _config(content: Content, muons: Sequence[PlanRow]) -> Mapping[str, Any]:
    config: dict[str, Any] = {"optimizer": "adam", "lr": content.lr, "weight_decay": content.weight_decay}
    if "adamw" in content.rules:
        betas = content.take(WHO, "adamw", {"betas": (0.9, 0.999)})["betas"]
        config |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    if muons:
        rule = muons[0].rule
        known = {"momentum": 0.95, "nesterov": True, "steps": 5}
        options = content.take("Megatron's Muon", rule, known)
        mode, extra, _ = MODES[scale_of(rule)]
        config |= {
            "optimizer": "muon",
            "muon_momentum": options["momentum"],
            "muon_nesterov": options["nesterov"],
            "muon_num_ns_steps": options["steps"],
            "muon_coefficient_type": "simple",
            "muon_scale_mode": mode,
            "muon_extra_scale_factor": extra,
        }
    return config


def _notes(content: Content, muons: Sequence[PlanRow], grouping: Grouping) -> list[str]:
    notes = [
        "Rates and decays are those of CONFIG until OptimizerParamScheduler sets max_lr and wd_mult: give it "
        "start_wd and end_wd as CONFIG's weight_decay, and init_lr 0, which keeps the ratios in the warmup."
    ]
    if muons:
        eps = sorted({row.eps for row in muons})
        notes.append(
            f"Megatron's Muon has no eps to set; the plan has {eps[0]:.3g}"
            + (f" to {eps[-1]:.3g}" if len(eps) > 1 else "")
            + ", which counts only where the norm of a matrix's gradient is as small. Coefficients are "
            "Jordan's (muon_coefficient_type simple), as the plan's."
        )
        steps = [(row, _step(row)) for row in muons]
        if adjusted := [row for row, one in steps if one.exact and not math.isclose(one.lr, row.lr)]:
            notes.append(
                "Megatron has no Muon without a factor of the shape: lr_mult and wd_mult of "
                f"{patterns(adjusted)} undo √max(1, out/in), so that the step is the planned one."
            )
        if inexact := [row for row, one in steps if not one.exact]:
            notes.append(
                f"{patterns(inexact)}: the plan orthogonalises {describe(inexact[0])} apart, and Megatron "
                "one matrix, or other blocks. The multipliers make the size of the step the same, not its "
                "direction."
            )
        if qkv := [row for row in muons if _is_qkv(row)]:
            notes.append(
                f"{patterns(qkv)}: Megatron orthogonalises queries, keys and values apart (muon_split_qkv), "
                "whatever the plan has. Its rows are interleaved by query group."
            )

    def key(row: PlanRow) -> Any:
        return grouping.group_of.get(row.name)

    if numbered := [
        name
        for name, rows in folded(content.rows.values(), key).items()
        if name == rows[0].name and any(step.isdecimal() for step in name.split("."))
    ]:
        notes.append(
            f"{numbered[0]} has settings of its own among the layers. Under pipeline parallelism each stage "
            "counts its layers from 0, so that this name is another layer there."
        )
    return notes


_BODY = '''
def config_overrides(lr=CONFIG["lr"], min_lr=0.0):
    """The overrides by parameter, instead of get_standard_config_overrides. lr and min_lr are the flags'."""
    found = {}
    for group, options in GROUPS.items():
        fn = lambda tensor, name, own=group: _group(name) == own
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=f"plan: {group}", fn=fn))
        override = {"max_lr": lr * options["lr_mult"], "min_lr": min_lr * options["lr_mult"]}
        override["wd_mult"] = options["wd_mult"]
        if "eps" in options:
            override["eps"] = options["eps"]
        found[key] = override
    return found


def mark(model):
    """Say of every parameter whether Muon trains it. A model with other parameters is refused."""
    for name, tensor in model.named_parameters():
        if _group(name) is None and tensor.requires_grad:
            raise ValueError(f"{name}: the plan does not train it, and Megatron would: requires_grad_(False)")
        use_muon = GROUPS.get(_group(name), {}).get("use_muon", False)
        if use_muon and getattr(tensor, "is_embedding_or_output_parameter", False):
            raise ValueError(f"{name}: Megatron trains embeddings and outputs by Adam, and the plan by Muon")
        tensor.use_muon = use_muon
    return model


def _group(name):
    row = _look_up(name)[1]
    if row is None:
        raise ValueError(f"{name} is not in the plan: the model is not the one of the plan")
    return TENSORS[row][2]
'''

FORMATS = (Format("megatron", "Megatron Core 0.20", (".py",), _write),)
