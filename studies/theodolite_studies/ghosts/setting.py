"""The networks, data and optimizers of the study of ghosts."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.models import GPT
from theodolite.optimizers import Muon
from theodolite.workloads import next_token_loss

PIXELS = 8
LENGTH = 32


@dataclass(frozen=True)
class Setting:
    """A network and what it is trained on."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """`batch(seed, step)`."""
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int
    """ln of it is the loss of one who knows nothing."""
    lr: float
    """Of Adam; of SGD thirty times as much."""

    def model(self, seed: int) -> nn.Module:
        """The network with the weights of a seed."""
        with untouched_randomness(seed):
            return self.build()


def adam(model: nn.Module, lr: float) -> Optimizer:
    """AdamW as everybody has it."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=30 * lr)


def muon(model: nn.Module) -> Optimizer:
    """Muon for all that is a matrix; vectors do not move."""
    plain = [tensor for tensor in model.parameters() if tensor.ndim == 2]
    filters = [tensor for tensor in model.parameters() if tensor.ndim == 4]
    groups: list[dict[str, Any]] = [{"params": plain}, {"params": filters, "axes": ((1, 2, 3), (0,))}]
    return Muon([group for group in groups if group["params"]], lr=0.02)


def _mlp(norm: bool) -> nn.Module:
    def hidden(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 64), *([nn.LayerNorm(64)] if norm else []), nn.ReLU()]

    return nn.Sequential(*hidden(PIXELS**2), *hidden(64), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (PIXELS // 2) ** 2, 10),
    )


def _gpt() -> nn.Module:
    return GPT(32, 2, vocab=256, context=LENGTH)


def _rows(seed: int, step: int) -> Batch:
    return data.draw_examples(data.mixture(dimensions=PIXELS**2), num=64, seed=seed, step=step)


def _images(seed: int, step: int) -> Batch:
    values, labels = _rows(seed, step)
    return values.view(-1, 1, PIXELS, PIXELS), labels


def _text(seed: int, step: int) -> Batch:
    return data.draw_text(data.state_of_the_union(), num=8, length=LENGTH, seed=seed, step=step)


SETTINGS = {
    "mlp": Setting(lambda: _mlp(False), _rows, nn.functional.cross_entropy, 10, 3e-3),
    "mlp-norm": Setting(lambda: _mlp(True), _rows, nn.functional.cross_entropy, 10, 3e-3),
    "cnn": Setting(_cnn, _images, nn.functional.cross_entropy, 10, 3e-3),
    "gpt": Setting(_gpt, _text, next_token_loss, 256, 3e-3),
}
"""Two hidden layers of 64 without and with norms, and two convolutions, all on a Gaussian mixture of ten
classes in 64 dimensions; a GPT of width 32 and depth 2 on bytes of the State of the Union."""
