"""Calling a network: kinds of inputs and losses, and the logits in an output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import register_pytree_node, tree_leaves

from theodolite.core.errors import UseError
from theodolite.core.higher_order import trainable_operators

Build = Callable[[int, int], nn.Module]
"""`build(width, depth) -> nn.Module`."""

LOGITS = ("logits", "sample", "logits_per_image")
"""Names of the logits in transformers, diffusers and CLIP."""


@dataclasses.dataclass(frozen=True)
class OutputLoss:
    """A loss of the whole output of the model: `function(output, targets) -> scalar`.

    For a model that returns its own loss, or several tensors that the loss needs, as a variational
    autoencoder does.

    >>> import torch
    >>> loss = OutputLoss(lambda output, targets: output["loss"])
    >>> evaluate(loss, nn.Identity(), ({"input": {"loss": torch.tensor(2.0)}}, None))
    tensor(2.)
    """

    function: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of one output."""
        return self.function(output, targets)


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A loss that calls the model itself: `function(model, batch) -> scalar`, with `batch` (inputs, targets).

    For losses with derivatives with respect to the inputs (physics-informed networks, gradient penalties), or
    with several calls of the model.

    >>> import torch
    >>> def slope(model, batch):
    ...     inputs = batch[0].requires_grad_()
    ...     (found,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    ...     return found.square().mean()
    >>> evaluate(ModelLoss(slope), nn.Linear(3, 1, bias=False), (torch.ones(2, 3), None)).ndim
    0
    """

    function: Callable[[nn.Module, Any], Tensor]

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """The loss on one batch."""
        return self.function(model, batch)


Loss = Callable[[Tensor, Any], Tensor] | OutputLoss | ModelLoss
"""`loss(logits, targets) -> scalar`, or one of the two classes for other arguments."""


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, `model(*inputs)` for a tuple, `model(**inputs)` for a mapping."""
    with trainable_operators(inputs):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, tuple):
            return model(*inputs)
        return model(inputs)


def evaluate(loss: Loss, model: nn.Module, batch: tuple[Any, Any], *, temperature: float = 1.0) -> Tensor:
    """The loss of the model on one batch, with its logits divided by the temperature."""
    if temperature != 1:
        require_logits(loss, "A temperature")
    if isinstance(loss, ModelLoss):
        with trainable_operators(batch), torch.enable_grad():  # it may differentiate by the inputs
            value = loss(model, batch)
        return value if torch.is_grad_enabled() else value.detach()
    output = call(model, batch[0])
    if isinstance(loss, OutputLoss):
        return loss(output, batch[1])
    found = logits(output)
    return loss(found if temperature == 1 else found / temperature, batch[1])


def require_logits(loss: Loss, what: str) -> None:
    """Check that a loss is a function of the logits; the error names what needs that.

    >>> require_logits(nn.functional.cross_entropy, "A temperature")
    >>> require_logits(ModelLoss(lambda model, batch: model(batch[0])), "A temperature")
    Traceback (most recent call last):
    theodolite.UseError: A temperature needs loss(logits, targets), but this loss takes the model ...
    """
    if isinstance(loss, OutputLoss | ModelLoss):
        taken = "the model and the batch" if isinstance(loss, ModelLoss) else "the model's whole output"
        kind = type(loss).__name__
        raise UseError(f"{what} needs loss(logits, targets), but this loss takes {taken} ({kind})")
    if not callable(loss):
        raise UseError(f"{what} needs loss(logits, targets), but loss is {described(loss)}")


