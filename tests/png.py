"""Read PNG files by their specification."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray


def decoded(content: bytes) -> NDArray[np.uint8]:
    """The pixels of an 8-bit grey PNG without filters; every checksum is checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        kind, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", content, place + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 0, 0, 0, 0]  # eight bits, grey, the one compression and filter method, no interlacing
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width)
    assert not rows[:, 0].any()
    return rows[:, 1:]
