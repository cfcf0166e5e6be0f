"""Networks of physics, tables, pairs and weights that are made: most have one odd use of a parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .exhibit import Exhibit
from .layers import SMALL_LR, Attention, Block, Mlp

DATA, OUT = 6, 4
PLAIN_WIDTHS = (64, 256, 1024)


class PINN(nn.Module):
    """A field and the residual of its equation, by derivatives in the forward pass."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The field, and how far it is from the equation of diffusion."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = torch.tanh(self.enter(x))
            for layer in self.hidden:
                h = torch.tanh(layer(h))
            u = self.head(h)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return u, first[:, 1] - 0.1 * second[:, 0]


def pinn_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The equation everywhere, the field where it is known."""
    u, residual = output
    return (residual**2).mean() + F.mse_loss(u, targets)


class Siren(nn.Module):
    """Sines of layers, with the initialisation that keeps their distribution."""

    FREQUENCY = 5.0

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        nn.init.uniform_(self.enter.weight, -0.5, 0.5)
        for layer in (*self.hidden, self.head):
            bound = math.sqrt(6 / width) / self.FREQUENCY
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Colours at points."""
        x = torch.sin(self.FREQUENCY * self.enter(x))
        for layer in self.hidden:
            x = torch.sin(self.FREQUENCY * layer(x))
        return self.head(x)


class KAN(nn.Module):
    """A spline on every edge, times a number for it, beside a plain weight; one output."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [DATA] + [width] * depth + [1]
        self.layers = nn.ModuleList(KANLayer(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """One number for each example."""
        for layer in self.layers:
            x = layer(x)
        return x


class KANLayer(nn.Module):
    """`y_o = Σ_i b_oi silu(x_i) + Σ_ik s_oi c_oik B_k(x_i)`."""

    KNOTS = 5

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(after, before) / before**0.5)
        self.spline = nn.Parameter(torch.randn(after, before, self.KNOTS) / before**0.5)
        self.scale = nn.Parameter(torch.ones(after, before))
        self.register_buffer("knots", torch.linspace(-1, 1, self.KNOTS))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all splines."""
        hats = F.relu(1 - 2 * (x[..., None] - self.knots).abs())
        weight = self.spline * self.scale[..., None]
        return F.linear(F.silu(x), self.base) + F.linear(hats.flatten(1), weight.flatten(1))


class FNO(nn.Module):
    """Fourier layers: complex weights on the lowest frequencies, beside a pointwise layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList(FourierLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A function on the same grid."""
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FourierLayer(nn.Module):
    """A global convolution by its Fourier transform, and a local one."""

    MODES = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        drawn = torch.randn(width, width, self.MODES, dtype=torch.cfloat)
        self.spectrum = nn.Parameter(drawn / width**0.5)
        self.local = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Both, bent."""
        modes = torch.fft.rfft(x, dim=1)[:, : self.MODES]
        mixed = torch.einsum("bki,iok->bko", modes, self.spectrum)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + self.local(x))


class DeepONet(nn.Module):
    """Two networks, one of a function and one of a point, whose results are multiplied and added up."""

    BASIS = 8

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.function = Tower(DATA, width, self.BASIS)
        self.point = Tower(1, width, self.BASIS)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, function: Tensor, point: Tensor) -> Tensor:
        """The operator's result at points."""
        return (self.function(function) * self.point(point)).sum(-1) + self.bias


class Tower(nn.Module):
    """A plain network."""

    def __init__(self, before: int, width: int, after: int) -> None:
        super().__init__()
        self.enter, self.hidden = nn.Linear(before, width), nn.Linear(width, width)
        self.head = nn.Linear(width, after)

    def forward(self, x: Tensor) -> Tensor:
        """Three layers."""
        return self.head(F.gelu(self.hidden(F.gelu(self.enter(x)))))


class Hypernetwork(nn.Module):
    """A network makes the weights of another, of a fixed size."""

    INNER = 5

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.task = nn.Embedding(3, width)
        self.hidden = nn.Linear(width, width)
        self.first = nn.Linear(width, self.INNER * DATA)
        self.second = nn.Linear(width, OUT * self.INNER)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        """What the network of a task says of x."""
        h = F.relu(self.hidden(self.task(task)))
        first = self.first(h).view(-1, self.INNER, DATA)
        second = self.second(h).view(-1, OUT, self.INNER)
        return (second @ torch.tanh(first @ x[..., None]))[..., 0]


