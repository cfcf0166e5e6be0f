"""A file that is torn, or not the one it should be, is never taken for the data set."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from theodolite import UseError, data
from theodolite.data.files import locate, read
from theodolite.data.sources import File

CONTENT = b"all of it " * 1000
FILE = File("text", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def _write(place: Path, suffix: str) -> Path:
    target = place / ("text" + suffix)
    if suffix == ".zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("text", CONTENT)
    else:
        pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
        target.write_bytes(pack(CONTENT))
    return target


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip"])
def test_a_whole_file_is_read_however_it_is_packed(suffix: str, tmp_path: Path) -> None:
    _write(tmp_path, suffix)
    assert read(tmp_path, FILE) == CONTENT


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_torn_file_is_refused(suffix: str, keep: float, tmp_path: Path) -> None:
    target = _write(tmp_path, suffix)
    whole = target.read_bytes()
    target.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(
        UseError, match=r"text.* is (damaged|not the expected file).*Delete it and fetch it again"
    ):
        read(tmp_path, FILE)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip"])
def test_one_flipped_bit_is_noticed(suffix: str, tmp_path: Path) -> None:
    target = _write(tmp_path, suffix)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 16
    target.write_bytes(content)
    with pytest.raises(UseError, match="text"):
        read(tmp_path, FILE)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip"])
def test_a_bomb_is_not_unpacked(suffix: str, tmp_path: Path) -> None:
    """20 MB of zeros in a file that should hold 10 kB: what is read is bounded."""
    bomb, zeros = tmp_path / f"text{suffix}", bytes(1_000_000)
    if suffix == ".zip":
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("text", "w") as out:
            for _ in range(20):
                out.write(zeros)
    else:
        with {"": Path.open, ".gz": gzip.open, ".xz": lzma.open}[suffix](bomb, "wb") as out:  # type: ignore[operator]
            for _ in range(20):
                out.write(zeros)
    tracemalloc.start()
    try:
        with pytest.raises(UseError, match="it holds more than 10000 bytes"):
            read(tmp_path, FILE)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["mnist", "cifar10", "enwik8"])
def test_a_missing_set_names_the_command_that_fetches_it(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    assert not data.present(name)
    with pytest.raises(UseError, match=f"Fetch it with: theodolite data fetch {name}\\. Or put"):
        data.path(name)


LENGTHS = {"train-images-idx3": 47_040_016, "train-labels-idx1": 60_008}
LENGTHS |= {"t10k-images-idx3": 7_840_016, "t10k-labels-idx1": 10_008}


def _write_sparse(file: Path, length: int) -> None:
    """Nothing but zeros, which take no place on the disk."""
    with file.open("wb") as stream:
        stream.truncate(length)


def test_half_a_set_is_a_missing_set(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name, length in LENGTHS.items():
        assert not data.present("mnist")
        _write_sparse(tmp_path / "mnist" / f"{name}-ubyte", length)
    assert data.path("mnist") == tmp_path / "mnist"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_is_too_short_is_not_there(suffix: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name, length in LENGTHS.items():
        _write_sparse(tmp_path / "mnist" / f"{name}-ubyte", length)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    torn = tmp_path / "mnist" / f"t10k-labels-idx1-ubyte{suffix}"
    whole = gzip.compress(bytes(10_008)) if suffix else bytes(10_008)
    torn.write_bytes(whole)
    assert data.present("mnist")
    torn.write_bytes(whole[: len(whole) // 2])
    assert not data.present("mnist")
    with pytest.raises(UseError, match=rf"{torn} is damaged.*theodolite data fetch mnist"):
        data.path("mnist")


def test_what_the_package_carries_does_not_depend_on_the_data_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    place, (file,) = locate("sotu")
    assert place == Path(data.__file__).parent
    assert (place / f"{file.name}.xz").stat().st_size < 10_000_000
    assert len(read(place, file)) == 7_696_080


def test_a_computed_set_is_present_and_has_no_path() -> None:
    assert data.present("mixture")
    with pytest.raises(UseError, match="mixture is computed, it has no files"):
        data.path("mixture")


def test_the_data_folder_is_in_the_users_cache_unless_said_otherwise(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("THEODOLITE_DATA", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.folder() == tmp_path / "theodolite"
    monkeypatch.setenv("THEODOLITE_DATA", "/elsewhere")
    assert data.folder() == Path("/elsewhere")
