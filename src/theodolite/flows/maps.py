"""Flow maps: networks that jump from any time to any later one, trained by self-distillation."""

# B batch, N examples on the diagonal

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.core.arguments import number, one_of, whole
from theodolite.core.batches import Batch
from theodolite.core.calling import ModelLoss, described
from theodolite.core.errors import UseError
from theodolite.data.batches import generator
from theodolite.flows.fields import check_function, check_shape, check_signature, predicted
from theodolite.flows.forward_mode import derivative
from theodolite.flows.interpolants import (
    LINEAR,
    Interpolant,
    along,
    check_times,
    find_interpolant,
    finite_times,
)
from theodolite.flows.sampling import check_noise, refuse_not_finite
from theodolite.flows.training import Draw, as_data, as_times, check_draw, drawn, null_labels

Jump = Callable[[Tensor, float, float], Tensor]
"""`jump(x, s, t)`: where the points x at time s are at time t. A `FlowMap`, or `GaussianMixture.flow_map`."""

MapLoss = Literal["lagrangian", "eulerian", "progressive-midpoint", "progressive-uniform", "matching"]
"""Kinds of `map_loss`."""


@dataclass(frozen=True)
class FlowMap:
    """The flow map of a network: `X_{s,t}(x) = x + (t − s) v_{s,t}(x)`.

    The network is called as `net(x, times, *condition)`, with times (B, 2) whose columns are s and t, and
    returns `v_{s,t}(x)`, the mean velocity on the way from s to t. With s = t it is the velocity.

    Args:
        net: the network. Put it into eval mode to sample.
        condition: further inputs, such as labels (B,); an integer is the same label for all examples.

    >>> class Constant(nn.Module):
    ...     def forward(self, x, times):
    ...         return torch.ones_like(x)
    >>> flow_map = FlowMap(Constant())
    >>> flow_map(torch.zeros(1, 2), 0.25, 1.0)
    tensor([[0.7500, 0.7500]])
    """

    net: nn.Module
    condition: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.condition, tuple):
            raise UseError(f"condition is {described(self.condition)}: give a tuple of the further inputs")
        check_signature(self.net, "times", self.condition)

    def __call__(self, x: Tensor, s: float | Tensor, t: float | Tensor) -> Tensor:
        """The points X_{s,t}(x), for times that are numbers or (B,)."""
        s, t = _times("s", s, x), _times("t", t, x)
        return x + along(t - s, x) * self.average(x, s, t)

    def average(self, x: Tensor, s: float | Tensor, t: float | Tensor) -> Tensor:
        """The mean velocity v_{s,t}(x)."""
        times = torch.stack([_times("s", s, x), _times("t", t, x)], 1)
        return predicted(self.net, x, times, self.condition, given=", as in FlowMap(net, (labels,))")

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """The velocity v_{t,t}(x): a field, for `sample`."""
        both = _times("t", t, x)
        return self.average(x, both, both)


def sample_map(flow_map: Jump, noise: Tensor, steps: int = 1, *, differentiable: bool = False) -> Tensor:
    """Move noise to data in a few jumps of equal length.

    Args:
        flow_map: a `FlowMap`, or any function `jump(x, s, t)`; not a network.
        noise: standard normal numbers (B, ...).
        steps: number of jumps.
        differentiable: keep the graph for gradients.

    Points that are not finite raise a `UseError`. The exact map gives the same points in one jump as in four:

    >>> from theodolite.flows import three_gaussians
    >>> exact, noise = three_gaussians().flow_map, torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    >>> torch.allclose(sample_map(exact, noise), sample_map(exact, noise, 4))
    True
    """
    _check_jump(flow_map)
    check_noise(noise)
    whole("steps", steps, least=1)
    grid = [step / steps for step in range(steps + 1)]
    x, finite = noise, [noise.isfinite().all()]
    with contextlib.nullcontext() if differentiable else torch.no_grad():
        for s, t in pairwise(grid):
            x = check_shape("flow_map", flow_map(x, s, t), x, "return the points at the time t")
            finite.append(x.isfinite().all())
    refuse_not_finite(finite, grid)
    return x


def _check_jump(flow_map: Any) -> None:
    """Check that it is not a network, which would be called with (x, times) instead of (x, s, t)."""
    fix = "give FlowMap(net), or a function jump(x, s, t)"
    if isinstance(flow_map, nn.Module):
        raise UseError(f"flow_map is {described(flow_map)}: {fix}")
    check_function("flow_map", flow_map, 3, fix)


