"""Attacks: one fault, tried many times on the real thing, and what has to hold each time.

A file `tests/faults/attack_SUBJECT.py` lists its attacks in `ATTACKS`. `make test` makes `few` tries of each
(test_attacks.py). `make attack` makes `many` and prints the table of docs/reliability.md:

    python -m tests.faults.attack                    all of them
    python -m tests.faults.attack --only ledger      those whose file or title has this word
    python -m tests.faults.attack --scale 0.1        a tenth of the tries
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Attack:
    """One kind of fault.

    Args:
        title: what is done, such as "a bit is flipped in a checkpoint".
        promise: what has to hold, such as "refused, and the run begins again".
        tries: `tries(count, folder)` makes `count` tries in an empty folder and yields for each of them None,
            or in one line what went wrong. The n-th try is the same on every machine.
        few: tries in `make test`, a second or two; 0 for none.
        many: tries in `make attack`, a minute or two.
    """

    title: str
    promise: str
    tries: Callable[[int, Path], Iterator[str | None]]
    few: int
    many: int


def found() -> dict[str, list[Attack]]:
    """By subject, the attacks of every file `attack_*.py` beside this one."""
    package = __package__ or "tests.faults"
    subjects = sorted(file.stem for file in HERE.glob("attack_*.py"))
    return {
        subject.removeprefix("attack_"): importlib.import_module(f"{package}.{subject}").ATTACKS
        for subject in subjects
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Attack files, runs, commands and probes; count what fails.")
    parser.add_argument("--only", default="", help="a word of the file's name or of the title")
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of tries (default 1)")
    given = parser.parse_args(arguments)
    chosen = [
        (subject, attack)
        for subject, attacks in found().items()
        for attack in attacks
        if given.only.lower() in f"{subject} {attack.title}".lower()
    ]
    if not chosen:
        parser.error(f"no attack has {given.only!r} in its name")
    print("| what is done | what has to hold | tries | failed | seconds |\n|---|---|---:|---:|---:|")
    total = failed = 0
    for subject, attack in chosen:
        count = max(1, round(attack.many * given.scale))
        begun, faults = time.monotonic(), []
        with tempfile.TemporaryDirectory(prefix="attack") as folder:
            for number, fault in enumerate(attack.tries(count, Path(folder)), 1):
                if fault is not None:
                    faults.append(f"try {number - 1}: {fault}")
                print(f"\r{attack.title}: {number} of {count}\033[K", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr)
        assert number == count, f"{attack.title}: {number} tries were made, {count} were asked for"
        spent = time.monotonic() - begun
        row = f"| {attack.title} | {attack.promise} | {count} | {len(faults)} | {spent:.0f} |"
        print(row, flush=True)
        for fault in faults[:5]:
            print(f"{subject}: {fault}", file=sys.stderr)
        total, failed = total + count, failed + len(faults)
    print(f"\n{failed} of {total} tries failed.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
