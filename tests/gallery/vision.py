"""Networks that read images: convolutions with every kind of norm, transformers, mixers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, images
from .layers import HEAD, SMALL_LR, Attention, Block, Mlp, start_small

CLASSES = 10
DRAWN = images(CLASSES, size=8)(0)


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    """The same images every time: what is learned of them shows in them."""
    return DRAWN


class ResNet(nn.Module):
    """Two stages, the second of twice the channels; norms after convolutions, the last of a block at 0."""

    def __init__(self, width: int, depth: int, *, bottleneck: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        kind = Bottleneck if bottleneck else BasicBlock
        self.stage1 = nn.Sequential(*(kind(width, width, 1) for _ in range(depth)))
        self.stage2 = nn.Sequential(
            *(kind(2 * width if i else width, 2 * width, 1 if i else 2) for i in range(depth))
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        return self.head(self.stage2(self.stage1(x)).mean((2, 3)))


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = _shortcut(before, after, stride)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class Bottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 2
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(n) for n in (inner, inner, after))
        self.shortcut = _shortcut(before, after, stride)
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.shortcut(x) + self.norm3(self.conv3(y)))


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    if before == after and stride == 1:
        return nn.Identity()
    return Projection(before, after, stride)


class Projection(nn.Module):
    """The stream where its shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class PreActivationResNet(nn.Module):
    """Version 2: the norm and the nonlinearity stand before each convolution, the stream is linear."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        sizes = (
            [(width, width, 1)] * depth + [(width, 2 * width, 2)] + [(2 * width, 2 * width, 1)] * (depth - 1)
        )
        self.blocks = nn.Sequential(*(PreActivationBlock(*size) for size in sizes))
        self.norm, self.head = nn.BatchNorm2d(2 * width), nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


class PreActivationBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        nn.init.normal_(self.conv2.weight, std=0.02)
        self.project = None if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        x = x if self.project is None else self.project(y)
        y = F.relu(self.norm2(self.conv1(y)))
        return x + self.conv2(y)


class StandardisedConv(nn.Conv2d):
    """NFNet's: the weight standardised over its inputs, times a learned length over √fan-in."""

    def __init__(self, before: int, after: int, kernel: int) -> None:
        super().__init__(before, after, kernel, padding=kernel // 2)
        self.gain = nn.Parameter(torch.ones(after, 1, 1, 1))
        self.scale = (before * kernel**2) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        gain = (self.gain * self.scale).view(-1)
        weight = F.batch_norm(self.weight.reshape(1, len(gain), -1), None, None, weight=gain, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=self.padding)


class NFNet(nn.Module):
    """No norm of a signal: standardised weights, activations scaled to variance one, `x + α·f(x/β)`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = StandardisedConv(3, width, 3)
        self.blocks = nn.ModuleList(NFBlock(width, math.sqrt(1 + 0.04 * i)) for i in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(_scaled_relu(x).mean((2, 3)))


class NFBlock(nn.Module):
    def __init__(self, width: int, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.conv1, self.conv2 = StandardisedConv(width, width, 3), StandardisedConv(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(_scaled_relu(x) / self.beta)
        return x + 0.2 * self.conv2(_scaled_relu(y))


def _scaled_relu(x: Tensor) -> Tensor:
    return F.relu(x) * math.sqrt(2 / (1 - 1 / math.pi))


class BiT(nn.Module):
    """Pre-activation blocks with GroupNorm; weights of variance one, standardised as activations are."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = UnitConv(3, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(BiTBlock(width) for _ in range(depth)))
        self.norm, self.head = nn.GroupNorm(8, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


class UnitConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8)
        return F.conv2d(x, weight.reshape_as(self.weight), None, self.stride, self.padding)


class BiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 2
        self.norm1, self.conv1 = nn.GroupNorm(8, width), UnitConv(width, inner, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(8, inner), UnitConv(inner, inner, 3, padding=1, bias=False)
        self.norm3, self.conv3 = nn.GroupNorm(8, inner), UnitConv(inner, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return x + self.conv3(F.relu(self.norm3(y)))


class ConvNeXt(nn.Module):
    """Depthwise convolutions, channels last inside of a block, a layer scale at its end."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(ConvNeXtBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width, 4 * width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)


class EfficientNet(nn.Module):
    """MobileNet's inverted bottlenecks with squeeze and excitation; the last convolution is linear."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(InvertedBottleneck(width) for _ in range(depth)))
        self.last, self.last_norm = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.silu(self.stem_norm(self.stem(x))))
        return self.head(F.silu(self.last_norm(self.last(x))).mean((2, 3)))


class InvertedBottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner, squeezed = 2 * width, width // 4
        self.expand, self.norm1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.squeeze, self.excite = nn.Conv2d(inner, squeezed, 1), nn.Conv2d(squeezed, inner, 1)
        self.project, self.norm3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.expand(x)))
        y = F.silu(self.norm2(self.depthwise(y)))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.norm3(self.project(y))