def map_batches(
    draw: Draw,
    *,
    path: str | Interpolant = LINEAR,
    diagonal: float = 0.75,
    classes: int | None = None,
    label_dropout: float = 0.0,
    name: str = "flow map",
) -> Callable[[int, int], Batch]:
    """Batches for `map_loss`, as pure functions of a seed and a step.

    A batch is `((x_s, times), (velocity, split))`, with the labels after the times if `classes` is given. The
    first N examples are on the diagonal: their two times are equal, and `velocity` (N, ...) has their
    targets. The other B − N have a sorted pair of uniform times, and `split` (B − N,) has a uniform number
    for each of them, which `progressive-uniform` needs.

    Args:
        draw: the data, `draw(seed, step) -> (data, labels)`.
        path: the interpolant or its name.
        diagonal: the fraction N/B.
        classes: keep the labels, integers below `classes`.
        label_dropout: probability of replacing a label by `classes`, the null label.
        name: of the random numbers.

    >>> batch = map_batches(lambda seed, step: (torch.ones(8, 2), None))
    >>> (x, times), (velocity, split) = batch(0, 0)
    >>> x.shape, times.shape, velocity.shape, split.shape
    (torch.Size([8, 2]), torch.Size([8, 2]), torch.Size([6, 2]), torch.Size([2]))
    """
    if not number("diagonal", diagonal, least=0, most=1):
        raise UseError("diagonal is 0: the velocity is learnt from the diagonal, give a larger fraction")
    null_labels(classes, label_dropout)
    check_draw(draw)
    return _MapBatches(draw, find_interpolant(path), diagonal, classes, label_dropout, name)


@dataclass(frozen=True)
class _MapBatches:
    """The function that `map_batches` returns, as an object, which can be sent to another process."""

    draw: Draw
    path: Interpolant
    diagonal: float
    classes: int | None
    label_dropout: float
    name: str

    def __call__(self, seed: int, step: int) -> Batch:
        data, labels = drawn(self.draw, seed, step)
        rng = generator(self.name, "noise", seed, step)
        on = max(1, round(self.diagonal * len(data)))
        pairs = np.sort(rng.random((len(data), 2)), axis=1)
        pairs[:on] = rng.random((on, 1))
        low, high = finite_times("velocity", self.path)
        times = as_times(low + (high - low) * pairs, data)
        noise = as_data(rng.standard_normal(tuple(data.shape)), data)
        split = as_times(rng.random(len(data) - on), data)
        kept = null_labels(self.classes, self.label_dropout)(labels, rng, data)
        s = times[:, 0]
        velocity = self.path.velocity(noise[:on], data[:on], s[:on])
        return (self.path.between(noise, data, s), times, *kept), (velocity, split)


def map_loss(kind: MapLoss = "lagrangian", *, stop_gradients: bool = True) -> ModelLoss:
    """The loss of a flow map: flow matching on the diagonal, self-distillation off it.

    A mean over all examples and dimensions of a batch of `map_batches`. On the diagonal the residual of an
    example is `v_{t,t}(x_t) − velocity`. Off the diagonal it is, with sg(·) for what is not differentiated:

    - `lagrangian`: `∂_t X_{s,t}(x_s) − sg(v_{t,t}(X_{s,t}(x_s)))`;
    - `eulerian`: `∂_s X_{s,t}(x_s) + sg(∇X_{s,t}(x_s) v_{s,s}(x_s))`;
    - `progressive-midpoint`: `v_{s,t}(x_s) − sg((1 − γ) v_{s,u}(x_s) + γ v_{u,t}(X_{s,u}(x_s)))`, with
      γ = ½ and `u = γs + (1 − γ)t`;
    - `progressive-uniform`: the same with a uniform γ;
    - `matching`: none. The mean is over the diagonal alone.

    The first two differentiate the network with respect to times and inputs, in forward mode
    (`torch.func.jvp`). There, attention and normalisations are computed by their definitions: fused attention
    has no forward mode, and torch's gradients of the forward-mode derivative of layer norms are wrong.

    Args:
        kind: of the self-distillation.
        stop_gradients: stop gradients where the paper's authors do, marked sg above; if not, nowhere.

    >>> class Line(nn.Module):
    ...     def forward(self, x, times):
    ...         return 2 * torch.ones_like(x)
    >>> times = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> batch = (torch.zeros(2, 1), times), (torch.ones(1, 1), torch.zeros(1))
    >>> map_loss("lagrangian")(Line(), batch)  # 1 on the diagonal, 0 off it
    tensor(0.5000)

    References:
        Boffi et al., How to build a consistency model: learning flow maps via self-distillation, 2025.
    """
    one_of("kind", kind, get_args(MapLoss))
    return ModelLoss(partial(_loss, kind, stop_gradients))


