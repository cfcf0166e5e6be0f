"""The exact trace of the Gauss–Newton matrix of a cross-entropy.

`Tr(G) = Σ_n w_n Σ_k p_nk ‖J_nᵀ(e_k − p_n)‖²`: K backward passes, one for each class, give the derivatives δ
at the outputs of all layers for all examples. The weight of a linear map that an example passes once has the
gradient `δ xᵀ`, whose square is `‖δ‖² ‖x‖²`; that of a convolution is summed over the places first.
"""

# B examples, K classes, O outputs, I inputs, L places

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    with _Calls(chosen) as calls:
        logits = objective.forward(chosen, batch)
    if calls.unknown or calls.unused or logits.ndim != 2 or logits.shape[1] > MOST_CLASSES or known.dim != -1:
        return None
    outputs = [call.output for call in calls.found]
    if any(len(one) != len(logits) for one in outputs) or not _independent(logits, outputs):
        return None
    return [_trace(logits, known, calls.found, temperature) for temperature in temperatures]


def _independent(logits: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Are the examples independent? Then the logits of half of them do not depend on the layers of the rest.

    Splitting by each binary digit of their index separates every two examples once.
    """
    number = torch.arange(len(logits), device=logits.device)
    place = torch.arange(max(1, (len(logits) - 1).bit_length()), device=logits.device)
    digits = (number >> place[:, None]) % 2 == 1
    chosen = torch.cat([digits, ~digits])
    seed = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    return not any(bool(one[~chosen].any()) for one in _back(logits, outputs, seed * chosen[..., None]))


def _back(logits: Tensor, outputs: Sequence[Tensor], seeds: Tensor) -> tuple[Tensor, ...]:
    """The derivatives by the outputs, for each of several seeds; zero where there are none."""
    found = torch.autograd.grad(
        logits, outputs, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    none = [output.new_zeros(()).expand(len(seeds), *output.shape) for output in outputs]
    return tuple(one if one is not None else zero for one, zero in zip(found, none, strict=True))


def _trace(logits: Tensor, known: CrossEntropy, calls: Sequence[_Call], temperature: float) -> float:
    p = (logits.detach() / temperature).softmax(1)
    units = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[:, None]
    seeds = (known.weights.to(p) * p).sqrt().mT[..., None] * (units - p) / temperature  # (K, B, K)
    total = torch.zeros((), dtype=torch.float64, device=p.device)
    for call, deltas in zip(calls, _back(logits, [call.output for call in calls], seeds), strict=True):
        inputs = call.inputs().detach() if call.weight else None
        for delta in deltas:
            total += _square(delta.reshape(*delta.shape[:2], -1), inputs, bias=call.bias).double()
    return total.item()


def _square(delta: Tensor, inputs: Tensor | None, *, bias: bool) -> Tensor:
    """The squared gradient of weight and bias, summed over examples, from (B, O, L) and (B, I, L)."""
    found = delta.sum(2).square().sum() if bias else delta.new_zeros(())
    if inputs is None:
        return found
    if delta.shape[2] == 1:
        return found + (delta.square().sum(1) * inputs.square().sum(1)).sum()
    return found + (delta @ inputs.mT).square().sum()


class _Call(NamedTuple):
    """A call of a linear map or a convolution."""

    output: Tensor
    inputs: Callable[[], Tensor]
    """(B, I, L), unfolded for a convolution."""
    weight: bool
    """Was the weight chosen?"""
    bias: bool


class _Calls(TorchFunctionMode):
    """Records the maps that the chosen parameters belong to."""

    def __init__(self, chosen: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: list[_Call] = []
        self.unused = {id(tensor) for tensor in chosen.values()}
        self.unknown = False
        """Was a parameter used in any other way?"""
        self._chosen = set(self.unused)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        met = [id(leaf) for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._chosen]
        if not met or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):  # shapes and the like
            return value
        read = {"linear": self._linear, "conv2d": self._convolution}.get(getattr(func, "__name__", ""))
        call = None if read is None else read(value, *args, **kwargs)
        if call is None or not self.unused.issuperset(met) or len(met) != call.weight + call.bias:
            self.unknown = True
        else:
            self.unused.difference_update(met)
            self.found.append(call)
        return value

    def _linear(self, value: Tensor, input: Tensor, weight: Tensor, bias: Any = None) -> _Call | None:
        if input.ndim != 2:
            return None
        return _Call(value, lambda: input[..., None], id(weight) in self._chosen, id(bias) in self._chosen)

    def _convolution(
        self, value: Tensor, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any
    ) -> _Call | None:
        options = dict(zip(("stride", "padding", "dilation", "groups"), args, strict=False)) | kwargs
        if options.pop("groups", 1) != 1 or isinstance(options.get("padding"), str) or input.ndim != 4:
            return None

        def inputs() -> Tensor:
            return nn.functional.unfold(input, weight.shape[2:], **options)

        return _Call(value, inputs, id(weight) in self._chosen, id(bias) in self._chosen)
