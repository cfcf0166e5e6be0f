"""The residual network in which width–depth scaling was derived."""

# B batch, I inputs, D width, O outputs

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import one_of, whole
from theodolite.core.size import Size

Activation = Literal["relu", "linear"]


class ResidualMLP(nn.Module):
    """`h_0 = W_in x`, then `depth` blocks `h_l = h_{l−1} + F_l(h_{l−1})`, then `y = W_out h_L`.

    A branch of k = `block_layers` ≥ 2 weights is `F(h) = W_k φ(W_{k−1} … φ(W_1 h))`. A branch of one
    weight is `F(h) = W φ(h)`, and not `φ(W h)`: the multiplier 1/√L of one-layer blocks is derived for
    branches that add like independent vectors of mean zero, and the output of a ReLU has a positive mean.
    Neither the input layer nor the readout has an activation.

    Args:
        width: features D of the stream and inside the branches.
        depth: number L of residual blocks.
        inputs: number of input features; 3072 for a CIFAR image. More dimensions are flattened.
        outputs: number of outputs.
        block_layers: weights in a branch.
        activation: φ, `relu` or `linear` (none), the network of the paper's derivation.
        bias: do the linear maps have biases?

    Initial values: every weight is `N(0, 1/fan_in)`, biases are 0.

    Linear blocks with identity weights double the stream, 2³ here:

    >>> import torch
    >>> model = ResidualMLP(2, 3, inputs=2, outputs=2, block_layers=1, activation="linear")
    >>> for parameter in model.parameters():
    ...     _ = nn.init.eye_(parameter)
    >>> model(torch.tensor([[1.0, -3.0]]))
    tensor([[  8., -24.]], grad_fn=<...>)

    References:
        Spectral condition for muP under width–depth scaling, equations (2) and (38) and appendix B.
        The place of φ in one-layer blocks follows Bordelon et al., Depthwise hyperparameter transfer in
        residual networks, 2024.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        inputs: int = 3072,
        outputs: int = 10,
        block_layers: int = 2,
        activation: Activation = "relu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        Size(width, depth)
        for name, value in {"inputs": inputs, "outputs": outputs, "block_layers": block_layers}.items():
            whole(name, value, least=1)
        one_of("activation", activation, get_args(Activation))
        self.embed = make_linear(inputs, width, bias=bias)
        self.blocks = nn.ModuleList(
            MLPBlock(width, block_layers, activation=activation, bias=bias) for _ in range(depth)
        )
        self.readout = make_linear(width, outputs, bias=bias)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Outputs (B, O)."""
        h_BD = self.embed(x_BI.flatten(1))
        for block in self.blocks:
            h_BD = block(h_BD)
        return self.readout(h_BD)


class MLPBlock(nn.Module):
    """`h + W_k φ(… φ(W_1 h))`, or `h + W φ(h)` for a single weight.

    >>> import torch
    >>> MLPBlock(4, 2, activation="relu", bias=False)(torch.zeros(1, 4))
    tensor([[0., 0., 0., 0.]], grad_fn=<...>)
    """

    def __init__(self, width: int, layers: int, *, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_linear(width, width, bias=bias) for _ in range(layers))
        self.rectified = activation == "relu"

    def forward(self, h_BD: Tensor) -> Tensor:
        """The stream after the block."""
        branch_BD = h_BD
        for number, layer in enumerate(self.layers):
            # With several weights, no activation precedes the first.
            if self.rectified and (number > 0 or len(self.layers) == 1):
                branch_BD = F.relu(branch_BD)
            branch_BD = layer(branch_BD)
        return h_BD + branch_BD


def make_linear(fan_in: int, fan_out: int, *, bias: bool) -> nn.Linear:
    """A linear map with weights `N(0, 1/fan_in)` and biases 0."""
    linear = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.normal_(linear.weight, std=fan_in**-0.5)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
