"""Where the numbers of a row come from: formulas in symbols, the numbers put in, and why.

Symbols, all in units of the base size:

    r_in, r_out, r_L   fan-in, fan-out and number of residual branches
    o                  what the network's own forward pass multiplies the layer by
    α                  multiplier of the layer beside o, absorbed into everything else
    c, u, w            sizes ‖·‖_R of the allowed change, of an update and of the weight
    f                  what eps is compared with
    m_B, m_D           batch and tokens
    h, s               how the learning rate follows batch and tokens, and the momentum with them

and at base size η, λ, ε and σ for the learning rate, the weight decay, eps and the initial std.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from theodolite.anatomy.part import Part
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Policy, Ratios
from theodolite.optimizers.condition import centre, change, deviation, multiplier, norm
from theodolite.optimizers.decay_policies import decays
from theodolite.optimizers.horizon import TIMESCALE, HorizonCase, HorizonFactors
from theodolite.optimizers.scaling import Scaling, fraction, inverse
from theodolite.optimizers.spec import OptimizerSpec
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import WITH_EXTENT, WITHOUT_EPS


@dataclass(frozen=True)
class Derivation:
    """How the numbers of one tensor follow from a rule."""

    part: Part
    partner: Part
    ratios: Ratios
    num_branches: tuple[int, int]
    """At the target and at the base size."""
    rule: str
    policy: Policy
    base: Base
    init: InitDistribution
    """At base size."""
    explicit: Hyper
    """With the multiplier beside the weight."""
    hyper: Hyper
    """With the multiplier absorbed."""
    horizon: HorizonCase
    """The rule for batch and tokens."""
    factors: HorizonFactors
    """What it multiplies by; not in `explicit`."""
    readout: float = 1.0
    """A multiplier that stays beside the weight, on the readout of a tied embedding."""

    @property
    def spec(self) -> OptimizerSpec | None:
        """What is known of the optimizer; None for a rule of the user's."""
        return OPTIMIZERS.get(self.rule)


def reasons(case: Derivation) -> dict[str, str]:
    """What the tensor is, and for each column the formula with its numbers; below it, why."""
    found = {"tensor": _identity(case), "sizes": _sizes(case)}
    if case.explicit.multiplier != 1 or _alpha_symbol(case) != "1":
        found["α"] = _alpha(case)
    if case.readout != 1:
        found["multiplier"] = (
            f"{fraction(case.readout)}, in the forward pass of the readout: it shares this tensor with the "
            "embedding, which goes without it, so that the tensor cannot absorb it"
        )
    if case.horizon.stretch.changes:
        found["batch and tokens"] = _horizon(case)
    found |= {"init": _init(case), "lr": _lr(case), "decay": _decay(case)}
    if case.rule not in WITHOUT_EPS:
        found["eps"] = _eps(case)
    if word := WITH_EXTENT.get(case.rule):
        found[word] = _extent(case)
    return found | {option: _average(case, option) for option in case.horizon.averages}


def _identity(case: Derivation) -> str:
    part = case.part
    noun = part.role if part.role in ("bias", "gain") else f"{part.role} weight"
    what = f"{noun} of shape {'×'.join(map(str, part.shape)) or '()'}"
    if part.norm:
        what += f" of an {part.norm.capitalize()}-Norm" if part.op == "norm" else " inside a weight"
    places = {
        f"in block {part.block}": part.block is not None,
        "in a branch of one layer": part.branch_layers == 1,
        "where its branch ends": part.ends_branch,
        "on the residual stream": part.on_stream,
    }
    where = [place for place, applies in places.items() if applies]
    return f"{', '.join([what, *where])}; trained by {case.rule}"


def _sizes(case: Derivation) -> str:
    part, partner, ratios = case.part, case.partner, case.ratios
    sizes = [
        ("r_in", ratios.fan_in, "fan-in", part.fan_in, partner.fan_in),
        ("r_out", ratios.fan_out, "fan-out", part.fan_out, partner.fan_out),
    ]
    if part.block is not None or part.on_stream:
        sizes.append(("r_L", ratios.depth, "residual branches", *case.num_branches))
    return "\n".join(
        f"{symbol} = {fraction(ratio)}: {what} {here} = {fraction(ratio)} × {there}"
        for symbol, ratio, what, here, there in sizes
    )


def _alpha(case: Derivation) -> str:
    alpha = case.explicit.multiplier
    if not math.isclose(alpha, multiplier(case.part, case.ratios)):
        return f"{fraction(alpha)}, the multiplier that the rule asks for, absorbed below"
    whose = []
    if case.part.role == "output":
        whose.append("an output's multiplier")
    if case.part.ends_branch:
        whose.append("the branch's multiplier")
    written, named = f"{_alpha_symbol(case)} = {fraction(alpha)}", " and ".join(whose)
    own = case.ratios.own
    if own == 1:
        return f"{written}: {named}, absorbed below"
    return (
        f"{written}: {named or 'the multiplier of this layer'} is {fraction(alpha * own)}, of which the "
        f"network's own forward pass does o = {fraction(own)}; the rest is absorbed below"
    )


