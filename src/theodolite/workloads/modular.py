"""Built-in workloads of addition modulo p: all sums, and most of them with the others held out.

Trained on all pairs, neurons learn waves over the residues (`theodolite.probes.fourier`). Trained on some of
them with weight decay, a network memorises these first and finds the other sums much later: it groks.
"""

# D width, P modulus

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.core.arguments import is_number, one_of, positive, whole
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models.residual_mlp import make_linear
from theodolite.workloads.definition import Workload
from theodolite.workloads.metrics import StepsTo

AdderActivation = Literal["relu", "square"]
MODULUS, FRACTION = 59, 0.75
NUM = 512
"""Pairs in a batch of `modular-addition`."""
LEAST_GROKKING = 29
"""With three quarters of the pairs modulo 23, width 256 has 71 % of the others right after 6000 steps."""
GENERALISED = 0.95
SIZE = Size(256, 1)


class Square(nn.Module):
    """`φ(z) = z²`."""

    def forward(self, values: Tensor) -> Tensor:
        """Entry by entry."""
        return values.square()


def adder(
    width: int,
    depth: int,
    *,
    modulus: int = MODULUS,
    activation: AdderActivation = "relu",
    init_scale: float = 1.0,
) -> nn.Sequential:
    """`W_out φ(W_in (e_x + e_y))` without biases; its neurons learn one frequency each.

    Depths above 1 add hidden layers. Weights are `N(0, init_scale²/fan_in)`.

    Args:
        width: D, neurons of a hidden layer.
        depth: hidden layers.
        modulus: P, inputs and outputs.
        activation: φ, `relu` or `square`.
        init_scale: of all weights.

    >>> model = adder(8, 1, modulus=5, activation="square")
    >>> [tuple(weight.shape) for weight in model.parameters()]
    [(8, 5), (5, 8)]
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([modulus, *[width] * depth, modulus]):
        linear = make_linear(fan_in, fan_out, bias=False)
        with torch.no_grad():
            linear.weight.mul_(init_scale)
        layers += [linear, nn.ReLU() if activation == "relu" else Square()]
    return nn.Sequential(*layers[:-1])


def modular_addition(
    modulus: int = MODULUS, *, activation: AdderActivation = "relu", init_scale: float = 1.0
) -> Workload:
    """The built-in workload `modular-addition`, or one with other options: all sums modulo P.

    Args:
        modulus: P. An even one has one frequency more, P/2, whose waves have no phase.
        activation: `relu` or `square`.
        init_scale: of all weights. At 0.1 most neurons learn a single frequency.

    >>> modular_addition(23, init_scale=0.1)
    Workload(name='modular-addition modulus=23 init_scale=0.1', ...)
    """
    whole("modulus", modulus, least=3)
    build = _build(modulus, activation, init_scale)
    name = _name("modular-addition", modulus=modulus, activation=activation, init_scale=init_scale)
    draw = partial(_rows, modulus, 1.0, False, min(NUM, modulus**2))
    return Workload(name, build, draw, nn.functional.cross_entropy, SIZE)


def grokking(
    modulus: int = MODULUS,
    *,
    fraction: float = FRACTION,
    init_scale: float = 1.0,
) -> Workload:
    """The built-in workload `grokking`, or one with other options: most sums modulo P, the rest held out.

    A batch is all pairs to train on, and the held-out batch all others. The metric `steps to generalise` is
    the number of steps after which 95 % of these are right. Train it by AdamW with weight decay.

    Args:
        modulus: P, at least 29. An even one works as well as an odd one.
        fraction: of the unordered pairs, to train on; see `theodolite.data.modular_addition`.
        init_scale: of all weights.

    >>> chosen = grokking()
    >>> len(chosen.draw(0, 0)[1]), len(chosen.draw_held_out(0)[1])
    (2610, 871)
    >>> grokking(23)
    Traceback (most recent call last):
    theodolite.UseError: modulus is 23: give an integer, at least 29. Fewer pairs do not suffice to generalise
    """
    whole(
        "modulus",
        modulus,
        least=LEAST_GROKKING,
        wanted=f"give an integer, at least {LEAST_GROKKING}. Fewer pairs do not suffice to generalise",
    )
    if not is_number(fraction) or not 0 < fraction < 1:
        raise UseError(f"fraction is {fraction!r}: give a number between 0 and 1, such as {FRACTION:g}")
    build = _build(modulus, "relu", init_scale)
    draw, held_out = (partial(_rows, modulus, float(fraction), part, None) for part in (False, True))
    metrics = {"steps to generalise": StepsTo("accuracy", at_least=GENERALISED, every=20)}
    return Workload(
        _name("grokking", modulus=modulus, fraction=fraction, init_scale=init_scale),
        build,
        draw,
        nn.functional.cross_entropy,
        SIZE,
        held_out=held_out,
        metrics=metrics,
    )


def _build(modulus: int, activation: AdderActivation, init_scale: float) -> partial[nn.Sequential]:
    one_of("activation", activation, get_args(AdderActivation))
    positive("init_scale", init_scale)
    return partial(adder, modulus=modulus, activation=activation, init_scale=init_scale)


def _name(name: str, **options: Any) -> str:
    """With the options that are not the default, as a ledger tells workloads apart by their names."""
    usual = {"modulus": MODULUS, "fraction": FRACTION, "activation": "relu", "init_scale": 1.0}
    return " ".join([name, *(f"{key}={value}" for key, value in options.items() if value != usual[key])])


def _rows(modulus: int, fraction: float, held_out: bool, num: int | None, seed: int, step: int) -> Batch:
    """Some of the pairs, or all of a part."""
    examples = data.modular_addition(modulus, fraction=fraction, held_out=held_out)
    return data.draw_examples(examples, num=num or len(examples.labels), seed=seed, step=step)


WORKLOADS = (modular_addition(), grokking())
