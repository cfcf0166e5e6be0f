"""LeNet-300-100 and LeNet-5, with the variants of the Goldilocks study."""

# B batch, I inputs, O outputs, C channels, S side of an image

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.models.options import require_multiple, require_positive, require_size
from theodolite.models.variant import EPS, Traits, Variant, activation, convolution, hidden, linear


class LeNet300(nn.Module):
    """A fully connected network, LeNet-300-100 at `width=300, depth=2`: 784-300-100-10.

    Args:
        width: features of the first hidden layer, a multiple of 3.
        depth: number of hidden layers: `depth − 1` of `width` features and a last one of `width/3`.
        inputs: number of input features; more dimensions are flattened.
        outputs: number of outputs.
        variant: `homogeneous`, `bias` or `layernorm`. Its layers all change shape, so `residual` and
            `all` are refused: `ResNet4` has them.

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
        require_size(width, depth)
        require_positive(inputs=inputs, outputs=outputs)
        require_multiple("width", width, 3, "the last hidden layer has width/3 features")
        traits = Traits.without_residual(variant, "LeNet300")
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
        require_size(width, depth)
        require_positive(outputs=outputs)
        require_multiple("width", width, 3, "the second convolution has 8/3·width channels")
        traits = Traits.without_residual(variant, "LeNet5")
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


def _head(features: list[int], outputs: int, traits: Traits) -> list[nn.Module]:
    layers = [layer for fan_in, fan_out in pairwise(features) for layer in hidden(fan_in, fan_out, traits)]
    return [*layers, linear(features[-1], outputs, traits)]


def _pooled_convolution(channels_in: int, channels_out: int, traits: Traits) -> list[nn.Module]:
    norm = nn.GroupNorm(1, channels_out, eps=EPS)
    return [
        convolution(channels_in, channels_out, traits),
        *activation(norm, traits),
        nn.MaxPool2d(2),
    ]


def _pooled(side: int) -> int:
    return (side - 4) // 2
