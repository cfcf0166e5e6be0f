"""The update that an optimizer would make now, without making it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.optimizers.step_checks import required_arguments

Closure = Callable[[], Any]


@exclusive()
def optimizer_step(
    optimizer: Optimizer, model: nn.Module | None = None, *, closure: Closure | None = None
) -> dict[str, Tensor]:
    """`Δθ = θ' − θ`, where θ' is what `optimizer.step()` would leave; by name.

    The step is taken and taken back. Parameters, gradients, the optimizer's state and its groups are as they
    were, bit by bit: state that the step would create is absent again. No hook of a step is called, no
    random number is spent. Weight decay is in the update, as in the step. Gradients with a graph, such as
    Sophia's, can still be differentiated.

    Args:
        optimizer: any torch optimizer, after `backward()`.
        model: gives the names; needed with a closure if the model has buffers that a forward pass changes.
            Without it names are those in the optimizer's groups, or else `parameter 0`, `parameter 1`, …
        closure: for optimizers that compute gradients themselves, such as LBFGS.

    The update is what the parameters' precision leaves of it. A parameter that would not move has zeros.
    Memory: a copy of the parameters, of their gradients and of the optimizer's state.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, -0.5]])).sum().backward()
    >>> optimizer = torch.optim.Adam(layer.parameters(), lr=0.25)
    >>> before = layer.weight.tolist()
    >>> optimizer_step(optimizer, layer)
    {'weight': tensor([[-0.2500,  0.2500]])}
    >>> layer.weight.tolist() == before, dict(optimizer.state)
    (True, {})
    """
    if not isinstance(optimizer, Optimizer):
        raise UseError(f"optimizer is {described(optimizer)}, not a torch.optim.Optimizer")
    names = parameter_names(optimizer, model)
    if closure is None and not any(parameter.grad is not None for parameter in names):
        raise UseError(
            f"none of the {len(names)} parameters of the optimizer has a gradient, so it would do nothing. "
            "Call loss.backward() first"
        )
    before = Snapshot(optimizer, model)
    step = type(optimizer).step.__get__(optimizer)  # without the counter that a scheduler puts around it
    try:
        with untouched_randomness(), no_hooks(optimizer), _kept_graphs(names), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a real step will show them
            take(optimizer, step, closure)
        return {
            name: parameter.detach() - before.copies[parameter].detach() for parameter, name in names.items()
        }
    finally:
        before.restore()


def parameter_names(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """The optimizer's parameters, each with its name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if model is not None:
        canonical = {id(tensor): name for name, tensor in canonical_parameters(model)}
        for place, parameter in enumerate(parameters):
            if id(parameter) not in canonical:
                raise UseError(
                    f"parameter {place} of the optimizer, of shape {tuple(parameter.shape)}, is none of the "
                    "model's. Give the model that the optimizer was made for"
                )
        return {parameter: canonical[id(parameter)] for parameter in parameters}
    named = [group.get("param_names") for group in optimizer.param_groups]
    if all(names is not None for names in named):
        return dict(zip(parameters, (name for names in named for name in names or ()), strict=True))
    return {parameter: f"parameter {place}" for place, parameter in enumerate(parameters)}


def take(optimizer: Optimizer, step: Callable[..., Any], closure: Closure | None) -> Any:
    """Take one step; raise if the optimizer needs a closure and none is given."""
    kind = type(optimizer).__name__
    needs = UseError(
        f"{kind} computes its gradients itself. Give closure=…, a function that zeroes the gradients, calls "
        "backward and returns the loss"
    )
    required = required_arguments(optimizer)
    if any(name != "closure" for name in required):
        raise UseError(
            f"the step of {kind} needs {', '.join(required)}, which is not known here. Give the optimizer "
            "that it was made of"
        )
    if closure is not None:
        return step(closure)
    if required:
        raise needs
    try:
        return step()
    except Exception as error:
        if "closure" in f"{type(error).__name__} {error}".lower():
            raise needs from error
        raise


class Snapshot:
    """All that a step of an optimizer may change: parameters, gradients, state and groups.

    With a model also its buffers, and the gradients of its other parameters. `restore` makes everything what
    it was: the same objects, with the same bits. Objects in the state are restored by their attributes; those
    without a `__dict__` (numpy arrays, generators, `__slots__`) stay as the step left them.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._add(optimizer)
        if model is not None:
            self._add([*model.parameters(), *model.buffers()])
        self.copies = {tensor: tensor.detach().clone() for tensor in self._tensors.values()}
        """By tensor."""
        # Tensors of inference mode have no versions.
        self._versions = {
            tensor: tensor._version
            for tensor in self.copies
            if _is_plain(tensor) and not tensor.is_inference()
        }
        # An optimizer may put other memory behind a parameter (`parameter.data = …`).
        self._memory = {tensor: tensor.data for tensor in self.copies if _is_plain(tensor)}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for value, before in self._containers.values():
            if before is None:
                continue
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        for tensor, values in self.copies.items():
            memory = self._memory.get(tensor)
            if memory is not None and memory.data_ptr() != tensor.data_ptr():
                tensor.data = memory
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                _once(tensor, tensor).copy_(_once(values, tensor))
        for tensor, grad in self._grads:
            tensor.grad = grad
        # Graphs that were made before may still go backward.
        torch._C._autograd._unsafe_set_version_counter(tuple(self._versions), tuple(self._versions.values()))

    def _add(self, value: Any, *, attributes: bool = False) -> None:
        """What can be reached from a value: by containers, tensors and optimizers, or by any attributes."""
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value
                if value.is_leaf:
                    self._grads.append((value, value.grad))
                    self._add(value.grad)
            return
        if id(value) in self._containers:
            return
        if isinstance(value, Optimizer):
            self._containers[id(value)] = value, None
            self._add(value.state, attributes=True)
            self._add(vars(value))
        elif isinstance(value, (dict, list, deque, set, tuple, frozenset)):
            if not isinstance(value, (tuple, frozenset)):
                self._containers[id(value)] = value, dict(value) if isinstance(value, dict) else tuple(value)
            for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
                self._add(item, attributes=attributes)
        elif attributes and not isinstance(value, ModuleType):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._add(own, attributes=True)


@contextmanager
def no_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Without the hooks of a step: those of the optimizer, and those of all optimizers."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    every = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    every += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    copies = [dict(hooks) for hooks in every]
    try:
        for hooks in every:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(every, copies, strict=True):
            hooks.update(before)


@contextmanager
def _kept_graphs(parameters: Iterable[Tensor]) -> Iterator[None]:
    """If gradients have graphs, let every backward pass through them retain the graph."""
    if not any(parameter.grad is not None and parameter.grad.requires_grad for parameter in parameters):
        yield
        return
    run = getattr(torch.autograd, _BACKWARD)

    def retaining(outputs: Any, grads: Any, retain_graph: bool, *given: Any, **options: Any) -> Any:
        return run(outputs, grads, True, *given, **options)

    setattr(torch.autograd, _BACKWARD, retaining)
    try:
        yield
    finally:
        setattr(torch.autograd, _BACKWARD, run)


# Every backward pass of torch calls it, also if somebody has imported `grad` by name.
_BACKWARD = "_engine_run_backward"


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """Without the repeats of an expanded tensor, which share their memory and cannot be written to."""
    if like.layout is not torch.strided or 0 not in like.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in like.stride())]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
