"""`groups`: which optimizer trains which tensor of a network as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.names import canonical_parameters, matching, unwrap
from theodolite.anatomy.part import Part, Role, untrained
from theodolite.core import arguments
from theodolite.core.building import build_hollow
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS, POLICIES, OptimizerSpec, Policy
from theodolite.optimizers.decay_policies import decays
from theodolite.planning.caveats import WARNING
from theodolite.planning.choosing import assumed, assumptions, why
from theodolite.planning.groups import Groups
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.planner import Covers
from theodolite.planning.rows import PlanRow
from theodolite.planning.translation import ADAMW_RMS, MUONS, adamw_rate, rate_ratio
from theodolite.present.text import number


@exclusive()
def groups(
    model: nn.Module | Build,
    inputs: Any,
    *,
    size: Size | None = None,
    optimizer: str = "muon",
    lr: float | None = None,
    adamw_lr: float | None = None,
    vector_lr: float | None = None,
    weight_decay: float = 0.0,
    eps: float | None = None,
    decay: Policy = "paper",
    covers: Covers = "hidden",
    roles: Mapping[str, Role] | None = None,
    no_decay: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    vector_options: Mapping[str, Any] | None = None,
) -> Groups:
    """Which optimizer trains which tensor of a network as it is, and why. No names are read.

    Args:
        model: a ready module, also on `meta` or wrapped; or `build(width, depth) -> nn.Module`, which is
            compared at two widths, so that nothing has to be assumed.
        inputs: what the model is called with: a tensor, a tuple (`model(*inputs)`) or a dict.
        size: the size to build at, with a build function.
        optimizer: a name in `theodolite.optimizers.OPTIMIZERS`.
        lr: its learning rate.
        adamw_lr: instead of `lr`, the learning rate of AdamW: Muon's becomes the one that moves each weight
            by the same root mean square, and its decay takes the same fraction of it.
        vector_lr: learning rate of the AdamW beside a matrix optimizer; `lr` or `adamw_lr` by default.
        weight_decay: of `W ← W − lr·(A + weight_decay·W)`, for the tensors that decay.
        eps: the optimizer's eps; its usual value by default.
        decay: `paper`, `independent`, `none`, `matrices` or `everything`, see
            `theodolite.optimizers.decay_policies`.
        covers: which weights a matrix optimizer trains: the `hidden` ones, or `all`. AdamW trains the rest.
        roles: roles of tensors that cannot be classified, or should have another, by pattern of names.
        no_decay: patterns of names of tensors that do not decay, whatever the policy.
        options: further options of the optimizer, such as momentum.
        vector_options: further options of the AdamW beside a matrix optimizer.

    >>> import torch
    >>> layers = nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    >>> made = groups(nn.Sequential(*layers), torch.zeros(1, 4), lr=0.02, vector_lr=1e-3)
    >>> [name for name, row in made.rows.items() if row.rule == "muon"]
    ['2.weight']
    """
    spec = _find(optimizer)
    _check(spec, lr, adamw_lr, vector_lr, options, vector_options)
    arguments.one_of("decay", decay, POLICIES)
    arguments.one_of("covers", covers, get_args(Covers))
    weight_decay = arguments.number("weight_decay", weight_decay, least=0)
    usual = spec.eps.usual if spec.eps else 1e-8
    eps = arguments.number("eps", usual if eps is None else eps, least=0)
    vector_eps = arguments.number("vector_options['eps']", (vector_options or {}).get("eps", 1e-8), least=0)
    if not callable(model):
        raise UseError(f"model is {model!r}: give a module, or a function build(width, depth) -> nn.Module")
    if not isinstance(model, nn.Module) and size is None:
        raise UseError(
            "a build function needs the size of the network: size=theodolite.Size(width, depth). Or give a "
            "ready module"
        )
    if isinstance(model, nn.Module) and size is not None:
        raise UseError(
            f"size is {size!r}, and model is a ready {type(model).__name__}: leave size out, or give the "
            "function that builds the network"
        )
    anatomy = dissect(model, inputs, size=size, roles=roles)
    _require_trained(anatomy)
    network = model if size is None else build_hollow(model, size)
    assert isinstance(network, nn.Module)  # without a size, a module was given
    complex_ = _complex(network) if spec.matrices_only else frozenset()
    undecayed = _undecayed(no_decay, anatomy)
    given = arguments.positive("lr", lr) if adamw_lr is None else arguments.positive("adamw_lr", adamw_lr)
    beside = given if vector_lr is None else arguments.positive("vector_lr", vector_lr)
    rows: dict[str, PlanRow] = {}
    for part in anatomy.values():
        part = replace(part, undecayed=part.undecayed or part.name in undecayed)
        row = PlanRow.of(part, InitDistribution("kept"), reasons=_reasons(part, anatomy))
        if part.trained:
            by_own = not spec.matrices_only or _is_matrix(part, covers)
            if by_own and part.name in complex_:
                why_not = {"why": f"complex: {spec.name} trains real matrices"}
                by_own, row = False, replace(row, reasons={**row.reasons, **why_not})
            row = replace(row, rule=spec.name if by_own else "adamw", eps=eps if by_own else vector_eps)
            ratio = rate_ratio(row) if adamw_lr is not None else 1.0  # 1 for AdamW
            rate = (given if by_own else beside) * ratio
            decayed = decays(part, decay) and OPTIMIZERS[row.rule].decays
            fraction = weight_decay / (rate if decay == "independent" else ratio)
            row = replace(row, lr=rate, weight_decay=fraction if decayed else 0.0)
        rows[part.name] = row
    return Groups(
        network=_title(model, network),
        size=anatomy.size,
        optimizer_name=spec.name,
        lr=given,
        from_adamw=adamw_lr is not None,
        vector_lr=beside,
        weight_decay=weight_decay,
        eps=eps,
        vector_eps=vector_eps,
        policy=decay,
        options=dict(options or {}),
        vector_options={key: value for key, value in (vector_options or {}).items() if key != "eps"},
        rows=rows,
        notes=(
            *_rates(rows, spec, given, beside, adamw_lr is not None, vector_lr is not None),
            *assumptions(anatomy),
            *_untrained(anatomy),
        ),
        model=model if isinstance(model, nn.Module) else None,
    )


def _reasons(part: Part, anatomy: Anatomy) -> dict[str, str]:
    """In a few words: why its optimizer, and what was assumed."""
    found = {"why": why(part, anatomy)}
    if part.trained and anatomy.size is None and (clause := assumed(part)):
        found["assumed"] = clause
    return found


def _untrained(anatomy: Anatomy) -> Iterator[str]:
    if left := untrained(anatomy.values()):
        yield f"{left}: not trained."


def _rates(
    rows: Mapping[str, PlanRow],
    spec: OptimizerSpec,
    lr: float,
    vector_lr: float,
    from_adamw: bool,
    is_given: bool,
) -> Iterator[str]:
    """How the learning rates of a matrix optimizer and of the AdamW beside it compare."""
    own = [row for row in rows.values() if row.trained and row.rule == spec.name]
    others = any(row.rule == "adamw" for row in rows.values())
    if not spec.matrices_only:
        return
    if not own:
        yield (
            f'{WARNING}no tensor is a hidden weight, so AdamW trains everything. covers="all" gives '
            f"{spec.name} the inputs and readouts too."
        )
    elif from_adamw:
        yield (
            f"lr is AdamW's {number(lr)} times {ADAMW_RMS}·√max(in, out)/s, which moves each weight by the "
            "same RMS. The decay takes the same fraction of it: lr·decay is AdamW's."
        )
    elif others and spec.name in MUONS:
        rates = sorted({adamw_rate(row) for row in own})
        span = " to ".join(dict.fromkeys(number(rate) for rate in (rates[0], rates[-1])))
        like = f"At lr {number(lr)}, {spec.name} moves its weights by the RMS of AdamW at {span}"
        if is_given:
            yield f"{like}; AdamW trains the rest at {number(vector_lr)}."
        else:
            far = vector_lr > 2 * rates[-1] or vector_lr < rates[0] / 2
            yield (
                f"{WARNING * far}{like}. AdamW trains the rest at the same {number(vector_lr)}, as vector_lr "
                f"is not given. vector_lr={number(rates[-1])} would move both alike."
            )
    elif others and not is_given:
        yield f"AdamW trains the rest at the same lr, {number(vector_lr)}, as vector_lr is not given."


def _find(optimizer: str) -> OptimizerSpec:
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        hint = arguments.did_you_mean(optimizer, OPTIMIZERS)
        raise UseError(f"optimizer is {optimizer!r}: it is one of {', '.join(OPTIMIZERS)}.{hint}")
    return OPTIMIZERS[optimizer]


def _check(
    spec: OptimizerSpec,
    lr: float | None,
    adamw_lr: float | None,
    vector_lr: float | None,
    options: Mapping[str, Any] | None,
    vector_options: Mapping[str, Any] | None,
) -> None:
    if lr is None and adamw_lr is None:
        raise UseError(
            f"lr is missing: give the learning rate of {spec.name}, or the one you use with AdamW as adamw_lr"
        )
    if lr is not None and adamw_lr is not None:
        raise UseError(
            f"lr is {lr!r} and adamw_lr is {adamw_lr!r}: give lr, the learning rate of {spec.name}, or "
            "adamw_lr, from which it follows"
        )
    if adamw_lr is not None and "scale" not in spec.fixed and spec.name != "adamw":
        raise UseError(
            f"adamw_lr is {adamw_lr!r}, and optimizer is {spec.name!r}: AdamW's learning rate is translated "
            f"to Muon's only. Give lr, the learning rate of {spec.name}"
        )
    if not spec.matrices_only and (vector_options or vector_lr is not None):
        raise UseError(
            f"vector_lr and vector_options are for what a matrix optimizer leaves to AdamW; {spec.name} "
            "trains every tensor. Leave them out"
        )
    for name, given in (("options", options), ("vector_options", vector_options)):
        if not isinstance(given, Mapping | None):
            raise UseError(f"{name} is {given!r}: give options by name, as in {{'betas': (0.9, 0.95)}}")
    if options:
        spec.maker(options)  # refuses what is no option of it
    OPTIMIZERS["adamw"].maker({name: one for name, one in (vector_options or {}).items() if name != "eps"})


def _require_trained(anatomy: Anatomy) -> None:
    if not anatomy.trained:
        raise UseError(
            f"no tensor of the network is trained: all {len(anatomy)} are frozen (requires_grad is False) or "
            "used by nothing in the forward pass. Unfreeze what is to be trained"
        )


def _is_matrix(part: Part, covers: Covers) -> bool:
    """Does a matrix optimizer train it?"""
    wanted = part.role == "hidden" or (covers == "all" and part.role in ("input", "output"))
    return wanted and bool(part.in_axes) and bool(part.out_axes)


def _complex(network: nn.Module) -> frozenset[str]:
    """The tensors of complex numbers."""
    return frozenset(name for name, tensor in canonical_parameters(network) if tensor.is_complex())


def _undecayed(no_decay: Sequence[str], anatomy: Anatomy) -> set[str]:
    """The tensors that the caller excludes from decay."""
    if isinstance(no_decay, str):
        raise UseError(f"no_decay is {no_decay!r}: give a list of patterns, no_decay=[{no_decay!r}]")
    found: set[str] = set()
    for pattern in no_decay:
        names = matching(anatomy, pattern)
        if not names:
            raise UseError(
                f"no_decay: no tensor has a name that matches {pattern!r}; there are "
                f"{', '.join(list(anatomy)[:4])}, …"
            )
        found.update(names)
    return found


def _title(model: nn.Module | Build, network: nn.Module) -> str:
    """The name of the function that builds the network, or else of its class."""
    if not isinstance(model, nn.Module):
        name = str(getattr(getattr(model, "func", model), "__name__", "_"))
        if not name.startswith(("_", "<")):
            return name
    cls = type(unwrap(network))
    sharded = cls.__bases__[0].__name__ == "FSDPModule"  # a class that fully_shard derives
    return (cls.__bases__[-1] if sharded else cls).__name__
