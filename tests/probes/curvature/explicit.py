"""The explicit Hessian of a small network: finite differences of its gradient and of its logits."""

from __future__ import annotations

import copy
import os
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.calling import call, logits, with_tensors
from theodolite.probes.curvature.objective import SEED
from theodolite.probes.curvature.operator import Operator

from .networks import Case, Loss, case

SHARED = "THEODOLITE_TESTS_SHARE"
"""Names a folder for what several processes of one run of the tests would find again."""

# f'(0) = (f(h) − f(−h))/2h + O(h²): in float64 good to nine digits. So short that nothing crosses a kink.
STEP = 1e-5
STENCIL = ((-STEP, -0.5 / STEP), (STEP, 0.5 / STEP))


@dataclass(frozen=True)
class Explicit:
    """H, G = JᵀBJ and the gradient over all parameters that require one, in the model's order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    hessian: Tensor
    gauss_newton: Tensor
    gradient: Tensor
    loss: float

    @property
    def residual(self) -> Tensor:
        """S = H − G."""
        return self.hessian - self.gauss_newton

    def rows(self, names: tuple[str, ...]) -> Tensor:
        """The places of these parameters' entries, in the order of `names`."""
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        starts = dict(zip(self.names, zip([0, *ends[:-1]], ends, strict=True), strict=True))
        return torch.cat([torch.arange(*starts[name]) for name in names])


@cache
def explicit_of(name: str) -> Explicit:
    """Of a network in `networks.CASES`; found once, for all processes that share a run of the tests."""
    if SHARED not in os.environ:
        return explicit(case(name))
    kept = Path(os.environ[SHARED], name)
    if not kept.exists():
        part = kept.with_suffix(f".{os.getpid()}")
        torch.save(astuple(explicit(case(name))), part)
        part.rename(kept)  # another process never sees half a file
    return Explicit(*torch.load(kept, weights_only=True))


@torch.random.fork_rng(devices=[])
def explicit(made: Case, *, temperature: float = 1.0) -> Explicit:
    """Works on copies, in the mode that the model is in.

    Each of P columns costs two gradients: all at once where `vmap` can follow the model, else one by one.
    Dropout has the mask that a probe gives it.
    """
    named = {name: value.detach() for name, value in made.model.named_parameters() if value.requires_grad}
    start = flat(tuple(named.values()))
    steps = torch.eye(len(start), dtype=start.dtype)
    points = torch.cat([start + step * steps for step, _ in STENCIL])
    outputs, gradient = (found[0] for found in one_by_one(made, named, start[None], temperature))
    try:
        moved = all_at_once(made, named, points, temperature)
    except Exception:  # an operation that it has no rule for, or a value that the model looks at
        moved = one_by_one(made, named, points, temperature)
    slopes, hessian = (
        sum(weight * found.flatten(1).T for (_, weight), found in zip(STENCIL, both.chunk(2), strict=True))
        for both in moved
    )
    curved = curvature_in_logits(made.loss, outputs, made.batch[1])
    return Explicit(
        tuple(named),
        tuple(value.numel() for value in named.values()),
        (hessian + hessian.T) / 2,
        slopes.T @ curved @ slopes,
        gradient,
        made.loss(outputs, made.batch[1]).item(),
    )


Named = dict[str, Tensor]


def one_by_one(made: Case, named: Named, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits and the gradient where the parameters have these values, at each point (…, P) in turn."""
    model, found = copy.deepcopy(made.model), []
    parameters = dict(model.named_parameters())
    values = [parameters[name] for name in named]
    for point in points:
        torch.nn.utils.vector_to_parameters(point, values)
        # torch.manual_seed, for devices that are not there, takes longer than all the rest.
        torch.default_generator.manual_seed(SEED)
        outputs = logits(call(model, made.batch[0])) / temperature
        loss = made.loss(outputs, made.batch[1])
        gradients = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        found.append((outputs.detach(), flat(gradients)))
    first, second = zip(*found, strict=True)
    return torch.stack(first), torch.stack(second)


def all_at_once(made: Case, named: Named, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same, for a model that `vmap` can follow."""
    model = copy.deepcopy(made.model)
    sizes = [value.numel() for value in named.values()]

    def evaluate(parameters: Named, buffers: Named) -> tuple[Tensor, Tensor]:
        # Buffers are copied for statistics that are written to.
        tensors = parameters | {name: buffer.clone() for name, buffer in buffers.items()}
        outputs = logits(with_tensors(model, tensors, call, made.batch[0])) / temperature
        return made.loss(outputs, made.batch[1]), outputs

    def at(point: Tensor, buffers: Named) -> tuple[Tensor, Tensor]:
        pieces = zip(named.items(), point.split(sizes), strict=True)
        parameters = {name: piece.view_as(value) for (name, value), piece in pieces}
        gradients, outputs = grad(evaluate, has_aux=True)(parameters, buffers)
        return outputs, torch.cat([gradients[name].flatten() for name in named])

    buffers = {name: buffer.expand(len(points), *buffer.shape) for name, buffer in model.named_buffers()}
    torch.default_generator.manual_seed(SEED)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for many points
        outputs, gradients = vmap(at, randomness="same")(points, buffers)
    return outputs.detach(), gradients.detach()


def curvature_in_logits(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """B, the Hessian of the loss in the logits, by finite differences of its gradient."""
    columns = []
    for place in range(outputs.numel()):
        column = torch.zeros(outputs.numel(), dtype=outputs.dtype)
        for step, weight in STENCIL:
            moved = outputs.detach().clone()
            moved.view(-1)[place] += step
            moved.requires_grad_()
            (gradient,) = torch.autograd.grad(loss(moved, targets), moved)
            column += weight * gradient.flatten()
        columns.append(column)
    return torch.stack(columns, 1)


def flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def apart(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """‖found − expected‖_F / ‖scale‖_F; the scale is `expected` unless given."""
    return ((found - expected).norm() / (expected if scale is None else scale).norm()).item()


def sketch(matrix: Tensor | Operator) -> Tensor:
    """A matrix or an operator on random vectors: what differs anywhere differs here, for fewer products."""
    return matrix @ _vectors(len(matrix) if isinstance(matrix, Tensor) else matrix.size).to(matrix.dtype)


def between(products: Tensor) -> Tensor:
    """What `sketch` gave, between the same vectors: as symmetric as the matrix is."""
    return _vectors(len(products)).T @ products


def _vectors(size: int) -> Tensor:
    return torch.randn(size, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
