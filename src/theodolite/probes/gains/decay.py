"""What an optimizer's weight decay does to each tensor of a network, and what it should do.

A linear map that reads a norm computes `y = W(γ∘n)`. With decay λ on W and μ on γ, gradient flow has

    d/dt (γ_j² − ‖w_j‖²) = 2λ‖w_j‖² − 2μγ_j²,        w_j the j-th column of W

so, by the paper below, the gain of an Input-Norm, which only linear maps read, should decay like the
matrices (μ = λ): without decay γ grows at the expense of W, and its steps with it. The gain of an
Output-Norm, which reaches the stream, a softmax or another nonlinearity, sets the size of a signal and should
not decay, nor should a scale outside a norm. The dataflow tells which is which. Names do not:
`post_attention_layernorm` is an Input-Norm in Llama and an Output-Norm in Gemma2 and OLMo2.

References:
    Negligible in size, significant in effect: on scale vectors in large language models, 2026.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy import dissect
from theodolite.anatomy.names import canonical_parameters, gather
from theodolite.anatomy.part import Part, Role
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.optimizers.decay_policies import decays, kind_of
from theodolite.optimizers.parameter_groups import (
    Handling,
    handlings,
    is_scheduled,
    regrouped,
)
from theodolite.optimizers.spec import find_optimizers
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted, number, plural

WITHOUT_DECAY = {spec.class_name for spec in find_optimizers().values() if not spec.decays}
"""Classes that keep the norm of what they train."""
Verdict = Literal["right", "wrong", "advice", "note"]
"""`wrong` is certain; `advice` is the paper's: a gain that only linear maps read could decay."""

ONLY_STEPS = "only its direction counts: decay shortens it, which lengthens its steps, and does nothing else"
UNREAD_ROWS = "rows that are not looked up get no gradient and only decay: those of rare tokens fade"
RATE = "it is the logarithm of a rate, and decay pulls that to zero"


@dataclass(frozen=True)
class Treatment:
    """One tensor: what it is, what the optimizer does to it, and what it should do."""

    part: Part
    kind: str
    """`Input-Norm gain`, `Output-Norm gain`, `scale`; inside a weight, `scale vector`, or `direction` if it
    is divided by its own norm; `bias`, `table`, `tied table` (also the readout) or `weight`. `zero-centred`
    marks a gain that multiplies by 1 + γ."""
    now: Handling
    should: float | None
    """The weight decay it should have, or could; None where that is a convention or unknown."""
    verdict: Verdict
    why: str
    """One sentence on what is wrong or worth knowing; empty if all is right."""

    @property
    def name(self) -> str:
        """Canonical."""
        return self.part.name

    @property
    def block(self) -> int | None:
        """The residual block it is in."""
        return self.part.block


