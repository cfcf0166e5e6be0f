"""Does every job decode? Patterns of late workers, played with gradients that are integers; and loads.

Stragglers that a scheme is made for: for GC(n, s) at most s late workers in a round; for SR-SGC and M-SGC, in
every window of W rounds, at most λ late workers, each of them late within B rounds in a row.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from theodolite.fleet import (
    CodedRounds,
    CodingScheme,
    GradientCoding,
    MultiplexedCoding,
    SelectiveReattempt,
)

Late = Sequence[frozenset[int]]
"""By round, the workers that are late."""
ENUMERATED: dict[str, tuple[CodingScheme, int]] = {
    "GC(4, 2)": (GradientCoding(4, 2), 3),
    "GC(5, 1)": (GradientCoding(5, 1), 4),
    "SR-SGC(3, 1, 2, 2)": (SelectiveReattempt(3, 1, 2, 2), 5),
    "SR-SGC(4, 1, 3, 3)": (SelectiveReattempt(4, 1, 3, 3), 5),
    "SR-SGC(4, 2, 3, 2)": (SelectiveReattempt(4, 2, 3, 2), 4),
    "M-SGC(3, 1, 2, 3)": (MultiplexedCoding(3, 1, 2, 3), 5),
    "M-SGC(4, 1, 2, 1)": (MultiplexedCoding(4, 1, 2, 1), 5),
    "M-SGC(4, 1, 3, 2)": (MultiplexedCoding(4, 1, 3, 2), 5),
    "M-SGC(3, 2, 3, 2)": (MultiplexedCoding(3, 2, 3, 2), 5),
}
"""Schemes, as the paper writes their parameters: n, s or n, B, W, λ; and rounds."""
DRAWN: dict[str, CodingScheme] = {
    "GC(6, 2)": GradientCoding(6, 2),
    "GC(6, 5)": GradientCoding(6, 5),
    "SR-SGC(6, 1, 2, 2)": SelectiveReattempt(6, 1, 2, 2),
    "SR-SGC(6, 1, 3, 4)": SelectiveReattempt(6, 1, 3, 4),
    "SR-SGC(6, 2, 3, 3)": SelectiveReattempt(6, 2, 3, 3),
    "M-SGC(6, 1, 2, 2)": MultiplexedCoding(6, 1, 2, 2),
    "M-SGC(6, 1, 4, 6)": MultiplexedCoding(6, 1, 4, 6),
    "M-SGC(6, 2, 3, 3)": MultiplexedCoding(6, 2, 3, 3),
    "M-SGC(6, 3, 5, 4)": MultiplexedCoding(6, 3, 5, 4),
}
ROUNDS = 24
"""Of a drawn pattern."""
EAGERNESS = (0.15, 0.4, 0.8)
"""Probabilities that a worker is late if it may be."""


def enumerated(scheme: CodingScheme, num_rounds: int) -> Iterator[tuple[frozenset[int], ...]]:
    """All patterns of late workers that a scheme is made for."""
    subsets = [
        frozenset(some)
        for size in range(scheme.workers + 1)
        for some in itertools.combinations(range(scheme.workers), size)
    ]
    patterns: list[tuple[frozenset[int], ...]] = [()]
    for _ in range(num_rounds):
        patterns = [
            (*before, some) for before in patterns for some in subsets if is_allowed(scheme, (*before, some))
        ]
    yield from patterns


def drawn(scheme: CodingScheme, num_rounds: int, luck: random.Random) -> tuple[frozenset[int], ...]:
    """A random pattern: workers in random order become late if they may."""
    eagerness = luck.choice(EAGERNESS)
    late: list[frozenset[int]] = []
    for _ in range(num_rounds):
        now: frozenset[int] = frozenset()
        for worker in luck.sample(range(scheme.workers), scheme.workers):
            more = now | {worker}
            if luck.random() < eagerness and is_allowed(scheme, (*late, more)):
                now = more
        late.append(now)
    return tuple(late)


def is_allowed(scheme: CodingScheme, late: Late) -> bool:
    """Is a scheme made for these stragglers, if it is for all but those of the last round?

    >>> scheme = MultiplexedCoding(4, 1, 3, 2)
    >>> is_allowed(scheme, [{0}, {1}, {0}]), is_allowed(scheme, [{0}, {1}, set(), {0, 2}])
    (False, False)
    >>> is_allowed(scheme, [{0}, {1}, set(), {0}])
    True
    """
    if isinstance(scheme, GradientCoding):
        return len(late[-1]) <= scheme.stragglers
    assert isinstance(scheme, SelectiveReattempt | MultiplexedCoding)
    window = late[-scheme.window :]
    if len(frozenset().union(*window)) > scheme.stragglers:
        return False
    earlier = window[: -scheme.burst]
    return not any(worker in before for before in earlier for worker in late[-1])


def num_lost(scheme: CodingScheme, late: Late) -> int:
    """Jobs whose gradient is not the sum over all examples within the delay.

    Each part has a gradient of its own, a large random integer. What workers send is added up job by job; a
    part that was sent before is not added again. After the pattern everybody answers.
    """
    values = random.Random(0)
    rounds = CodedRounds(scheme, jobs=len(late))
    gradients = [[values.getrandbits(60) for _ in range(scheme.parts)] for _ in late]
    sums = [0] * len(late)
    sent: list[set[int]] = [set() for _ in late]
    for turn in range(len(late) + scheme.delay):
        answered = set(range(scheme.workers)) - (late[turn] if turn < len(late) else set())
        for worker, tasks in enumerate(rounds.assignments()):
            for job, part in tasks if worker in answered else ():
                if part not in sent[job]:
                    sums[job] += gradients[job][part]
                    sent[job].add(part)
        rounds.end(answered)
    return sum(total != sum(parts) for total, parts in zip(sums, gradients, strict=True))


def load_errors() -> dict[str, tuple[int, int]]:
    """By scheme: parameters whose load is not exactly that of the closed formula, and how many were tried.

    All with up to 40 workers that can be grouped evenly.
    """
    found = {"GC": [0, 0], "SR-SGC": [0, 0], "M-SGC": [0, 0]}

    def compare(name: str, scheme: CodingScheme, expected: Fraction) -> None:
        found[name][0] += Fraction(scheme.minitasks, scheme.parts) != expected
        found[name][1] += 1

    for n in range(2, 41):
        for s in range(n):
            if n % (s + 1) == 0:
                compare("GC", GradientCoding(n, s), Fraction(s + 1, n))
        for burst, extra in itertools.product((1, 2, 3), (1, 2, 3, 4, 6)):
            window = burst + extra
            for late in range(n + 1):
                coded = -(-burst * late // (window - 1 + burst))
                if (window - 1) % burst == 0 and n % (coded + 1) == 0:
                    code = SelectiveReattempt(n, burst, window, late)
                    compare("SR-SGC", code, Fraction(coded + 1, n))
                if late == n or n % (late + 1) == 0:
                    multiplexed = MultiplexedCoding(n, burst, window, late)
                    compare("M-SGC", multiplexed, multiplexed_load(n, burst, window, late))
    return {name: (wrong, tried) for name, (wrong, tried) in found.items()}


def multiplexed_load(n: int, burst: int, window: int, late: int) -> Fraction:
    """The load of M-SGC by its formula: the share of a job's examples that a worker computes in a round."""
    if late == n:
        return Fraction(window - 1 + burst, n * (window - 1))
    return Fraction((late + 1) * (window - 1 + burst), n * (burst + (window - 1) * (late + 1)))


def random_patterns(scheme: CodingScheme, seed: int, count: int) -> tuple[int, float]:
    """Lost jobs over so many random patterns, and the share of workers and rounds that are late."""
    luck = random.Random(seed)
    patterns = [drawn(scheme, ROUNDS, luck) for _ in range(count)]
    lost = sum(num_lost(scheme, late) for late in patterns)
    sizes = [len(now) for late in patterns for now in late]
    return lost, float(np.mean(sizes)) / scheme.workers
