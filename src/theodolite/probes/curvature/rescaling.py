"""Multiply a network's weights, or divide its logits, and measure the curvature along such a scale.

    scaled(model, α)      θ → αθ, all weights and biases; not the gains and shifts of normalisations
    tempered(model, T)    z → z/T, so that the loss is that of softmax(z/T)

Both are undone at the end of their `with` block, also after an error: the weights are restored bit by bit,
and hooks removed.

References:
    Revisiting the Goldilocks zone in inhomogeneous networks, sections 2 and 3.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters, unwrap
from theodolite.core.arguments import positive
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss, logits, replace_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks
from theodolite.probes.curvature.curvature import Curvature, measure
from theodolite.probes.curvature.directions import draw
from theodolite.probes.curvature.objective import Objective, chosen_names

TORCH_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)

# Version numbers of tensors while they are scaled. No two blocks share one, so autograd does not accept a
# graph from one block in the next, or outside.
_VERSIONS = itertools.count(2**30)

_set_versions = torch._C._autograd._unsafe_set_version_counter

_SCALING: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
"""The threads inside `scaled`, by model."""


@contextmanager
def scaled(
    model: nn.Module, alpha: float, *, parameters: str | Sequence[str] | None = None
) -> Iterator[nn.Module]:
    """Multiply weights and biases by α inside the block; afterwards they are restored bit by bit.

    Args:
        model: any module, wrapped or not. Its tensors are changed in place, so optimizers see it too.
        alpha: positive.
        parameters: fnmatch patterns of the canonical names to multiply. By default all but the parameters of
            normalisations: torch's own, and modules that have only vectors as parameters and give the same
            output for x and 3x (see `is_normalisation`).

    All changes of the weights inside the block, training included, are undone. `.grad` and the state of an
    optimizer are not touched. Autograd refuses a backward pass outside through a graph from inside, and vice
    versa. Memory: a copy of what is multiplied.

    >>> layer = nn.Sequential(nn.Linear(1, 1, bias=False), nn.LayerNorm(1))
    >>> _ = nn.init.constant_(layer[0].weight, 3.0)
    >>> with scaled(layer, 0.5):
    ...     print([parameter.item() for parameter in layer.parameters()])
    [1.5, 1.0, 0.0]
    >>> [parameter.item() for parameter in layer.parameters()]
    [3.0, 1.0, 0.0]
    """
    positive("alpha", alpha)
    with _claimed(unwrap(model)), exchanged(scalable(model, parameters), lambda name, before: before * alpha):
        yield model


@contextmanager
def tempered(model: nn.Module, temperature: float) -> Iterator[nn.Module]:
    """Divide the logits, which the model returns, by a temperature.

    Args:
        model: any module. It may return a tensor, an object with `.logits`, a dict with `"logits"` or a
            tuple with one tensor. A compiled model runs uncompiled inside the block.
        temperature: positive.

    >>> layer = nn.Identity()
    >>> with tempered(layer, 4.0):
    ...     layer(torch.tensor([2.0, 6.0]))
    tensor([0.5000, 1.5000])
    >>> layer(torch.tensor([2.0, 6.0]))
    tensor([2., 6.])
    """
    positive("temperature", temperature)

    def divide(module: nn.Module, inputs: Any, output: Any) -> Any:
        return replace_logits(output, logits(output) / temperature)

    with uncompiled(model):
        hook = unwrap(model).register_forward_hook(divide)
        try:
            yield model
        finally:
            hook.remove()


@exclusive()
@on_all_ranks
def along_temperature(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    temperatures: Sequence[float],
    *,
    directions: int = 50,
    parameters: str | Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[Curvature, ...]:
    """The curvature of the loss of logits/T for each temperature T, all from one pass.

    >>> import theodolite as th
    >>> batch = torch.randn(16, 8), torch.randint(3, (16,))
    >>> model = th.models.LeNet300(12, inputs=8, outputs=3)
    >>> [one.temperature for one in along_temperature(model, nn.functional.cross_entropy, batch, [0.1, 10.0])]
    [0.1, 10.0]
    """
    temperatures = list(temperatures)
    if not temperatures:
        raise UseError("temperatures is empty: give at least one")
    objective = Objective(model, loss, batch, parameters=parameters)
    for temperature in temperatures:
        objective.at(temperature)  # each is checked
    rays = draw(objective.shapes, directions, seed=seed, dtype=objective.dtype, device=objective.device)
    return measure(objective, rays, temperatures)


@exclusive()
@on_all_ranks
def along_scale(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    scales: Sequence[float],
    *,
    temperatures: Sequence[float] | None = None,
    directions: int = 50,
    parameters: str | Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[Curvature, ...]:
    """The curvature at `αθ` for each scale α of weights and biases; norms keep their gains and shifts.

    Args:
        model, loss, batch, directions, parameters, seed: as in `curvature`.
        scales: the values of α.
        temperatures: one for each α, 1 if left out. `T = α^L` is the joint scaling under which the curvature
            of a homogeneous network of L layers does not change its shape.
    """
    scales = list(scales)
    if not scales:
        raise UseError("scales is empty: give at least one")
    objective = Objective(model, loss, batch, parameters=parameters)
    rays = draw(objective.shapes, directions, seed=seed, dtype=objective.dtype, device=objective.device)
    temperatures = [1.0] * len(scales) if temperatures is None else list(temperatures)
    if len(temperatures) != len(scales):
        raise UseError(
            f"there are {len(scales)} scales and {len(temperatures)} temperatures: give one for each"
        )
    found: list[Curvature] = []
    for scale, temperature in zip(scales, temperatures, strict=True):
        with scaled(model, scale):
            found += measure(objective, rays, [temperature])
    return tuple(found)


@contextmanager
def exchanged(tensors: Mapping[str, Tensor], exchange: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Replace each tensor by `exchange(name, copy of the tensor)`; afterwards all are restored bit by bit.

    >>> tensor = torch.ones(2)
    >>> with exchanged({"a": tensor}, lambda name, before: before + 1):
    ...     tensor.tolist()
    [2.0, 2.0]
    >>> tensor.tolist()
    [1.0, 1.0]
    """
    changed = tuple(tensors.values())
    with exclusive():
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        versions = tuple(tensor._version for tensor in changed)
    try:
        with exclusive(), torch.no_grad():  # an autocast around this drops the weights it has cast
            for name, tensor in tensors.items():
                tensor.copy_(exchange(name, kept[name]))  # of the copy, as two may share memory
            _set_versions(changed, (next(_VERSIONS),) * len(changed))
        yield
    finally:
        with exclusive(), torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])
            _set_versions(changed, versions)


