"""Networks that make data: diffusion, autoencoders, adversaries, flows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .exhibit import Exhibit
from .layers import HEAD, SMALL_LR, Attention, Mlp, start_small

SIDE, CHANNELS = 8, 3
FREQUENCIES = 16
LATENT = 8
TEXT = 12


def times(t: Tensor) -> Tensor:
    """Sines and cosines of a time, as many at every width."""
    rates = torch.exp(-math.log(100.0) * torch.arange(FREQUENCIES // 2) / (FREQUENCIES // 2)).to(t)
    angles = t[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), -1)


class DiT(nn.Module):
    """Blocks that a time shifts, scales and gates (adaLN-Zero); a frozen table of positions."""

    PATCHES = 16

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(CHANNELS, width, 2, 2)
        self.positions = nn.Parameter(sines(self.PATCHES, width), requires_grad=False)
        self.time1, self.time2 = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(depth))
        self.modulate, self.head = nn.Linear(width, 2 * width), nn.Linear(width, 4 * CHANNELS)
        for layer in (self.modulate, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in an image."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        c = F.silu(self.time2(F.silu(self.time1(times(t)))))
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulate(c)[:, None].chunk(2, -1)
        x = self.head(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (SIDE // 2, SIDE // 2)), 2)


class DiTBlock(nn.Module):
    """Attention and an MLP, each gated by what starts at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width)
        self.modulate = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Two residual branches."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(c)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(F.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


class MMDiT(nn.Module):
    """Two streams, of an image and of a text, that attend to both; nothing reads the text at the end."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch, self.text = nn.Conv2d(CHANNELS, width, 2, 2), nn.Linear(TEXT, width)
        self.time1, self.time2 = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(MMDiTBlock(width, last=i == depth - 1) for i in range(depth))
        self.head = nn.Linear(width, 4 * CHANNELS)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """The noise in an image."""
        x, y = self.patch(x).flatten(2).transpose(1, 2), self.text(text)
        c = F.silu(self.time2(F.silu(self.time1(times(t)))))
        for block in self.blocks:
            x, y = block(x, y, c)
        x = self.head(F.layer_norm(x, x.shape[-1:]))
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (SIDE // 2, SIDE // 2)), 2)


class MMDiTBlock(nn.Module):
    """Joint attention, and an MLP for each stream; the last block has no branches for the text."""

    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        self.image, self.text = MMDiTSide(width, 6), MMDiTSide(width, 2 if last else 6)

    def forward(self, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams after it."""
        of_x, of_y = self.image.modulate(c)[:, None], self.text.modulate(c)[:, None]
        first, second = self.image.projected(x, of_x), self.text.projected(y, of_y)
        mixed = F.scaled_dot_product_attention(
            *(torch.cat(pair, 2) for pair in zip(first, second, strict=True))
        )
        of_image, of_text = mixed.transpose(1, 2).flatten(2).split((x.shape[1], y.shape[1]), 1)
        return self.image.after(x, of_image, of_x), self.text.after(y, of_text, of_y)


class MMDiTSide(nn.Module):
    """The weights of one stream in a block: six modulations, or two if it ends here."""

    def __init__(self, width: int, modulations: int) -> None:
        super().__init__()
        self.modulate = nn.Linear(width, modulations * width)
        self.qkv = nn.Linear(width, 3 * width)
        if modulations == 6:
            self.out, self.mlp = nn.Linear(width, width), Mlp(width)
        start_small(self)
        nn.init.zeros_(self.modulate.weight)

    def projected(self, x: Tensor, modulated: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values of all heads."""
        shift, scale = modulated.split(x.shape[-1], -1)[:2]
        found = self.qkv(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift).chunk(3, -1)
        return (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in found)

    def after(self, x: Tensor, mixed: Tensor, modulated: Tensor) -> Tensor:
        """The stream after both branches, or as it was."""
        _, _, *rest = modulated.split(x.shape[-1], -1)
        if not rest:
            return x
        gate1, shift, scale, gate2 = rest
        x = x + gate1 * self.out(mixed)
        return x + gate2 * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


def sines(count: int, width: int) -> Tensor:
    """The usual table of sines and cosines, a row for each position."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2) / (width // 2))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)


class TimedUNet(nn.Module):
    """Residual blocks down and up, the way down laid beside the way up, a time added inside of each block."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.time = nn.Linear(FREQUENCIES, 2 * width)
        self.stem = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(width, width, 2 * width) for _ in range(depth))
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.up = nn.ModuleList(TimedBlock(width if i else 2 * width, width, 2 * width) for i in range(depth))
        self.norm, self.head = nn.GroupNorm(4, width), nn.Conv2d(width, CHANNELS, 3, padding=1)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in an image."""
        c, x = F.silu(self.time(times(t))), self.stem(x)
        for block in self.down:
            x = block(x, c)
        x = torch.cat((F.interpolate(self.shrink(x), scale_factor=2.0, mode="nearest"), x), 1)
        for block in self.up:
            x = block(x, c)
        return self.head(F.silu(self.norm(x)))


class TimedBlock(nn.Module):
    """Two convolutions behind norms, the time between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        nn.init.normal_(self.conv2.weight, std=0.02)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """One residual branch."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(c)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class VAE(nn.Module):
    """A latent of a fixed size, drawn in the forward pass; three results."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(CHANNELS * SIDE**2, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.mean, self.logvar = nn.Linear(width, LATENT), nn.Linear(width, LATENT)
        self.leave = nn.Linear(LATENT, width)
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, CHANNELS * SIDE**2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, mean and logarithm of the variance."""
        h = F.silu(self.enter(x.flatten(1)))
        for layer in self.encoder:
            h = F.silu(layer(h))
        mean, logvar = self.mean(h), self.logvar(h)
        h = F.silu(self.leave(mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)))
        for layer in self.decoder:
            h = F.silu(layer(h))
        return self.head(h).view_as(x), mean, logvar


