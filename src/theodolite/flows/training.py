"""Batches of noisy data and their targets, as pure functions of a seed and a step."""

# B batch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from theodolite.core.arguments import number, one_of, whole
from theodolite.core.batches import Batch
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.data.batches import generator
from theodolite.flows.interpolants import (
    LINEAR,
    Interpolant,
    Quantity,
    along,
    find_interpolant,
    finite_times,
)

Draw = Callable[[int, int], tuple[Tensor, Any]]
"""`draw(seed, step) -> (data, labels)`, the same for the same arguments."""

Times = Literal["uniform", "logit-normal"]
"""Distributions of training times. Logit-normal, `1/(1 + exp(−N(0, 1)))`, prefers the middle."""


def noisy(
    draw: Draw,
    *,
    path: str | Interpolant = LINEAR,
    predict: Quantity = "velocity",
    times: Times = "uniform",
    classes: int | None = None,
    label_dropout: float = 0.0,
    name: str = "flow",
) -> Callable[[int, int], Batch]:
    """Batches for a network `model(x_t, t)` that predicts a quantity from noisy data.

    A batch is `((x_t, t), target)`, or `((x_t, t, labels), target)` with `classes`, for a network
    `model(x_t, t, labels)`. The loss is `velocity_loss`. Noise and times depend on the name, the seed and the
    step alone.

    Args:
        draw: the data, `draw(seed, step) -> (data, labels)`; data are (B, ...), of about unit variance.
        path: the interpolant or its name.
        predict: the target: `velocity`, `noise`, `data` or `score`. Times at which it is infinite are left
            out.
        times: the distribution of t.
        classes: keep the labels, integers below `classes`.
        label_dropout: probability of replacing a label by `classes`, the null label of classifier-free
            guidance.
        name: of the random numbers.

    >>> batch = noisy(lambda seed, step: (torch.ones(4, 2), None))
    >>> (x_t, t), target = batch(0, 0)
    >>> x_t.shape, t.shape
    (torch.Size([4, 2]), torch.Size([4]))
    >>> torch.allclose(x_t + (1 - t[:, None]) * target, torch.ones(4, 2))
    True

    References:
        Lipman et al., Flow matching for generative modeling, 2023. Esser et al., Scaling rectified flow
        transformers for high-resolution image synthesis, 2024 (logit-normal times).
    """
    one_of("predict", predict, get_args(Quantity))
    one_of("times", times, get_args(Times))
    null_labels(classes, label_dropout)
    check_draw(draw)
    return _Noisy(draw, find_interpolant(path), predict, times, classes, label_dropout, name)


@dataclass(frozen=True)
class _Noisy:
    """The function that `noisy` returns, as an object, which can be sent to another process."""

    draw: Draw
    path: Interpolant
    predict: Quantity
    times: Times
    classes: int | None
    label_dropout: float
    name: str

    def __call__(self, seed: int, step: int) -> Batch:
        data, labels = drawn(self.draw, seed, step)
        rng = generator(self.name, "noise", seed, step)
        place = rng.random(len(data))
        if self.times == "logit-normal":
            place = 1 / (1 + np.exp(-rng.standard_normal(len(data))))
        low, high = finite_times(self.predict, self.path)
        t = as_times(low + (high - low) * place, data)
        noise = as_data(rng.standard_normal(tuple(data.shape)), data)
        kept = null_labels(self.classes, self.label_dropout)(labels, rng, data)
        target = _target(self.predict, self.path, noise, data, t)
        return (self.path.between(noise, data, t), t, *kept), target


def _target(predict: Quantity, path: Interpolant, noise: Tensor, data: Tensor, t: Tensor) -> Tensor:
    if predict == "velocity":
        return path.velocity(noise, data, t)
    if predict == "score":
        return -noise / along(path.sigma(t), noise)
    return data if predict == "data" else noise


def check_draw(draw: Any) -> None:
    """Check that data can be drawn from it."""
    if not callable(draw):
        raise UseError(f"draw is {described(draw)}: give a function draw(seed, step) -> (data, labels)")


def drawn(draw: Draw, seed: int, step: int) -> tuple[Tensor, Any]:
    """The data and labels of a step; checks that data are a batch of floats."""
    pair = draw(seed, step)
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UseError(f"draw returned {described(pair)}: return a pair (data, labels)")
    data = pair[0]
    if not isinstance(data, Tensor) or not data.is_floating_point() or data.ndim < 2:
        raise UseError(f"draw returned {described(data)} as data: return floats of shape (B, ...)")
    return data, pair[1]


def null_labels(
    classes: int | None, label_dropout: float
) -> Callable[[Any, np.random.Generator, Tensor], tuple[Tensor, ...]]:
    """A function that returns the labels to give to the network, some of them replaced by the null label."""
    number("label_dropout", label_dropout, least=0, most=1)
    if classes is None:
        if label_dropout:
            raise UseError(f"label_dropout is {label_dropout:g}, but labels are not kept: give classes too")
        return lambda labels, rng, data: ()
    null = whole("classes", classes, least=1)

    def replace(labels: Any, rng: np.random.Generator, data: Tensor) -> tuple[Tensor, ...]:
        if not isinstance(labels, Tensor) or labels.shape != (len(data),) or labels.is_floating_point():
            raise UseError(f"draw returned {described(labels)} as labels: return one integer per example")
        labels = labels.long()
        if (wrong := labels[(labels < 0) | (labels >= null)]).numel():
            raise UseError(
                f"labels hold {wrong[0].item()}, but classes is {null}: labels go from 0 to {null - 1}"
            )
        dropped = torch.from_numpy(rng.random(len(data)) < label_dropout).to(labels.device)
        return (labels.masked_fill(dropped, null),)

    return replace


def as_data(values: np.ndarray[Any, Any], data: Tensor) -> Tensor:
    """Numbers as a tensor of the data's dtype, on its device."""
    return torch.from_numpy(values).to(data)


def as_times(values: np.ndarray[Any, Any], data: Tensor) -> Tensor:
    """Times on the data's device, in float32 at least: in bfloat16 the times from 0.998 on are 1."""
    return torch.from_numpy(values).to(data.device, torch.promote_types(data.dtype, torch.float32))


def velocity_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean squared error, over examples and dimensions.

    For every quantity that `noisy` makes a target of. On data with a known distribution its minimum is known
    and is not zero: `GaussianMixture.floor`.

    >>> velocity_loss(torch.zeros(2, 2), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    tensor(1.)
    """
    _require_tensor("target", target, "with map_batches, use map_loss")
    _require_tensor("prediction", prediction, "give the tensor that the network predicts")
    if prediction.shape != target.shape:
        raise UseError(
            f"the network returned the shape {tuple(prediction.shape)} for a target of shape "
            f"{tuple(target.shape)}: let it return the shape of its input"
        )
    return (prediction - target).square().mean()


def _require_tensor(name: str, value: Any, fix: str) -> None:
    if not isinstance(value, Tensor):
        raise UseError(f"the {name} is {described(value)}: {fix}")
