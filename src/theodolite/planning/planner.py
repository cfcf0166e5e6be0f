"""`plan`: from a build function and the values that are right at base size to a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.names import matching
from theodolite.anatomy.part import Part, Role
from theodolite.core import arguments
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS, POLICIES, Base, Hyper, Policy, Ratios, Rule
from theodolite.optimizers.condition import centre, deviation
from theodolite.optimizers.decay_policies import decayed
from theodolite.optimizers.horizon import UNCHANGED, Horizon, HorizonCase, HorizonFactors
from theodolite.planning.caveats import caveats, horizon_caveats, refuse_unscalable
from theodolite.planning.counterparts import counterparts, repeated_branches
from theodolite.planning.explaining import Derivation, reasons
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.init_reading import Distributions, depth_in_init, read_init
from theodolite.planning.plan import Plan
from theodolite.planning.readout_multiplier import readout_multipliers
from theodolite.planning.rows import PlanRow

Covers = Literal["hidden", "all"]


@exclusive()
def plan(
    build: Build,
    inputs: Any,
    *,
    base: Size,
    size: Size,
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
    horizon: Horizon | str = UNCHANGED,
    anatomies: Mapping[Size, Anatomy] | None = None,
) -> Plan:
    """Plan how every tensor starts and is trained at one size, from values that are right at another.

    At the base size the plan is the network as it is, trained with the plain optimizer, except that gains
    which should not decay (`theodolite.optimizers.decay_policies`) do not.

    Args:
        build: `build(width, depth) -> nn.Module`.
        inputs: what the model is called with.
        base: the size at which the hyperparameters below are right; with `batch` and `tokens` if one of them
            changes.
        size: the size to plan for. What it does not say of batch and tokens is as at the base.
        optimizer: a name in `theodolite.optimizers.OPTIMIZERS`, or a rule of your own.
        lr: learning rate at base size.
        weight_decay: weight decay at base size, of `W ← W − lr·(A + weight_decay·W)`; under the policy
            `independent` the fraction that a weight loses per step, at base size too.
        eps: the optimizer's eps at base size; its usual value by default.
        decay: `paper`, `independent`, `none`, `matrices` or `everything`, see
            `theodolite.optimizers.decay_policies`.
        covers: which weights a matrix optimizer trains: the `hidden` ones, or `all`. AdamW trains the rest.
        vector_lr: learning rate at base size for what a matrix optimizer leaves to AdamW; `lr` by default.
        init: initial std at base size by pattern of names, instead of the network's own; 0 for zeros.
        roles: roles of tensors that cannot be classified from the dataflow, by pattern of names; `frozen` for
            those that the plan should leave alone.
        no_decay: patterns of names of tensors that do not decay, whatever the policy. Parameters that the
            network marks by `_no_weight_decay = True` or `_optim = {"weight_decay": 0.0}` do not either.
        options: further options of the optimizer at base size, such as betas.
        vector_options: further options of the AdamW beside a matrix optimizer.
        horizon: how the hyperparameters follow batch and tokens: `none`, `sde`, `timescale`,
            `sde+timescale`, `power(a, b)`, see `theodolite.optimizers.horizon`.
        anatomies: anatomies of the network at either size, if you have them already.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> made = plan(th.models.GPT, tokens, base=Size(64, 2), size=Size(256, 8), lr=2**-8)
    >>> made["blocks.7.feed_forward.branch.up.weight"].lr == 2**-8 / 4      # four times as wide
    True
    """
    rule, name = _find_rule(optimizer)
    spec = OPTIMIZERS.get(name)
    if eps is None:
        eps = spec.eps.usual if spec and spec.eps else 1e-8
    vectors = spec is not None and spec.matrices_only
    if not vectors and (vector_options or vector_lr is not None):
        raise UseError(
            f"vector_lr and vector_options are for what a matrix optimizer leaves to AdamW; {name} trains "
            "every tensor. Leave them out"
        )
    for argument, value in (("base", base), ("size", size)):
        if not isinstance(value, Size):
            raise UseError(f"{argument} is {value!r}: give a Size, for example Size(256, 4)")
    arguments.one_of("decay", decay, POLICIES)
    arguments.one_of("covers", covers, get_args(Covers))
    lr = arguments.positive("lr", lr)
    vector_lr = lr if vector_lr is None else arguments.positive("vector_lr", vector_lr)
    weight_decay = arguments.number("weight_decay", weight_decay, least=0)
    eps = arguments.number("eps", eps, least=0)
    vector_eps = arguments.number("vector_options['eps']", (vector_options or {}).get("eps", 1e-8), least=0)
    horizon = Horizon.of(horizon)
    known = {one.network: anatomy for one, anatomy in (anatomies or {}).items()}
    for one in (size.network, base.network):
        if one not in known:
            known[one] = dissect(build, inputs, size=one, roles=roles)
    target, reference = known[size.network], known[base.network]
    if not target.trained:
        raise UseError(
            f"no tensor of the network at {size} is trained: all {len(target)} are frozen (requires_grad is "
            "False) or used by nothing in the forward pass. Unfreeze what is to be trained"
        )
    branches = repeated_branches(target, reference)
    refuse_unscalable(branches)
    partners = counterparts(target, reference)
    at_base = read_init(build, base, {part.name for part in reference.trained})
    own_depth = depth_in_init(build, base, at_base) if branches.ratio != 1 else {}
    inits = _overridden(at_base, partners, init)
    undecayed = _undecayed(no_decay, partners)
    multipliers, tied = readout_multipliers(target, partners)
    cases = {name: HorizonCase(horizon, base, size, spec, dict(options or {}))}
    if vectors:
        cases["adamw"] = HorizonCase(horizon, base, size, OPTIMIZERS["adamw"], dict(vector_options or {}))
    rows: dict[str, PlanRow] = {}
    for part in target.values():
        if not part.trained:
            rows[part.name] = _untrained_row(part)
            continue
        partner = partners[part.name]
        part = replace(part, undecayed=part.undecayed or part.name in undecayed)
        ratios = Ratios(
            part.fan_in / partner.fan_in,
            part.fan_out / partner.fan_out,
            branches.depth(part),
            part.factor / partner.factor,
        )
        is_matrix = part.role == "hidden" or (covers == "all" and part.role in ("input", "output"))
        by_own = not vectors or is_matrix
        its_rule, its_name = (rule, name) if by_own else (OPTIMIZERS["adamw"].rule, "adamw")
        given = Base(lr, weight_decay, eps) if by_own else Base(vector_lr, weight_decay, vector_eps)
        start = inits[part.name]
        explicit = _explicit(its_rule, its_name, part, ratios, given, decay)
        factors = cases[its_name].factors(
            explicit.degree, explicit.eps_degree, independent=decay == "independent"
        )
        hyper = _absorbed(part, explicit, factors, given)
        made = Derivation(
            part=part,
            partner=partner,
            ratios=ratios,
            num_branches=branches.counts(part),
            rule=its_name,
            policy=decay,
            base=given,
            init=start if part.role in ("bias", "gain") else start.without_chance(partner.numel),
            explicit=explicit,
            hyper=hyper,
            readout=tied.get(part.name, 1.0),
            horizon=cases[its_name],
            factors=factors,
        )
        rows[part.name] = _row(made)
    vector_options = cases["adamw"].options_here if vectors else {}
    vector_options.pop("eps", None)  # it is in the rows
    return Plan(
        size=size,
        base=base,
        optimizer_name=name,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        policy=decay,
        options=cases[name].options_here,
        vector_options=vector_options,
        rows=rows,
        multipliers=multipliers,
        notes=(
            *horizon_caveats(base, size, horizon),
            *caveats(target, reference, branches, own_depth),
        ),
        horizon=str(horizon),
        build_function=build,
        inputs=inputs,
    )


def _find_rule(optimizer: str | Rule) -> tuple[Rule, str]:
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
        hint = arguments.did_you_mean(optimizer, OPTIMIZERS)
        raise UseError(f"optimizer is {optimizer!r}: there is a rule for {', '.join(OPTIMIZERS)}.{hint}")
    return OPTIMIZERS[optimizer].rule, optimizer


def _overridden(
    at_base: Distributions, partners: Mapping[str, Part], init: Mapping[str, float] | None
) -> Distributions:
    """By tensor of the target: its distribution at base size, the network's own or the caller's."""
    if init is not None and not isinstance(init, Mapping):
        raise UseError(f"init is {init!r}: give the std by pattern of names, as in {{'embed.*': 0.02}}")
    found = {name: at_base[partner.name] for name, partner in partners.items()}
    for pattern, std in (init or {}).items():
        names = _matching(pattern, partners, "init")
        std = arguments.number(f"init: the std for {pattern!r}", std, least=0)
        given = InitDistribution("normal", std=std) if std else InitDistribution("constant")
        found.update(dict.fromkeys(names, given))
    return found


def _undecayed(no_decay: Sequence[str], partners: Mapping[str, Part]) -> set[str]:
    """The tensors of the target that the caller excludes from decay."""
    if isinstance(no_decay, str):
        raise UseError(f"no_decay is {no_decay!r}: give a list of patterns, no_decay=[{no_decay!r}]")
    return {name for pattern in no_decay for name in _matching(pattern, partners, "no_decay")}


def _matching(pattern: str, partners: Mapping[str, Part], option: str) -> list[str]:
    """The tensors of the target whose names at base size match; if none does, those whose own names match."""

    at_base = set(matching((partner.name for partner in partners.values()), pattern))
    names = [name for name, partner in partners.items() if partner.name in at_base]
    names = names or matching(partners, pattern)
    if not names:
        some = ", ".join(list(partners)[:4])
        raise UseError(
            f"{option}: no tensor that is trained has a name that matches {pattern!r}; there are {some}, …"
        )
    return names


def _explicit(rule: Rule, name: str, part: Part, ratios: Ratios, base: Base, policy: Policy) -> Hyper:
    """What a rule gives under a decay policy, with the multiplier beside the weight."""
    explicit = rule(part, ratios, base)
    if not explicit.lr > 0:
        raise UseError(
            f"{part.name}: the rule {name} gives it the learning rate {explicit.lr!r}. Give a "
            "positive one; leave out what is not to be trained by plan.optimizer(model, skip=[…])"
        )
    return replace(explicit, weight_decay=decayed(policy, part, explicit, base.weight_decay))


def _absorbed(part: Part, explicit: Hyper, factors: HorizonFactors, base: Base) -> Hyper:
    """The same for the batch and tokens of the target, with the multiplier absorbed."""
    hyper = replace(
        explicit,
        lr=explicit.lr * factors.lr,
        weight_decay=explicit.weight_decay * factors.weight_decay,
        eps=explicit.eps * factors.eps,
    ).absorbed()
    if not all(map(math.isfinite, (hyper.lr, hyper.weight_decay, hyper.eps, hyper.std, hyper.extent))):
        raise UseError(
            f"{part.name}: lr {base.lr!r}, weight decay {base.weight_decay!r} or eps {base.eps!r} is beyond "
            "what a number can hold at this size. Check the values at base size"
        )
    return hyper


def _row(made: Derivation) -> PlanRow:
    """The row of a trained tensor."""
    part, hyper, factor = made.part, made.hyper, made.hyper.std
    if part.role in ("bias", "gain"):
        # What multiplies is offset + gain: that is what an absorbed multiplier scales.
        init = made.init.scaled(factor).shifted(part.offset * (factor - 1))
    else:
        mean = factor / deviation(part, made.ratios) * centre(part, made.ratios)
        init = made.init.scaled(factor, mean=mean)
    return replace(
        _untrained_row(part),
        rule=made.rule,
        multiplier=made.readout,
        init=init,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        extent=hyper.extent,
        reasons=reasons(made),
    )


def _untrained_row(part: Part) -> PlanRow:
    """The row of a tensor that is left as it is."""
    frozen = part.role == "frozen"
    why = "takes no gradient (requires_grad is False)" if frozen else "is used by nothing in the forward pass"
    shape = "×".join(map(str, part.shape)) or "()"
    reasons = {
        "tensor": f"of shape {shape}; it {why}, and the plan leaves it as it is",
        "init": "what build makes of it at this size",
        "lr": "none: no optimizer has it",
    }
    return PlanRow.of(part, init=InitDistribution("kept"), reasons=reasons)
