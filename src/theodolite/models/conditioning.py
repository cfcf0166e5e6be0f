"""Conditioning a network on times and a class, as diffusion models and flow maps are."""

# B batch, S times for each example, D width

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError

TIME_FEATURES = 64
"""Sines and cosines of a time."""
HIGHEST = 100.0
"""The largest of their frequencies. It limits how fast a network can change with time, and so the derivatives
with respect to time that flow maps are trained with."""


def time_features(t: Tensor) -> Tensor:
    """Cosines and sines of `t·f`, with frequencies f from 1 to `HIGHEST` in a geometric series, on a new last
    dimension.

    >>> features = time_features(torch.zeros(2))
    >>> features.shape, features[0, 0], features[0, -1]
    (torch.Size([2, 64]), tensor(1.), tensor(0.))
    """
    num = TIME_FEATURES // 2
    wide = torch.promote_types(t.dtype, torch.float32)
    frequencies = HIGHEST ** (torch.arange(num, device=t.device, dtype=wide) / (num - 1))
    angles = t[..., None].to(wide) * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


class Conditioning(nn.Module):
    """`c = W₂ silu(W₁ features(t)) + label`, (B, D): what the network is conditioned on.

    Args:
        width: features D.
        classes: number of labels. The label `classes` stands for none of them, for classifier-free guidance.
            0: the network has no labels.
        times: times for each example: 1, or 2 for a flow map from s to t.

    >>> condition = Conditioning(8, classes=3)
    >>> condition(torch.tensor([0.2, 0.7]), torch.tensor([0, 3])).shape
    torch.Size([2, 8])
    >>> condition(torch.tensor([0.2, 0.7]))
    Traceback (most recent call last):
    theodolite.UseError: labels are missing: this network was built with classes=3. Give one for each
    example, or the label 3 for none
    """

    def __init__(self, width: int, *, classes: int = 0, times: int = 1) -> None:
        super().__init__()
        self.classes = whole("classes", classes, least=0)
        self.times = whole("times", times, least=1)
        self.time_in = nn.Linear(times * TIME_FEATURES, width)
        self.time_out = nn.Linear(width, width)
        self.label = nn.Embedding(classes + 1, width) if classes else None

    def forward(self, t: Tensor, label_B: Tensor | None = None) -> Tensor:
        """c (B, D), for times (B,) or (B, S); one time of a flow map stands for both of its times."""
        t_BS = self._columns(t)
        hidden_BD = F.silu(self.time_in(time_features(t_BS).flatten(1).to(self.time_in.weight.dtype)))
        c_BD = self.time_out(hidden_BD)
        if self.label is None:
            if label_B is not None:
                raise UseError("labels were given, but this network was built with classes=0: leave them out")
            return c_BD
        if label_B is None:
            raise UseError(
                f"labels are missing: this network was built with classes={self.classes}. Give one for each "
                f"example, or the label {self.classes} for none"
            )
        return c_BD + self.label(label_B)

    def _columns(self, t: Tensor) -> Tensor:
        if t.dim() == 1:
            return t[:, None].expand(-1, self.times)
        if t.dim() != 2 or t.shape[1] != self.times:
            wanted = "(batch,)" if self.times == 1 else f"(batch,) or (batch, {self.times})"
            raise UseError(
                f"the times have the shape {tuple(t.shape)}: this network was built with times={self.times} "
                f"and takes {wanted}"
            )
        return t


@torch.no_grad()
def initialise(network: nn.Module) -> None:
    """Weights of linear maps and convolutions `N(0, 1/fan_in)`, embeddings `N(0, 1)`, biases 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