@dataclass(frozen=True)
class Decay(Result):
    """An optimizer's weight decay, tensor by tensor. Made by `decay`."""

    kind: ClassVar[str] = "weight decay"
    rows: tuple[Treatment, ...]
    optimizers: tuple[Optimizer, ...] = field(repr=False, compare=False)
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    """The network's own, by canonical name."""
    strangers: int = 0
    """Tensors that the optimizer trains and the network does not have."""

    @property
    def gains(self) -> tuple[Treatment, ...]:
        """The rows of gains."""
        return tuple(row for row in self.rows if row.part.kind == "gain")

    @property
    def wrong(self) -> tuple[Treatment, ...]:
        """The rows that are not as they should be."""
        return tuple(row for row in self.rows if row.verdict == "wrong")

    @property
    def advised(self) -> tuple[Treatment, ...]:
        """Gains that do not decay and should by the paper: advice, which may not pay off."""
        return tuple(row for row in self.rows if row.verdict == "advice")

    @property
    def ok(self) -> bool:
        """Is nothing wrong? Advice does not count."""
        return not self.wrong

    def groups(self, *, inputs: bool = False) -> list[dict[str, Any]]:
        """Parameter groups for a new optimizer: the old ones, corrected.

        A tensor moves to a group that differs only in the decay, if there is one, else to a new group. The
        optimizer that was read is left unchanged.

        Args:
            inputs: follow the advice too, and let the gains of Input-Norms decay.
        """
        if len(self.optimizers) > 1:
            raise UseError(
                f"{len(self.optimizers)} optimizers were read, and their groups do not mix: "
                "apply() corrects each in place"
            )
        return regrouped(self.optimizers[0].param_groups, self._due(inputs))

    def apply(self, *, inputs: bool = False) -> None:
        """Correct the optimizer's groups in place; its state and all other options stay.

        Call it before making a schedule: torch's schedules count the groups once.

        Args:
            inputs: follow the advice too, and let the gains of Input-Norms decay. Off by default, since gain
                and matrix then shrink together, and a decay tuned without it is too strong.
        """
        due = self._due(inputs)
        made = [regrouped(optimizer.param_groups, due) for optimizer in self.optimizers]
        for optimizer, groups in zip(self.optimizers, made, strict=True):
            more = len(groups) - len(optimizer.param_groups)
            if more and is_scheduled(optimizer):
                raise UseError(
                    f"this takes {more} more group{'s' if more > 1 else ''}, and a schedule was made for the "
                    f"{len(optimizer.param_groups)} groups of {type(optimizer).__name__}. "
                    "Call apply() before making the schedule"
                )
        for optimizer, groups in zip(self.optimizers, made, strict=True):
            for old, new in zip(optimizer.param_groups, groups, strict=False):
                old.update(new)  # in place, for whoever holds the group
            optimizer.param_groups.extend(groups[len(optimizer.param_groups) :])

    def _due(self, inputs: bool) -> dict[int, float]:
        """By `id` of a tensor: its new weight decay."""
        found = {}
        for row in (*self.wrong, *(self.advised if inputs else ())):
            if row.should is None:
                raise UseError(f"{row.name}: {row.why}. Correct that by hand")
            found[id(self.tensors[row.name])] = row.should
        return found

    def blocks(self) -> Iterator[Block]:
        """The verdict, one row for each kind of tensor but plain weights, and the reasons."""
        yield self._summary()
        shown = _folded(row for row in self.rows if (row.kind, row.verdict) != ("weight", "right"))
        rows = [
            (name, one.kind, _now(one.now), _should(one), "" if one.verdict == "right" else one.verdict)
            for name, one in shown
        ]
        yield Table(("tensor", "what it is", "decay now", "should be", "verdict"), rows)
        said = []
        for verdict in ("wrong", "advice", "note"):
            reasons: dict[str, dict[str, None]] = {}
            for row in self.rows:
                if row.verdict == verdict:
                    reasons.setdefault(row.why, {})[row.kind] = None
            said += [f"{verdict}: {', '.join(kinds)}: {why}." for why, kinds in reasons.items()]
        if any(row.should is not None for row in self.wrong):
            said += [
                "apply() corrects the optimizer's groups; groups() makes such groups for a new optimizer."
            ]
        if self.advised:
            said += [
                "The advice is the scale-vector paper's and may not pay off. apply(inputs=True) and "
                "groups(inputs=True) follow it: tune λ again then."
            ]
        yield "\n".join(said)

    def table(self) -> Table:
        """One row for each tensor."""
        columns = ("tensor", "what it is", "state", "weight decay", "lr·λ", "should be", "verdict", "why")
        rows = []
        for row in self.rows:
            now = (row.now.state, row.now.weight_decay, row.now.rate)
            rows.append((row.name, row.kind, *now, row.should, row.verdict, row.why))
        return Table(columns, rows)

    def _summary(self) -> str:
        gains, wrong = self.gains, [row for row in self.wrong if row.part.kind == "gain"]
        if not gains:
            said = "This network has no gains: nothing to do."
        else:
            unknown = sum(row.now.state == "unknown" for row in gains)
            said = f"Weight decay is wrong for {len(wrong) or 'none'} of {counted(len(gains), 'gain')}"
            said += f", and not known for {unknown}." if unknown else "."
        if self.advised:
            more = f"{len(self.advised)}{' more' if wrong else ''}"
            said += f" By the scale-vector paper {more} could decay."
        said += f" {self._weights()}"
        if self.strangers:
            others = counted(self.strangers, "tensor")
            said += f" The optimizer also trains {others} that this network does not have."
        return said

    def _weights(self) -> str:
        weights = [row for row in self.rows if row.kind in ("weight", "tied table")]
        decaying = [row for row in weights if row.now.weight_decay > 0]
        unknown = sorted({row.now.rule for row in weights if row.now.state == "unknown"})
        if unknown:
            return f"Whether weights decay is not known: {', '.join(unknown)} has no option weight_decay."
        if not decaying:
            return "No weight decays, so no gain has to."
        kinds = sorted({_coupling(row.now) for row in decaying})
        rates = sorted({row.now.rate for row in decaying if not math.isnan(row.now.rate)})
        ends = dict.fromkeys(map(number, (rates[0], rates[-1]))) if rates else ()
        per_step = f", lr·λ = {' to '.join(ends)} per step" if ends else ""
        return f"{len(decaying)} of {counted(len(weights), 'weight')} decay{per_step}: {'; '.join(kinds)}."