def _horizon(case: Derivation) -> str:
    stretch, base, size = case.horizon.stretch, case.horizon.base, case.horizon.size
    symbols = {"batch": "m_B", "tokens": "m_D"}
    lines = [
        f"{symbols[name]} = {fraction(getattr(stretch, name))}: {name} {getattr(size, name)} = "
        f"{fraction(getattr(stretch, name))} × {getattr(base, name)}"
        for name in stretch.changes
    ]
    return "\n".join([*lines, f"by the rule {case.horizon.horizon}"])


def _average(case: Derivation, option: str) -> str:
    before, after = case.horizon.averages[option]
    written = [
        ", ".join(f"{each:.6g}" for each in (value if isinstance(value, tuple | list) else [value]))
        for value in (before, after)
    ]
    return (
        f"{written[0]} → {written[1]}\n"
        f"averages keep their half-life in tokens, of which a step holds "
        f"{fraction(case.horizon.stretch.batch)} times as many"
    )


def _init(case: Derivation) -> str:
    init, constant = case.init, case.init.kind == "constant"
    factor = case.explicit.std / case.base.std
    usual = deviation(case.part, case.ratios)
    is_usual = math.isclose(factor, usual)
    by_fan = case.part.role != "output" and is_usual
    spread = ("1/√r_in" if by_fan else "1" if is_usual else "d", factor)
    shift = ("1/r_in" if by_fan else spread[0], factor / usual * centre(case.part, case.ratios))
    formula = _product(
        ("value", init.mean) if constant else ("σ", init.std),
        shift if constant else spread,
        *_power(case, 1),
    )
    if constant and not init.mean:
        return f"{formula}\nzeros stay zeros"
    vector = case.part.role in ("bias", "gain")
    if by_fan and vector:
        why = "a vector has no fan-in to sum over"
    elif by_fan:
        why = "a sum over the fan-in keeps its size"
    elif is_usual:
        why = "an output keeps its std, and its multiplier lets it start small"
    else:
        why = "d: as the rule asks"
    drawn = "as the network draws it" if init.kind == "own" else f"{init.kind} at base size"
    lines = [formula, f"{drawn}; {why}"]
    if init.mean and not constant and not vector:
        lines.append(
            f"mean {_product(('m', init.mean), shift, *_power(case, 1))}: a mean adds up over the fan-in"
        )
    return "\n".join(lines)


def _lr(case: Derivation) -> str:
    factor = case.explicit.lr / case.base.lr
    follows = case.horizon.horizon.rates != "none" and bool(case.horizon.stretch.changes)
    own = [("h", case.factors.rate)] if follows else []
    momentum = case.factors.mixing / case.factors.sums
    own += [("s", momentum)] if momentum != 1 else []
    formula = _product(("η", case.base.lr), ("c/u", factor), *_power(case, 1 + case.explicit.degree), *own)
    words = _rate_words(case) if follows else ()
    return "\n".join([formula, f"{_allowed(case)}; {_update(case)}", *words])


def _rate_words(case: Derivation) -> Iterator[str]:
    """Where h and s come from."""
    if case.horizon.horizon.rates == "power":
        yield f"h = {case.horizon.horizon.words(case.horizon.stretch)}, by the exponents given"
    elif case.spec is not None and case.spec.fades:
        yield f"h = 1: steps of {case.rule} go as 1/√step by themselves"
    else:
        words = case.horizon.horizon.words(case.horizon.stretch, case.explicit.degree)
        yield f"h = {words}: the random walk of the weights stays"
    if case.factors.sums != 1:
        yield f"s = {fraction(1 / case.factors.sums)}: momentum sums the gradients of fewer or more steps"
    if case.factors.mixing != 1:
        yield (
            f"s = {fraction(case.factors.mixing)}: momentum is normalised, and its steps are "
            f"{'less' if case.factors.mixing > 1 else 'more'} correlated"
        )


