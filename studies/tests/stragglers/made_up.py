"""Records of the study of stragglers with known verdicts."""

from __future__ import annotations

from typing import Any

from theodolite.fleet.straggling.simulation import BACKUP, LEAVE, WAIT
from theodolite_studies.stragglers.report import ANY, GC, MODELS, SLOPES, SR, M
from theodolite_studies.stragglers.waiting import BY_COUNT, GC_MODEL, M_MODEL

TIMES = {
    LEAVE: 1.1,
    BACKUP: 0.3,
    GC: 0.5,
    SR: 0.5,
    M: 0.4,
    BY_COUNT: 0.8,
    GC_MODEL: 1.2,
    M_MODEL: 0.9,
    ANY: 0.4,
}
"""Of a round at most shares of computing, in units of waiting for all."""


def records(
    *,
    regret: float = 1.0,
    lost: int = 0,
    wrong: int = 0,
    amplification: float = 1e8,
    single: float = 0.1,
    repetition: float = 1e-7,
    seeds: int = 4,
    **times: float,
) -> list[dict[str, Any]]:
    """All claims hold as they stand. A scheme's time, at every share of computing, by a name in `SHORT`."""
    found: list[dict[str, Any]] = []
    for scheme in (GC, SR, M):
        found.append({"part": "load", "setting": "", "seed": 0, "scheme": scheme, "wrong": wrong, "tried": 9})
    for way in ("all", "random"):
        own = {"part": "decode", "setting": f"GC {way}", "seed": 0, "way": way, "patterns": 10}
        found.append({**own, "lost": lost})
    usual = {**TIMES, **{SHORT[name]: value for name, value in times.items()}}
    for seed in range(seeds):
        slight = 1 + 0.001 * seed
        for setting in ("64 workers", "256 workers"):
            own = {"part": "times", "setting": setting, "seed": seed, "parameters": "s = 1", "load": 2.0}
            own["schemes"] = [WAIT] * len(SLOPES)
            for scheme, value in usual.items():
                series = [value * slight] * len(SLOPES)
                if not times and scheme == GC:  # best where load costs nothing, worst where it costs most
                    series[0], series[-1] = 0.3, 1.1
                kept = {"chosen": series, "best": [one / regret for one in series], "scheme": scheme}
                for models in MODELS if scheme in (SR, M, M_MODEL, ANY) else (1,):
                    found.append({**own, **kept, "models": models})
        for n, s in ((20, 4), (64, 8), (128, 15)):
            code = {"part": "codes", "setting": f"n = {n}, s = {s}", "seed": seed, "workers": n}
            code |= {
                f"{most} {name}": 1e-12 for most in ("median", "largest") for name in ("double", "single")
            }
            code |= {"median amplification": 10.0, "largest amplification": amplification * slight}
            code |= {"largest single": single * slight, "repetition": repetition * slight}
            found.append(code)
    return found


SHORT = {"gc": GC, "m": M, "backup": BACKUP, "count": BY_COUNT, "gc_model": GC_MODEL, "m_model": M_MODEL}
