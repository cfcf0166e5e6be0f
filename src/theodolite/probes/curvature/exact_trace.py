"""The exact trace of the Gauss–Newton matrix of a cross-entropy.

`Tr(G) = Σ_n w_n Σ_k p_nk ‖J_nᵀ(e_k − p_n)‖²`: K backward passes, one for each class, give the derivatives δ
at the outputs of all layers for all examples. The weight of a linear map that an example passes once has the
gradient `δ xᵀ`, whose square is `‖δ‖² ‖x‖²`; that of a convolution is summed over the places first.
"""

# B examples, K classes, O outputs, I inputs, L places

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from theodolite.core.batches import Batch
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.score import CrossEntropy

MOST_CLASSES = 64
"""With more classes an estimate is cheaper."""


def gauss_newton_trace(
    objective: Objective, batch: Batch, known: CrossEntropy, temperatures: Sequence[float]
) -> list[float] | None:
    """`Tr(G)` at each temperature; None if the network is not of this kind. Call under `conditions`.

    Every chosen parameter has to be the weight or the bias of one linear map or convolution, called once.
    """
    chosen = objective.stand_ins(grad=True)
    taps = _Taps(chosen)
    with taps:
        logits = objective.forward(chosen, batch)
    suited = logits.ndim == 2 and logits.shape[1] <= MOST_CLASSES and known.dim == -1
    if not suited or not taps.complete or any(len(tap.input) != len(logits) for tap in taps.found):
        return None
    if not _apart(logits, taps.found):
        return None
    return [_trace(logits, known, taps.found, temperature) for temperature in temperatures]


def _apart(logits: Tensor, taps: Sequence[_Tap]) -> bool:
    """Are the examples independent? Then the logits of half of them do not depend on the layers of the rest.

    Splitting by each binary digit of their index separates every two examples once.
    """
    number = torch.arange(len(logits), device=logits.device)
    place = torch.arange(max(1, (len(logits) - 1).bit_length()), device=logits.device)
    digits = (number >> place[:, None]) % 2 == 1
    chosen = torch.cat([digits, ~digits])
    seed = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    deltas = torch.autograd.grad(
        logits,
        [tap.output for tap in taps],
        seed * chosen[..., None],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    return not any(one is not None and bool(one[~chosen].any()) for one in deltas)


@dataclass(frozen=True)
class _Tap:
    """A call of a linear map or a convolution."""

    input: Tensor
    output: Tensor
    weight: Tensor | None
    """None if it was not chosen."""
    bias: bool
    options: Mapping[str, Any] | None
    """Of a convolution: how its input is unfolded."""

    @property
    def num_parameters(self) -> int:
        """The number of chosen parameters it uses, as weight or bias."""
        return (self.weight is not None) + self.bias

    def squares(self, delta: Tensor) -> Tensor:
        """The squared gradient of weight and bias, summed over the examples."""
        found = delta.new_zeros(())
        if self.options is None:
            if self.weight is not None:
                found = found + (delta.square().sum(1) * self.input.detach().square().sum(1)).sum()
            return found + delta.square().sum() if self.bias else found
        if self.weight is not None:
            patches = nn.functional.unfold(self.input.detach(), self.weight.shape[2:], **self.options)
            found = found + (delta.flatten(2) @ patches.mT).square().sum()
        return found + delta.flatten(2).sum(2).square().sum() if self.bias else found


class _Taps(TorchFunctionMode):
    """Records inputs and outputs of the maps that the chosen parameters belong to."""

    def __init__(self, chosen: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: list[_Tap] = []
        self._left = {id(tensor) for tensor in chosen.values()}
        self._chosen = set(self._left)
        self._strange = False

    @property
    def complete(self) -> bool:
        """Was every chosen parameter used in a map, and nowhere else?"""
        return not self._left and not self._strange

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        met = [id(leaf) for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._chosen]
        if not met or not isinstance(value, Tensor):  # shapes and the like
            held = tree_leaves(value) if isinstance(value, (tuple, list)) else []
            self._strange |= bool(met) and any(isinstance(leaf, Tensor) for leaf in held)
            return value
        tapping = {"linear": self._linear, "conv2d": self._convolution}.get(getattr(func, "__name__", ""))
        tap = None if tapping is None else tapping(value, *args, **kwargs)
        if tap is None or not self._left.issuperset(met) or len(met) != tap.num_parameters:
            self._strange = True
        else:
            self._left.difference_update(met)
            self.found.append(tap)
        return value

    def _linear(
        self, value: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> _Tap | None:
        if input.ndim != 2:
            return None
        return _Tap(input, value, self._own(weight), self._own(bias) is not None, None)

    def _convolution(
        self,
        value: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Tap | None:
        if groups != 1 or isinstance(padding, str) or input.ndim != 4:
            return None
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        return _Tap(input, value, self._own(weight), self._own(bias) is not None, options)

    def _own(self, parameter: Tensor | None) -> Tensor | None:
        return parameter if id(parameter) in self._chosen else None


def _trace(logits: Tensor, known: CrossEntropy, taps: Sequence[_Tap], temperature: float) -> float:
    p = (logits.detach() / temperature).softmax(1)
    weights = known.weights.to(p)
    units = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[:, None]
    seeds = (weights * p).sqrt().mT[..., None] * (units - p) / temperature  # (K, B, K)
    outputs = [tap.output for tap in taps]
    deltas = torch.autograd.grad(
        logits, outputs, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    found = [
        tap.squares(one) for tap, many in zip(taps, deltas, strict=True) if many is not None for one in many
    ]
    return torch.stack(found).double().sum().item()
