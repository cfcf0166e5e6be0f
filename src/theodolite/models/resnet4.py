"""The small residual network of the Goldilocks study, with its five variants."""

# B batch, I inputs, D width, O outputs

from __future__ import annotations

from torch import Tensor, nn

from theodolite.models.options import require_positive, require_size
from theodolite.models.variant import EPS, Traits, Variant, hidden, linear


class ResNet4(nn.Module):
    """A fully connected network of 4 layers at `depth=1`: `W_out(h + W_2 φ(W_1 h))`, `h = φ(W_in x)`.

    Args:
        width: features D of every hidden layer.
        depth: number of residual blocks, each of two layers.
        inputs: number of input features: 784 for Fashion-MNIST, 3072 for CIFAR-10; more dimensions
            are flattened.
        outputs: number of outputs.
        variant: what departs from homogeneity:

            | variant | computes |
            |---|---|
            | `homogeneous` | `h ← W_2 φ(W_1 h)`, no biases |
            | `bias` | the same with biases U[−0.1, 0.1] in every layer |
            | `residual` | `h ← h + W_2 φ(W_1 h)` |
            | `layernorm` | `h ← N W_2 φ(N W_1 h)` and `h = φ(N W_in x)`, N with ε = 1e-5 |
            | `all` | `h ← h + N(W_2 φ(N(W_1 h + b_1)) + b_2)` |

    There are L = 2·depth + 2 layers, ℒ = 2·depth of them inside branches. With all weights and biases
    multiplied by α the output is `α^L f` if homogeneous, tends to `α^{L−ℒ}` times a fixed function for
    α → 0 if residual, and is `α f` with LayerNorm as long as ε is negligible.

    The paper leaves open the width, the initial weights (here `N(0, 2/fan_in)`) and whether layers are
    convolutions (here they are not). It wants LayerNorm after every layer but the last, so the end of a
    branch has one too: without it `all` would not scale like α. No activation follows a block, as in
    its formula `y = x + W_2 φ(W_1 x)`.

    >>> sum(parameter.numel() for parameter in ResNet4(20).parameters()) == 784 * 20 + 2 * 20**2 + 20 * 10
    True

    References:
        Revisiting the Goldilocks zone in inhomogeneous networks, section 2 and appendices C to F.
    """

    def __init__(
        self,
        width: int = 300,
        depth: int = 1,
        *,
        inputs: int = 784,
        outputs: int = 10,
        variant: Variant = "residual",
    ) -> None:
        super().__init__()
        require_size(width, depth)
        require_positive(inputs=inputs, outputs=outputs)
        traits = Traits.of(variant)
        self.embed = nn.Sequential(nn.Flatten(), *hidden(inputs, width, traits))
        self.blocks = nn.ModuleList(_block(width, traits) for _ in range(depth))
        self.readout = linear(width, outputs, traits)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Outputs (B, O)."""
        h_BD = self.embed(x_BI)
        for block in self.blocks:
            h_BD = block(h_BD)
        return self.readout(h_BD)


class Residual(nn.Sequential):
    """`h + f(h)`, f the modules one after the other."""

    def forward(self, h_BD: Tensor) -> Tensor:
        """The stream after the block."""
        branch_BD: Tensor = super().forward(h_BD)
        return h_BD + branch_BD


def _block(width: int, traits: Traits) -> nn.Sequential:
    last = [nn.LayerNorm(width, eps=EPS)] if traits.layernorm else []
    kind = Residual if traits.residual else nn.Sequential
    return kind(*hidden(width, width, traits), linear(width, width, traits), *last)
