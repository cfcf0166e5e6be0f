"""The five ways in which the networks of the Goldilocks study depart from homogeneity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import nn

from theodolite.core.errors import UseError
from theodolite.models.options import require_one_of

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
Variant = Literal["homogeneous", "bias", "residual", "layernorm", "all"]

EPS = 1e-5
BIAS_BOUND = 0.1


@dataclass(frozen=True)
class Traits:
    """What a variant has: columns A to E of the paper's figures.

    >>> Traits.of("all")
    Traits(bias=True, residual=True, layernorm=True)
    """

    bias: bool
    """Biases from U[−0.1, 0.1] in every layer, the last one too."""
    residual: bool
    """`x + W_2 φ(W_1 x)` instead of `W_2 φ(W_1 x)`."""
    layernorm: bool
    """LayerNorm after every linear or convolutional layer but the last, before the activation."""

    @classmethod
    def of(cls, variant: Variant) -> Traits:
        """The traits that go by this name."""
        require_one_of("variant", variant, get_args(Variant))
        return cls(
            bias=variant in ("bias", "all"),
            residual=variant in ("residual", "all"),
            layernorm=variant in ("layernorm", "all"),
        )

    @classmethod
    def without_residual(cls, variant: Variant, network: str) -> Traits:
        """The same for a network whose layers all change shape and have no place for an identity path.

        >>> Traits.without_residual("residual", "LeNet300")
        Traceback (most recent call last):
        theodolite.UseError: variant is 'residual': LeNet300 has no two layers of equal width to
        bridge. Give 'homogeneous', 'bias' or 'layernorm', or take ResNet4
        """
        traits = cls.of(variant)
        if traits.residual:
            raise UseError(
                f"variant is {variant!r}: {network} has no two layers of equal width to bridge. "
                "Give 'homogeneous', 'bias' or 'layernorm', or take ResNet4"
            )
        return traits


def linear(fan_in: int, fan_out: int, traits: Traits) -> nn.Linear:
    """A linear map with weights `N(0, 2/fan_in)` (He et al., 2015).

    >>> linear(2, 3, Traits.of("homogeneous"))
    Linear(in_features=2, out_features=3, bias=False)
    """
    return _initialised(nn.Linear(fan_in, fan_out, bias=traits.bias))


def convolution(channels_in: int, channels_out: int, traits: Traits) -> nn.Conv2d:
    """A 5×5 convolution without padding, with weights `N(0, 2/fan_in)`.

    >>> convolution(3, 6, Traits.of("bias")).weight.shape
    torch.Size([6, 3, 5, 5])
    """
    return _initialised(nn.Conv2d(channels_in, channels_out, 5, bias=traits.bias))


def activation(norm: nn.Module, traits: Traits) -> list[nn.Module]:
    """What follows a layer: the norm, if the variant has one, then ReLU.

    >>> activation(nn.LayerNorm(2), Traits.of("bias"))
    [ReLU()]
    """
    return [norm, nn.ReLU()] if traits.layernorm else [nn.ReLU()]


def hidden(fan_in: int, fan_out: int, traits: Traits) -> list[nn.Module]:
    """A linear map and what follows it.

    >>> [type(layer).__name__ for layer in hidden(2, 3, Traits.of("layernorm"))]
    ['Linear', 'LayerNorm', 'ReLU']
    """
    return [linear(fan_in, fan_out, traits), *activation(nn.LayerNorm(fan_out, eps=EPS), traits)]


def _initialised(layer: Layer) -> Layer:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -BIAS_BOUND, BIAS_BOUND)
    return layer
