"""What shows that an edit kept the function: outputs and gradients before it and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.recording.trace import tensors_in
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import call, with_tensors
from theodolite.core.higher_order import plain_operators
from theodolite.surgery.editing import scaled_gains, scaled_weights
from theodolite.surgery.randomness import draw_others, kept_randomness

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""By the coarsest dtype that a network holds or computes in: how far outputs and gradients may differ, in
parts of themselves. Some ten times what rounding does to a network of a dozen blocks."""
HALVES = (torch.float16, torch.bfloat16)
"""A network in halves is called in float32, so that what is seen is the rounding of what it holds."""


@dataclass(frozen=True)
class Proof:
    """What an edit of a network did to its outputs and gradients.

    `left` holds the gains that were not moved, with the reason for each.
    """

    operation: str
    outputs: float | None
    """Largest difference between the outputs before and after, in parts of the largest output; None for a
    network on the meta device, which has none."""
    gradients: float | None
    """The same for the gradient by each tensor that was there before, from the gradients by the products that
    the network computes with after, by the chain rule; the worst of all tensors."""
    dtype: str
    """The coarsest that the network holds or computes in."""
    inputs: str
    """What the network was called with."""
    tolerance: float
    moved: tuple[str, ...]
    """The gains that are part of the weights now; the blocks that are new."""
    left: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    """What was done, in one sentence; nothing for what is said of gains."""

    @property
    def holds(self) -> bool:
        """Are both within the tolerance? True where nothing could be computed."""
        if self.outputs is None or self.gradients is None:
            return True
        return self.outputs <= self.tolerance and self.gradients <= self.tolerance

    def __str__(self) -> str:
        done = self.said or f"{len(self.moved)} gains moved, {len(self.left)} left"
        lines = [f"{self.operation}: {done}"]
        if self.outputs is None:
            lines.append("not compared: on the meta device nothing is computed")
        else:
            lines.append(
                f"outputs differ by {self.outputs:.1e}, gradients by {self.gradients:.1e} "
                f"(at most {self.tolerance:.0e}), {self.dtype}, on {self.inputs}"
            )
        return "\n".join([*lines, *(f"  left {name}: {reason}" for name, reason in self.left.items())])


@dataclass(frozen=True)
class Evidence:
    """Outputs of a network, and gradients of a fixed random combination of them."""

    outputs: tuple[Tensor, ...]
    """Everything it returned that is a number."""
    dtype: torch.dtype
    """The coarsest that is held or was computed in."""
    gradients: Mapping[str, Tensor]
    """By canonical name of a parameter that is trained and used."""
    effective: Mapping[str, Tensor]
    """The same by the tensors that the network computes with: a weight with scale vectors in it is the
    product, under its plain name."""


