"""No space is left: a clear stop, nothing half written, and it goes on when there is space again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from theodolite.fleet.ledger import Ledger, LedgerError

from .driving import Driver, checked, is_sound, open_ledger, outcome


@pytest.mark.parametrize("limit", [150_000, 151_000, 301_234])
def test_a_file_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    with Driver(tmp_path, str(limit)) as driver:
        *safe, last = map(str.strip, driver.rest())
    assert last.startswith(f"refused: LedgerError: {tmp_path / 'ledger.sqlite'} cannot be written or read")
    assert last.endswith("the same command continues here")
    with open_ledger(tmp_path) as ledger:
        assert checked(ledger) == len(safe) > 0
        ledger.append(outcome(len(safe)))
    assert is_sound(tmp_path / "ledger.sqlite")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "theodolite", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def append_all(ledger: Ledger) -> None:
    for number in range(1000):
        ledger.append(outcome(number))


def test_a_disk_that_is_full_and_then_is_not(small_disk: Path) -> None:
    other = small_disk / "other"
    other.write_bytes(bytes(300_000))
    with open_ledger(small_disk) as ledger:
        with pytest.raises(LedgerError, match="is full: free some space, and the same command continues"):
            append_all(ledger)
        safe = checked(ledger)
        assert safe > 10
        with pytest.raises(LedgerError, match="is full"):
            ledger.append(outcome(3 + 6 * safe))
        other.unlink()
        ledger.append(outcome(safe))
        assert checked(ledger) == safe + 1
    assert is_sound(small_disk / "ledger.sqlite")
    with open_ledger(small_disk) as ledger:
        assert checked(ledger) == safe + 1


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(2**20))
    with pytest.raises(LedgerError, match="is full"):
        open_ledger(small_disk)
    (small_disk / "other").unlink()
    with open_ledger(small_disk) as ledger:
        ledger.append(outcome(0))
        assert checked(ledger) == 1
