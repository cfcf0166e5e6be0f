"""A file of the Python package index, as bytes: nothing of it is run.

`pip download` would run the setup of a source package to find out what it depends on.
"""

from __future__ import annotations

import ast
import base64
import html
import re
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO

from theodolite.core.errors import UseError

PYPI = "https://pypi.org/simple"
SECONDS = 60.0
"""Without a byte, after which a download is given up."""
LONGEST_PAGE = 2**24
"""Bytes in the list of a project's files."""


def download(project: str, file: str, size: int, folder: Path) -> Path:
    """Bring a file of a project into a folder, from pip's indexes in their order.

    Args:
        project: its name on the index.
        file: as the index lists it.
        size: bytes of the file. More are not read.
        folder: where it goes.
    """
    settings = _settings()
    verified = ssl.create_default_context(cafile=settings.get("cert"))
    indexes = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    reasons = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{project.lower()}/" + ("index.html" if index.startswith("file:") else "")
        try:
            with _open(page, verified) as stream:
                listed = stream.read(LONGEST_PAGE).decode("utf-8", "replace")
            links = (html.unescape(link) for link in re.findall(r'href="([^"]+)"', listed))
            found = [link for link in links if urllib.parse.urlsplit(link).path.endswith(f"/{file}")]
            if not found:
                reasons.append(f"{_shown(page)} does not list it")
                continue
            with _open(urllib.parse.urljoin(page, found[0]), verified) as stream:
                content = stream.read(size + 1)
        except (OSError, ValueError) as error:  # ValueError: an address that is none
            reasons.append(f"{_shown(page)}: {' '.join(str(error).split())}")
            continue
        target = folder / file
        target.write_bytes(content)
        return target
    raise UseError(f"{file} could not be downloaded: {'; '.join(reasons)}")


def _settings() -> dict[str, str]:
    """What pip's environment variables and files say of indexes; nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = dict(line.split("=", 1) for line in done.stdout.splitlines() if "='" in line)
    return {
        name: str(ast.literal_eval(listed[key]))
        for name in ("index-url", "extra-index-url", "cert")
        for key in (f"global.{name}", f"download.{name}", f":env:.{name}")  # the last one counts
        if key in listed
    }


def _open(address: str, verified: ssl.SSLContext) -> IO[bytes]:
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
    """Without a password."""
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(parts._replace(netloc=_host(parts)))


def _host(parts: urllib.parse.SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]
