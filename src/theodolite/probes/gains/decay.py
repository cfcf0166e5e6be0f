"""What an optimizer's weight decay does to each tensor of a network, and what it should do.

A linear map that reads a norm computes `y = W(γ∘n)`. With decay λ on W and μ on γ, gradient flow has

    d/dt (γ_j² − ‖w_j‖²) = 2λ‖w_j‖² − 2μγ_j²,        w_j the j-th column of W

so, by the paper below, the gain of an Input-Norm, which only linear maps read, should decay like the
matrices (μ = λ): without it γ grows at the expense of W, and its steps with it. The gain of an Output-Norm,
which reaches the stream, a softmax or another nonlinearity, sets the size of a signal and should not decay,
nor should a scale that no norm owns. Which is which is read off the dataflow. Names do not tell:
`post_attention_layernorm` is an Input-Norm in Llama and an Output-Norm in Gemma2 and OLMo2.

References:
    Negligible in size, significant in effect: on scale vectors in large language models, 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy import dissect
from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.part import Part, Role
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.optimizers.decay_policies import decays, kind_of
from theodolite.probes.gains.handling import Handling, handlings, is_scheduled
from theodolite.probes.gains.regrouping import regrouped

Verdict = Literal["right", "wrong", "advice", "note"]
"""`wrong` is certain; `advice` is the paper's, that a gain which only linear maps read could decay."""

ONLY_STEPS = "only its direction counts: decay makes it shorter, and so its steps longer, and does no more"
RATE = "it stands for a rate by its logarithm: decay pulls the rate to that of zero"


@dataclass(frozen=True)
class Treatment:
    """One tensor: what it is, what the optimizer does to it, and what it should do."""

    part: Part
    kind: str
    """`Input-Norm gain`, `Output-Norm gain`, `scale`; inside a weight, `scale vector`, or `direction` if it
    is divided by a norm of itself; `bias`, `table`, `tied table` (the readout too) or `weight`. With
    `zero-centred` before it, a gain that one is added to before it multiplies."""
    now: Handling
    should: float | None
    """The weight decay it should have, or could; None where that is a convention or cannot be said."""
    verdict: Verdict
    why: str
    """One sentence on what is wrong or worth knowing; empty where there is nothing to say."""

    @property
    def name(self) -> str:
        """Canonical."""
        return self.part.name

    @property
    def block(self) -> int | None:
        """The residual block it is in."""
        return self.part.block


@dataclass(frozen=True)
class Decay:
    """An optimizer's weight decay, tensor by tensor. Made by `decay`."""

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
        """The rows of gains that do not decay, and by the paper should: the advice, which may not pay."""
        return tuple(row for row in self.rows if row.verdict == "advice")

    @property
    def ok(self) -> bool:
        """Is nothing wrong? Advice does not count."""
        return not self.wrong

    def groups(self, *, inputs: bool = False) -> list[dict[str, Any]]:
        """Parameter groups for a new optimizer: the old ones, with what is wrong put right.

        A tensor moves to a group that differs in nothing but the decay, if there is one, else to a new one.
        The optimizer that was looked at stays as it is.

        Args:
            inputs: follow the advice too, and let the gains of Input-Norms decay.
        """
        if len(self.optimizers) > 1:
            raise UseError(
                f"{len(self.optimizers)} optimizers were looked at, and their groups do not mix: "
                "apply() mends each in its place"
            )
        return regrouped(self.optimizers[0].param_groups, self._due(inputs))

    def apply(self, *, inputs: bool = False) -> None:
        """Put right what is wrong, in the optimizer itself; its state and all other options stay.

        Do it before a schedule is made: torch's schedules count the groups once.

        Args:
            inputs: follow the advice too, and let the gains of Input-Norms decay. It is not done unasked, as
                gain and matrix then shrink together, and a decay that was tuned without it is too strong.
        """
        due = self._due(inputs)
        made = [regrouped(optimizer.param_groups, due) for optimizer in self.optimizers]
        for optimizer, groups in zip(self.optimizers, made, strict=True):
            more = len(groups) - len(optimizer.param_groups)
            if more and is_scheduled(optimizer):
                raise UseError(
                    f"this takes {more} more group{'s' if more > 1 else ''}, and a schedule was made for the "
                    f"{len(optimizer.param_groups)} that {type(optimizer).__name__} has. "
                    "Call apply() before making the schedule"
                )
        for optimizer, groups in zip(self.optimizers, made, strict=True):
            for old, new in zip(optimizer.param_groups, groups, strict=False):
                old.update(new)  # in place, for whoever holds the group
            optimizer.param_groups.extend(groups[len(optimizer.param_groups) :])

    def _due(self, inputs: bool) -> dict[int, float]:
        """By the identity of a tensor, the weight decay that is to replace its own."""
        found = {}
        for row in (*self.wrong, *(self.advised if inputs else ())):
            if row.should is None:
                raise UseError(f"{row.name}: {row.why}. That has to be mended by hand")
            found[id(self.tensors[row.name])] = row.should
        return found

    def __str__(self) -> str:
        from theodolite.probes.gains.decay_table import table

        return table(self)


