"""What the theory of depth expansion says about a given network, with every constant that it needs.

It says little: its bound holds for all networks of a class at once, and is vacuous at real sizes. A
certificate (`theodolite.growing.certificate`) is what can be used. This says by how much.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import Loss, call, logits
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch, num_examples, take
from theodolite.core.exclusive import exclusive
from theodolite.growing.lemma.complexity import Complexity, Theorem, refuse_rise
from theodolite.growing.lemma.constants import Factor, Layer, Side, amplified, measure
from theodolite.growing.lemma.layers import cut_in_layers
from theodolite.probes.example_losses import example_losses, losses_of
from theodolite.workloads.builtin import next_token_loss

CROSS_ENTROPIES = (nn.functional.cross_entropy, next_token_loss)
"""Their gradient by the logits of one prediction is p − y, of a norm of at most √2."""


@dataclass(frozen=True)
class Theory:
    """All constants, and what follows from them. Made by `theory`."""

    layers: tuple[Layer, ...]
    top: Factor
    """L_T."""
    parameters: int
    """p: of all branches, each tensor once. Embeddings and readout count as fixed."""
    loss: float
    """The mean loss of the units given."""
    loss_bound: float
    """B."""
    bound_is_measured: bool
    """Is B the largest loss seen, rather than given?"""
    loss_lipschitz: float
    """L_ℓ."""
    lipschitz_is_measured: bool
    """Is L_ℓ the largest slope seen, rather than √2 of a cross-entropy?"""
    n: int
    """Units to train on."""
    m: int
    """Units to test on."""
    delta: float
    units: int
    """How many units the Lipschitz constants were measured on."""
    is_post_norm: bool
    """Is the stream normalised between its layers, as the lemma assumes?"""
    margin: float | None
    """How much lower the loss is after the jump, if given."""
    training: float
    """How much training then took off the training loss."""

    @cached_property
    def whole(self) -> Complexity:
        """Of the class of all networks like this one."""
        return self._complexity("value")

    @cached_property
    def gamma(self) -> float:
        """Γ_n(δ)."""
        return self.whole.gamma(self.n, self.delta)

    @cached_property
    def theorems(self) -> tuple[Theorem, ...]:
        """Theorems 1 to 3, for the margin given, or for one as large as the whole loss."""
        margin = self.loss if self.margin is None else self.margin
        return self.whole.theorems(margin, self.n, self.m, self.delta, self.training)

    @property
    def vacuous_by(self) -> float:
        """2Γ over all that there is to gain, the loss itself: from 1 on the bound says nothing."""
        return 2 * self.gamma / self.loss if self.loss > 0 else math.inf

    def alone(self, place: int) -> Complexity:
        """Of the class in which only one branch may differ from this network."""
        own = self.layers[place]
        return Complexity(
            1, own.parameters, own.radius, own.log_amplification, self.loss_lipschitz, self.loss_bound
        )

    def side(self, side: Side) -> Complexity:
        """The constants from one side: `measured`, or with norms bounded `anywhere`."""
        return self._complexity(side)

    def _complexity(self, side: Side) -> Complexity:
        layers = amplified(self.layers, self.top, side)
        return Complexity(
            len({one.layer for one in layers}),
            self.parameters,
            max(one.radius for one in layers),
            max(one.log_amplification for one in layers),
            self.loss_lipschitz,
            self.loss_bound,
        )

    def __str__(self) -> str:
        from theodolite.growing.theory_table import table

        return table(self)


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
    units: int = 4,
    progress: Callable[[float], None] | None = None,
) -> Theory:
    """Measure or bound every constant of Lemma 1 on a network, and put them in Theorems 1 to 3.

    Args:
        model: any module with residual branches; it is left as it was. Batch norms count in eval mode.
        loss: `loss(logits, targets) -> scalar`.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader: for the loss, and its first units
            for the Lipschitz constants.
        n: units to train on; as many as are in the batches if not given.
        m: units to test on; n if not given.
        delta: the chance of being wrong.
        margin: how much lower the loss was after a jump; the whole loss, the most it could be, if not given.
        training: how much training then took off the training loss, at least 0.
        bound: B, the largest loss a unit can have; the largest seen if not given.
        units: how many units the Lipschitz constants are measured on.
        progress: is told which share of the work is done.

    >>> import theodolite as th
    >>> torch.manual_seed(0)
    <...>
    >>> tokens = torch.randint(16, (4, 8))
    >>> model = th.models.GPT(32, 1, vocab=16)
    >>> found = theory(model, th.workloads.next_token_loss, (tokens, tokens), n=50_000, units=1)
    >>> found.parameters, found.vacuous_by > 10
    (12352, True)
    """
    inner = unwrap(model)
    own: Any = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    refuse_rise(training)
    if units < 1:
        raise UseError(f"units is {units}: Lipschitz constants are measured on at least 1 unit")
    with untouched_randomness(0), evaluated(inner), torch.inference_mode(False):
        losses = losses_of(inner, own, batches)
        first = on_device(next(iter(each_batch(batches))), str(device_of(inner)))
        chosen = [take(first, [unit]) for unit in range(min(units, num_examples(first)))]
        cut = cut_in_layers(inner, chosen[0][0])
        layers, top = measure(cut, [inputs for inputs, _ in chosen], progress)
        slope = max(_slope(inner, own, one) for one in chosen)
        # A sum over tokens is steeper than one of them; what was seen has the last word.
        known = _is_mean_cross_entropy(loss) and slope <= math.sqrt(2) * (1 + 1e-6)
    if bound is not None and not bound >= float(losses.max()):
        raise UseError(f"bound is {bound}, but a unit has the loss {float(losses.max()):.4g}")
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
        units=len(chosen),
        is_post_norm=cut.is_post_norm,
        margin=margin,
        training=training,
    )


def _is_mean_cross_entropy(loss: Loss) -> bool:
    """Of the class itself: what is made from it may do otherwise."""
    if type(loss) is nn.CrossEntropyLoss:
        return loss.reduction == "mean" and loss.weight is None
    return loss in CROSS_ENTROPIES


def _slope(model: nn.Module, loss: Loss, unit: Batch) -> float:
    """How steep the loss of a unit is in its logits."""
    inputs, targets = unit
    with torch.no_grad():
        found = logits(call(model, inputs))
    with torch.enable_grad():
        leaf: Tensor = found.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(example_losses(loss, leaf, targets).sum(), leaf, allow_unused=True)
    return 0.0 if slope is None else float(slope.double().norm())