def scalable(model: nn.Module, parameters: str | Sequence[str] | None = None) -> dict[str, Tensor]:
    """The parameters that `scaled` multiplies, by canonical name.

    >>> list(scalable(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ['0.weight', '0.bias']
    >>> list(scalable(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), ["*.bias"]))
    ['0.bias', '1.bias']
    """
    everything = dict(canonical_parameters(model))
    if parameters is not None:
        return {name: everything[name] for name in chosen_names(model, parameters)}
    of_norms = {
        id(tensor)
        for _, module in canonical_modules(model)
        if is_normalisation(module)
        for tensor in module.parameters(recurse=False)
    }
    found = {name: tensor for name, tensor in everything.items() if id(tensor) not in of_norms}
    if not found:
        some = ", ".join(itertools.islice(everything, 3)) or "none"
        raise UseError(
            f"there is nothing to scale: the model has no parameters but those of normalisations ({some}, …)"
        )
    return found


def is_normalisation(module: nn.Module) -> bool:
    """Is it one of torch's normalisations, or does it act like one?

    It does if all its parameters are vectors of one length, its children have none, and its output is the
    same for x as for 3x, but not for another x. A copy is called, with random features in the last dimension,
    then in the second. So a norm written by the user is found, and a layer scale or PReLU is not. For what is
    not found here there is `parameters=`.

    >>> class MyNorm(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gain = nn.Parameter(torch.ones(8))
    ...     def forward(self, x):
    ...         return self.gain * x / x.abs().mean(-1, keepdim=True)
    >>> is_normalisation(MyNorm()), is_normalisation(nn.PReLU(8))
    (True, False)
    """
    if isinstance(module, TORCH_NORMS):
        return True
    own = list(module.parameters(recurse=False))
    lengths = {tensor.numel() for tensor in own}
    vectors = all(tensor.numel() == max(tensor.shape, default=0) for tensor in own)
    if not own or len(lengths) > 1 or not vectors or len(own) < len(list(module.parameters())):
        return False
    (length,) = lengths
    return any(_ignores_scale(module, shape) for shape in ((4, 3, length), (4, length, 3, 3)))


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run a model without its compiled code, which ignores new hooks and tensors."""
    compiled = any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


@contextmanager
def _claimed(model: nn.Module) -> Iterator[None]:
    """Refuse a second thread, which would restore the scaled weights of the first."""
    own = threading.get_ident()
    with exclusive():
        threads = _SCALING.setdefault(model, [])
        if any(one != own for one in threads):
            raise UseError(
                f"this {type(model).__name__} is inside scaled(...) in another thread already, and its "
                "weights would not be restored. Scale a copy, or wait until the other block has ended"
            )
        threads.append(own)
    try:
        yield
    finally:
        threads.remove(own)


def _ignores_scale(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """`f(3x) = f(x)` to a hundredth, and `f(y)` differs, of a copy of the module."""
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    try:
        twin = copy.deepcopy(module).to("cpu", torch.float32)
        with torch.no_grad():
            once, thrice, other = (twin.forward(one) for one in (x, 3 * x, y))
        apart, spread = (thrice - once).norm(), (other - once).norm()
    except Exception:  # it takes other inputs
        return False
    return bool(apart < 0.01 * spread)