def _decay(case: Derivation) -> str:
    if case.policy == "none":
        return "0: the policy is that nothing decays"
    if case.spec and not case.spec.decays:
        return f"0: {case.rule} keeps the norm of the tensor"
    if case.part.undecayed:
        return "0: no_decay names it, or the network marks it as not to decay"
    if not decays(case.part, case.policy):
        if case.policy == "matrices":
            return f"0: the policy is that no {case.part.role} decays"
        if case.part.scale_free:
            return "0: it is divided by a norm of itself, so decay would only enlarge its steps"
        if case.part.rate:
            return "0: it stands for a rate by its logarithm, which decay would pull to that of zero"
        whose = "an Output-Norm" if case.part.norm else "no norm"
        return f"0: the gain of {whose} never decays"
    stays = f"{TIMESCALE}: weights average over the same part of all steps, lr·decay goes as m_B/m_D"
    kept = case.horizon.horizon.timescale and bool(case.horizon.stretch.changes)
    if case.policy == "independent":
        part = case.base.weight_decay / (case.horizon.stretch.steps if kept else 1.0)
        symbol = "λ·m_B/m_D" if kept else "λ"
        summed = "" if case.factors.sums == 1 else "·s"  # the decay is in the sum
        part /= case.factors.sums
        return (
            f"{symbol}{summed} / lr = {_digits(part)} / {_digits(case.hyper.lr)} = "
            f"{_digits(case.hyper.weight_decay)}\n"
            f"independent: each step takes the fraction {symbol} of the weight, whatever its learning rate"
            + (f"\n{stays}" if kept else "")
        )
    size = norm(case.part, case.ratios)
    usual = _update_size(case) / size
    factor = case.explicit.weight_decay / case.base.weight_decay if case.base.weight_decay else usual
    named = math.isclose(factor, usual)
    below = ["m_D", *["h"] * (case.horizon.horizon.rates != "none"), *["s"] * (case.factors.mixing != 1)]
    share = f"m_B/({'·'.join(below)})" if len(below) > 1 else "m_B/m_D"
    formula = _product(
        ("λ", case.base.weight_decay),
        ("u/w" if named else "d", factor),
        *_power(case, -1 - case.explicit.degree),
        *([(share, case.factors.weight_decay)] if kept else []),
    )
    symbol = "r_in = " if case.part.role == "output" else ""
    why = f"w = {symbol}{fraction(size)}, the size of the weight: the decay stays comparable to the update"
    return "\n".join([formula, why if named else "d: as the rule asks", *([stays] if kept else [])])


def _eps(case: Derivation) -> str:
    factor = case.explicit.eps / case.base.eps if case.base.eps else 1.0
    degree = case.explicit.eps_degree
    fades = case.spec is not None and case.spec.fades
    own = [] if case.factors.eps == 1 else [("m_D/m_B²" if fades else "√(m_D/m_B)", case.factors.eps)]
    formula = _product(("ε", case.base.eps), ("f", factor), *_power(case, -degree), *own)
    compared = _written(case, factor, case.spec.eps.compared if case.spec and case.spec.eps else None)
    return f"{formula}\n" + (f"f = {compared}" if compared else "f: as the rule asks")


def _extent(case: Derivation) -> str:
    factor = case.explicit.extent
    own = [] if factor == 1 else [("e", factor)]
    words = "times the optimizer's own, in units of the weight"
    scaling = _written(case, factor, case.spec.extent.scaling if case.spec and case.spec.extent else None)
    if own and scaling:
        words += f"; e = {scaling}"
    return f"{_product(('1', 1.0), *own, *_power(case, 1))}\n{words}"


def _allowed(case: Derivation) -> str:
    value = change(case.part, case.ratios)
    above = "r_in" if case.part.role == "output" else "1"
    symbol = f"{above}/√r_L" if case.part.branch_layers == 1 else above
    if case.part.on_stream:
        symbol = f"{above}/r_L"
    written = fraction(value) if symbol == "1" else f"{symbol} = {fraction(value)}"
    return f"c = {written}, the change allowed"


def _update(case: Derivation) -> str:
    size = _update_size(case)
    update = _written(case, size, case.spec.update if case.spec else None)
    return f"u = {update}" if update else f"u = {fraction(size)}: the size of the update, as the rule says"


def _written(case: Derivation, value: float, scaling: Scaling | None) -> str:
    """A scaling in symbols and words; empty if it is not the one of the rule in use."""
    if scaling is None or not math.isclose(value, scaling.value(case.part, case.ratios)):
        return ""
    symbols = scaling.formula(case.part, case.ratios)
    written = fraction(value) if symbols == "1" else f"{symbols} = {fraction(value)}"
    return f"{written}, as {scaling.why(case.part, case.ratios)}"


def _power(case: Derivation, power: int) -> list[tuple[str, float]]:
    """The factor that an absorbed multiplier leaves; none where there is no multiplier."""
    alpha = case.explicit.multiplier
    if not power or (alpha == 1 and _alpha_symbol(case) == "1"):
        return []
    symbol = "α" if abs(power) == 1 else "α²"
    return [(symbol if power > 0 else f"1/{symbol}", alpha**power)]


def _product(*factors: tuple[str, float]) -> str:
    """`η · α = 0.01 · 1/4 = 0.0025`; the first factor in digits, the others as fractions where they are."""
    (first, value), *rest = factors
    result = math.prod(factor for _, factor in factors)
    symbols = " · ".join([first, *(symbol for symbol, _ in rest)])
    numbers = " · ".join([_digits(value), *(fraction(factor) for _, factor in rest)])
    return f"{symbols} = {numbers} = {_digits(result)}"


def _digits(value: float) -> str:
    return f"{value:.4g}"


def _update_size(case: Derivation) -> float:
    """By how much `‖A‖_R` grew, as the rule's learning rate implies."""
    return change(case.part, case.ratios) * case.base.lr / case.explicit.lr


def _alpha_symbol(case: Derivation) -> str:
    """The multiplier α."""
    below = ["r_in"] if case.part.role == "output" else []
    if case.part.ends_branch:
        below.append("√r_L" if case.part.branch_layers == 1 else "r_L")
    return inverse([*below, "o"] if case.ratios.own != 1 else below)