@exclusive()
def decay(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    inputs: Any,
    *,
    roles: Mapping[str, Role] | None = None,
) -> Decay:
    """Look at every tensor: who reads it, what weight decay it has, and what it should have.

    Nothing is trained and nothing changes; one forward pass is traced without being computed.

    Args:
        model: a network, or what DDP or `torch.compile` made of it.
        optimizer: any optimizer with parameter groups: torch's own, a Trainer's, a plan's; several, where
            several share the network between them.
        inputs: what the network is called with, as for `dissect`.
        roles: what tensors are that `dissect` cannot classify.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> adamw = torch.optim.AdamW([
    ...     {"params": [p for p in model.parameters() if p.dim() > 1]},
    ...     {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ... ], weight_decay=0.1)
    >>> audit = decay(model, adamw, torch.zeros(3, 4))
    >>> [(row.name, row.kind, row.now.weight_decay, row.should) for row in audit.advised]
    [('1.weight', 'Input-Norm gain', 0.0, 0.1)]
    >>> audit.apply(inputs=True)
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
    weights = [
        (anatomy[name], how) for name, how in found.items() if name in anatomy and _is_weight(anatomy[name])
    ]
    rows = (_treated(anatomy[name], how, weights) for name, how in found.items() if name in anatomy)
    return Decay(tuple(rows), optimizers, tensors, strangers)


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


def _is_weight(part: Part) -> bool:
    return kind_of(part) in ("weight", "tied table")


def _treated(part: Part, now: Handling, weights: Sequence[tuple[Part, Handling]]) -> Treatment:
    kind = kind_of(part)
    if now.state == "twice":
        return Treatment(
            part, kind, now, None, "wrong", f"{now.count} groups train it: each step moves it twice"
        )
    if now.state == "frozen":
        return Treatment(part, kind, now, 0.0, "right", "")
    if now.state == "absent":
        return Treatment(part, kind, now, None, "note", "in no group: it has a gradient and is never trained")
    if now.state == "unknown":
        why = f"{now.rule} has no option weight_decay: whether it decays is not known"
        return Treatment(part, kind, now, None, "note", why)
    if part.role == "gain":
        return _treated_gain(part, kind, now, _usual(now, weights))
    decaying, why = now.weight_decay > 0, ""
    if kind == "unused":
        why = "nothing in the forward pass reads it: no step moves it, and decay only shrinks it"
    elif part.rate and decaying:
        why = RATE
    elif kind == "bias":
        why = "a convention: a bias may decay or not, and little depends on it"
    elif kind == "table" and decaying:
        why = "rows that are not looked up get no gradient and only decay: those of rare tokens fade"
    elif kind == "tied table":
        why = "table and readout are one tensor: what decays, or does not, is both" + (
            "; the readout gives every row a gradient" if decaying else ""
        )
    elif part.scale_free and decaying:
        why = ONLY_STEPS
    elif kind == "weight" and not decaying and any(how.weight_decay > 0 for _, how in weights):
        why = "a weight that does not decay, while others do"
    should = now.weight_decay if kind == "weight" and decaying else None
    return Treatment(part, kind, now, should, "note" if why else "right", why)


def _treated_gain(part: Part, kind: str, now: Handling, usual: float) -> Treatment:
    decaying, centre = now.weight_decay > 0, "one" if part.offset else "zero"
    if not decays(part):
        why = f"it sets the size of a signal, which decay pulls to {centre}"
        why = ONLY_STEPS if part.scale_free else RATE if part.rate else why
        return Treatment(part, kind, now, 0.0, "wrong" if decaying else "right", why if decaying else "")
    if decaying or usual == 0:
        why = (
            "decay pulls 1 + γ to one, not to zero: it holds the gain where it started" if part.offset else ""
        )
        return Treatment(part, kind, now, now.weight_decay, "note" if why and decaying else "right", why)
    why = "only linear maps read it, and they decay: without decay it grows at their expense"
    why += "; decay holds 1 + γ at one" if part.offset else ""
    return Treatment(part, kind, now, usual, "advice", why)


def _usual(now: Handling, weights: Iterable[tuple[Part, Handling]]) -> float:
    """The decay that suits a vector: that of the weights beside it, by number of elements.

    Weights that the same optimizer trains at the same learning rate lend theirs as it is; at another learning
    rate, such that lr·λ is the same; those of another optimizer, as it is.
    """
    nearest: dict[int, dict[float, int]] = {}
    for part, how in weights:
        if how.state != "trained" or how.weight_decay <= 0:
            continue
        if how.rule != now.rule:
            rank, value = 2, how.weight_decay
        elif how.lr == now.lr or not now.lr > 0:
            rank, value = 0, how.weight_decay
        else:
            rank, value = 1, how.weight_decay * how.lr / now.lr
        counts = nearest.setdefault(rank, {})
        counts[value] = counts.get(value, 0) + part.numel
    if not nearest:
        return 0.0
    counts = nearest[min(nearest)]
    return max(counts, key=lambda value: counts[value])
