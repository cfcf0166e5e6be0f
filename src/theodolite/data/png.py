"""A strict PNG reader for one layout: 8-bit RGB, not interlaced. It is what CIFAR-10's image form needs."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from theodolite.core.errors import UseError

Pixels = NDArray[np.uint8]


def decode_png(data: bytes, *, where: str = "the image") -> Pixels:
    """The pixels of an 8-bit RGB image, (height, width, 3).

    Every chunk's checksum is verified, and anything but this one layout is refused.

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
    """Undo a row's filter: it stores differences from the left, the upper or both neighbours, modulo 256."""
    match kind:
        case 0:
            return row
        case 1:
            return np.cumsum(row, axis=0, dtype=np.uint8)
        case 2:
            return row + above
        case 3 | 4:
            predict = _mean if kind == 3 else _paeth
            out: list[int] = []
            upper = above.reshape(-1).tolist()
            for i, value in enumerate(row.reshape(-1).tolist()):
                left, corner = (out[i - 3], upper[i - 3]) if i >= 3 else (0, 0)
                out.append((value + predict(left, upper[i], corner)) % 256)
            return np.array(out, np.uint8).reshape(row.shape)
        case _:
            raise UseError(f"{where} is damaged: a row has the filter {kind}, and there are only 0 to 4")


def _mean(left: int, up: int, corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    """Whichever neighbour is nearest to left + up - corner; ties in that order."""
    guess = left + up - corner
    by_left, by_up, by_corner = abs(guess - left), abs(guess - up), abs(guess - corner)
    if by_left <= by_up and by_left <= by_corner:
        return left
    return up if by_up <= by_corner else corner
