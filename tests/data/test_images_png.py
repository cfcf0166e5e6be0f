"""The PNG reader undoes every filter of the standard, and refuses what is damaged."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from theodolite import UseError
from theodolite.data.images import decode_png


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _encode(pixels: np.ndarray, filters: list[int], header: bytes = bytes([8, 2, 0, 0, 0])) -> bytes:
    """Write a PNG with a filter for each row, byte by byte as the standard's section 9 has it."""
    height, width, _ = pixels.shape
    rows = b""
    for y, kind in enumerate(filters):
        rows += bytes([kind])
        for x in range(width):
            for c in range(3):
                a = int(pixels[y, x - 1, c]) if x else 0
                b = int(pixels[y - 1, x, c]) if y else 0
                corner = int(pixels[y - 1, x - 1, c]) if x and y else 0
                nearest = min((a, b, corner), key=lambda value: abs(a + b - corner - value))
                guess = (0, a, b, (a + b) // 2, nearest)[kind]
                rows += bytes([(int(pixels[y, x, c]) - guess) % 256])
    packed = zlib.compress(rows)
    data = [_chunk(b"IDAT", packed[i : i + 50]) for i in range(0, len(packed), 50)]
    head = _chunk(b"IHDR", struct.pack(">II", width, height) + header)
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(data) + _chunk(b"IEND", b"")


PIXELS = np.random.default_rng(0).integers(0, 256, (10, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", range(5))
def test_every_filter_is_undone(kind: int) -> None:
    assert np.array_equal(decode_png(_encode(PIXELS, [kind] * 10)), PIXELS)


def test_filters_may_change_from_row_to_row() -> None:
    assert np.array_equal(decode_png(_encode(PIXELS, [0, 1, 2, 3, 4, 4, 3, 2, 1, 0])), PIXELS)


WHOLE = _encode(PIXELS, [1] * 10)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"GIF89a", "is not a PNG image"),
        (WHOLE[:-12], "it ends before its IEND chunk"),
        (WHOLE[:60], "ends before its IEND chunk|checksum of its b'IDAT' chunk"),
        (
            WHOLE[:50] + bytes([WHOLE[50] ^ 1]) + WHOLE[51:],
            "the checksum of its b'IDAT' chunk at byte 33 is wrong",
        ),
        (_encode(PIXELS, [1] * 9), "bytes for 10 rows of 7 RGB pixels"),
        (_encode(PIXELS, [0] * 10, bytes([16, 2, 0, 0, 0])), "is not an 8-bit RGB image without interlacing"),
        (_encode(PIXELS, [0] * 10, bytes([8, 2, 0, 0, 1])), "is not an 8-bit RGB image without interlacing"),
    ],
)
def test_anything_else_is_refused(damaged: bytes, message: str) -> None:
    with pytest.raises(UseError, match=message):
        decode_png(damaged, where="batch.png")
