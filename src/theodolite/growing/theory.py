"""What the theory of depth expansion says about a given network, with every constant that it needs.

It says little: its bound holds for all networks of a class at once, and is vacuous at real sizes. This module
says by how much. Use a certificate (`theodolite.growing.certificate`) instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.core import arguments
from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import Loss, call, logits
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch, num_examples, take
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress
from theodolite.growing.complexity import Complexity, Theorem, refuse_rise
from theodolite.growing.lemma import LemmaLayer, LipschitzConstant, Side, amplified, cut_in_layers, measure
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, number
from theodolite.probes.example_losses import example_losses, losses_of
from theodolite.workloads import next_token_loss

CROSS_ENTROPIES = (nn.functional.cross_entropy, next_token_loss)
"""Their gradient with respect to the logits of one prediction is p − y, whose norm is at most √2."""


@dataclass(frozen=True)
class Theory(Result):
    """All constants, and what follows from them. Made by `theory`."""

    kind: ClassVar[str] = "depth theory"
    loads: ClassVar[bool] = True

    layers: tuple[LemmaLayer, ...]
    top: LipschitzConstant
    """L_T."""
    parameters: int
    """p: of all branches, each tensor once. Embeddings and readout count as fixed."""
    loss: float
    """The mean loss of the examples."""
    loss_bound: float
    """B."""
    bound_is_measured: bool
    """Is B the largest loss seen, rather than given?"""
    loss_lipschitz: float
    """L_ℓ."""
    lipschitz_is_measured: bool
    """Is L_ℓ the largest slope seen, rather than √2 of a cross-entropy?"""
    n: int
    """Number of training examples."""
    m: int
    """Number of test examples."""
    delta: float
    examples: int
    """How many examples the Lipschitz constants were measured on."""
    is_post_norm: bool
    """Is the stream normalised between its layers, as the lemma assumes?"""
    margin: float | None
    """How much lower the loss is after the jump, if given."""
    training: float
    """By how much training then lowered the training loss."""

    @cached_property
    def whole(self) -> Complexity:
        """Of the class of all networks like this one."""
        return self.side("value")

    @cached_property
    def gamma(self) -> float:
        """Γ_n(δ)."""
        return self.whole.gamma(self.n, self.delta)

    @cached_property
    def theorems(self) -> tuple[Theorem, ...]:
        """Theorems 1 to 3, for the given margin, or for one as large as the whole loss."""
        margin = self.loss if self.margin is None else self.margin
        return self.whole.theorems(margin, self.n, self.m, self.delta, self.training)

    @property
    def vacuous_by(self) -> float:
        """2Γ over the loss, the most there is to gain: from 1 on the bound says nothing."""
        return 2 * self.gamma / self.loss if self.loss > 0 else math.inf

    def alone(self, place: int) -> Complexity:
        """Of the class in which only one branch may differ from this network."""
        own = self.layers[place]
        return Complexity(
            1, own.parameters, own.radius, own.log_amplification, self.loss_lipschitz, self.loss_bound
        )

    def side(self, side: Side) -> Complexity:
        """With the constants from one side: `measured`, `value`, or norms bounded `anywhere`."""
        layers = amplified(self.layers, self.top, side)
        return Complexity(
            len({one.layer for one in layers}),
            self.parameters,
            max(one.radius for one in layers),
            max(one.log_amplification for one in layers),
            self.loss_lipschitz,
            self.loss_bound,
        )

    def table(self) -> Table:
        """One row for each branch."""
        columns = ("branch", "L_N", "L_x ≥", "L_x ≤", "L_θ", "R", "p", "A", "how")
        rows = [
            (
                f"{one.block}.{one.branch}",
                *map(_finite, (one.norm.value, one.input.measured, one.input.bound, one.parameter)),
                *(one.radius, one.parameters, _power(one.log_amplification), one.how),
            )
            for one in self.layers
        ]
        return Table([Column(name, side="right" if name == "A" else None) for name in columns], rows)

    def blocks(self) -> Iterator[Block]:
        """A row for each branch, the constants, and the theorems."""
        yield self.table()
        yield "\n".join(self._constants())
        measured, anywhere = (
            number(self.side(side).gamma(self.n, self.delta)) for side in ("measured", "anywhere")
        )
        gain = (
            f"a block that removes the whole loss, {number(self.loss)}"
            if self.margin is None
            else f"a gain of {number(self.margin)} by the jump and {number(self.training)} by training"
        )
        yield Heading("Theorems")
        yield (
            f"Γ = {number(self.gamma)} at n = {self.n:,} examples, δ = {self.delta:g} ({measured} with "
            f"measured constants, {anywhere} with norms at 1/√ε). For {gain}, and m = {self.m:,} test "
            "examples:"
        )
        yield Table(
            (
                "theorem",
                Column("new − old at most", lambda change: f"{change:+.3g}"),
                "with probability",
                "shown",
                Column("examples needed", _count),
            ),
            [
                (
                    f"{one.number}: {one.about}",
                    *(one.change, max(0.0, 1 - one.failure), "gain" if one.shows_gain else "nothing"),
                    one.needed,
                )
                for one in self.theorems
            ],
        )
        said = f"The bound is not vacuous: 2Γ is {self.vacuous_by:.2g} of the loss."
        if self.vacuous_by >= 1:
            said = (
                f"The bound is vacuous by a factor of {number(self.vacuous_by)}: 2Γ is that many times the "
                "loss, so no block, however good, can be shown to help. Use a certificate."
            )
        alone = [self.alone(place).gamma(self.n, self.delta) for place in range(len(self.layers))]
        best = self.layers[alone.index(min(alone))]
        yield (
            f"{said}\nIf only one branch may change, Γ is at best {number(min(alone))}, for branch "
            f"{best.block}.{best.branch}."
        )

    def _constants(self) -> Iterator[str]:
        whole, top = self.whole, self.top
        seen = "the largest seen" if self.bound_is_measured else "given"
        slope = "the largest seen" if self.lipschitz_is_measured else "√2, of a cross-entropy"
        held = "" if math.isfinite(top.bound) else f"; no bound for {top.missing}"
        yield (
            f"L_T {number(top.value)} (measured {number(top.measured)}{held}), L_ℓ "
            f"{number(self.loss_lipschitz)} ({slope}), B {number(self.loss_bound)} ({seen})"
        )
        measured, anywhere = (_power(self.side(side).log_amplification) for side in ("measured", "anywhere"))
        yield (
            f"L {whole.layers}, p {self.parameters:,}, R {number(whole.radius)}, "
            f"A {_power(whole.log_amplification)} ({measured} with measured constants, {anywhere} with norms "
            "at 1/√ε)"
        )
        if not self.is_post_norm:
            yield (
                "The stream is not normalised between layers: L_N is of what else stands there. The lemma "
                "has norms there, which bound the stream; here that is assumed. A last norm is part of the "
                "top."
            )
        yield (
            f"The lower L_x and L_θ are the largest of {self.examples} examples, the upper L_x is for inputs "
            "like theirs. The theorem needs constants for every network of the class, fixed before the data "
            "are seen: they are not below those measured."
        )


@exclusive()
def theory(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    *,
    n: int | None = None,
    m: int | None = None,
    delta: float = 0.05,
    margin: float | None = None,
    training: float = 0.0,
    bound: float | None = None,
    examples: int = 4,
    progress: Progress | None = None,
) -> Theory:
    """Measure or bound every constant of Lemma 1 on a network, and evaluate Theorems 1 to 3.

    Args:
        model: any module with residual branches; it is left as it was. Batch norms are in eval mode.
        loss: `loss(logits, targets) -> scalar`.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader: for the loss, and its first
            examples for the Lipschitz constants.
        n: number of training examples; those in the batches by default.
        m: number of test examples; n by default.
        delta: the probability of being wrong.
        margin: how much lower the loss was after a jump; by default the whole loss, the most it could be.
        training: by how much training then lowered the training loss, at least 0.
        bound: B, the largest loss an example can have; the largest seen by default.
        examples: how many examples the Lipschitz constants are measured on.
        progress: called with what is being done and the fraction done.

    >>> import theodolite as th
    >>> torch.manual_seed(0)
    <...>
    >>> tokens = torch.randint(16, (4, 8))
    >>> model = th.models.GPT(32, 1, vocab=16)
    >>> found = theory(model, th.workloads.next_token_loss, (tokens, tokens), n=50_000, examples=1)
    >>> found.parameters, found.vacuous_by > 10
    (12352, True)
    """
    inner = unwrap(model)
    own: Any = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    refuse_rise(training)
    arguments.whole("examples", examples, least=1)
    with untouched_randomness(0), evaluated(inner), torch.inference_mode(False):
        losses = losses_of(inner, own, batches)
        first = on_device(next(iter(each_batch(batches))), str(device_of(inner)))
        chosen = [take(first, [row]) for row in range(min(examples, num_examples(first)))]
        cut = cut_in_layers(inner, chosen[0][0])
        layers, top = measure(cut, [inputs for inputs, _ in chosen], progress)
        slope = max(_slope(inner, own, one) for one in chosen)
        # A sum over tokens is steeper than one of them, so the measured slope decides.
        known = _is_mean_cross_entropy(loss) and slope <= math.sqrt(2) * (1 + 1e-6)
    if bound is not None and not bound >= float(losses.max()):
        raise UseError(f"bound is {bound}, but an example has the loss {float(losses.max()):.4g}")
    n = len(losses) if n is None else n
    every = {name for branch in range(len(layers)) for name in cut.names(branch)}
    return Theory(
        layers=layers,
        top=top,
        parameters=sum(cut.parameters[name].numel() for name in every),
        loss=float(losses.mean()),
        loss_bound=float(losses.max()) if bound is None else bound,
        bound_is_measured=bound is None,
        loss_lipschitz=math.sqrt(2) if known else slope,
        lipschitz_is_measured=not known,
        n=n,
        m=n if m is None else m,
        delta=delta,
        examples=len(chosen),
        is_post_norm=cut.is_post_norm,
        margin=margin,
        training=training,
    )


@dataclass(frozen=True)
class BetterModel(Result):
    """The better of two models on the training data. Made by `keep_better`."""

    kind: ClassVar[str] = "better model"

    model: nn.Module = field(repr=False, compare=False)
    which: Literal["jumped", "trained"]
    margin: float
    """Δ_opt: how much lower its training loss is than that of the jumped model; 0 if that is kept."""
    jumped_loss: float
    trained_loss: float

    def blocks(self) -> Iterator[Block]:
        """Which one, and by how much."""
        if self.which == "trained":
            yield f"kept after training: the training loss is lower by {self.margin:.4g} than after the jump"
        else:
            yield (
                f"kept after the jump: training changed the training loss from {self.jumped_loss:.4g} to "
                f"{self.trained_loss:.4g}"
            )


@exclusive()
def keep_better(jumped: nn.Module, trained: nn.Module, loss: Loss, batches: Batches) -> BetterModel:
    """Keep the trained model if its training loss is lower than the jumped model's, else the jumped one.

    This is Condition 2 (the fallback rule) on depth expansion: with it, training can only help on the
    training data, so a claim about the jumped model's training loss also holds for the kept model. A trained
    model whose loss is not finite is not kept.

    Args:
        jumped: the model after the jump.
        trained: the model after further training.
        loss: `loss(logits, targets) -> scalar`.
        batches: of the training data, the same examples for both.

    >>> worse, better = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> for model, weight in ((worse, 0.5), (better, 0.75)):
    ...     _ = nn.init.constant_(model.weight, weight), nn.init.zeros_(model.bias)
    >>> kept = keep_better(worse, better, nn.functional.mse_loss, (torch.ones(4, 1), torch.ones(4, 1)))
    >>> kept.which, kept.margin
    ('trained', 0.1875)
    """
    before = float(losses_of(jumped, loss, batches, finite=False).mean())
    after = float(losses_of(trained, loss, batches, finite=False).mean())
    if math.isfinite(after) and not after >= before:
        return BetterModel(trained, "trained", before - after, before, after)
    if not math.isfinite(before):
        raise UseError(
            f"the training loss is {before} after the jump and {after} after training: neither can be kept"
        )
    return BetterModel(jumped, "jumped", 0.0, before, after)


def _is_mean_cross_entropy(loss: Loss) -> bool:
    """Only the class itself: a subclass may compute something else."""
    if type(loss) is nn.CrossEntropyLoss:
        return loss.reduction == "mean" and loss.weight is None
    return loss in CROSS_ENTROPIES


def _slope(model: nn.Module, loss: Loss, example: Batch) -> float:
    """The slope of the loss of one example in its logits."""
    inputs, targets = example
    with torch.no_grad():
        found = logits(call(model, inputs))
    with torch.enable_grad():
        leaf: Tensor = found.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(example_losses(loss, leaf, targets).sum(), leaf, allow_unused=True)
    return 0.0 if slope is None else float(slope.double().norm())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _power(log: float) -> str:
    """e^log, which may be too large for a float."""
    if not math.isfinite(log):
        return "0" if log < 0 else "inf"
    exponent = math.floor(log / math.log(10))
    if -2 <= exponent < 4:
        return f"{math.exp(log):.3g}"
    return f"{10 ** (log / math.log(10) - exponent):.1f}e{exponent:+03d}"


def _count(examples: float) -> str:
    return (
        "no number" if math.isinf(examples) else f"{examples:,.0f}" if examples < 1e7 else f"{examples:.1e}"
    )