def gathered(model: nn.Module, inputs: Any, *, others: bool = False) -> Evidence | None:
    """Evidence of the network as it is, in eval mode; it is left as it was. None on the meta device.

    A network that draws random numbers draws the same ones every time, or `others` if that is asked for.
    """
    model = unwrap(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        return None
    held = {name: one for name, one in canonical_parameters(model) if one.is_floating_point()}
    dtype = _coarser(torch.float64, *(one.dtype for one in (*held.values(), *model.buffers())))
    coarsest = _Coarsest()
    weighing = torch.Generator().manual_seed(0)  # its own: the network may draw more numbers than before
    with (
        resting(model),
        untouched_randomness(0),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        plain_operators(),
        _watched(model) as seen,
    ):
        if others:
            draw_others(model)
        for tensor in held.values():
            tensor.requires_grad_()  # also by what is frozen: it may be the reader of a gain that is not
        state = _widened(model) if dtype in HALVES else {}
        torch.clear_autocast_cache()
        with coarsest:
            try:
                returned = _called(model, inputs, state)
            except RuntimeError:
                if not state:
                    raise
                state = {}  # it casts by itself what it computes with
                seen.clear()
                returned = _called(model, inputs, state)
        tensors = {name: state.get(id(one), one) for name, one in held.items()}
        found = [one for one in tensors_in(returned) if one.is_floating_point()]
        loss = sum((_combined(one, weighing) for one in found), torch.zeros(()))
        wanted = [*tensors.values(), *(one for each in seen.values() for one in each)]
        every = list(torch.autograd.grad(loss, wanted, allow_unused=True))
    outputs = tuple(one.detach() for one in found)
    dtype = _coarser(dtype, coarsest.dtype)
    gradients = {
        name: one for name, one in zip(tensors, every[: len(tensors)], strict=True) if one is not None
    }
    computed: dict[str, Tensor] = {}
    rest = iter(every[len(tensors) :])
    for name, each in seen.items():  # a weight may be computed several times in one pass
        several = [one for one in [next(rest) for _ in each] if one is not None]
        if several:
            computed[name] = torch.stack(several).sum(0)
    return Evidence(outputs, dtype, gradients, {**gradients, **computed})


def apart(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest difference between outputs, in parts of the largest; what is infinite has to stay so.

    >>> apart([torch.tensor([4.0, -torch.inf])], [torch.tensor([3.0, -torch.inf])])
    0.25
    """
    worst = 0.0
    if len(before) != len(after):
        return math.inf
    for one, other in zip(before, after, strict=True):
        finite = one.isfinite()
        if one.shape != other.shape or not torch.equal(one[~finite], other[~finite]):
            return math.inf
        difference = _largest(other[finite].double() - one[finite].double())
        worst = max(worst, difference / max(_largest(one[finite]), 1e-300))
    return worst


def farthest(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """The largest difference between gradients by the same tensor, in parts of it.

    What is zero but for rounding, as the gradient by a key's bias, is measured by the largest of all.
    """
    norms = {name: one.double().norm().item() for name, one in measured.items()}
    least = max(1e-3, torch.finfo(dtype).eps ** 0.5) * max(norms.values(), default=0.0)
    found: list[float] = []
    for name, one in measured.items():
        if name in expected:
            difference = (expected[name].double() - one.double()).norm().item()
            found.append(difference / max(norms[name], least, 1e-300))
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def said(inputs: Any) -> str:
    """The inputs in a few words.

    >>> said({"tokens": torch.zeros(2, 8, dtype=torch.long)})
    'int64 (2, 8)'
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves)


def _combined(output: Tensor, generator: torch.Generator) -> Tensor:
    """A random combination of the entries of an output, as far as they are finite."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    wide = torch.where(wide.isfinite(), wide, 0.0)
    weights = torch.randn(wide.shape, dtype=wide.dtype, generator=generator).to(wide.device)
    return (wide * weights).sum().cpu() / max(wide.numel(), 1) ** 0.5


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """In eval mode; modes, buffers, generators and what is frozen are as before at the end."""
    frozen = [one for one in model.parameters() if not one.requires_grad]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        with evaluated(model), kept_randomness(model):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for buffer, value in buffers:
            buffer.copy_(value)


def _widened(model: nn.Module) -> dict[int, Tensor]:
    """By id of a parameter or a buffer in halves: the same in float32."""
    return {
        id(one): one.detach().float().requires_grad_(one.requires_grad)
        for one in (*model.parameters(), *model.buffers())
        if one.dtype in HALVES
    }


def _called(model: nn.Module, inputs: Any, state: Mapping[int, Tensor]) -> Any:
    """What the network returns, with other tensors in the place of some of its own."""
    if not state:
        return call(model, inputs)
    named = (*model.named_parameters(), *model.named_buffers())
    stand_ins = {name: state[id(one)] for name, one in named if id(one) in state}
    inputs = tree_map(
        lambda one: one.float() if isinstance(one, Tensor) and one.dtype in HALVES else one, inputs
    )
    return with_tensors(model, stand_ins, call, inputs)


def _coarser(*dtypes: torch.dtype) -> torch.dtype:
    known = list(TOLERANCE)
    return max((dtype for dtype in dtypes if dtype in TOLERANCE), key=known.index)


class _Coarsest(TorchDispatchMode):
    """Notes the coarsest dtype that comes out of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.dtype = _coarser(self.dtype, leaf.dtype)
        return result


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What the scale vectors make of weights and gains in a forward pass, by plain name."""
    seen: dict[str, list[Tensor]] = {}

    def keeping(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(how: nn.Module, args: Any, made: Tensor) -> None:
            if made.requires_grad:
                seen.setdefault(name, []).append(made)

        return keep

    parametrized = {**scaled_weights(model), **scaled_gains(model)}
    hooks = [how.register_forward_hook(keeping(name)) for name, (_, how) in parametrized.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0
