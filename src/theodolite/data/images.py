"""Images with labels: Fashion-MNIST, MNIST and CIFAR-10."""

# N examples, C channels, H height, W width

from __future__ import annotations

import json
import math
import struct
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.data.png import Pixels, decode_png
from theodolite.data.reading import locate, read
from theodolite.data.sets import Examples, Split
from theodolite.data.sources import File

Located = tuple[Path, tuple[File, ...]]


def fashion_mnist(split: Split = "train") -> Examples:
    """60 000 or 10 000 grey images of clothing, 28 × 28, in ten balanced classes.

    References:
        Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    return _from_idx("fashion-mnist", _is_train("fashion-mnist", split), (0.2860,), (0.3530,))


def mnist(split: Split = "train") -> Examples:
    """60 000 or 10 000 grey images of handwritten digits, 28 × 28.

    References:
        LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition, 1998.
    """
    return _from_idx("mnist", _is_train("mnist", split), (0.1307,), (0.3081,))


def cifar10(split: Split = "train") -> Examples:
    """50 000 or 10 000 colour images, 32 × 32, in ten balanced classes.

    References:
        Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    pixels_NCHW, labels_N = _cifar10(locate("cifar10"), _is_train("cifar10", split))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Examples("cifar10", pixels_NCHW, labels_N, 10, mean, std)


def decode_idx(content: bytes, *, where: str = "the file") -> Pixels:
    """An array of bytes in IDX, MNIST's format: 0, 0, type 8, the number of dimensions, these, the data.

    >>> decode_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [[7, 8, 9]]
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise UseError(f"{where} is not an IDX file of bytes: it begins with {content[:4].hex()}")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise UseError(f"{where} is damaged: {len(content) - start} bytes for the shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _is_train(name: str, split: Split) -> bool:
    if split not in ("train", "test"):
        raise UseError(f"{name} has no {split!r} part: say 'train' or 'test'")
    return split == "train"


def _from_idx(name: str, train: bool, mean: tuple[float], std: tuple[float]) -> Examples:
    pixels_NCHW, labels_N = _idx_pair(locate(name), train)
    return Examples(name, pixels_NCHW, labels_N, 10, mean, std)


@cache
def _idx_pair(located: Located, train: bool) -> tuple[Tensor, Tensor]:
    place, files = located
    images_NHW, labels_N = (
        decode_idx(read(place, file), where=file.name) for file in files[0 if train else 2 :][:2]
    )
    return torch.from_numpy(images_NHW.copy())[:, None], torch.from_numpy(labels_N.astype(np.int64))


@cache
def _cifar10(located: Located, train: bool) -> tuple[Tensor, Tensor]:
    place, files = located
    batches = files[:5] if train else files[5:6]
    if files[0].name.endswith(".bin"):
        # A record is the label and the three planes, red, green and blue.
        records = [np.frombuffer(read(place, file), np.uint8).reshape(10_000, 3073) for file in batches]
        table = np.concatenate(records)
        labels_N, pixels_NCHW = table[:, 0], table[:, 1:].reshape(-1, 3, 32, 32)
    else:
        # One row of 1024 pixels for each image.
        rows = [decode_png(read(place, file), where=str(place / file.name)) for file in batches]
        pixels_NCHW = np.concatenate(rows).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels_N = np.array(json.loads(read(place, files[6 if train else 7])))
    return torch.from_numpy(pixels_NCHW.copy()), torch.from_numpy(labels_N.astype(np.int64))
