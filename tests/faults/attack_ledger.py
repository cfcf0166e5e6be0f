"""Ledgers and exports that are damaged: what is read is what was written, or it is refused and named."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger

from .attack import Attack
from .driving import NAME, SPEC, open_ledger, outcome

ERROR = "Traceback\n  FileNotFoundError: '\udc80\0.bin'"
STORED_ERROR = "Traceback\n  FileNotFoundError: '\\udc80\\x00.bin'"
RUNS = [number for number in range(18) if number % 6 in (0, 1, 2, 4)]  # those with short series

Chance = random.Random
Change = Callable[[bytearray, Chance], None]


def outcomes() -> list[Any]:
    """Every fourth run fails before it finishes, and the last fails only."""
    found: list[Any] = []
    for number in RUNS:
        if number % 4 == 0:
            found.append(replace(outcome(number), status="failed", step=0, error=ERROR, readings={}))
        found.append(outcome(number))
    return [*found, replace(outcome(100), status="failed", step=0, error=ERROR, readings={})]


def facts(made: Any, error: str | None) -> tuple[Any, ...]:
    """What has to be read of an outcome, by its own values."""
    metrics = {name: list(series) for name, series in made.metrics.items() if series}
    values = (made.status, made.step, made.held_out, made.seconds, made.device, made.engine, error)
    return (made.run.identity, made.run.to_dict(), values, metrics, made.readings)


EXPECTED = [facts(made, made.error and STORED_ERROR) for made in outcomes()]


def read(ledger: Ledger) -> list[tuple[Any, ...]]:
    """The same of a ledger; the ways to read it have to agree."""
    names = ("status", "step", "held_out", "seconds", "device", "engine", "error")
    found = [
        (each.run, each.spec, tuple(each.values[name] for name in names), each.metrics, each.readings)
        for each in ledger.attempts()
    ]
    rows = ledger.rows()
    assert len(rows) == len({each[0] for each in found})
    for row in rows:
        tries = [each for each in found if each[0] == row["identity"]]
        shown = next((each for each in tries if each[2][0] != "failed"), tries[-1])
        assert tuple(row[name] for name in names) == shown[2]
        assert row["attempts"] == len(tries)
        assert ledger.metrics(row["identity"]) == shown[3]
    assert ledger.settled() == {each[0] for each in found if each[2][0] != "failed"}
    assert (ledger.name, ledger.spec) == (NAME, SPEC)
    return found


def flip_a_bit(content: bytearray, chance: Chance) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def flip_a_bit_of_the_first_page(content: bytearray, chance: Chance) -> None:
    """Where SQLite's header and the first definitions of tables lie."""
    content[chance.randrange(100 if chance.random() < 0.5 else 4096)] ^= 1 << chance.randrange(8)


