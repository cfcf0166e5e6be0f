"""`plan`: a rule over an anatomy."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.part import Part, Role
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS, POLICIES, Base, Policy, Ratios, Rule
from theodolite.planning.caveats import caveats, refuse_endless
from theodolite.planning.counterparts import counterparts
from theodolite.planning.law import Law
from theodolite.planning.laws import depth_in_init, read_laws
from theodolite.planning.plan import Plan, Row
from theodolite.planning.quantities import Case
from theodolite.planning.readout import readouts
from theodolite.planning.repeating import repeating
from theodolite.planning.rows import kept_row, make_row, settled

Covers = Literal["hidden", "all"]


@exclusive()
def plan(
    build: Build,
    inputs: Any,
    *,
    size: Size,
    base: Size,
    optimizer: str | Rule = "adamw",
    lr: float,
    weight_decay: float = 0.0,
    eps: float | None = None,
    decay: Policy = "paper",
    covers: Covers = "hidden",
    vector_lr: float | None = None,
    init: Mapping[str, float] | None = None,
    roles: Mapping[str, Role] | None = None,
    no_decay: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    vector_options: Mapping[str, Any] | None = None,
    anatomies: Mapping[Size, Anatomy] | None = None,
) -> Plan:
    """Say for every tensor how it has to start and to be trained at a size, from what is right at another.

    At the base size the plan is the network as it is, trained with the plain optimizer, except that gains
    which should not decay (`theodolite.optimizers.decay_policies`) do not.

    Args:
        build: `build(width, depth) -> nn.Module`.
        inputs: what the model is called with.
        size: the size to plan for.
        base: the size at which the hyperparameters below are right.
        optimizer: a name in `theodolite.optimizers.OPTIMIZERS`, or a rule of your own.
        lr: learning rate at base size.
        weight_decay: weight decay at base size, of `W ← W − lr·(A + weight_decay·W)`; under the policy
            `independent` the fraction that a weight loses per step, at base size too.
        eps: the optimizer's eps at base size; its usual value if not given.
        decay: `paper`, `independent` or `none`, see `theodolite.optimizers.decay_policies`.
        covers: which weights a matrix optimizer trains: the `hidden` ones, or `all`. The rest gets AdamW.
        vector_lr: learning rate at base size of what a matrix optimizer leaves to AdamW; `lr` if not given.
        init: by pattern of names, the std at base size where it should not be the network's own; 0 for zeros.
        roles: what tensors are that cannot be classified by looking, by pattern of names; `frozen` for those
            that the plan should leave alone.
        no_decay: patterns of names of tensors that do not decay, whatever the policy. Parameters that the
            network marks by `_no_weight_decay = True` or `_optim = {"weight_decay": 0.0}` do not either.
        options: further options of the optimizer, such as betas.
        vector_options: the same of the AdamW beside a matrix optimizer.
        anatomies: of the network at either size, if they are at hand: they need not be found again.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> made = plan(th.models.GPT, tokens, size=Size(256, 8), base=Size(64, 2), lr=2**-8)
    >>> made["blocks.7.feed_forward.branch.up.weight"].lr == 2**-8 / 4      # four times as wide
    True
    """
    rule, name = _rule(optimizer)
    spec = OPTIMIZERS.get(name)
    if eps is None:
        eps = spec.eps.usual if spec and spec.eps else 1e-8
    vectors = spec is not None and spec.matrices_only
    if not vectors and (vector_options or vector_lr is not None):
        raise UseError(
            f"vector_lr and vector_options are for what a matrix optimizer leaves to AdamW; {name} trains "
            "every tensor. Leave them out"
        )
    vector_eps = (vector_options or {}).get("eps", 1e-8)
    _check(
        size,
        base,
        decay,
        covers,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        vector_lr=vector_lr,
        vector_eps=vector_eps,
    )
    lr, weight_decay, eps = float(lr), float(weight_decay), float(eps)
    known = dict(anatomies or {})
    for one in (size, base):
        if one not in known:
            known[one] = dissect(build, inputs, size=one, roles=roles)
    target, reference = known[size], known[base]
    if not target.trained:
        raise UseError(
            f"no tensor of the network at {size} is trained: all {len(target)} are frozen (requires_grad is "
            "False) or used by nothing in the forward pass. Unfreeze what is to be trained"
        )
    branches = repeating(target, reference)
    refuse_endless(branches)
    partners = counterparts(target, reference)
    among = {part.name for part in reference.trained}
    own_depth = depth_in_init(build, base, among) if branches.ratio != 1 else {}
    laws = _overridden(read_laws(build, base, among), partners, init)
    undecayed = _undecayed(no_decay, partners)
    multipliers, tied = readouts(target, partners)
    rows: dict[str, Row] = {}
    for part in target.values():
        if not part.trained:
            rows[part.name] = kept_row(part)
            continue
        partner = partners[part.name]
        part = replace(part, undecayed=part.undecayed or part.name in undecayed)
        ratios = _ratios(part, partner, branches.depth(part))
        by_matrix = not vectors or _is_matrix(part, covers)
        its_rule, rule_name = (rule, name) if by_matrix else (OPTIMIZERS["adamw"].rule, "adamw")
        given = Base(
            lr=lr if by_matrix or vector_lr is None else vector_lr,
            weight_decay=weight_decay,
            eps=eps if by_matrix else vector_eps,
            std=1.0,
        )
        law = laws[part.name]
        explicit, hyper = settled(its_rule, rule_name, part, ratios, given, decay)
        rows[part.name] = make_row(
            Case(
                part=part,
                partner=partner,
                ratios=ratios,
                num_branches=branches.counts(part),
                rule=rule_name,
                policy=decay,
                base=given,
                law=law if part.role in ("bias", "gain") else law.without_chance(partner.numel),
                explicit=explicit,
                hyper=hyper,
                readout=tied.get(part.name, 1.0),
            )
        )
    return Plan(
        size=size,
        base=base,
        optimizer_name=name,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        policy=decay,
        options=dict(options or {}),
        vector_options={key: value for key, value in (vector_options or {}).items() if key != "eps"},
        rows=rows,
        multipliers=multipliers,
        notes=tuple(caveats(target, reference, branches, own_depth)),
        build_function=build,
        inputs=inputs,
    )


def _ratios(part: Part, partner: Part, depth: float) -> Ratios:
    own = part.factor / partner.factor
    return Ratios(part.fan_in / partner.fan_in, part.fan_out / partner.fan_out, depth, own)


def _is_matrix(part: Part, covers: Covers) -> bool:
    return part.role == "hidden" or (covers == "all" and part.role in ("input", "output"))


def _rule(optimizer: str | Rule) -> tuple[Rule, str]:
    if isinstance(optimizer, type):
        raise UseError(
            f"optimizer is the class {optimizer.__name__}: give the name of its rule, one of "
            f"{', '.join(OPTIMIZERS)}, or a rule of your own, a function (part, ratios, base) -> Hyper"
        )
    for name, spec in OPTIMIZERS.items():
        if optimizer == spec.rule:
            return spec.rule, name
    if callable(optimizer):
        return optimizer, getattr(optimizer, "__name__", "custom")
    if optimizer not in OPTIMIZERS:
        near = difflib.get_close_matches(str(optimizer), OPTIMIZERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UseError(f"optimizer is {optimizer!r}: there is a rule for {', '.join(OPTIMIZERS)}.{hint}")
    return OPTIMIZERS[optimizer].rule, optimizer


def _check(size: Size, base: Size, decay: str, covers: str, **numbers: Any) -> None:
    for name, value in (("size", size), ("base", base)):
        if not isinstance(value, Size):
            raise UseError(f"{name} is {value!r}: give a Size, for example Size(256, 4)")
    if decay not in POLICIES:
        raise UseError(f"decay is {decay!r}: it is one of {', '.join(POLICIES)}")
    if covers not in ("hidden", "all"):
        raise UseError(f"covers is {covers!r}: it is hidden or all")
    for name, number in numbers.items():
        if number is None and name == "vector_lr":
            continue
        lowest = "positive" if name in ("lr", "vector_lr") else "not negative"
        good = isinstance(number, Real) and 0 <= float(number) < math.inf
        good = good and not isinstance(number, bool)
        if not good or (number == 0 and lowest == "positive"):
            raise UseError(f"{name} is {number!r}: it has to be a finite number and {lowest}")


def _overridden(
    laws: Mapping[str, Law], partners: Mapping[str, Part], init: Mapping[str, float] | None
) -> dict[str, Law]:
    """By tensor of the target, its law at base size; patterns mean names there, or else at the target."""
    if init is not None and not isinstance(init, Mapping):
        raise UseError(f"init is {init!r}: give the std by pattern of names, as in {{'embed.*': 0.02}}")
    found = {name: laws[partner.name] for name, partner in partners.items()}
    for pattern, std in (init or {}).items():
        names = _matching(pattern, partners, "init")
        if not (isinstance(std, (int, float)) and math.isfinite(std) and std >= 0):
            raise UseError(f"init: the std for {pattern!r} is {std!r}: it has to be finite and not negative")
        found.update(dict.fromkeys(names, Law("normal", std=std) if std else Law("constant")))
    return found


def _undecayed(no_decay: Sequence[str], partners: Mapping[str, Part]) -> set[str]:
    """The tensors of the target that the caller wants not to decay."""
    if isinstance(no_decay, str):
        raise UseError(f"no_decay is {no_decay!r}: give a list of patterns, no_decay=[{no_decay!r}]")
    return {name for pattern in no_decay for name in _matching(pattern, partners, "no_decay")}


def _matching(pattern: str, partners: Mapping[str, Part], option: str) -> list[str]:
    """The tensors of the target whose names at base size match, or else those whose own names do."""
    names = [name for name, partner in partners.items() if _matches(partner.name, pattern)]
    names = names or [name for name in partners if _matches(name, pattern)]
    if not names:
        some = ", ".join(list(partners)[:4])
        raise UseError(
            f"{option}: no tensor that is trained has a name that matches {pattern!r}; there are {some}, …"
        )
    return names


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)