def vae_loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The negative evidence lower bound."""
    made, mean, logvar = output
    divergence = -0.5 * (1 + logvar - mean**2 - logvar.exp()).mean()
    return F.mse_loss(made, targets) + 0.1 * divergence


class Generator(nn.Module):
    """DCGAN's: transposed convolutions from a latent vector."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.norm0 = nn.ConvTranspose2d(LATENT, 2 * width, 2), nn.BatchNorm2d(2 * width)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.grow2 = nn.ConvTranspose2d(width, CHANNELS, 4, 2, 1)
        for layer in (self.enter, self.grow1, self.grow2):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, z: Tensor) -> Tensor:
        """Images in −1 to 1."""
        x = F.relu(self.norm0(self.enter(z[:, :, None, None])))
        return torch.tanh(self.grow2(F.relu(self.norm1(self.grow1(x)))))


class Discriminator(nn.Module):
    """DCGAN's, with spectral norms."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = spectral_norm(nn.Conv2d(CHANNELS, width, 4, 2, 1))
        self.shrink = spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, 1))
        self.head = spectral_norm(nn.Conv2d(2 * width, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """How real it looks."""
        x = F.leaky_relu(self.shrink(F.leaky_relu(self.enter(x), 0.2)), 0.2)
        return self.head(x).flatten()


class RealNVP(nn.Module):
    """Affine couplings: half of the data shifts and scales the other half, in turn."""

    DATA = 6

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(self.DATA // 2, width) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latent, and the logarithm of the determinant."""
        first, second = x.chunk(2, -1)
        total = torch.zeros(len(x), device=x.device)
        for coupling in self.couplings:
            scale, shift = coupling(first)
            second = second * scale.exp() + shift
            total = total + scale.sum(-1)
            first, second = second, first
        return torch.cat((first, second), -1), total


