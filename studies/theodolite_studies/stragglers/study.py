"""Does sequential gradient coding save time where workers are late now and then?

Four parts:

    load      the loads of GC, SR-SGC and M-SGC against the paper's formulas, as fractions
    decode    every pattern of late workers that a scheme is made for: all of them for up to 5 workers, and
              random ones for 6, with gradients that are integers
    times     rounds with Gilbert–Elliott stragglers: parameters are chosen on the first half, and the times
              are those of the second, by how much of a round is computing
    codes     rounding errors of random cyclic codes and of fractional repetition

A round takes `1 + a·(load·n − 1)` times as long as one with 1/n of the examples on each of n workers.

References:
    Krishnan, Ebrahimi, Khisti, Sequential gradient coding for straggler mitigation, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.fleet.straggling.comparison import PATIENCE
from theodolite.fleet.straggling.simulation import BACKUP, TimedScheme, timed_schemes
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.stragglers.cyclic_codes import CODES, rounding
from theodolite_studies.stragglers.decoding import (
    DRAWN,
    ENUMERATED,
    enumerated,
    load_errors,
    num_lost,
    random_patterns,
)
from theodolite_studies.stragglers.report import ANY, CLAIMS, MODELS, SLOPES, USUAL, figures, notes
from theodolite_studies.stragglers.waiting import SETTINGS, Waited, waited


@dataclass(frozen=True)
class StragglerSetting(Setting):
    """How much is run."""

    seeds: int = 20
    rounds: int = 400
    patterns: int = 400
    """Random ones for each scheme."""
    failures: int = 100
    """Patterns of late workers for each random code."""

    def about(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "seeds": self.seeds,
            "rounds": self.rounds,
            "patterns": self.patterns,
            "failures": self.failures,
        }


def cells(setting: StragglerSetting) -> list[Cell]:
    """Parts and what they are about, times seeds where something is random."""
    seeds = range(setting.seeds)
    found: list[Cell] = [{"part": "load", "setting": "", "seed": 0}]
    found += [{"part": "decode", "setting": name, "seed": 0} for name in (*ENUMERATED, *DRAWN)]
    found += [{"part": "times", "setting": name, "seed": seed} for seed in seeds for name in SETTINGS]
    found += [{"part": "codes", "setting": name, "seed": seed} for seed in seeds for name in CODES]
    return found


def run(cell: Cell, setting: StragglerSetting, *_: object) -> Iterator[Record]:
    """The records of one scheme, setting or code."""
    name, seed = cell["setting"], cell["seed"]
    if cell["part"] == "load":
        for scheme, (wrong, tried) in load_errors().items():
            yield {"scheme": scheme, "wrong": wrong, "tried": tried}
    elif cell["part"] == "codes":
        found = rounding(*CODES[name], seed, setting.failures)
        yield {"workers": CODES[name][0], **{key: short(value) for key, value in found.items()}}
    elif cell["part"] == "times":
        yield from compared(SETTINGS[name].times(setting.rounds, seed))
    elif name in ENUMERATED:
        code, num_rounds = ENUMERATED[name]
        lost = [num_lost(code, late) for late in enumerated(code, num_rounds)]
        yield {"way": "all", "patterns": len(lost), "rounds": num_rounds, "lost": sum(lost)}
    else:
        total, share = random_patterns(DRAWN[name], seed, setting.patterns)
        yield {"way": "random", "patterns": setting.patterns, "lost": total, "late": short(share)}


def compared(times: Array) -> Iterator[Record]:
    """For each scheme and `SLOPES`: the time on the second half over that of waiting for all.

    `chosen` has the parameters that are best on the first half, `best` those that are best on the second.
    """
    half, most = len(times) // 2, max(MODELS)
    names = [str(worker) for worker in range(times.shape[1])]
    found: list[TimedScheme | Waited] = list(timed_schemes(times, half, names, most, PATIENCE))
    pairs = [(burst, count - burst + 1) for count in range(2, most + 1) for burst in range(1, count // 2 + 1)]
    base = times[half:].max(1).mean()
    planned = [one for one in found if one.scheme != BACKUP]
    found += waited(times, pairs)
    for scheme in dict.fromkeys(one.scheme for one in found):
        own = [one for one in found if one.scheme == scheme]
        for models in MODELS if max(one.models for one in own) > 1 else (1,):
            able = [one for one in own if one.models <= models]
            yield {"scheme": scheme, "models": models, **_judged(able, half, base)}
    for models in MODELS:
        able = [one for one in planned if one.models <= models]
        yield {"scheme": ANY, "models": models, **_judged(able, half, base)}


def _judged(some: Sequence[TimedScheme | Waited], half: int, base: float) -> Record:
    factors = np.array([[1 + slope * (one.load - 1) for slope in SLOPES] for one in some])
    first, second = (
        np.array([part.mean() for part in parts])[:, None] * factors / base
        for parts in ([one.seconds[:half] for one in some], [one.seconds[half:] for one in some])
    )
    places = first.argmin(0)
    usual = some[places[SLOPES.index(USUAL)]]
    return {
        "chosen": [short(second[place, column], 4) for column, place in enumerate(places)],
        "best": [short(value, 4) for value in second.min(0)],
        "schemes": [some[place].scheme for place in places],
        "parameters": usual.setting,
        "load": short(usual.load, 4),
    }


STUDY = Study(
    "stragglers",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=StragglerSetting(),
    small=StragglerSetting(small=True, seeds=1, rounds=80, patterns=20, failures=20),
)
