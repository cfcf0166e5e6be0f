"""ResNets with BatchNorm, written here: the usual one and one with pre-activation."""

from __future__ import annotations

from torch import Tensor, nn

from .table import Limb, Table
from .vocabulary import CLASSES, bias, conv, gain, readout

# A ResNet in torchvision's manner: relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))).


class BasicBlock(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.downsample = None
        if stride != 1 or fan_in != fan_out:
            shortcut = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.bn1(out).relu()
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return out.relu()


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(*(BasicBlock(width, width, 1) for _ in range(depth)))
        self.layer2 = nn.Sequential(
            BasicBlock(width, 2 * width, 2), *(BasicBlock(2 * width, 2 * width, 1) for _ in range(depth - 1))
        )
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def resnet(d: int, n: int) -> Table:
    def block(prefix: str, fan_in: int, d: int) -> list[Limb]:
        return [
            Limb(
                prefix,
                "out",
                {
                    "conv1.weight": conv(fan_in, d, 3),
                    "bn1.weight": gain(d, reaches="relu"),
                    "bn1.bias": bias(d),
                    "conv2.weight": conv(d, d, 3),
                    "bn2.weight": gain(d, reaches="stream"),
                    "bn2.bias": bias(d),
                },
                ends=("bn2.weight", "bn2.bias"),
            )
        ]

    first = [block(f"layer1.{i}.", d, d) for i in range(n)]
    second = [block(f"layer2.{i}.", 2 * d if i else d, 2 * d) for i in range(n)]
    outside = {
        "conv1.weight": conv(3, d, 3, role="input"),
        "bn1.weight": gain(d, reaches="relu"),
        "bn1.bias": bias(d),
        # The shortcut carries the stream into the second stage: no branch.
        "layer2.0.downsample.0.weight": conv(d, 2 * d, 1),
        "layer2.0.downsample.1.weight": gain(2 * d, reaches="stream"),
        "layer2.0.downsample.1.bias": bias(2 * d),
        "fc.weight": readout(2 * d, CLASSES),
        "fc.bias": bias(CLASSES, grows=False),
    }
    return Table(outside, first + second, on_stream=("*.downsample.*",))


# A ResNet with pre-activation: x + conv(relu(bn(conv(relu(bn(x)))))).


class PreActivationBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.bn1(x).relu())
        return x + self.conv2(self.bn2(out).relu())


class PreActivationResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*(PreActivationBlock(width) for _ in range(depth)))
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.blocks(self.stem(x))).relu().mean((2, 3)))


def preactivation(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"blocks.{i}.",
                "pre",
                {
                    # At the start of the branch, but a ReLU stands between it and the convolution.
                    "bn1.weight": gain(d, reaches="relu"),
                    "bn1.bias": bias(d),
                    "conv1.weight": conv(d, d, 3),
                    "bn2.weight": gain(d, reaches="relu"),
                    "bn2.bias": bias(d),
                    "conv2.weight": conv(d, d, 3),
                },
                ends=("conv2.weight",),
            )
        ]

    outside = {
        "stem.weight": conv(3, d, 3, role="input"),
        "bn.weight": gain(d, reaches="relu"),
        "bn.bias": bias(d),
        "fc.weight": readout(d, CLASSES),
        "fc.bias": bias(CLASSES, grows=False),
    }
    return Table(outside, [block(i) for i in range(n)])
