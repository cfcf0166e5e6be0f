"""The built-in workloads."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.calling import Build, Loss
from theodolite.core.optional import find_by_name
from theodolite.core.size import Size
from theodolite.models import GPT, LeNet300, ResidualMLP, ResNet
from theodolite.workloads.definition import Workload

Draw = Callable[[int, int], Batch]


def built_in() -> dict[str, Workload]:
    """The built-in workloads by name: the `WORKLOADS` of the modules in this folder.

    Data are read when the first batch is drawn.

    >>> gpt = built_in()["gpt-sotu"]
    >>> tokens, targets = gpt.batch(0, 0)
    >>> tokens.shape, gpt.size
    (torch.Size([16, 128]), Size(width=128, depth=4))
    """
    return find_by_name("theodolite.workloads", "WORKLOADS")


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in nats.

    >>> import torch
    >>> next_token_loss(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.long)).exp().round()
    tensor(256.)
    """
    return nn.functional.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def _texts(load: Callable[..., data.Text], num: int, length: int) -> tuple[Draw, Draw]:
    """Batches for training and held-out ones."""
    held_out = partial(load, "validation")
    return partial(_windows, load, num, length), partial(_windows, held_out, num, length)


def _examples(load: Callable[[], data.Examples], held_out: Callable[[], data.Examples]) -> tuple[Draw, Draw]:
    return partial(_rows, load, 128), partial(_rows, held_out, 128)


def _windows(load: Callable[[], data.Text], num: int, length: int, seed: int, step: int) -> Batch:
    return data.draw_text(load(), num=num, length=length, seed=seed, step=step)


def _rows(load: Callable[[], data.Examples], num: int, seed: int, step: int) -> Batch:
    return data.draw_examples(load(), num=num, seed=seed, step=step)


_GPT = partial(GPT, vocab=256, context=256)
_SOTU, _ENWIK8 = _texts(data.state_of_the_union, 16, 128), _texts(data.enwik8, 32, 256)
_MIXTURE = _examples(data.mixture, partial(data.mixture, seed=1))
_FASHION = _examples(data.fashion_mnist, partial(data.fashion_mnist, "test"))
_CIFAR10 = _examples(data.cifar10, partial(data.cifar10, "test"))
_CLASSES = nn.functional.cross_entropy
_TABLE: tuple[tuple[str, Build, tuple[Draw, Draw], Loss, Size], ...] = (
    ("gpt-sotu", partial(GPT, vocab=256, context=128), _SOTU, next_token_loss, Size(128, 4)),
    ("gpt-enwik8", _GPT, _ENWIK8, next_token_loss, Size(128, 4)),
    ("gpt-enwik8-bare", partial(_GPT, norm_placement="none"), _ENWIK8, next_token_loss, Size(128, 4)),
    ("mlp-mixture", partial(ResidualMLP, inputs=32, outputs=10), _MIXTURE, _CLASSES, Size(64, 4)),
    ("mlp-fashion", partial(ResidualMLP, inputs=784, outputs=10), _FASHION, _CLASSES, Size(128, 4)),
    ("lenet-fashion", LeNet300, _FASHION, _CLASSES, Size(300, 2)),
    ("resnet-cifar10", ResNet, _CIFAR10, _CLASSES, Size(16, 3)),
)
WORKLOADS = tuple(
    Workload(name, build, batch, loss, size, held_out=held_out)
    for name, build, (batch, held_out), loss, size in _TABLE
)
