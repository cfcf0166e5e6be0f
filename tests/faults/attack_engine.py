"""Attacks on the engines: settings that a run leaves, kills at any moment, and ways around the lock."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.fleet.checkpoint import RunCheckpoint, clear
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.ledger import Ledger

from ..fleet import tiny
from ..fleet.test_isolation import SPOILERS, restored_settings, state
from ..forking import start_script
from .attack import Attack
from .driving import Driver, checked, open_ledger, outcome
from .waiting import is_alive, wait_until

PROGRAMS = Path(__file__).parent / "programs"
SEEDS = range(4)
STEPS = 30


def spoilt_by_a_run(count: int, folder: Path) -> Iterator[str | None]:
    """The n-th run changes some settings at one of its steps, and fails or not."""
    (alone,) = serial([tiny.run(steps=4)], Resources())
    for number in range(count):
        chance = random.Random(number)
        names, at = chance.sample([*SPOILERS], chance.randint(1, 4)), chance.randrange(4)
        run, resources = _spoiling(names, at, fails=chance.random() < 0.3)
        with restored_settings():
            before = state()
            list(serial([run], resources))
            left = [name for name, value in state().items() if value != before[name]]
            (after,) = serial([tiny.run(steps=4)], Resources())
        if left:
            yield f"{', '.join(names)} at step {at}: {', '.join(left)} not put back"
        elif tiny.numbers(after) != tiny.numbers(alone):
            yield f"{', '.join(names)} at step {at}: the next run has other numbers"
        else:
            yield None


def spoilt_by_the_caller(count: int, folder: Path) -> Iterator[str | None]:
    """The caller has changed some settings before."""
    (alone,) = serial([tiny.run(steps=4)], Resources())
    for number in range(count):
        chance = random.Random(number)
        names = chance.sample([*SPOILERS], chance.randint(1, 4))
        with restored_settings():
            for name in names:
                SPOILERS[name]()
            before = state()
            (found,) = serial([tiny.run(steps=4)], Resources())
            left = [name for name, value in state().items() if value != before[name]]
        if tiny.numbers(found) != tiny.numbers(alone):
            yield f"under {', '.join(names)}: other numbers"
        else:
            yield f"under {', '.join(names)}: {', '.join(left)} not put back" if left else None


def _spoiling(names: list[str], at: int, *, fails: bool) -> tuple[Any, Resources]:
    def batch(seed: int, step: int) -> Any:
        drawn = tiny.batch(seed, step)
        if step == at:
            for name in names:
                SPOILERS[name]()
            if fails:
                raise ArithmeticError("and it fails")
        return drawn

    workload = dataclasses.replace(tiny.plain, name="spoiling", batch=batch)
    return dataclasses.replace(tiny.run(steps=4), workload="spoiling"), Resources({"spoiling": workload})


def removed_folder(count: int, folder: Path) -> Iterator[str | None]:
    """First checkpoints, while another thread removes the folder whenever it is empty."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, ended = folder / "checkpoints" / "state.safetensors", threading.Event()

    def remove() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                path.parent.rmdir()
            time.sleep(5e-5)  # else this thread has its turn after every call of the other's

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(count):
            said: list[str] = []
            checkpoint = RunCheckpoint(path, 0, said.append)
            checkpoint.keep(model, optimizer, {"loss": [1.0]})
            fault = said[0] if said else None if path.exists() else "it is not there"
            checkpoint.forget()
            yield fault
    finally:
        ended.set()
        remover.join()


def killed_at_random(count: int, folder: Path) -> Iterator[str | None]:
    """The driver or a worker is killed after a random number of steps; then the same command goes on."""
    expected = {
        outcome.run.identity: tiny.numbers(outcome)[1:4]
        for outcome in serial(
            [tiny.run("noted", seed, steps=STEPS, optimizer="adamw") for seed in SEEDS], Resources()
        )
    }
    for number in range(count):
        chance = random.Random(number)
        here = folder / str(number)
        here.mkdir()
        for _ in range(chance.randint(1, 2)):
            if fault := _session(
                folder, here, chance.randrange(2 * STEPS), kills_driver=chance.random() < 0.7
            ):
                break
        else:
            fault = _session(folder, here, None, kills_driver=False) or _compared(here, expected)
        yield fault


