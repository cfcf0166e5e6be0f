"""The networks of the Goldilocks study, LeNets and a small ResNet, in homogeneous and other variants."""

# B batch, I inputs, D width, O outputs, C channels, S side of an image

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar, get_args

from torch import Tensor, nn

from theodolite.core.arguments import multiple, one_of, whole
from theodolite.core.errors import UseError
from theodolite.core.size import Size

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
Variant = Literal["homogeneous", "bias", "residual", "layernorm", "all"]

EPS = 1e-5
BIAS_BOUND = 0.1


class LeNet300(nn.Module):
    """A fully connected network, LeNet-300-100 at `width=300, depth=2`: 784-300-100-10.

    Args:
        width: features of the first hidden layer, a multiple of 3.
        depth: number of hidden layers: `depth − 1` of `width` features and a last one of `width/3`.
        inputs: number of input features; more dimensions are flattened.
        outputs: number of outputs.
        variant: `homogeneous`, `bias` or `layernorm`. All layers change shape, so there is no `residual` and
            no `all`; `ResNet4` has them.

    Activations are ReLU, weights `N(0, 2/fan_in)`, biases U[−0.1, 0.1]. The network has L = depth + 1
    layers, and `f(αθ) = α^L f(θ)` if homogeneous.

    >>> sum(parameter.numel() for parameter in LeNet300().parameters()) == 784 * 300 + 300 * 100 + 100 * 10
    True

    References:
        LeCun et al., Gradient-based learning applied to document recognition, 1998.
        Revisiting the Goldilocks zone in inhomogeneous networks, section 2.
    """

    def __init__(
        self,
        width: int = 300,
        depth: int = 2,
        *,
        inputs: int = 784,
        outputs: int = 10,
        variant: Variant = "homogeneous",
    ) -> None:
        super().__init__()
        Size(width, depth)
        whole("inputs", inputs, least=1)
        whole("outputs", outputs, least=1)
        multiple("width", width, 3, "the last hidden layer has width/3 features")
        traits = _traits(variant, without_residual="LeNet300")
        self.layers = nn.Sequential(
            nn.Flatten(), *_head([inputs, *[width] * (depth - 1), width // 3], outputs, traits)
        )

    def forward(self, x_BI: Tensor) -> Tensor:
        """Outputs (B, O)."""
        return self.layers(x_BI)


class LeNet5(nn.Module):
    """A small convolutional network, LeNet-5 at `width=6, depth=2`: 6-16-120-84-10.

    Two 5×5 convolutions of `width` and `8/3·width` channels, each followed by ReLU and 2×2 max-pooling,
    then hidden layers of `20·width` features, a last one of `14·width`, and the readout.

    Args:
        width: channels of the first convolution, a multiple of 3.
        depth: number of hidden layers that are fully connected: `depth − 1` of `20·width` features
            and a last one of `14·width`.
        image: channels, height and width of an image; (3, 32, 32) for CIFAR-10.
        outputs: number of outputs.
        variant: `homogeneous`, `bias` or `layernorm`, as in `LeNet300`. LayerNorm of a map is taken
            over all its channels and positions, with a gain and a shift for each channel.

    The network has L = depth + 3 layers, and `f(αθ) = α^L f(θ)` if homogeneous.

    >>> count = 5 * 5 * (3 * 6 + 6 * 16) + 5 * 5 * 16 * 120 + 120 * 84 + 84 * 10
    >>> sum(parameter.numel() for parameter in LeNet5().parameters()) == count
    True
    """

    def __init__(
        self,
        width: int = 6,
        depth: int = 2,
        *,
        image: tuple[int, int, int] = (3, 32, 32),
        outputs: int = 10,
        variant: Variant = "homogeneous",
    ) -> None:
        super().__init__()
        Size(width, depth)
        whole("outputs", outputs, least=1)
        multiple("width", width, 3, "the second convolution has 8/3·width channels")
        traits = _traits(variant, without_residual="LeNet5")
        channels, *sides = image
        if min(sides) < 16:
            raise UseError(f"image is {image}: two 5×5 convolutions and poolings need sides of 16 or more")
        second = 8 * width // 3
        features = second * _pooled(_pooled(sides[0])) * _pooled(_pooled(sides[1]))
        self.layers = nn.Sequential(
            *_pooled_convolution(channels, width, traits),
            *_pooled_convolution(width, second, traits),
            nn.Flatten(),
            *_head([features, *[20 * width] * (depth - 1), 14 * width], outputs, traits),
        )

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """Outputs (B, O)."""
        return self.layers(x_BCSS)


def _head(features: list[int], outputs: int, traits: _Traits) -> list[nn.Module]:
    layers = [layer for fan_in, fan_out in pairwise(features) for layer in _hidden(fan_in, fan_out, traits)]
    return [*layers, _linear(features[-1], outputs, traits)]


def _pooled_convolution(channels_in: int, channels_out: int, traits: _Traits) -> list[nn.Module]:
    convolution = _initialised(nn.Conv2d(channels_in, channels_out, 5, bias=traits.bias))
    norm = nn.GroupNorm(1, channels_out, eps=EPS)
    return [convolution, *_activation(norm, traits), nn.MaxPool2d(2)]


def _pooled(side: int) -> int:
    return (side - 4) // 2


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

    The paper does not give the width, the initial weights (here `N(0, 2/fan_in)`) and whether layers are
    convolutions (here they are not). It has LayerNorm after every layer but the last, so also at the end of a
    branch: without it `all` would not scale like α. No activation follows a block, as in its formula
    `y = x + W_2 φ(W_1 x)`.

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
        Size(width, depth)
        whole("inputs", inputs, least=1)
        whole("outputs", outputs, least=1)
        traits = _traits(variant)
        self.embed = nn.Sequential(nn.Flatten(), *_hidden(inputs, width, traits))
        self.blocks = nn.ModuleList(_block(width, traits) for _ in range(depth))
        self.readout = _linear(width, outputs, traits)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Outputs (B, O)."""
        h_BD = self.embed(x_BI)
        for block in self.blocks:
            h_BD = block(h_BD)
        return self.readout(h_BD)


class _Skip(nn.Sequential):
    """`h + f(h)`, f the modules in sequence."""

    def forward(self, h_BD: Tensor) -> Tensor:
        branch_BD: Tensor = super().forward(h_BD)
        return h_BD + branch_BD


def _block(width: int, traits: _Traits) -> nn.Sequential:
    last = [nn.LayerNorm(width, eps=EPS)] if traits.layernorm else []
    kind = _Skip if traits.residual else nn.Sequential
    return kind(*_hidden(width, width, traits), _linear(width, width, traits), *last)


@dataclass(frozen=True)
class _Traits:
    """What a variant has: columns A to E of the paper's figures."""

    bias: bool
    """Biases from U[−0.1, 0.1] in every layer, the last one too."""
    residual: bool
    """`x + W_2 φ(W_1 x)` instead of `W_2 φ(W_1 x)`."""
    layernorm: bool
    """LayerNorm after every linear or convolutional layer but the last, before the activation."""


def _traits(variant: Variant, *, without_residual: str = "") -> _Traits:
    """The traits of a variant; those with a residual are refused for a network without equal layers."""
    one_of("variant", variant, get_args(Variant))
    bias, residual, layernorm = (variant in (name, "all") for name in ("bias", "residual", "layernorm"))
    if residual and without_residual:
        raise UseError(
            f"variant is {variant!r}: {without_residual} has no two layers of equal width to bridge. "
            "Give 'homogeneous', 'bias' or 'layernorm', or take ResNet4"
        )
    return _Traits(bias, residual, layernorm)


def _linear(fan_in: int, fan_out: int, traits: _Traits) -> nn.Linear:
    """A linear map with weights `N(0, 2/fan_in)` (He et al., 2015)."""
    return _initialised(nn.Linear(fan_in, fan_out, bias=traits.bias))


def _activation(norm: nn.Module, traits: _Traits) -> list[nn.Module]:
    """The norm, if the variant has one, then ReLU."""
    return [norm, nn.ReLU()] if traits.layernorm else [nn.ReLU()]


def _hidden(fan_in: int, fan_out: int, traits: _Traits) -> list[nn.Module]:
    """A linear map, norm and activation."""
    return [_linear(fan_in, fan_out, traits), *_activation(nn.LayerNorm(fan_out, eps=EPS), traits)]


def _initialised(layer: Layer) -> Layer:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -BIAS_BOUND, BIAS_BOUND)
    return layer
