"""Files of data sets: found in their folders, unpacked, and verified."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.data.sources import File, Source, folder, source

MEMORY = 2**28
"""The most memory in bytes to unpack an .xz with; xz -9 needs 65 MiB."""
# RuntimeError (and NotImplementedError, a subclass): a .zip with a password or an unknown compression.
_DAMAGE = (EOFError, KeyError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)
_SUFFIXES = ("", ".gz", ".xz", ".zip")


def path(name: str) -> Path:
    """The folder that holds a data set.

    >>> (path("sotu") / "state_of_the_union.txt.xz").exists()
    True
    """
    return locate(name)[0]


def present(name: str) -> bool:
    """Are all files of a data set there and of the right length, or is it computed?

    The length of an `.xz` or `.zip` is not checked, and contents are verified when they are read.
    """
    chosen = source(name)
    return not chosen.forms or _search(chosen) is not None


def locate(name: str) -> tuple[Path, tuple[File, ...]]:
    """The folder that holds a data set, and the files of the form it has there."""
    chosen = source(name)
    if not chosen.forms:
        raise UseError(f"{name} is computed, it has no files")
    if found := _search(chosen):
        return found
    for place, form in _candidates(chosen):
        for file in form:
            if (torn := packed(place, file)) and not _fits(torn, file):
                raise UseError(
                    f"{torn} is damaged: its length is wrong. Fetch it again with: "
                    f"theodolite data fetch {name}"
                )
    by_hand = " or ".join(", ".join(file.name for file in form) for form in chosen.forms)
    raise UseError(
        f"the data set {name} is not in {folder()}. Fetch it with: theodolite data fetch {name}. "
        f"Or put its files ({by_hand}; .gz, .xz and .zip are read too) into {folder() / chosen.places[0]}"
    )


def read(place: Path, file: File) -> bytes:
    """The unpacked content of a file; raises `UseError` if it is missing, damaged or another file."""
    found = packed(place, file)
    if found is None:
        raise UseError(f"{place / file.name} is not there")
    try:
        content = _unpack(found, file)
    except (*_DAMAGE, OSError) as error:
        raise UseError(f"{found} is damaged ({error}). Delete it and fetch it again") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise UseError(
            f"{found} is not the expected file: its {len(content)} bytes have the SHA-256 {digest}, not "
            f"{file.sha256}. Delete it and fetch it again"
        )
    return content


def packed(place: Path, file: File) -> Path | None:
    """The path of a file in a folder, plain or packed."""
    candidates = (place / (file.name + suffix) for suffix in _SUFFIXES)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _candidates(chosen: Source) -> Iterator[tuple[Path, tuple[File, ...]]]:
    """Folders and the files that one of them would hold."""
    return itertools.product((folder() / relative for relative in chosen.places), chosen.forms)


def _search(chosen: Source) -> tuple[Path, tuple[File, ...]] | None:
    for place, form in _candidates(chosen):
        if all((found := packed(place, file)) and _fits(found, file) for file in form):
            return place, form
    return None


def _fits(found: Path, file: File) -> bool:
    """Is the unpacked length right, as far as it is known without unpacking?"""
    if found.suffix in (".xz", ".zip"):
        return True
    if found.suffix != ".gz":
        return found.stat().st_size == file.size
    with found.open("rb") as stream:  # in the last four bytes, modulo 2³²
        stream.seek(max(0, found.stat().st_size - 4))
        return int.from_bytes(stream.read(), "little") == file.size


def _unpack(archive: Path, file: File) -> bytes:
    """Unpack at most one byte more than the file should have, as packed data may be endless."""
    most = file.size + 1
    match archive.suffix:
        case ".gz":
            with gzip.open(archive) as stream:
                content = stream.read(most)
        case ".xz":
            unpacker = lzma.LZMADecompressor(memlimit=MEMORY)
            content = unpacker.decompress(archive.read_bytes(), max_length=most)
            if len(content) < most and not unpacker.eof:
                raise EOFError("it ends too early")
        case ".zip":
            with zipfile.ZipFile(archive) as members, members.open(file.name) as stream:
                content = stream.read(most)
        case _:
            with archive.open("rb") as stream:
                content = stream.read(most)
    if len(content) == most:
        raise EOFError(f"it holds more than {file.size} bytes")
    return content
