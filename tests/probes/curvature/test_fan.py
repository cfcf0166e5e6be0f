"""The curvature in random directions is that of products with the Hessian, whatever a network is made of.

Products go through autograd alone; tangents have a rule for each operation, or give up in favour of
products. It must never pass over an operation that it does not know.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from theodolite import probes
from theodolite.probes.curvature.directions import draw

from .explicit import apart


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Rows(nn.Module):
    """A layer that takes sequences, over the rows of an image; its first output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x.flatten(1, 2))
        return (found[0] if isinstance(found, tuple) else found).unflatten(1, (4, 6))


def set_entries(x):
    y = x.clone()
    y[:, 0] = x[:, 1] * x[:, 2]
    y[x > 1] = 0.5
    return y


def scattered(x):
    return torch.zeros_like(x).index_add(1, torch.tensor([0, 0, 1, 3]), x * x)


def inverse(x):
    grams = x @ x.mT + 3 * torch.eye(6, dtype=x.dtype)
    return torch.linalg.solve(grams, x)


def in_chunks(x):
    first, *rest = x.split([1, 2, 1], 1)
    return torch.cat([part.sin() for part in rest] + [first * first], 1)


def own_layer_norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


class Rounded(torch.autograd.Function):
    """A straight-through estimator: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return (3 * x).round() / 3

    @staticmethod
    def backward(ctx, grad):
        return grad


# From images of 4 channels, 6 × 6, to such images.
LAYERS = {
    "strided": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Upsample(scale_factor=2)),
    "grouped": lambda: nn.Conv2d(4, 4, 3, groups=2, padding=1),
    "dilated": lambda: nn.Conv2d(4, 4, 3, dilation=2, padding=2, bias=False),
    "circular": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "same": lambda: nn.Conv2d(4, 4, 3, padding="same"),
    "transposed": lambda: nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 4, 2, stride=2)),
    "rows": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 4, 3, padding=1), nn.Unflatten(2, (6, 6))),
    "linear on channels": lambda: Do(lambda x: x.movedim(1, -1).square().movedim(-1, 1)),
    "bilinear upsampling": lambda: nn.Sequential(
        nn.AvgPool2d(2), nn.Tanh(), nn.Upsample(scale_factor=2, mode="bilinear")
    ),
    "max pooling": lambda: nn.Sequential(nn.Tanh(), nn.MaxPool2d(3, 1, 1)),
    "adaptive pooling": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Upsample(scale_factor=2)),
    "pixel shuffle": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.SiLU(), nn.PixelShuffle(2)),
    "layer norm": lambda: nn.LayerNorm([4, 6, 6]),
    "layer norm without gain": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "layer norm without shift": lambda: nn.LayerNorm(6, bias=False),
    "own layer norm": lambda: Do(own_layer_norm),
    "rms norm": lambda: nn.RMSNorm([6, 6]),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 4, affine=False),
    "batch norm, eval": lambda: nn.BatchNorm2d(4).eval(),
    "local response": lambda: nn.LocalResponseNorm(2),
    "normalize": lambda: Do(lambda x: F.normalize(x, dim=1)),
    "prelu": lambda: nn.PReLU(4),
    "gelu by tanh": lambda: nn.GELU(approximate="tanh"),
    **{
        kind.__name__: kind
        for kind in (
            nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish, nn.Hardtanh, nn.ReLU6,
            nn.LogSigmoid, nn.Softsign, nn.Softplus, nn.Sigmoid, nn.Tanhshrink, nn.Softmax2d, nn.SiLU,
        )
    },
    "in place relu": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
    "glu": lambda: Do(lambda x: F.glu(torch.cat([x, 2 * x.flip(1)], 1), 1)),
    "softmax": lambda: nn.Softmax(1),
    "log-softmax": lambda: nn.LogSoftmax(1),
    "dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Dropout2d(0.2)),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "lstm": lambda: Rows(nn.LSTM(6, 6, batch_first=True)),
    "gru": lambda: Rows(nn.GRU(6, 6, batch_first=True)),
    "transformer": lambda: Rows(
        nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0, batch_first=True, activation="gelu")
    ),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6))),
    "checkpointed": lambda: Do(lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False)),
    "vmapped": lambda: Do(torch.func.vmap(lambda x: x.sin() * x.sum())),
    "entries set": lambda: Do(set_entries),
    "scattered": lambda: Do(scattered),
    "gathered": lambda: Do(lambda x: x.gather(1, (x > 0).long()) * x[:, [3, 0, 0, 1]]),
    "sorted": lambda: Do(lambda x: x.sort(1).values * x),
    "top": lambda: Do(lambda x: x * x.topk(2, 1).values.sum(1, keepdim=True)),
    "accumulated": lambda: Do(lambda x: x.cumsum(2) * x.cumprod(3)),
    "products of entries": lambda: Do(lambda x: x * x.prod(1, keepdim=True)),
    "extremes": lambda: Do(lambda x: x * x.amax(1, keepdim=True) - x.min(2, keepdim=True).values ** 2),
    "clamped": lambda: Do(lambda x: x.clamp(-0.5, 0.5) * x.abs()),
    "rounded": lambda: Do(lambda x: x * x.round().detach() + x.sign()),
    "spectrum": lambda: Do(lambda x: torch.fft.rfft2(x).abs()[..., :1].expand_as(x) * x),
    "solved": lambda: Do(inverse),
    "split": lambda: Do(in_chunks),
    "einsum": lambda: Do(lambda x: torch.einsum("nchw,ndhw,ndkl->nckl", x, x, x) / 6),
    "batched products": lambda: Do(lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2])[:, None] * x),
    "matrix products": lambda: Do(lambda x: torch.matmul(x, x.mT.sin()) @ x / 6),
    "attention": lambda: Do(lambda x: F.scaled_dot_product_attention(x, x.sin(), x * x, is_causal=True)),
    "attention with a mask": lambda: Do(
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(6, 6).tril().bool(), scale=0.3)
    ),
    "grouped queries": lambda: Do(
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2].tanh(), enable_gqa=True)
    ),
    "moments": lambda: Do(lambda x: x / (x.std((2, 3), keepdim=True) + x.norm(dim=1, keepdim=True))),
    "logarithms": lambda: Do(lambda x: (1 + x * x).log() + torch.logaddexp(x, x.flip(1)) + x.expm1().log1p()),
    "powers": lambda: Do(lambda x: (1 + x.abs()) ** 1.5 + 2**x + (2 + x.sin()) ** x.cos()),
    "quotients": lambda: Do(lambda x: x / (2 + x.flip(1)) + 1 / (3 + x * x) + (4 + x).rsqrt().reciprocal()),
    "angles": lambda: Do(lambda x: torch.atan2(x, 2 + x.flip(1)) + x.erf() + torch.hypot(x, x + 1)),
    "fused arithmetic": lambda: Do(
        lambda x: torch.addcmul(x, x, x, value=0.3) + torch.lerp(x, x * x, 0.4) + x.addcdiv(x, x * x + 1)
    ),
    "where": lambda: Do(lambda x: torch.where(x > 0, x.sin(), x * x) + x.masked_fill(x < 0, 0.0) ** 2),
    "padded": lambda: Do(lambda x: F.pad(x * x, (1, 0, 0, 1))[..., 1:, :-1]),
    "unfolded": lambda: Do(lambda x: F.unfold(x, 1).unflatten(1, (4, 1)).unflatten(-1, (6, 6))[:, :, 0] * x),
    "stacked": lambda: Do(lambda x: torch.stack([x, x * x, x.sin()], 2).mean(2)),
    "repeated": lambda: Do(lambda x: x.repeat(1, 2, 1, 1)[:, ::2] * x.repeat_interleave(2, 1)[:, 1:5]),
    "in place": lambda: Do(lambda x: (2 * x).add_(x.sin()).mul_(x)),
    "straight through": lambda: Do(lambda x: x * Rounded.apply(x)),
    "straight through by detaching": lambda: Do(lambda x: x * (x + (x.round() - x).detach())),
    "numbers": lambda: Do(lambda x: x * float(x.detach().mean()) + x.new_tensor(0.3)),
    "data": lambda: Do(lambda x: x * x.data),
    "detached": lambda: Do(lambda x: x * (x - x.detach() + 1)),
}  # fmt: skip


def network(layer):
    """A layer between others that curve."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Tanh(), layer, nn.Conv2d(4, 3, 6), nn.Flatten()
    ).double()  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_tangents_give_what_products_do(name):
    model = network(LAYERS[name]())
    batch = torch.randn(3, 2, 6, 6).double(), torch.arange(3)
    operator = probes.hessian(model, F.cross_entropy, batch)
    reading = probes.curvature(model, F.cross_entropy, batch, directions=6)
    R = draw(operator.shapes, 6, dtype=torch.float64).matrix
    expected = R.T @ (operator @ R)
    assert expected.norm() > 1e-6
    assert apart(reading.hessian.matrix, expected) < 1e-9, reading.route
    assert apart(reading.gauss_newton.matrix, R.T @ (operator.gauss_newton @ R)) < 1e-9, reading.route
    assert apart(reading.residual.matrix, R.T @ (operator.residual @ R), expected) < 1e-9, reading.route
