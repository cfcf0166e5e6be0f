"""Images with labels: Fashion-MNIST, MNIST and CIFAR-10, and their formats, IDX and PNG."""

from __future__ import annotations

import json
import math
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.data.batches import Examples, Split
from theodolite.data.files import locate, read
from theodolite.data.sources import File

Pixels = NDArray[np.uint8]
Located = tuple[Path, tuple[File, ...]]


def fashion_mnist(split: Split = "train") -> Examples:
    """60 000 or 10 000 grey images of clothing, 28 × 28, in ten balanced classes.

    References:
        Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    return _from_idx("fashion-mnist", split, (0.2860,), (0.3530,))


def mnist(split: Split = "train") -> Examples:
    """60 000 or 10 000 grey images of handwritten digits, 28 × 28.

    References:
        LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition, 1998.
    """
    return _from_idx("mnist", split, (0.1307,), (0.3081,))


def cifar10(split: Split = "train") -> Examples:
    """50 000 or 10 000 colour images, 32 × 32, in ten balanced classes.

    References:
        Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    pixels_NCHW, labels_N = _cifar10(locate("cifar10"), _is_train("cifar10", split))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Examples("cifar10", pixels_NCHW, labels_N, 10, mean, std)


def decode_idx(content: bytes, *, where: str = "the file") -> Pixels:
    """An array of bytes in MNIST's format IDX: 0, 0, type 8, the number of dimensions, the shape, the data.

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
        raise UseError(f"{name} has no {split!r} part: give 'train' or 'test'")
    return split == "train"


def _from_idx(name: str, split: Split, mean: tuple[float], std: tuple[float]) -> Examples:
    train = _is_train(name, split)
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


def decode_png(data: bytes, *, where: str = "the image") -> Pixels:
    """The pixels (height, width, 3) of an 8-bit RGB image in PNG, without interlacing.

    The checksum of every chunk is verified; any other layout is refused.

    >>> header = struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0)
    >>> def chunk(kind, body):
    ...     return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    >>> row = bytes([1, 10, 20, 30, 1, 1, 255])  # filter 1: each pixel is the difference from its left one
    >>> image = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    >>> decode_png(b"\\x89PNG\\r\\n\\x1a\\n" + image).tolist()
    [[[10, 20, 30], [11, 21, 29]]]

    Reference: PNG specification, third edition, W3C 2025, sections 5, 9 and 11.
    """
    width, height, packed = _chunks(data, where)
    length, unpacker = height * (1 + 3 * width), zlib.decompressobj()
    try:
        flat = unpacker.decompress(packed, length + 1)
    except (zlib.error, OverflowError) as error:
        raise UseError(f"{where} is damaged: {error}") from None
    if len(flat) != length or not unpacker.eof:
        raise UseError(f"{where} is damaged: {len(flat)} bytes for {height} rows of {width} RGB pixels")
    rows = np.frombuffer(flat, np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height, width, 3), np.uint8)
    above = np.zeros((width, 3), np.uint8)
    for filter_kind, row, out in zip(rows[:, 0].tolist(), rows[:, 1:], pixels, strict=True):
        out[:] = _unfilter(filter_kind, row.reshape(width, 3), above, where)
        above = out
    return pixels


def _chunks(data: bytes, where: str) -> tuple[int, int, bytes]:
    """Width, height and the compressed rows."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise UseError(f"{where} is not a PNG image")
    header, packed, place = b"", [], 8
    while True:
        if place + 12 > len(data):
            raise UseError(f"{where} is damaged: it ends before its IEND chunk")
        (length,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        check = data[place + 8 + length : place + 12 + length]
        if check != struct.pack(">I", zlib.crc32(kind + body)):
            raise UseError(f"{where} is damaged: the checksum of its {kind!r} chunk at byte {place} is wrong")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed.append(body)
        elif kind == b"IEND":
            break
        place += 12 + length
    if len(header) != 13 or header[8:] != bytes([8, 2, 0, 0, 0]):
        raise UseError(f"{where} is not an 8-bit RGB image without interlacing: its header is {header.hex()}")
    width, height = struct.unpack(">II", header[:8])
    return width, height, b"".join(packed)


def _unfilter(kind: int, row: Pixels, above: Pixels, where: str) -> Pixels:
    """Undo the filter of a row, which stores differences from neighbouring pixels modulo 256."""
    match kind:
        case 0:
            return row
        case 1:
            return np.cumsum(row, axis=0, dtype=np.uint8)
        case 2:
            return row + above
        case 3 | 4:
            predict = _paeth if kind == 4 else lambda left, up, corner: (left + up) // 2
            out: list[int] = []
            upper = above.reshape(-1).tolist()
            for i, value in enumerate(row.reshape(-1).tolist()):
                left, corner = (out[i - 3], upper[i - 3]) if i >= 3 else (0, 0)
                out.append((value + predict(left, upper[i], corner)) % 256)
            return np.array(out, np.uint8).reshape(row.shape)
        case _:
            raise UseError(f"{where} is damaged: a row has the filter {kind}, and there are only 0 to 4")


def _paeth(left: int, up: int, corner: int) -> int:
    """The neighbour nearest to left + up - corner; the first of equally near ones."""
    return min(left, up, corner, key=lambda one: abs(left + up - corner - one))