@exclusive()
def decay(
    model: nn.Module,
    inputs: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    roles: Mapping[str, Role] | None = None,
) -> Decay:
    """The weight decay of every tensor: what reads it, what decay it has, and what it should have.

    Nothing is trained and nothing changes; one forward pass is traced without being computed.

    Args:
        model: a network, also wrapped by DDP or `torch.compile`.
        inputs: what the network is called with, as for `dissect`.
        optimizer: any optimizer with parameter groups: torch's own, a Trainer's, a plan's; a list if several
            share the network.
        roles: of tensors that `dissect` cannot classify.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> adamw = torch.optim.AdamW([
    ...     {"params": [p for p in model.parameters() if p.dim() > 1]},
    ...     {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ... ], weight_decay=0.1)
    >>> found = decay(model, torch.zeros(3, 4), adamw)
    >>> [(row.name, row.kind, row.now.weight_decay, row.should) for row in found.advised]
    [('1.weight', 'Input-Norm gain', 0.0, 0.1)]
    >>> found.apply(inputs=True)
    >>> [len(group["params"]) for group in adamw.param_groups]
    [3, 3]
    """
    optimizers = _listed(optimizer)
    tensors = dict(canonical_parameters(model))
    found, strangers = handlings(tensors, optimizers)
    if strangers and all(how.state in ("absent", "frozen") for how in found.values()):
        kinds = " and ".join(type(one).__name__ for one in optimizers)
        raise UseError(
            f"{kinds} trains {strangers} tensors, none of which is a parameter of this "
            f"{type(model).__name__}. It was made for another model, for a copy, or holds copies in another "
            "precision: give the optimizer that was made from this model's parameters"
        )
    anatomy = dissect(model, inputs, roles=roles)
    known = [(anatomy[name], how) for name, how in found.items() if name in anatomy]
    weights = [(part, how) for part, how in known if kind_of(part) in ("weight", "tied table")]
    rows = tuple(_treated(part, how, weights) for part, how in known)
    return Decay(rows, optimizers, tensors, strangers)


