"""The theory's report: one row for each branch, the constants, and what they come to in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theodolite.growing.lemma.constants import Layer
    from theodolite.growing.theory import Theory


def table(found: Theory) -> str:
    """All of it."""
    return "\n".join([*_rows(found), "", *_constants(found), "", *_statements(found)])


def _rows(found: Theory) -> list[str]:
    lines = [
        f"{'branch':<8}{'L_N':>9}{'L_x ≥':>9}{'L_x ≤':>9}{'L_θ':>9}{'R':>9}{'p':>12}{'A':>10}  how",
    ]
    for one in found.layers:
        lines.append(
            f"{f'{one.block}.{one.branch}':<8}{_number(one.norm.value):>9}{_number(one.input.measured):>9}"
            f"{_number(one.input.bound):>9}{_number(one.parameter):>9}{_number(one.radius):>9}{one.parameters:>12,}"
            f"{_power(one.log_amplification):>10}  {one.how}"
        )
    return lines


def _constants(found: Theory) -> list[str]:
    whole, top = found.whole, found.top
    seen = "the largest seen" if found.bound_is_measured else "given"
    slope = "the largest seen" if found.lipschitz_is_measured else "√2, of a cross-entropy"
    held = "" if math.isfinite(top.bound) else f", measured: no bound for {top.missing}"
    lines = [
        f"L_T {_number(top.value)} ({_number(top.measured)} seen{held}), L_ℓ {_number(found.loss_lipschitz)} "
        f"({slope}), B {_number(found.loss_bound)} ({seen})",
        f"L {whole.layers}, p {found.parameters:,}, R {_number(whole.radius)}, "
        f"A {_power(whole.log_amplification)} ({_power(found.side('measured').log_amplification)} with what "
        f"was measured alone, {_power(found.side('anywhere').log_amplification)} with norms at 1/√ε)",
    ]
    if not found.is_post_norm:
        lines.append(
            "The stream is not normalised between layers: L_N is of what else stands there. The lemma has\n"
            "norms there, which bound the stream. Here that is assumed; a last norm is part of the top."
        )
    lines.append(
        f"L_x from below and L_θ are the largest of {found.units} units, L_x from above is for inputs like\n"
        "theirs. The theorem needs constants for every network of the class, fixed before the data are\n"
        "seen: they are not below those measured."
    )
    return lines


def _statements(found: Theory) -> list[str]:
    gain = (
        f"a block that takes away the whole loss, {_number(found.loss)}"
        if found.margin is None
        else f"a gain of {_number(found.margin)} by the jump and {_number(found.training)} by training"
    )
    measured, anywhere = (
        _number(found.side(side).gamma(found.n, found.delta)) for side in ("measured", "anywhere")
    )
    lines = [
        f"Γ = {_number(found.gamma)} at n = {found.n:,} units, δ = {found.delta:g} ({measured} with what was "
        f"measured alone, {anywhere} with\nnorms at 1/√ε). For {gain},\n"
        f"and m = {found.m:,} units to test on:",
        "",
        f"{'theorem':<32}{'new − old at most':>18}{'with probability':>18}{'shown':>8}{'units needed':>15}",
    ]
    for one in found.theorems:
        lines.append(
            f"{f'{one.number}: {one.about}':<32}{one.change:>+18.3g}{max(0.0, 1 - one.failure):>18.3g}"
            f"{'gain' if one.shows_gain else 'nothing':>8}{_count(one.needed):>15}"
        )
    lines.append("")
    if found.vacuous_by >= 1:
        lines.append(
            f"The bound is vacuous by a factor of {_number(found.vacuous_by)}: 2Γ is that many times the "
            "loss, so no block,\nhowever good, could be shown to help. Use a certificate."
        )
    else:
        lines.append(f"The bound is not vacuous: 2Γ is {found.vacuous_by:.2g} of the loss.")
    smallest = min(range(len(found.layers)), key=lambda place: _alone(found, place))
    lines.append(
        f"If only one branch may change, at best {_place(found.layers[smallest])}, Γ is "
        f"{_number(_alone(found, smallest))}."
    )
    return lines


def _alone(found: Theory, place: int) -> float:
    return found.alone(place).gamma(found.n, found.delta)


def _place(layer: Layer) -> str:
    return f"{layer.block}.{layer.branch}"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def _power(log: float) -> str:
    """e^log, which may be too large for a float."""
    if not math.isfinite(log):
        return "0" if log < 0 else "inf"
    exponent = math.floor(log / math.log(10))
    if -2 <= exponent < 4:
        return f"{math.exp(log):.3g}"
    return f"{10 ** (log / math.log(10) - exponent):.1f}e{exponent:+03d}"


def _count(units: float) -> str:
    return "no number" if math.isinf(units) else f"{units:,.0f}" if units < 1e7 else f"{units:.1e}"