class NeuralODE(nn.Module):
    """One block, applied in as many Euler steps as the depth says."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.steps = depth
        self.enter, self.field, self.head = nn.Linear(DATA, width), Mlp(width), nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """The state after one unit of time."""
        x = self.enter(x)
        for _ in range(self.steps):
            x = x + (1 / self.steps) * self.field(x)
        return self.head(x)


class DeepSets(nn.Module):
    """A network of each element, summed, and a network of the sum."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.element = nn.Linear(DATA, width), nn.Linear(width, width)
        self.whole, self.head = nn.Linear(width, width), nn.Linear(width, OUT)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each set."""
        x = self.element(F.relu(self.enter(x))).sum(1)
        return self.head(F.relu(self.whole(x)))


class FTTransformer(nn.Module):
    """A token for every number of a row, by a vector times the number; and one to read."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.weight, self.shift = (nn.Parameter(torch.randn(DATA, width) * 0.5) for _ in range(2))
        self.category = nn.Embedding(5, width)
        self.token = nn.Parameter(torch.randn(width) * 0.5)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, OUT)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        """Logits of each row."""
        x = numbers[..., None] * self.weight + self.shift
        token = self.token.expand(len(x), 1, -1)
        x = torch.cat((token, x, self.category(category)[:, None]), 1)
        return self.head(F.relu(self.norm(self.blocks(x)[:, 0])))


class RealMLP(nn.Module):
    """A scale for every input, weights of variance one over √fan-in (NTK parameterization)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DATA))
        sizes = [DATA] + [width] * depth + [OUT]
        self.layers = nn.ModuleList(NTKLinear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each row."""
        x = self.layers[0](x * self.scale)
        for layer in self.layers[1:]:
            x = layer(F.selu(x))
        return x


class NTKLinear(nn.Module):
    """`x W/√n + b`."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(before, after)), nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor) -> Tensor:
        """The factor is in the forward pass."""
        return x @ self.weight / math.sqrt(x.shape[-1]) + self.bias


class MixtureDensity(nn.Module):
    """Three heads: weights, means and widths of normal distributions."""

    PARTS = 3

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.hidden = nn.Linear(DATA, width), nn.Linear(width, width)
        self.weights, self.means, self.widths = (nn.Linear(width, self.PARTS) for _ in range(3))
        for head in (self.weights, self.means, self.widths):
            nn.init.normal_(head.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithms of weights, means, logarithms of widths."""
        x = torch.tanh(self.hidden(torch.tanh(self.enter(x))))
        return self.weights(x).log_softmax(-1), self.means(x), self.widths(x)


