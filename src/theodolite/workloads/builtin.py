"""The workloads that are built in."""

# B batch, T tokens, V vocabulary, P modulus

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.size import Size
from theodolite.models import GPT, LeNet300, ResidualMLP, ResNet
from theodolite.workloads.definition import Workload

MODULUS = 59


def built_in() -> dict[str, Workload]:
    """The built-in workloads by name. No data is read before the first batch is drawn.

    >>> print(*built_in())
    gpt-sotu gpt-enwik8 gpt-enwik8-bare mlp-mixture mlp-fashion lenet-fashion resnet-cifar10 modular-addition
    >>> gpt = built_in()["gpt-sotu"]
    >>> tokens, targets = gpt.batch(0, 0)
    >>> tokens.shape, gpt.size
    (torch.Size([16, 128]), Size(width=128, depth=4))
    """
    workloads = (
        Workload(
            "gpt-sotu",
            partial(GPT, vocab=256, context=128),
            partial(_windows, data.state_of_the_union, 16, 128),
            next_token_loss,
            Size(128, 4),
            held_out=partial(_windows, partial(data.state_of_the_union, "validation"), 16, 128),
        ),
        Workload(
            "gpt-enwik8",
            partial(GPT, vocab=256, context=256),
            partial(_windows, data.enwik8, 32, 256),
            next_token_loss,
            Size(128, 4),
            held_out=partial(_windows, partial(data.enwik8, "validation"), 32, 256),
        ),
        Workload(
            "gpt-enwik8-bare",
            partial(GPT, vocab=256, context=256, norm_placement="none"),
            partial(_windows, data.enwik8, 32, 256),
            next_token_loss,
            Size(128, 4),
            held_out=partial(_windows, partial(data.enwik8, "validation"), 32, 256),
        ),
        Workload(
            "mlp-mixture",
            partial(ResidualMLP, inputs=32, outputs=10),
            partial(_rows, data.mixture, 128),
            nn.functional.cross_entropy,
            Size(64, 4),
            held_out=partial(_rows, partial(data.mixture, seed=1), 128),
        ),
        Workload(
            "mlp-fashion",
            partial(ResidualMLP, inputs=784, outputs=10),
            partial(_rows, data.fashion_mnist, 128),
            nn.functional.cross_entropy,
            Size(128, 4),
            held_out=partial(_rows, partial(data.fashion_mnist, "test"), 128),
        ),
        Workload(
            "lenet-fashion",
            LeNet300,
            partial(_rows, data.fashion_mnist, 128),
            nn.functional.cross_entropy,
            Size(300, 2),
            held_out=partial(_rows, partial(data.fashion_mnist, "test"), 128),
        ),
        Workload(
            "resnet-cifar10",
            ResNet,
            partial(_rows, data.cifar10, 128),
            nn.functional.cross_entropy,
            Size(16, 3),
            held_out=partial(_rows, partial(data.cifar10, "test"), 128),
        ),
        Workload(
            "modular-addition",
            adder,
            partial(_rows, partial(data.modular_addition, MODULUS), 512),
            nn.functional.cross_entropy,
            Size(256, 1),
        ),
    )
    return {workload.name: workload for workload in workloads}


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in nats.

    >>> import torch
    >>> next_token_loss(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.long)).exp().round()
    tensor(256.)
    """
    return nn.functional.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def adder(width: int, depth: int) -> nn.Module:
    """`W_out φ(W_in (e_x + e_y))` without biases, whose neurons learn one frequency each; φ is ReLU.

    Depths above 1 have further hidden layers in between. Weights are `N(0, 1/fan_in)`.
    """
    features = [MODULUS, *[width] * depth, MODULUS]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(features):
        linear = nn.Linear(fan_in, fan_out, bias=False)
        nn.init.normal_(linear.weight, std=fan_in**-0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _windows(load: Callable[[], data.Text], num: int, length: int, seed: int, step: int) -> Batch:
    return data.draw_text(load(), num=num, length=length, seed=seed, step=step)


def _rows(load: Callable[[], data.Examples], num: int, seed: int, step: int) -> Batch:
    return data.draw_examples(load(), num=num, seed=seed, step=step)