class ViT(nn.Module):
    """Patches, a CLS token, learned positions; the class is read from the token."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class CaiT(nn.Module):
    """Blocks with layer scales, then blocks that change the CLS token alone, a slice of the stream."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 4, width) * 0.02)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.blocks = nn.ModuleList(ScaledBlock(width) for _ in range(depth))
        self.class_blocks = nn.ModuleList(ClassBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        for class_block in self.class_blocks:
            x = class_block(x)
        return self.head(self.norm(x)[:, 0])


class ScaledBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


class ClassBlock(ScaledBlock):
    def forward(self, x: Tensor) -> Tensor:
        token, normed = x[:, :1], self.norm1(x)
        token = token + self.scale1 * self.attention(normed[:, :1], normed)
        token = token + self.scale2 * self.mlp(self.norm2(token))
        return torch.cat((token, x[:, 1:]), 1)


class Swin(nn.Module):
    """Attention inside of windows, every second time shifted; relative positions; a merge of patches."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 1)
        self.stage1 = nn.ModuleList(WindowBlock(width, 2 * (i % 2)) for i in range(depth))
        self.merge_norm = nn.LayerNorm(4 * width)
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)
        self.stage2 = nn.ModuleList(WindowBlock(2 * width, 0) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for block in self.stage1:
            x = block(x)
        x = torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1)
        x = self.merge(self.merge_norm(x))
        for block in self.stage2:
            x = block(x)
        return self.head(self.norm(x).mean((1, 2)))


class WindowBlock(nn.Module):
    WINDOW = 4

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), Mlp(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        start_small(self)
        self.relative = nn.Parameter(torch.randn((2 * self.WINDOW - 1) ** 2, width // HEAD) * 0.02)
        place = torch.cartesian_prod(torch.arange(self.WINDOW), torch.arange(self.WINDOW))
        apart = place[:, None] - place[None] + self.WINDOW - 1
        self.register_buffer("index", apart[..., 0] * (2 * self.WINDOW - 1) + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        batch, height, _, width = x.shape
        windows, side = height // self.WINDOW, self.WINDOW
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(batch, windows, side, windows, side, width).transpose(2, 3).reshape(-1, side**2, width)
        q, k, v = self.qkv(x).view(len(x), side**2, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * HEAD**-0.5 + self.relative[self.index].permute(2, 0, 1)
        x = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        x = x.view(batch, windows, windows, side, side, width).transpose(2, 3)
        return torch.roll(x.reshape(batch, height, height, width), (self.shift, self.shift), (1, 2))


class Mixer(nn.Module):
    """MLPs over the patches and over the channels in turn; patches are as many at every width."""

    PATCHES = 16

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, 2)
        self.blocks = nn.Sequential(*(MixerBlock(self.PATCHES, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.across = nn.LayerNorm(width), Mlp(patches, width // 2)
        self.norm2, self.along = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class VGG(nn.Module):
    """A plain stack of convolutions, pooled, then flattened into two linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in (width, 2 * width):
            for _ in range(depth):
                layers += [nn.Conv2d(before, stage, 3, padding=1), nn.ReLU()]
                before = stage
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(2 * width * 4, 4 * width)
        self.head = nn.Linear(4 * width, CLASSES)
        for layer in (*layers, self.hidden):
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.features(x).flatten(1))))


class DenseNet(nn.Module):
    """Each layer reads all before it, side by side; a transition halves them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(DenseLayer((i + 1) * width, width) for i in range(depth))
        total = (depth + 1) * width
        self.transition_norm = nn.BatchNorm2d(total)
        self.transition = nn.Conv2d(total, total // 2, 1, bias=False)
        self.later = nn.ModuleList(DenseLayer(total // 2 + i * width, width) for i in range(depth))
        total = total // 2 + depth * width
        self.norm, self.head = nn.BatchNorm2d(total), nn.Linear(total, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = F.avg_pool2d(self.transition(F.relu(self.transition_norm(x))), 2)
        for layer in self.later:
            x = layer(x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, 2 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * growth)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat((x, self.conv2(F.relu(self.norm2(y)))), 1)


class UNet(nn.Module):
    """Down and up again, what was on the way down laid beside what comes up; a class for every pixel."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(3, width, depth), _convolutions(width, 2 * width, depth)
        self.bottom = _convolutions(2 * width, 4 * width, depth)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.after2, self.after1 = (
            _convolutions(4 * width, 2 * width, depth),
            _convolutions(2 * width, width, depth),
        )
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.after2(torch.cat((self.up2(x), second), 1))
        return self.head(self.after1(torch.cat((self.up1(x), first), 1)))