def _listed(optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    several = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for one in several:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise UseError(
                f"optimizer is {one!r}: give an optimizer with parameter groups, such as torch.optim.AdamW"
            )
    if not several:
        raise UseError("optimizer is an empty list: give at least one optimizer")
    return several


def _treated(part: Part, now: Handling, weights: Sequence[tuple[Part, Handling]]) -> Treatment:
    kind, decaying = kind_of(part), now.weight_decay > 0
    by_state: dict[str, tuple[float | None, Verdict, str]] = {
        "twice": (None, "wrong", f"{now.count} groups train it: each step moves it twice"),
        "frozen": (0.0, "right", ""),
        "absent": (None, "note", "in no group: it has a gradient and is never trained"),
        "unknown": (None, "note", f"{now.rule} has no option weight_decay: whether it decays is not known"),
    }
    if now.state in by_state:
        return Treatment(part, kind, now, *by_state[now.state])
    if part.role == "gain":
        return Treatment(part, kind, now, *_gain_verdict(part, now, _usual(now, weights)))
    others_decay = any(how.weight_decay > 0 for _, how in weights)
    tied = "embedding and readout are one tensor: decay applies to both or to neither"
    reasons = (
        (
            kind == "unused",
            "nothing in the forward pass reads it: no step moves it, and decay only shrinks it",
        ),
        (part.rate and decaying, RATE),
        (kind == "bias", "a convention: a bias may decay or not, and little depends on it"),
        (kind == "table" and decaying, UNREAD_ROWS),
        (kind == "tied table" and decaying, f"{tied}; the readout gives every row a gradient"),
        (kind == "tied table", tied),
        (part.scale_free and decaying, ONLY_STEPS),
        (now.rule in WITHOUT_DECAY, ""),
        (kind == "weight" and not decaying and others_decay, "a weight that does not decay, while others do"),
    )
    why = next((why for applies, why in reasons if applies), "")
    should = now.weight_decay if kind == "weight" and decaying else None
    return Treatment(part, kind, now, should, "note" if why else "right", why)


def _gain_verdict(part: Part, now: Handling, usual: float) -> tuple[float, Verdict, str]:
    decaying = now.weight_decay > 0
    if not decays(part):
        why = f"it sets the size of a signal, which decay pulls to {'one' if part.offset else 'zero'}"
        why = ONLY_STEPS if part.scale_free else RATE if part.rate else why
        return (0.0, "wrong", why) if decaying else (0.0, "right", "")
    if decaying or usual == 0:
        why = "decay pulls 1 + γ to one, not to zero: it keeps the gain where it started"
        return now.weight_decay, "note" if part.offset and decaying else "right", why if part.offset else ""
    why = "only linear maps read it, and they decay: without decay it grows at their expense"
    return usual, "advice", why + ("; decay keeps 1 + γ at one" if part.offset else "")


def _usual(now: Handling, weights: Iterable[tuple[Part, Handling]]) -> float:
    """The decay that suits a gain: the most common one of comparable weights, by number of elements.

    First choice are weights of the same optimizer at the same learning rate; then those at another learning
    rate, scaled so that lr·λ is the same; then those of another optimizer.
    """
    nearest: dict[int, Counter[float]] = {}
    for part, how in weights:
        if how.state != "trained" or how.weight_decay <= 0:
            continue
        if how.rule != now.rule:
            rank, value = 2, how.weight_decay
        elif how.lr == now.lr or not now.lr > 0:
            rank, value = 0, how.weight_decay
        else:
            rank, value = 1, how.weight_decay * how.lr / now.lr
        nearest.setdefault(rank, Counter())[value] += part.numel
    return nearest[min(nearest)].most_common(1)[0][0] if nearest else 0.0


def _folded(rows: Iterable[Treatment]) -> list[tuple[str, Treatment]]:
    """Names with their treatment: equal rows of equal blocks in one; biases and the like counted last."""
    shown, many = [], dict[tuple[str, ...], list[Treatment]]()
    for row in rows:
        if row.kind in ("bias", "direction", "scale vector"):
            many.setdefault((row.kind, _now(row.now), _should(row)), []).append(row)
        else:
            shown.append(row)
    folds = gather(shown, lambda row: (row.kind, _now(row.now), row.should, row.verdict, row.why))
    return [(name, same[0]) for name, same in folds] + [
        (same[0].name if len(same) == 1 else f"{len(same)} {plural(kind)}", same[0])
        for (kind, *_), same in many.items()
    ]


def _coupling(now: Handling) -> str:
    if now.decoupled is None:
        return f"{now.rule} (coupled or decoupled: it does not say)"
    if now.decoupled:
        return f"{now.rule}, decoupled"
    through = "momentum" if now.rule in ("SGD", "ASGD") else "its preconditioner"
    return f"{now.rule}, coupled (λ·W joins the gradient and goes through {through})"


def _now(now: Handling) -> str:
    if now.state != "trained":
        return {"absent": "in no group", "twice": f"in {now.count} groups"}.get(now.state, now.state)
    per_step = "" if math.isnan(now.rate) or not now.rate else f" (lr·λ {number(now.rate)})"
    return f"{number(now.weight_decay)}{per_step}"


def _should(row: Treatment) -> str:
    if row.now.state != "trained":
        return ""
    return "either" if row.should is None else number(row.should)