def mixture_loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The negative logarithm of the likelihood."""
    weights, means, widths = output
    each = weights - widths - 0.5 * ((targets[:, None] - means) / widths.exp()) ** 2
    return -each.logsumexp(-1).mean()


class TwoTowers(nn.Module):
    """Like CLIP: two networks, directions in a common space, a learned temperature."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.left, self.right = Tower(DATA, width, 8), Tower(OUT, width, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """How similar each pair is."""
        left, right = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return self.temperature.exp() * left @ right.T


class Autoencoder(nn.Module):
    """A code of a fixed size."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.narrow = nn.Linear(12, width), nn.Linear(width, 3)
        self.widen, self.hidden = nn.Linear(3, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        """What is left of x."""
        code = self.narrow(F.gelu(self.enter(x)))
        return self.head(F.gelu(self.hidden(F.gelu(self.widen(code)))))


class WeightNormHead(nn.Module):
    """The readout has one output, and a length and a direction."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.hidden = nn.Linear(DATA, width), nn.Linear(width, width)
        self.head = weight_norm(nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """One number for each example."""
        return self.head(F.gelu(self.hidden(F.gelu(self.enter(x)))))[:, 0]


class ScaledWeights(nn.Module):
    """`F.linear(x, w*s)` with a scale for every output of a layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(DATA, width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(width, 1))
        self.head = nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """Three layers, the second with a weight of two factors."""
        x = F.gelu(self.enter(x))
        return self.head(F.gelu(F.linear(x, self.weight * self.scale)))


class MaskedWeights(ScaledWeights):
    """`F.linear(x, w*s)` where the scale is as large as the weight."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.scale = nn.Parameter(torch.ones(width, width))


class LoRA(nn.Module):
    """Residual blocks whose layers are frozen, with a trained product of low rank beside each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(DATA, width)
        self.blocks = nn.ModuleList(LoRABlock(width) for _ in range(depth))
        self.head = nn.Linear(width, OUT)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LoRABlock(nn.Module):
    """Two adapted layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = Adapted(width, width), Adapted(width, width)
        with torch.no_grad():
            self.down.weight.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return x + self.down(F.gelu(self.up(x)))


class Adapted(nn.Module):
    """`(W + B A) x` with W frozen."""

    RANK = 4

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before) / before**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(self.RANK, before) / before**0.5)
        self.b = nn.Parameter(torch.zeros(after, self.RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)


class DoRA(LoRA):
    """LoRA, the sum scaled to a learned length for every output."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        for block in self.blocks:
            block.up, block.down = Decomposed(width, width), Decomposed(width, width)
            with torch.no_grad():
                block.down.length.mul_(0.1)


class Decomposed(Adapted):
    """`m (W + B A)/‖W + B A‖ x`."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.length = nn.Parameter(torch.ones(after, 1))

    def forward(self, x: Tensor) -> Tensor:
        """A product of parameters, divided by its own norm."""
        weight = self.weight + self.b @ self.a
        return F.linear(x, self.length * weight / weight.norm(dim=1, keepdim=True))


class Residual(nn.Module):
    """A residual network whose blocks are joined to the stream in a way of their own."""

    def __init__(self, block: Callable[[int], nn.Module], width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(DATA, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Joined(nn.Module):
    """Two layers and a vector or number that stands at the join."""

    START = 0.0
    VECTOR = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = Mlp(width)
        self.gain = nn.Parameter(torch.full((width,) if self.VECTOR else (1,), self.START))


class ReZero(Joined):
    """`x + a·f(x)`."""

    VECTOR = False

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return x + self.gain * self.mlp(x)


class ScaledSkip(Joined):
    """`g∘x + f(x)`."""

    START = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return self.gain * x + self.mlp(x)


class Lerp(Joined):
    """`x + a∘(f(x) − x)`."""

    START = 0.1

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return torch.lerp(x, self.mlp(x), self.gain)


class Addcmul(Joined):
    """`x + g∘f(x)` in one operation."""

    START = 0.1

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return torch.addcmul(x, self.gain, self.mlp(x))


class Stacked(nn.Module):
    """The sum of a stack of the stream and the branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return torch.stack([x, self.mlp(x)]).sum(0)


class Addmm(nn.Module):
    """The branch's last layer adds the stream by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Parameter(torch.randn(2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch."""
        return torch.addmm(x, F.gelu(self.up(x)), self.down)


class TokenLearner(nn.Module):
    """Attention maps choose a few tokens of many, between two stacks of blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(DATA, width)
        self.before = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.maps = nn.LayerNorm(width), nn.Linear(width, 3)
        self.after = nn.ModuleList(Block(width) for _ in range(depth))
        nn.init.zeros_(self.maps.weight)
        self.last_norm, self.head = nn.LayerNorm(width), nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.enter(x)
        for block in self.before:
            x = block(x)
        x = self.maps(self.norm(x)).softmax(1).transpose(1, 2) @ x
        for block in self.after:
            x = block(x)
        return self.head(self.last_norm(x).mean(1))


class Perceiver(nn.Module):
    """Learned latents attend to the data, and to each other, in turn."""

    LATENTS = 4

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(self.LATENTS, width))
        self.blocks = nn.ModuleList(PerceiverBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, OUT)

    def forward(self, data: Tensor) -> Tensor:
        """Logits."""
        x = self.latents.expand(len(data), -1, -1)
        for block in self.blocks:
            x = block(x, data)
        return self.head(self.norm(x).mean(1))


class PerceiverBlock(nn.Module):
    """Cross-attention and a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.cross = nn.LayerNorm(width), Attention(width, DATA)
        self.block = Block(width)

    def forward(self, x: Tensor, data: Tensor) -> Tensor:
        """Three residual branches."""
        return self.block(x + self.cross(self.norm(x), data))


class CosineHead(nn.Module):
    """Cosines of features and directions of classes, over a learned temperature."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.hidden = nn.Linear(DATA, width), nn.Linear(width, width)
        self.classes = nn.Parameter(torch.randn(OUT, width))
        self.temperature = nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.hidden(F.gelu(self.enter(x)))
        return F.normalize(x, dim=-1) @ F.normalize(self.classes, dim=-1).T / self.temperature


def residual(block: Callable[[int], nn.Module]) -> Callable[[int, int], Residual]:
    """A network of such blocks."""
    return lambda width, depth: Residual(block, width, depth)


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _classes(count: int, classes: int = OUT) -> Tensor:
    return torch.arange(count) % classes


def _fixed(inputs: Any, targets: Tensor) -> Callable[[int], tuple[Any, Tensor]]:
    """The same batch every time: what is learned of it shows in it."""
    return lambda seed: (inputs, targets)


ROWS = _fixed(_drawn(32, DATA), _classes(32))
SETS = _fixed(_drawn(16, 8, DATA), _classes(16))
NUMBERS = _fixed(_drawn(32, DATA), _drawn(32, seed=1))
TWO = {"*bias": "bias", "enter.weight": "input", "head.weight": "output", "*": "hidden"}
GAINED = {"*gain": "gain"} | TWO
NORMED = {"*norm*weight": "gain"} | TWO


def _one(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output.squeeze(-1), targets)


def _pairs(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (F.cross_entropy(output, targets) + F.cross_entropy(output.T, targets))


STARTS_SMALL = "a product of two readouts, which start as 1/√width: so does the other's part in a change"

EXHIBITS = [
    Exhibit(
        name="PINN",
        build=PINN,
        batch=_fixed(_drawn(32, 2), _drawn(32, 1, seed=1)),
        loss=pinn_loss,
        roles=TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="autograd.grad inside of the forward pass",
    ),
    Exhibit(
        name="SIREN",
        build=Siren,
        batch=_fixed(_drawn(32, 2), _drawn(32, 3, seed=1)),
        loss=F.mse_loss,
        roles=TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="sines, a factor before each",
    ),
    Exhibit(
        name="KAN",
        build=KAN,
        batch=_fixed(_drawn(32, DATA), _drawn(32, seed=1)),
        loss=_one,
        roles={
            "layers.0.scale": "gain",
            "layers.0.*": "input",
            "layers.1.scale": "gain",
            "layers.1.*": "hidden",
            "layers.2.scale": "gain",
            "layers.2.*": "output",
        },
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="weights that are products of parameters; the last has one output",
    ),
    Exhibit(
        name="FNO",
        build=FNO,
        batch=_fixed(_drawn(8, 16, 2), _drawn(8, 16, 1, seed=1)),
        loss=F.mse_loss,
        roles=TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="complex weights between Fourier transforms",
    ),
    Exhibit(
        name="DeepONet",
        build=DeepONet,
        batch=_fixed((_drawn(32, DATA), _drawn(32, 1, seed=1)), _drawn(32, seed=2)),
        loss=F.mse_loss,
        roles={"*bias": "bias", "*enter.weight": "input", "*head.weight": "output", "*": "hidden"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="the result is a product of two networks'",
        exceptions={"": STARTS_SMALL},
    ),
    Exhibit(
        name="hypernetwork",
        build=Hypernetwork,
        batch=_fixed((_drawn(30, DATA), torch.arange(30) % 3), _classes(30)),
        loss=F.cross_entropy,
        roles={
            "*bias": "bias",
            "task.weight": "input",
            "hidden.weight": "hidden",
            "first.weight": "output",
            "second.weight": "output",
        },
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="weights that a network makes are signal",
        exceptions={"": STARTS_SMALL},
    ),
    Exhibit(
        name="neural ODE",
        build=NeuralODE,
        batch=ROWS,
        loss=F.cross_entropy,
        roles=TWO,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="one block again and again; the forward pass divides by the depth itself",
    ),
    Exhibit(
        name="deep sets",
        build=DeepSets,
        batch=SETS,
        loss=F.cross_entropy,
        roles=TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="a sum over the elements of a set",
    ),
    Exhibit(
        name="FT-Transformer",
        build=FTTransformer,
        batch=_fixed((_drawn(16, DATA), torch.arange(16) % 5), _classes(16).clamp(max=1)),
        loss=F.cross_entropy,
        roles={"weight": "input", "shift": "input", "category.weight": "input", "token": "input"}
        | {"*norm*weight": "gain", "*bias": "bias", "head.weight": "output", "*": "hidden"},
        branches=4,
        lr=4 * SMALL_LR,
        shows="a number times a vector is an embedding of the number",
    ),
    Exhibit(
        name="RealMLP",
        build=RealMLP,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={
            "scale": "gain",
            "*bias": "bias",
            "layers.0.weight": "input",
            "layers.1.weight": "hidden",
            "layers.2.weight": "output",
        },
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=8 * SMALL_LR,
        shows="NTK parameterization: 1/√fan-in in the forward pass; a scale for every input",
    ),
    Exhibit(
        name="mixture density",
        build=MixtureDensity,
        batch=NUMBERS,
        loss=mixture_loss,
        roles={"*bias": "bias", "enter.weight": "input", "hidden.weight": "hidden", "*": "output"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="three readouts, returned as a tuple",
    ),
    Exhibit(
        name="two towers",
        build=TwoTowers,
        batch=_fixed((_drawn(16, DATA), _drawn(16, OUT, seed=1)), torch.arange(16)),
        loss=_pairs,
        roles={"temperature": "gain", "*bias": "bias"}
        | {"*enter.weight": "input", "*head.weight": "output", "*": "hidden"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="directions of two networks compared, over a learned temperature",
    ),
    Exhibit(
        name="autoencoder",
        build=Autoencoder,
        batch=_fixed(_drawn(32, 12), _drawn(32, 12)),
        loss=F.mse_loss,
        roles={"*bias": "bias", "enter.weight": "input", "narrow.weight": "output"}
        | {"widen.weight": "input", "hidden.weight": "hidden", "head.weight": "output"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="a readout in the middle and another at the end",
    ),
    Exhibit(
        name="weight-normed readout",
        build=WeightNormHead,
        batch=NUMBERS,
        loss=F.mse_loss,
        roles={"*bias": "bias", "*original0": "gain", "*original1": "output"}
        | {"enter.weight": "input", "hidden.weight": "hidden"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="weight_norm(nn.Linear(width, 1)): a direction with one row",
    ),
    Exhibit(
        name="scaled weights",
        build=ScaledWeights,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={"scale": "gain"} | TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="F.linear(x, w*s) with one scale for each output",
    ),
    Exhibit(
        name="masked weights",
        build=MaskedWeights,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={"scale": "gain"} | TWO,
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="F.linear(x, w*s) with a scale for each entry",
    ),
    Exhibit(
        name="LoRA",
        build=LoRA,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={"enter.weight": "input", "head.weight": "output", "*bias": "bias"}
        | {"*.weight": "frozen", "*.a": "output", "*.b": "input"},
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="frozen weights, trained ones of low rank beside them",
        exceptions={"*.down": "B starts at 0 and reads Ax, which starts as 1/√width as every readout does"},
    ),
    Exhibit(
        name="DoRA",
        build=DoRA,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={"enter.weight": "input", "head.weight": "output", "*bias": "bias"}
        | {"*.weight": "frozen", "*.a": "output", "*.b": "input", "*length": "gain"},
        branches=2,
        lr=SMALL_LR,
        shows="a product of parameters added to a frozen weight, divided by its norm, times a length",
    ),
    Exhibit(
        name="ReZero",
        build=residual(ReZero),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=GAINED,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="x + a·f(x), a number that starts at 0",
    ),
    Exhibit(
        name="scaled skip",
        build=residual(ScaledSkip),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=GAINED,
        branches=2,
        lr=SMALL_LR,
        shows="g∘x + f(x): a learned scale of the stream",
    ),
    Exhibit(
        name="lerp",
        build=residual(Lerp),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=GAINED,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="torch.lerp(x, f(x), a) with a learned a",
    ),
    Exhibit(
        name="addcmul",
        build=residual(Addcmul),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=GAINED,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="torch.addcmul(x, g, f(x))",
    ),
    Exhibit(
        name="stack and sum",
        build=residual(Stacked),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=TWO,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="torch.stack([x, f(x)]).sum(0)",
    ),
    Exhibit(
        name="addmm",
        build=residual(Addmm),
        batch=ROWS,
        loss=F.cross_entropy,
        roles=TWO,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="torch.addmm(x, h, w): the product adds the stream itself",
    ),
    Exhibit(
        name="TokenLearner",
        build=TokenLearner,
        batch=SETS,
        loss=F.cross_entropy,
        roles={"maps.weight": "output"} | NORMED,
        branches=8,
        lr=4 * SMALL_LR,
        shows="the stream passes a softmax-weighted sum over its positions",
    ),
    Exhibit(
        name="Perceiver",
        build=Perceiver,
        batch=SETS,
        loss=F.cross_entropy,
        roles={"latents": "input", "*cross.key.weight": "input", "*cross.value.weight": "input"}
        | {"*norm*weight": "gain", "*bias": "bias", "head.weight": "output", "*": "hidden"},
        branches=6,
        lr=SMALL_LR,
        shows="the stream begins as a parameter; keys and values read the data",
    ),
    Exhibit(
        name="cosine classifier",
        build=CosineHead,
        batch=ROWS,
        loss=F.cross_entropy,
        roles={"temperature": "gain", "classes": "output", "*bias": "bias"}
        | {"enter.weight": "input", "hidden.weight": "hidden"},
        branches=0,
        widths=PLAIN_WIDTHS,
        depths=(),
        lr=SMALL_LR,
        shows="a normalised readout of normalised features, over a learned temperature",
    ),
]