def _session(folder: Path, here: Path, steps: int | None, *, kills_driver: bool) -> str | None:
    """One life of a driver: until so many steps were drawn, or to its end."""
    notes = here / f"notes {len([*here.glob('notes *')])}"
    notes.mkdir()
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "noted_driver.py"), str(here), str(len(SEEDS)), str(STEPS)],
        cwd=folder,
        env={**os.environ, "TINY_FOLDER": str(notes)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def workers() -> list[int]:
        return [int(file.name.split()[1]) for file in notes.glob("worker *")]

    if steps is not None:
        wait_until(lambda: driver.poll() is not None or _lines(notes) > steps)
        victims = [driver.pid] if kills_driver else workers()[:1]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    if steps is None or not kills_driver:
        code = driver.wait()
        if code:
            return f"the driver ended with {code}"
    driver.wait()
    wait_until(lambda: not any(map(is_alive, workers())))
    return None


def _lines(notes: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in notes.glob("worker *"))


def _compared(here: Path, expected: dict[str, Any]) -> str | None:
    with Ledger.read(here) as ledger:
        found = {
            row["identity"]: (row["step"], row["held_out"], ledger.metrics(row["identity"]))
            for row in ledger.rows()
        }
    plain = {
        key: (step, loss, {name: [*each] for name, each in metrics.items()})
        for key, (step, loss, metrics) in expected.items()
    }
    if found != plain:
        return "other numbers than without a kill"
    left = sorted(file.name for file in here.iterdir() if not file.name.startswith("notes"))
    return None if left == ["ledger.sqlite"] else f"left behind: {', '.join(left)}"


def killed_while_writing(count: int, folder: Path) -> Iterator[str | None]:
    """A process is killed while it writes checkpoints; the next driver clears what it left."""
    path, script = folder / "checkpoints" / "state.safetensors", PROGRAMS / "checkpoint_writer.py"
    pipe, its_pipe = multiprocessing.get_context("forkserver").Pipe()
    writer = start_script(script, [str(path)], folder / "printed", given={"pipe": its_pipe})
    its_pipe.close()
    try:
        assert pipe.recv() == "ready"
        others = {*folder.iterdir()}
        for _ in range(count):
            pipe.send("write")
            child = pipe.recv()
            wait_until(lambda: any(path.parent.glob("*.part")))
            os.kill(child, signal.SIGKILL)
            assert pipe.recv() == "ended"
            RunCheckpoint(path).forget()
            clear(path.parent)
            left = sorted(str(file.relative_to(folder)) for file in {*folder.rglob("*")} - others)
            yield f"left behind: {', '.join(left)}" if left else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(writer.pid or 0, signal.SIGKILL)  # with its child
        writer.join()
        pipe.close()


def second_driver(count: int, folder: Path) -> Iterator[str | None]:
    """While one driver writes, a second one comes by another name, or after the lock file was removed."""
    for number in range(count):
        chance = random.Random(number)
        here = folder / str(number)
        here.mkdir()
        path, other = here / "ledger.sqlite", here / "other.db"
        way = ("symlink", "hard link", "folder", "itself")[number % 4]
        with Driver(path, "loop") as first:
            first.next()
            if way == "symlink":
                other.symlink_to(path)
            elif way == "hard link":
                other.hardlink_to(path)
            elif way == "folder":
                (folder / f"link {number}").symlink_to(here)
                other = folder / f"link {number}" / "ledger.sqlite"
            else:
                other = path
            removes = way == "itself" or chance.random() < 0.5
            if removes:
                Path(f"{path}-lock").unlink()
            try:
                open_ledger(other).close()
            except UseError:
                fault = None
            else:
                fault = f"by {way}{', without the lock file' if removes else ''}: two drivers at once"
        if way == "hard link":
            other.unlink()
        with open_ledger(path) as ledger:
            there = checked(ledger)
            ledger.append(outcome(there))
        yield fault


ATTACKS = [
    Attack(
        "a run changes settings of its process, and fails or not",
        "all are as before, the next run has the same numbers",
        spoilt_by_a_run,
        few=20,
        many=500,
    ),
    Attack(
        "the caller has changed settings of the process",
        "a run has the same numbers, the settings are as the caller set them",
        spoilt_by_the_caller,
        few=20,
        many=500,
    ),
    Attack(
        "the empty folder of checkpoints is removed while a first one is written",
        "it is written",
        removed_folder,
        few=300,
        many=10_000,
    ),
    Attack(
        "a worker is killed while it writes a checkpoint",
        "nothing is left of it once the next driver has ended",
        killed_while_writing,
        few=3,
        many=500,
    ),
    Attack(
        "driver or worker of a study are killed after a random number of steps",
        "no process is left, and resumed runs are equal bit for bit",
        killed_at_random,
        few=0,  # test_workers.py has a small form
        many=8,
    ),
    Attack(
        "a second driver comes by a link, or the lock file is removed",
        "it is refused, and the ledger is whole",
        second_driver,
        few=4,
        many=100,
    ),
]
