"""Drivers of a ledger that are killed, and files that are cut short then: nothing is lost or wrong."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger, LedgerError

from .attack import Attack
from .driving import (
    PAGE,
    Driver,
    State,
    assert_whole,
    checked,
    halted_states,
    is_sound,
    open_ledger,
    outcome,
    reopened,
)


def kill(count: int, folder: Path) -> Iterator[str | None]:
    chance = random.Random(4)
    path = folder / "ledger.sqlite"
    known = 0
    for number in range(count):
        if number % 100 == 99:  # a ledger that is read whole after each kill must not grow for ever
            path, known = folder / f"{number}.sqlite", 0
        with Driver(path, "loop") as driver:
            # Every fifth is killed while it starts.
            printed = [driver.next()] if number % 5 else []
            time.sleep(chance.uniform(0, 0.08))
            printed += driver.kill()
        safe = [line.strip() for line in printed if line.endswith("\n")]
        if safe != [outcome(known + i).run.identity for i in range(len(safe))]:
            yield "a run was made twice, or left out"
            continue
        try:
            with open_ledger(path) as ledger:
                there = checked(ledger)
            assert is_sound(path)
        except (AssertionError, UseError) as error:
            yield f"after the kill: {error!r}"
            continue
        # One more may be there: killed after it was safe, before it said so.
        is_all = known + len(safe) <= there <= known + len(safe) + 1
        yield None if is_all else f"{known + len(safe)} runs were safe and {there} are there"
        known = there


def _tries(
    damaged: Callable[[list[State], random.Random], State], check: Callable[[State, Path], None]
) -> Callable[[int, Path], Iterator[str | None]]:
    """The n-th damage to a state that a killed driver left, and a check that raises what is wrong."""

    def tries(count: int, folder: Path) -> Iterator[str | None]:
        (folder / "driver").mkdir()
        states = halted_states(folder / "driver", 18 if count > 100 else 6)
        for number in range(count):
            state = damaged(states, random.Random(number))
            try:
                check(state, state.put(folder / "try"))
            except Exception as error:
                yield repr(error)
            else:
                yield None

    return tries


def log_cut(states: list[State], chance: random.Random) -> State:
    state = chance.choice([state for state in states if state.log])
    return state.cut(log=chance.randrange(len(state.log)))


def log_flipped(states: list[State], chance: random.Random) -> State:
    state = chance.choice([state for state in states if state.log])
    log = bytearray(state.log)
    log[chance.randrange(len(log))] ^= 1 << chance.randrange(8)
    return replace(state, log=bytes(log))


def last_page_cut(states: list[State], chance: random.Random) -> State:
    return chance.choice(states).cut(file=-chance.randint(1, PAGE))


def much_cut(states: list[State], chance: random.Random) -> State:
    state = chance.choice(states)
    return replace(state.cut(file=chance.randrange(len(state.file))), spare=None)


def half_moved(states: list[State], chance: random.Random) -> State:
    """Killed while SQLite moved its log into the file."""
    number = chance.randrange(len(states) // 3)
    before, after = states[3 * number + 1 : 3 * number + 3]
    moved = PAGE * chance.randrange(1, len(after.file) // PAGE)
    return replace(before, file=after.file[:moved] + before.file[moved:])


def half_moved_and_log_cut(states: list[State], chance: random.Random) -> State:
    state = half_moved(states, chance)
    return state.cut(log=chance.randrange(len(state.log)))


def half_moved_and_logs_gone(states: list[State], chance: random.Random) -> State:
    return replace(half_moved(states, chance), log=b"", spare=None)


def nothing_is_lost(state: State, path: Path) -> None:
    there = reopened(path)
    assert there == state.safe + 1, f"{state.safe + 1} runs were in the log and {there} are there"


def at_most_the_last_is_lost(state: State, path: Path) -> None:
    there = reopened(path)
    assert state.safe <= there <= state.safe + 1, f"{state.safe} runs were safe and {there} are there"


def refused_or_whole(state: State, path: Path) -> None:
    try:
        at_most_the_last_is_lost(state, path)
    except UseError:
        with (
            contextlib.suppress(LedgerError),  # not even the study can be read
            Ledger.salvage(path, path.with_name("new.db")) as ledger,
        ):
            assert_whole(ledger)


ONE = "at most the record that was not yet said to be safe is missing"
REFUSED = "nothing is missing, or it is refused and what is salvaged is whole"
ATTACKS = [
    Attack(
        "the driver of a ledger is killed (SIGKILL) at any moment",
        "what was said to be safe is there, once, to the last bit",
        kill,
        10,
        516,
    ),
    Attack("SQLite's log is cut short", ONE, _tries(log_cut, at_most_the_last_is_lost), 10, 300),
    Attack("a bit is flipped in SQLite's log", ONE, _tries(log_flipped, at_most_the_last_is_lost), 10, 300),
    Attack("the last page of a ledger is cut", ONE, _tries(last_page_cut, at_most_the_last_is_lost), 10, 300),
    Attack(
        "pages are half moved from log to ledger, the log is cut short",
        "nothing is missing",
        _tries(half_moved_and_log_cut, nothing_is_lost),
        10,
        300,
    ),
    Attack(
        "pages are half moved, the log and its copy are gone",
        REFUSED,
        _tries(half_moved_and_logs_gone, refused_or_whole),
        10,
        300,
    ),
    Attack("a ledger is cut anywhere", REFUSED, _tries(much_cut, refused_or_whole), 10, 300),
]
