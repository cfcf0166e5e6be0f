"""A driver of a ledger that can be killed, and outcomes whose every value is known beforehand.

`python tests/faults/driving.py PATH MODE` appends one outcome after the other and prints the identity of each
when it is safe. It starts quickly: nothing here imports torch. Modes:

- `loop`: as fast as it can;
- `halt`: stops itself (SIGSTOP) three times with each record: when it is committed to SQLite's log, when the
  log was copied, and when it was moved to the file;
- `fork`: one outcome, then a child that outlives it, then waits;
- a number: no file may grow beyond so many bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.fleet import opening
from theodolite.fleet.ledger import Ledger

NAME, SPEC = "faults", {"steps": 500}
PAGE = 4096


@dataclass(frozen=True)
class KnownRun:
    """What a ledger needs of a run."""

    number: int
    workload: str = "mlp-mixture"

    @property
    def identity(self) -> str:
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        spec = {"workload": self.workload, "size": [64, 2], "base": None, "seed": self.number, "lr": 0.1}
        return {**spec, "note": "n" * (self.number * 53 % 900)}


@dataclass(frozen=True)
class KnownOutcome:
    """What a ledger needs of an outcome. Records are small and large, some with a long error before it."""

    run: KnownRun
    status: str = "finished"
    step: int = 500
    seconds: float = 1.0
    device: str = "cpu"
    engine: str = "serial"
    error: str | None = None
    readings: dict[str, Any] = field(default_factory=lambda: {"parameters": 10, "tokens": 20})

    @property
    def held_out(self) -> float:
        return 1 / (1 + self.run.number)

    @property
    def metrics(self) -> dict[str, tuple[tuple[int, float], ...]]:
        length = (0, 3, 40, 500, 150, 1500)[self.run.number % 6]
        return {"loss": tuple((step, self.run.number + step / 1000) for step in range(length))}


def outcome(number: int) -> Any:
    return KnownOutcome(KnownRun(number))


def open_ledger(path: Path) -> Ledger:
    return Ledger.open(path, name=NAME, spec=SPEC)


def checked(ledger: Ledger) -> int:
    """How many runs there are; they have to be the first so many, each once, whole and as they were."""
    rows = ledger.rows()
    for number, row in enumerate(rows):
        expected = outcome(number)
        assert row["identity"] == expected.run.identity
        assert row["held_out"] == expected.held_out
        assert row["attempts"] == 1
        assert row["tokens"] == 20
        series = ledger.metrics(row["identity"]).get("loss", [])
        assert tuple(series) == expected.metrics["loss"]
    assert ledger.settled() >= {row["identity"] for row in rows}
    return len(rows)


def is_sound(path: Path) -> bool:
    """What SQLite itself says of a file that nobody has open."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def reopened(path: Path) -> int:
    """How many records there are when the driver comes back; then it goes on."""
    with open_ledger(path) as ledger:
        there = checked(ledger)
        ledger.append(outcome(there))
        assert len(ledger.settled()) == there + 1
    assert is_sound(path)
    return there


def assert_whole(ledger: Ledger) -> None:
    """Some may be missing, but those that are there have all their values."""
    for row in ledger.rows():
        expected = outcome(row["seed"])
        assert tuple(ledger.metrics(row["identity"]).get("loss", ())) == expected.metrics["loss"]
        assert (row["held_out"], row["tokens"], row["attempts"]) == (expected.held_out, 20, 1)


class Driver:
    """This file as a process of its own; a context manager that leaves none behind."""

    def __init__(self, path: Path, mode: str) -> None:
        command = [sys.executable, __file__, str(path), mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.out, self.held = self.process.stdout, self.process.stdin

    def next(self) -> str:
        """What it prints next: the identity of a record that is safe."""
        return self.out.readline()

    def kill(self) -> list[str]:
        """Kill it, and see what it has printed before."""
        self.process.send_signal(signal.SIGKILL)
        return self.rest()

    def rest(self) -> list[str]:
        """All that it prints until it ends."""
        return self.out.readlines()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.held.close()


@dataclass(frozen=True)
class State:
    """What lay on the disk at one moment, and how many records were said to be safe by then."""

    file: bytes
    log: bytes
    spare: bytes | None
    safe: int

    def put(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / "ledger.sqlite"
        path.write_bytes(self.file)
        Path(f"{path}-wal").write_bytes(self.log)
        if self.spare is not None:
            Path(f"{path}-spare").write_bytes(self.spare)
        Path(f"{path}-lock").write_text("process 1")  # whose driver has not ended well
        return path

    def cut(self, *, file: int | None = None, log: int | None = None) -> State:
        """With so many bytes left."""
        return replace(self, file=self.file[:file], log=self.log[:log])


def halted_states(folder: Path, records: int) -> list[State]:
    """Three for each record: when it is committed to the log, when the log was copied, when it was moved."""
    path = folder / "ledger.sqlite"
    states: list[State] = []
    with Driver(path, "halt") as driver:
        for _ in range(3 * records):
            wait_until_stopped(driver)
            states.append(state_of(driver, path, states[-1].safe if states else 0))
            driver.process.send_signal(signal.SIGCONT)
    return states


def wait_until_stopped(driver: Driver) -> None:
    _, status = os.waitpid(driver.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def state_of(driver: Driver, path: Path, safe: int) -> State:
    """Of a driver that is stopped; so many were safe when it was looked at before."""
    while select.select([driver.out.fileno()], [], [], 0)[0]:
        safe += os.read(driver.out.fileno(), 1 << 16).count(b"\n")
    log, spare = (Path(f"{path}{ending}") for ending in ("-wal", "-spare"))
    return State(
        path.read_bytes(),
        log.read_bytes() if log.exists() else b"",
        spare.read_bytes() if spare.exists() else None,
        safe,
    )


def main(path: Path, mode: str) -> None:
    if mode.isdigit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(mode), int(mode)))
    with open_ledger(path) as ledger:
        if mode == "halt":
            halt_within(ledger)
        number = len(ledger.settled())
        while True:
            ledger.append(outcome(number))
            print(outcome(number).run.identity, flush=True)
            number += 1
            if mode == "fork":
                if os.fork() == 0:
                    print("forked", flush=True)
                    sys.stdin.read()  # until nobody holds the other end any more
                    os._exit(0)
                signal.pause()


def halt_within(ledger: Ledger) -> None:
    clear, keep = ledger._clear_log, opening.keep_log

    def halt() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def halting_clear() -> None:
        halt()
        clear()
        halt()

    def halting_keep(path: Path) -> None:
        keep(path)
        halt()

    ledger._clear_log, opening.keep_log = halting_clear, halting_keep  # type: ignore[method-assign]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except UseError as error:
        print(f"refused: {type(error).__name__}: {error}", flush=True)