def overwrite_a_sector(content: bytearray, chance: Chance) -> None:
    start = 512 * chance.randrange(len(content) // 512)
    content[start : start + 512] = chance.choice((bytes(512), chance.randbytes(512)))


def damage_ledgers(change: Change, count: int, folder: Path) -> Iterator[str | None]:
    with open_ledger(folder / "whole") as ledger:
        for made in outcomes():
            ledger.append(made)
    whole = (folder / "whole" / "ledger.sqlite").read_bytes()
    for number in range(count):
        content = bytearray(whole)
        change(content, random.Random(number))
        shutil.rmtree(folder / "try", ignore_errors=True)
        (folder / "try").mkdir()
        path = folder / "try" / "ledger.sqlite"
        path.write_bytes(content)
        yield read_wrong(path) or salvaged_wrong(path) or continued_wrong(path)


def read_wrong(path: Path) -> str | None:
    try:
        with Ledger.read(path) as ledger:
            return None if read(ledger) == EXPECTED else "other values were read"
    except UseError:
        return None
    except Exception as error:
        return f"reading raised {error!r}"


def salvaged_wrong(path: Path) -> str | None:
    left_out: list[str] = []
    try:
        with Ledger.salvage(path, path.with_name("new.db"), said=left_out.append) as ledger:
            found = read(ledger)
    except UseError:
        return None
    except Exception as error:
        return f"salvaging raised {error!r}"
    if strange := [each for each in found if each not in EXPECTED]:
        return f"salvaged what was not written: {strange[0]}"
    named = {int(re.findall(r"attempt (\d+)", line)[0]) for line in left_out}
    lost = {number for number, each in enumerate(EXPECTED, 1) if each not in found}
    return None if lost <= named else f"attempts {sorted(lost - named)} are lost and not named"


def continued_wrong(path: Path) -> str | None:
    """The driver goes on only with a ledger that is whole."""
    try:
        with open_ledger(path) as ledger:
            if read(ledger) != EXPECTED:
                return "a driver read other values"
            ledger.append(outcome(101))
        with Ledger.read(path) as ledger:
            return None if read(ledger) == [*EXPECTED, facts(outcome(101), None)] else "spoilt by a driver"
    except UseError:
        return None
    except Exception as error:
        return f"a driver raised {error!r}"


def change_a_digit(content: bytearray, chance: Chance) -> None:
    places = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    place = chance.choice(places)
    content[place] = chance.choice([digit for digit in b"0123456789" if digit != content[place]])


def change_lines(content: bytearray, chance: Chance) -> None:
    """Take lines out, put one in twice, or exchange two."""
    head, *lines = bytes(content).splitlines(keepends=True)
    first, second = sorted(chance.sample(range(len(lines)), 2))
    kind = chance.randrange(4)
    if kind == 0:
        del lines[first]
    elif kind == 1:
        del lines[first:]
    elif kind == 2:
        lines.insert(second, lines[first])
    else:
        lines[first], lines[second] = lines[second], lines[first]
    content[:] = head + b"".join(lines)


def cut(content: bytearray, chance: Chance) -> None:
    del content[chance.randrange(len(content)) :]


def change_exports(
    ending: str, changes: tuple[Change, ...], count: int, folder: Path
) -> Iterator[str | None]:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    with open_ledger(folder / "whole") as ledger:
        for made in outcomes():
            ledger.append(made)
        files = ledger.export(folder / f"out.{ending}")
    whole = [file.read_bytes() for file in files]
    for number in range(count):
        chance = random.Random(number)
        for file, content in zip(files, whole, strict=True):
            file.write_bytes(content)
        changed = bytearray(whole[number % 2])
        changes[number // 2 % len(changes)](changed, chance)
        files[number % 2].write_bytes(changed)
        shutil.rmtree(folder / "try", ignore_errors=True)
        yield imported_wrong(files[0], folder / "try")


def imported_wrong(file: Path, folder: Path) -> str | None:
    try:
        with Ledger.import_(file, folder) as ledger:
            return None if read(ledger) == EXPECTED else "other values were imported"
    except UseError:
        return None
    except Exception as error:
        return f"importing raised {error!r}"


AS_WRITTEN = "what is read is what was written, or it is refused; salvage leaves out and names the rest"
REFUSED = "what is imported is what was exported, or it is refused"
ATTACKS = [
    Attack("a bit is flipped in a ledger", AS_WRITTEN, partial(damage_ledgers, flip_a_bit), 15, 500),
    Attack(
        "a bit is flipped in a ledger's first page",
        AS_WRITTEN,
        partial(damage_ledgers, flip_a_bit_of_the_first_page),
        10,
        200,
    ),
    Attack(
        "512 bytes of a ledger are overwritten",
        AS_WRITTEN,
        partial(damage_ledgers, overwrite_a_sector),
        10,
        300,
    ),
    Attack(
        "an exported CSV is edited",
        REFUSED,
        partial(change_exports, "csv", (change_a_digit, change_lines, cut, flip_a_bit)),
        16,
        400,
    ),
    Attack(
        "an exported Parquet is damaged",
        REFUSED,
        partial(change_exports, "parquet", (flip_a_bit, cut)),
        8,
        400,
    ),
]