class Coupling(nn.Module):
    """Makes a scale and a shift; the last layer has a learned length."""

    def __init__(self, half: int, width: int) -> None:
        super().__init__()
        self.enter, self.hidden = nn.Linear(half, width), nn.Linear(width, width)
        self.leave = weight_norm(nn.Linear(width, 2 * half))
        with torch.no_grad():
            self.leave.parametrizations.weight.original0.fill_(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift."""
        scale, shift = self.leave(F.relu(self.hidden(F.relu(self.enter(x))))).chunk(2, -1)
        return torch.tanh(scale), shift


class Glow(nn.Module):
    """Steps of an affine map of each channel, an invertible 1×1 convolution, and an additive coupling."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GlowStep(4, width) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latent, and the logarithm of the determinant."""
        x = F.pixel_unshuffle(x, 2)
        total = torch.zeros((), device=x.device)
        for step in self.steps:
            x, volume = step(x)
            total = total + volume
        return x, total


class GlowStep(nn.Module):
    """One step; the data have as many channels at every width."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(make(1, channels, 1, 1)) for make in (torch.ones, torch.zeros))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.enter = nn.Conv2d(channels // 2, width, 3, padding=1)
        self.hidden = nn.Conv2d(width, width, 1)
        self.leave = nn.Conv2d(width, channels // 2, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image, and the logarithm of the determinant for one pixel."""
        x = F.conv2d(x * self.scale + self.shift, self.mix[:, :, None, None])
        first, second = x.chunk(2, 1)
        second = second + self.leave(F.relu(self.hidden(F.relu(self.enter(first)))))
        return torch.cat((first, second), 1), self.scale.abs().log().sum() + self.mix.det().abs().log()


def flow_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The negative logarithm of the likelihood."""
    latent, volume = output
    return 0.5 * (latent**2).flatten(1).sum(1).mean() - volume.mean()


def noisy(seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Images and times, and the noise in them; the same at every seed."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, CHANNELS, SIDE, SIDE)
    image, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return (0.3 * image + noise, torch.arange(8.0)), noise


def described(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The same, each with a text."""
    inputs, noise = noisy(seed)
    return (*inputs, torch.randn(8, 5, TEXT, generator=torch.Generator().manual_seed(1))), noise


def _fixed(*shape: int, targets: Any = None) -> Any:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return lambda seed: (drawn, drawn if targets is None else targets)


IMAGES = torch.rand(8, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) * 2 - 1

EXHIBITS = [
    Exhibit(
        name="DiT",
        build=DiT,
        batch=noisy,
        loss=F.mse_loss,
        roles={
            "positions": "frozen",
            "*bias": "bias",
            "patch.weight": "input",
            "time1.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=4,
        lr=SMALL_LR,
        shows="adaLN-Zero: branches gated by what starts at 0; a frozen table",
    ),
    Exhibit(
        name="MMDiT",
        build=MMDiT,
        batch=described,
        loss=F.mse_loss,
        roles={
            "*bias": "bias",
            "patch.weight": "input",
            "text.weight": "input",
            "time1.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=6,
        lr=2.0**-7,  # so that gradients behind gates of zero exceed Adam's eps after three steps
        shows="two streams, of which one ends a block earlier: each has its own number of branches",
    ),
    Exhibit(
        name="timed U-Net",
        build=TimedUNet,
        batch=noisy,
        loss=F.mse_loss,
        roles={
            "*norm*weight": "gain",
            "*bias": "bias",
            "time.weight": "input",
            "stem.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=4,
        lr=SMALL_LR,
        shows="a residual block whose input is a concatenation; a time from beside",
    ),
    Exhibit(
        name="VAE",
        build=VAE,
        batch=_fixed(8, CHANNELS, SIDE, SIDE),
        loss=vae_loss,
        roles={
            "*bias": "bias",
            "enter.weight": "input",
            "mean.weight": "output",
            "logvar.weight": "output",
            "leave.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=0,
        widths=(64, 256, 1024),
        depths=(),
        lr=SMALL_LR,
        shows="returns three tensors, draws noise, has a readout in its middle",
    ),
    Exhibit(
        name="DCGAN generator",
        build=Generator,
        batch=_fixed(16, LATENT, targets=IMAGES.repeat(2, 1, 1, 1)),
        loss=F.mse_loss,
        roles={
            "norm*weight": "gain",
            "*bias": "bias",
            "enter.weight": "input",
            "grow2.weight": "output",
            "*": "hidden",
        },
        branches=0,
        depths=(),
        lr=SMALL_LR,
        shows="transposed convolutions: their weights are laid out the other way round",
    ),
    Exhibit(
        name="DCGAN discriminator",
        build=Discriminator,
        batch=lambda seed: (IMAGES, torch.arange(8.0) % 2),
        loss=F.binary_cross_entropy_with_logits,
        roles={
            "*bias": "bias",
            "enter*": "input",
            "head*": "output",
            "*": "hidden",
        },
        branches=0,
        depths=(),
        lr=SMALL_LR,
        shows="spectral_norm on every layer, the readout too",
        exceptions={
            "enter": "a spectral norm of one: the RMS of more outputs of as many inputs falls as 1/√width",
            "shrink": "it reads what falls so",
            "head": "a readout of length one, whose outputs may change as √width; the plan says so",
            "": "the head",
        },
    ),
    Exhibit(
        name="RealNVP",
        build=RealNVP,
        batch=_fixed(32, RealNVP.DATA),
        loss=flow_loss,
        roles={
            "*bias": "bias",
            "*enter.weight": "input",
            "*leave*original0": "gain",
            "*leave*original1": "output",
            "*": "hidden",
        },
        branches=2,
        lr=SMALL_LR,
        exceptions={"couplings.-1": "it returns the branch itself, whose share is 1/depth"},
        shows="the stream is the data, of a fixed size; weight_norm on the last layer of a coupling",
    ),
    Exhibit(
        name="Glow",
        build=Glow,
        batch=_fixed(8, 1, SIDE, SIDE),
        loss=flow_loss,
        roles={
            "*bias": "bias",
            "*scale": "gain",
            "*shift": "bias",
            "*mix": "input",
            "*enter.weight": "input",
            "*leave.weight": "output",
            "*": "hidden",
        },
        hints={"*mix": "input"},
        branches=2,
        lr=SMALL_LR,
        shows="invertible 1×1 convolutions that do not grow, and their determinants",
    ),
]