def with_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    act: Callable[..., Any],
    *args: Any,
    tied: bool = True,
) -> Any:
    """`act(model, *args)` with other tensors in place of the model's parameters and buffers, by name.

    If `tied`, a tensor that is named once replaces all that are tied to it. What user code has set on a
    parameter, such as mup's `infshape`, is set on the tensor that replaces it.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Tensors of another class keep their own state in attributes.
        if type(parameter) is nn.Parameter and vars(parameter) and name in tensors:
            vars(tensors[name]).update(vars(parameter))
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return functional_call(_Acting(model, act), prefixed, args, tie_weights=tied)


class _Acting(nn.Module):
    """A function of a model as a module, for `functional_call`."""

    def __init__(self, model: nn.Module, act: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.act = model, act

    def forward(self, *args: Any) -> Any:
        return self.act(self.model, *args)


def logits(output: Any) -> Tensor:
    """The logits in the output of a model.

    The output itself if it is a tensor; else its entry `logits`, `sample` or `logits_per_image`; else the
    only tensor that is not a scalar in a tuple, a dict, a dataclass or another object.

    >>> import torch
    >>> logits({"logits": torch.ones(2), "cache": None})
    tensor([1., 1.])
    >>> logits((torch.ones(2), torch.tensor(0.5)))
    tensor([1., 1.])
    """
    if isinstance(output, Tensor):
        return output
    held = _held(output)
    for name in LOGITS:
        if isinstance(found := held.get(name, getattr(output, name, None)), Tensor):
            return found
    tensors = [value for value in held.values() if isinstance(value, Tensor)]
    for candidates in ([one for one in tensors if one.ndim and one.is_floating_point()], tensors):
        if len(candidates) == 1:
            return candidates[0]
    raise UseError(
        f"the model returned {described(output)}, in which the logits cannot be found. Return a tensor, "
        "an object with .logits, or a dict with the key 'logits'; or take the loss of the whole output, "
        "with theodolite.workloads.OutputLoss"
    )


def replace_logits(output: Any, found: Tensor) -> Any:
    """A copy of the output with other logits."""
    before = logits(output)
    if output is before:
        return found
    held = {name: found if value is before else value for name, value in _held(output).items()}
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(**held)
    if isinstance(output, (tuple, list)):
        return type(output)(held.values())
    other = copy.copy(output)
    for name, value in held.items():
        if isinstance(other, MutableMapping):
            other[name] = value
        else:
            object.__setattr__(other, name, value)  # also for frozen dataclasses
    return other


def see_inside(inputs: Any) -> Any:
    """Register classes of objects in the inputs that hold tensors with torch's pytree; returns the inputs.

    Dataclasses and other objects with attributes are then handled like dicts and lists.

    >>> import torch
    >>> @dataclasses.dataclass
    ... class Molecule:
    ...     positions: Tensor
    >>> [leaf.shape for leaf in tree_leaves(see_inside(Molecule(torch.ones(5, 3))))]
    [torch.Size([5, 3])]
    """
    while kinds := {type(leaf) for leaf in tree_leaves(inputs) if _holds_tensors(leaf)}:
        for kind in kinds:
            register_pytree_node(kind, _flattened, partial(_unflattened, kind))
    return inputs


def _holds_tensors(leaf: Any, depth: int = 3) -> bool:
    """Does an object have tensors among its attributes, or among their attributes?"""
    if depth == 0 or callable(leaf) or isinstance(leaf, Tensor):
        return False
    inside = tree_leaves(_attributes(leaf))
    return any(isinstance(one, Tensor) or _holds_tensors(one, depth - 1) for one in inside)


def _flattened(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    held = _attributes(value)
    return list(held.values()), tuple(held)


def _unflattened(kind: type, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also for frozen dataclasses
    return made


def _held(output: Any) -> dict[Any, Any]:
    """The entries of an output, by name or number."""
    if isinstance(output, Mapping):
        return dict(output)
    if hasattr(output, "_asdict"):
        return dict(output._asdict())
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    return _attributes(output)


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(getattr(value, "__dict__", {}))


def described(value: Any) -> str:
    """A short description of a value, for error messages.

    >>> import torch
    >>> described((torch.ones(2), None))
    'a tuple of 2 (Tensor, NoneType)'
    >>> described(3)
    'the int 3'
    """
    if isinstance(value, (int, float)):
        return f"the {type(value).__name__} {value!r}"
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return f"a {type(value).__name__}"