def _convolutions(before: int, after: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(after if i else before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def pixels(seed: int) -> tuple[Tensor, Tensor]:
    """The same images every time, and a class for every pixel."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(8, 3, 8, 8, generator=generator)
    return drawn, torch.randint(CLASSES, (8, 8, 8), generator=generator)


ENDS = {"head.weight": "output", "*": "hidden"}
CONVOLUTIONAL = {"*norm*weight": "gain", "*bias": "bias", "stem.weight": "input"} | ENDS
PATCHED = {"*norm*weight": "gain", "*bias": "bias", "patch.weight": "input"} | ENDS
TOKENS = {"token": "input", "positions": "input"}


def bottleneck_resnet(width: int, depth: int) -> ResNet:
    """ResNet of blocks with three convolutions."""
    return ResNet(width, depth, bottleneck=True)


EXHIBITS = (
    Exhibit(
        name="ResNet",
        build=ResNet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=CONVOLUTIONAL,
        branches=4,
        shows="BatchNorm ends the branches; one shortcut is a projection",
    ),
    Exhibit(
        name="ResNet, bottlenecks",
        build=bottleneck_resnet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=CONVOLUTIONAL,
        branches=4,
        shows="three convolutions in a branch",
    ),
    Exhibit(
        name="ResNet v2",
        build=PreActivationResNet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=CONVOLUTIONAL,
        branches=4,
        shows="norm and nonlinearity first; the shortcut reads what the branch reads",
    ),
    Exhibit(
        name="NFNet",
        build=NFNet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*gain": "gain", "*bias": "bias", "stem.weight": "input"} | ENDS,
        branches=2,
        shows="weights standardised by F.batch_norm, a gain and 1/√fan-in inside of it",
    ),
    Exhibit(
        name="BiT",
        build=BiT,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=CONVOLUTIONAL,
        branches=2,
        shows="weights standardised to variance one, without a gain",
        depths=(),
        exceptions={
            "*conv?": "weights of variance one at every width: outputs grow as √fan-in by definition",
            "blocks*": "the stream is the sum of what these convolutions put out",
            "norm": "the blocks' part of the stream, which learns, grows as √width beside the stem's",
            "head": "it reads this norm",
            "": "it reads this norm",
        },
    ),
    Exhibit(
        name="ConvNeXt",
        build=ConvNeXt,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*depthwise.weight": "input", "*scale": "gain"} | CONVOLUTIONAL,
        branches=2,
        shows="depthwise kernels, whose fan-in does not grow; layer scale",
    ),
    Exhibit(
        name="EfficientNet",
        build=EfficientNet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*depthwise.weight": "input"} | CONVOLUTIONAL,
        branches=2,
        shows="squeeze and excitation; the convolution before the head is outside of the blocks",
    ),
    Exhibit(
        name="ViT",
        build=ViT,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=TOKENS | PATCHED,
        branches=4,
        shows="CLS token, learned positions",
    ),
    Exhibit(
        name="CaiT",
        build=CaiT,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=TOKENS | {"*scale?": "gain"} | PATCHED,
        branches=8,
        widths=(64, 128, 256),
        shows="the last blocks change a slice of the stream, the CLS token",
    ),
    Exhibit(
        name="Swin",
        build=Swin,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*relative": "input"} | PATCHED,
        branches=8,
        shows="windows, rolled; a table of relative positions; merged patches",
    ),
    Exhibit(
        name="MLP-Mixer",
        build=Mixer,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*across.up.weight": "input", "*across.down.weight": "output"} | PATCHED,
        branches=4,
        shows="an MLP over the patches reads and writes a number that does not grow",
        exceptions={
            "*across*": "all channels share these weights: a gradient that averages over more of them "
            "changes each one less",
        },
    ),
    Exhibit(
        name="VGG",
        build=VGG,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*bias": "bias", "features.0.weight": "input"} | ENDS,
        branches=0,
        shows="a plain stack; positions are flattened into the fan-in of a linear layer",
        depths=(),
    ),
    Exhibit(
        name="DenseNet",
        build=DenseNet,
        batch=pictures,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles=CONVOLUTIONAL,
        branches=0,
        shows="layers read the concatenation of all before them",
        depths=(),
    ),
    Exhibit(
        name="U-Net",
        build=UNet,
        batch=pixels,
        loss=F.cross_entropy,
        lr=SMALL_LR,
        roles={"*bias": "bias", "down1.0.weight": "input"} | ENDS,
        branches=0,
        shows="long skips by concatenation, transposed convolutions",
        depths=(),
    ),
)