def _loss(kind: MapLoss, stop: bool, net: nn.Module, batch: Any) -> Tensor:
    x, times, condition, velocity, split = _parts(batch)
    check_signature(net, "times", tuple(condition), missing="give classes to map_batches")
    on = len(velocity)
    s, t = times.unbind(1)
    here = tree_map(lambda one: one[:on], condition)
    diagonal = torch.stack([s[:on], s[:on]], 1)
    given = ": labels by giving classes to map_batches"
    matched = predicted(net, x[:on], diagonal, tuple(here), given=given) - velocity
    if kind == "matching":
        return matched.square().mean()
    if on == len(x):
        raise UseError(
            f"the batch has no example off the diagonal, which {kind} needs: give diagonal below 1"
        )
    there = _Off(net, x[on:], s[on:], t[on:], tree_map(lambda one: one[on:], condition), stop)
    if kind == "lagrangian":
        distilled = there.lagrangian()
    elif kind == "eulerian":
        distilled = there.eulerian()
    else:
        distilled = there.progressive(split if kind == "progressive-uniform" else torch.full_like(split, 0.5))
    return (matched.square().sum() + distilled.square().sum()) / x.numel()


@dataclass(frozen=True)
class _Off:
    """The examples off the diagonal, and their residuals by each kind of self-distillation."""

    net: nn.Module
    x: Tensor
    s: Tensor
    t: Tensor
    condition: list[Any]
    stop: bool

    def lagrangian(self) -> Tensor:
        moved, rate = self._derivative(
            lambda t: self._jump(self.x, self.s, t), (self.t,), (torch.ones_like(self.t),)
        )
        with self._stopped():
            target = self._average(moved, self.t, self.t)
        return rate - target

    def eulerian(self) -> Tensor:
        with self._stopped():
            velocity = self._average(self.x, self.s, self.s)
        one = torch.ones_like(self.s)
        if not self.stop:
            both = (self.x, self.s), (velocity, one)
            return self._derivative(lambda x, s: self._jump(x, s, self.t), *both)[1]
        with self._stopped():
            _, carried = self._derivative(lambda x: self._jump(x, self.s, self.t), (self.x,), (velocity,))
        _, rate = self._derivative(lambda s: self._jump(self.x, s, self.t), (self.s,), (one,))
        return rate + carried

    def progressive(self, split: Tensor) -> Tensor:
        middle, share = split * self.s + (1 - split) * self.t, along(split, self.x)
        with self._stopped():
            first = self._average(self.x, self.s, middle)
            second = self._average(self.x + along(middle - self.s, self.x) * first, middle, self.t)
            target = (1 - share) * first + share * second
        return self._average(self.x, self.s, self.t) - target

    def _average(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return predicted(self.net, x, torch.stack([s, t], 1), tuple(self.condition), given=None)

    def _jump(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x + along(t - s, x) * self._average(x, s, t)

    def _stopped(self) -> contextlib.AbstractContextManager[object]:
        """No gradients of what is computed inside."""
        return torch.no_grad() if self.stop else contextlib.nullcontext()

    def _derivative(
        self, function: Callable[..., Tensor], at: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        scripted = [name for name, one in self.net.named_modules() if isinstance(one, torch.jit.ScriptModule)]
        if scripted:
            raise UseError(
                f"{scripted[0] or 'the network'} is compiled by torch.jit, where derivatives of norms have "
                "wrong gradients: use the module that it was made from, or progressive-midpoint, which needs "
                "no derivative"
            )
        try:
            return derivative(function, at, tangents)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an error of the network itself has come up on the diagonal
            raise UseError(
                f"{type(self.net).__name__} cannot be differentiated in forward mode "
                f"({str(error).splitlines()[0]}): use progressive-midpoint, which needs no derivative"
            ) from error


def _parts(batch: Any) -> tuple[Tensor, Tensor, list[Any], Tensor, Tensor]:
    """Points, times, condition, velocity and split of a batch of `map_batches`."""
    try:
        (x, times, *condition), (velocity, split) = batch
    except (TypeError, ValueError):
        raise UseError(f"the batch is {described(batch)}: give one of map_batches") from None
    if times.shape != (len(x), 2) or len(velocity) + len(split) != len(x):
        raise UseError(
            f"a batch of {len(x)} examples has times of shape {tuple(times.shape)}, {len(velocity)} "
            f"velocities and {len(split)} splits: give a whole batch of map_batches"
        )
    if times.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(times):
        for time in times.unbind(1):  # a GPU would be waited for in each step of a training
            check_times(time, x, "the batch")
    return x, times, condition, velocity, split


def _times(name: str, time: float | Tensor, x: Tensor) -> Tensor:
    """A time for each point."""
    if not isinstance(time, Tensor):
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.full((len(x),), number(name, time, least=0, most=1), dtype=dtype, device=x.device)
    return check_times(time, x, name)
