"""A network with its weights multiplied, or its logits divided, for the length of a `with` block.

    scaled(model, α)      θ → αθ, all weights and biases; not the gains and shifts of normalisations
    tempered(model, T)    z → z/T, which softmax(z/T) and the loss then see

Both leave no trace: the weights come back bit by bit, hooks go, also when something is raised inside.

References:
    Revisiting the Goldilocks zone in inhomogeneous networks, sections 2 and 3.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters, unwrap
from theodolite.core.calling import logits, replace_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive

TORCH_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)

# What autograd takes for the version of a tensor while it is scaled. No two blocks share one, so a graph
# made in one block is not mistaken for valid in the next, or outside.
_VERSIONS = itertools.count(2**30)

_SCALING: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
"""The threads inside `scaled`, by model."""


@contextmanager
def scaled(
    model: nn.Module, alpha: float, *, parameters: str | Sequence[str] | None = None
) -> Iterator[nn.Module]:
    """Multiply weights and biases by α; afterwards they are what they were, bit by bit.

    Args:
        model: any module, wrapped or not. Its tensors are changed in place, so optimizers see it too.
        alpha: positive.
        parameters: fnmatch patterns of canonical names: what is multiplied. Without them it is everything
            except the parameters of normalisations: torch's own, and modules with nothing but vectors that
            give the same output for x and 3x (see `is_normalisation`).

    Whatever changes the weights inside, training included, is undone. `.grad` and the state of an optimizer
    are not touched. Autograd refuses to go backward through a graph from inside when outside, and the other
    way round. Memory: a copy of what is multiplied.

    >>> layer = nn.Sequential(nn.Linear(1, 1, bias=False), nn.LayerNorm(1))
    >>> _ = nn.init.constant_(layer[0].weight, 3.0)
    >>> with scaled(layer, 0.5):
    ...     print([parameter.item() for parameter in layer.parameters()])
    [1.5, 1.0, 0.0]
    >>> [parameter.item() for parameter in layer.parameters()]
    [3.0, 1.0, 0.0]
    """
    require_positive("alpha", alpha)
    with _claimed(unwrap(model)), exchanged(scalable(model, parameters), lambda name, before: before * alpha):
        yield model


@contextmanager
def tempered(model: nn.Module, temperature: float) -> Iterator[nn.Module]:
    """Divide the logits by a temperature: what the model returns, or the logits in it.

    Args:
        model: any module. It may return a tensor, an object with `.logits`, a dict with `"logits"` or a
            tuple with one tensor. A compiled one runs uncompiled inside.
        temperature: positive.

    >>> layer = nn.Identity()
    >>> with tempered(layer, 4.0):
    ...     layer(torch.tensor([2.0, 6.0]))
    tensor([0.5000, 1.5000])
    >>> layer(torch.tensor([2.0, 6.0]))
    tensor([2., 6.])
    """
    require_positive("temperature", temperature)

    def divide(module: nn.Module, inputs: Any, output: Any) -> Any:
        return replace_logits(output, logits(output) / temperature)

    with ExitStack() as stack:
        if is_compiled(model):  # a compiled program does not look for new hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        hook = unwrap(model).register_forward_hook(divide)
        stack.callback(hook.remove)
        yield model


@contextmanager
def exchanged(tensors: Mapping[str, Tensor], exchange: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Put `exchange(name, copy of the tensor)` in the place of each; afterwards the bits are what they were.

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
        with exclusive(), torch.no_grad():  # an autocast around this forgets the weights it has cast
            for name, tensor in tensors.items():
                tensor.copy_(exchange(name, kept[name]))  # of the copy: two may share their memory
            _set_versions(changed, (next(_VERSIONS),) * len(changed))
        yield
    finally:
        with exclusive(), torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])
            _set_versions(changed, versions)


def scalable(model: nn.Module, parameters: str | Sequence[str] | None = None) -> dict[str, Tensor]:
    """The parameters that `scaled` multiplies, under their canonical names.

    >>> list(scalable(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ['0.weight', '0.bias']
    >>> list(scalable(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), ["*.bias"]))
    ['0.bias', '1.bias']
    """
    everything = dict(canonical_parameters(model))
    if parameters is not None:
        parameters = [parameters] if isinstance(parameters, str) else parameters
        found = {
            name: tensor
            for name, tensor in everything.items()
            if any(fnmatchcase(name, pattern) for pattern in parameters)
        }
        why = f"no parameter has a name like {', '.join(map(repr, parameters))}"
    else:
        of_norms = {
            id(tensor)
            for _, module in canonical_modules(model)
            if is_normalisation(module)
            for tensor in module.parameters(recurse=False)
        }
        found = {name: tensor for name, tensor in everything.items() if id(tensor) not in of_norms}
        why = "the model has no parameters but those of normalisations"
    if not found:
        some = ", ".join(itertools.islice(everything, 3)) or "none"
        raise UseError(f"there is nothing to scale: {why}. Its parameters are called {some}, …")
    return found


def is_normalisation(module: nn.Module) -> bool:
    """Is it one of torch's normalisations, or does it act like one?

    It does if all its parameters are vectors of one length, its children have none, and its output is the
    same for x as for 3x, but not for another x. That is asked of a copy, with random features in the last
    dimension, then in the second. So a norm of the user's own is found, and a layer scale or PReLU is not.
    What is not found here goes by `parameters=`.

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


def is_compiled(model: nn.Module) -> bool:
    """Is the model, or a module in it, compiled by `torch.compile`?"""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def require_positive(name: str, value: float) -> None:
    """Refuse a factor that is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UseError(f"{name} is {value!r}: it has to be a positive, finite number")


@contextmanager
def _claimed(model: nn.Module) -> Iterator[None]:
    """Refuse a second thread, which would keep the weights of the first as those to come back to."""
    own = threading.get_ident()
    with exclusive():
        threads = _SCALING.setdefault(model, [])
        if any(one != own for one in threads):
            raise UseError(
                f"this {type(model).__name__} is inside scaled(...) in another thread already: its weights "
                "would not come back. Scale a copy, or wait until the other block has ended"
            )
        threads.append(own)
    try:
        yield
    finally:
        threads.remove(own)


def _ignores_scale(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """`f(3x) = f(x)` to a hundredth, and `f(y)` is something else. The module is not called, a copy is."""
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    try:
        twin = copy.deepcopy(module).to("cpu", torch.float32)
        with torch.no_grad():
            once, thrice, other = (twin.forward(one) for one in (x, 3 * x, y))
        apart, spread = (thrice - once).norm(), (other - once).norm()
    except Exception:  # it takes other inputs, so it cannot be told; the caller can say
        return False
    return bool(apart < 0.01 * spread)


def _set_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)
