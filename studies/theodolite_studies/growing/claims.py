"""What is claimed of growing, decided by the records of the study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from theodolite_studies.framework.claims import Decided, Observation, at_least
from theodolite_studies.framework.paired import Paired, Verdict, paired, standing
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.growing.coverage import DELTA, METHODS, SPLITS
from theodolite_studies.growing.envelope import HELD, Envelope, envelope
from theodolite_studies.growing.ranking import (
    SIGNALS,
    Correlation,
    correlation,
    in_two_orders,
    realised,
    together,
)
from theodolite_studies.growing.training import ADDED

PARTS = ("growing", "ranking", "coverage", "envelope")
DIFFERENCES = (
    ("signal", "random", "the strongest places end better than random ones"),
    ("signal", "even", "and better than evenly spaced ones"),
    ("signal", "weakest", "and better than the weakest"),
    ("signal", "stack", "and better than stacking"),
    ("signal", "none", "growing ends better than training on without"),
    ("signal", "scratch", "and better than the deep network from scratch"),
    ("tried", "random", "places where a jump gains most end better than random ones"),
    ("jump", "tried", "a block that jumps there ends better than one that starts at zero"),
)
"""First less second is to be below zero, in the loss at the end, when all have spent the same."""
DOUBLED = (
    ("stack", "even", "doubled by stacking, a network ends better than with a closed copy behind each block"),
    ("stack", "scratch", "and better than the deep network from scratch"),
    ("signal", "even", "six of seven places by the signal are better than the last six"),
)
TRAINED = {"new": "the new block alone trained", "all": "everything trained"}
CERTIFIED = (
    ("wrong", "certificates on splits of their own are rarely wrong"),
    ("above", "and the gain that they promise is rarely too large"),
)
RANKED = 0.5
"""A rank correlation that would be of use."""
CLAIMED = ("gain", "preconditioned", "relative", "jumped preconditioned")
AGREEING = 0.8
"""What two orders of the data should have in common if there is a ranking at all."""
ALIKE = 2.0
"""Exponents within this factor agree."""
LEVEL = 0.05
"""How often a verdict may be wrong; all paired tests of a part together, by Holm's rule."""


def claims(records: Sequence[Record]) -> list[Decided]:
    """All that there are records for. The thresholds were written down before anything was run."""
    deciding = (_grown, _ranked, _covered, _enveloped)
    return [
        each
        for part, decide in zip(PARTS, deciding, strict=True)
        for each in _by_holm(list(decide(select(records, part=part))))
    ]


def losses(records: Sequence[Record], added: int, way: str, column: str = "loss") -> dict[int, float]:
    """By seed, of one way; a mean over the draws of random places."""
    found: dict[int, list[float]] = {}
    for one in select(records, added=added, way=way):
        found.setdefault(one["seed"], []).append(np.inf if one[column] is None else one[column])
    return {seed: float(np.mean(values)) for seed, values in found.items()}


@dataclass(frozen=True)
class _Test:
    """A claim that a difference is below zero."""

    statement: str
    threshold: str
    gap: Paired
    where: str

    def decided(self, *, stands: bool, of: int) -> Decided:
        """A difference that is seen, but does not stand among so many tests, is unclear."""
        verdict, where = self.gap.verdict(below=True), self.where
        # What diverged has no p, and is judged by its sides.
        if verdict != "unclear" and not stands and np.isfinite(self.gap.p):
            verdict, where = "unclear", f"{where}; does not stand among {of} tests"
        return Decided(self.statement, "–", self.threshold, f"{self.gap} ({where})", verdict)


def _by_holm(found: Sequence[Decided | _Test]) -> list[Decided]:
    """The tests of one part together."""
    tests = [each for each in found if isinstance(each, _Test)]
    stands = iter(standing([each.gap.p for each in tests], LEVEL))
    return [
        each.decided(stands=next(stands), of=len(tests)) if isinstance(each, _Test) else each
        for each in found
    ]


def _grown(records: Sequence[Record]) -> Iterator[Decided | _Test]:
    for added in sorted(distinct(records, "added")):
        where = f"+{added} blocks"
        for first, second, name in DIFFERENCES if added == ADDED else DOUBLED:
            one, other = losses(records, added, first), losses(records, added, second)
            if one.keys() & other.keys():
                yield _Test(name, f"{first} − {second} < 0", paired(one, other), where)
        if jumped := losses(records, added, "jump", "first"):
            gap = paired(jumped, losses(records, added, "jump", "before"))
            yield _Test("the jump alone lowers the loss", "first − before < 0", gap, where)
        if stacked := losses(records, added, "stack", "first"):
            gap = paired(stacked, losses(records, added, "stack", "before"))
            decision = at_least(0.1, lambda gap: [Observation(where, gap.differences)], level=LEVEL)(gap)  # noqa: B023
            assert decision is not None
            yield Decided("stacking forgets what was learned", "–", "first − before ≥ 0.1", *decision)


def _ranked(records: Sequence[Record]) -> Iterator[Decided | _Test]:
    if not records:
        return
    moments = sorted(int(moment) for moment in records[0]["gained"])
    first, last = moments[0], moments[-1]
    for variant, words in TRAINED.items():
        gained = {moment: realised(records, variant, moment, "gained") for moment in moments}
        for moment, names in ((first, ["gain"]), (last, CLAIMED)):
            for name in names:
                found = correlation(together(realised(records, variant, last, name), gained[moment]))
                yield _correlated(
                    f"{SIGNALS[name]} ranks the points as {moment} steps do, {words}", found, RANKED
                )
        agreed = correlation(in_two_orders(records, variant, last))
        yield _correlated(f"two orders of the data rank them alike, {words}", agreed, AGREEING)
        signals, ends = realised(records, variant, last, "gain"), gained[last]
        ahead = [ends[seed].mean() - ends[seed][int(np.argmax(signals[seed]))] for seed in sorted(ends)]
        name = f"the strongest point gains more than the points do in the mean, {words}"
        yield _Test(name, "mean − strongest < 0", Paired(np.array(ahead)), f"{last} steps")


def _correlated(statement: str, found: Correlation, limit: float) -> Decided:
    """By the interval over seeds: it may not reach zero, and the value has to reach the limit."""
    low, high = found.over_seeds
    verdict: Verdict = "fails" if high < limit else "unclear"
    if found.value >= limit and low > 0:
        verdict = "holds"
    return Decided(statement, "–", f"rank correlation ≥ {limit:g}", str(found), verdict)


def _covered(records: Sequence[Record]) -> Iterator[Decided]:
    for splits in SPLITS:
        for method in METHODS:
            own = select(records, splits=splits, method=method)
            if not own:
                continue
            if splits == SPLITS[0]:
                for column, name in CERTIFIED:
                    (low, high), here = _worst(own, column)
                    verdict: Verdict = "holds" if high <= DELTA else "fails" if low > DELTA else "unclear"
                    threshold = f"≤ {100 * DELTA:g} % of all tries"
                    yield Decided(f"{name} ({method})", "≤ δ", threshold, here, verdict)
            else:
                (low, high), here = _worst(own, "wrong")
                name = f"and {splits} split they are not to be trusted ({method})"
                verdict = "holds" if low > DELTA else "fails" if high <= DELTA else "unclear"
                yield Decided(name, "–", f"wrong ones > {100 * DELTA:g} %", here, verdict)


def _worst(records: Sequence[Record], column: str) -> tuple[tuple[float, float], str]:
    """The largest share of all regimes: its interval, and how it is shown."""
    shares = {one["regime"]: share(one[column], one["repetitions"]) for one in records}
    regime = max(shares, key=lambda each: shares[each])
    value, low, high = shares[regime]
    shown = f"{100 * value:.3g} % ({100 * low:.2g} to {100 * high:.3g} %), {regime} to gain"
    return (low, high), shown


def share(count: int, of: int) -> tuple[float, float, float]:
    """A share with its interval at 95 %, by Clopper and Pearson.

    >>> [round(each, 4) for each in share(0, 2000)]
    [0.0, 0.0, 0.0018]
    """
    found = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    return count / of, float(found.low), float(found.high)


def _enveloped(records: Sequence[Record]) -> Iterator[Decided | _Test]:
    found = envelope(records)
    if found is None:
        return
    # More depth, and not only more steps, is what lowers the loss.
    grown, alone = _last(records, "grown"), _last(records, "alone")
    if grown.keys() & alone.keys():
        name = "a network grown block by block ends better than one block"
        yield _Test(name, "grown − alone < 0", paired(grown, alone), "equal steps")
    beside = f"s {found.s}, of one block for the same steps {found.alone.s if found.alone else '–'}"
    yield Decided(
        "each block takes a power of what is left",
        "s > 1",
        f"foretells {HELD} stages better than s = 1",
        f"{found.rivals.less if found.rivals else 'too few depths'}; {beside}",
        _by_depth(found),
    )
    if found.measured is not None:
        yield Decided(
            "s gives the exponent in parameters of networks from scratch",
            "r/((2+r)(s−1))",
            f"within a factor of {ALIKE:g}",
            f"foretold {found.foretold}, measured {found.measured}",
            _alike(found),
        )


def _last(records: Sequence[Record], kind: str) -> dict[int, float]:
    own = select(records, kind=kind)
    end = max((one["steps"] for one in own), default=0)
    return {one["seed"]: one["loss"] for one in select(own, steps=end) if one["loss"] is not None}


def _by_depth(found: Envelope) -> Verdict:
    """Is it a power law rather than an exponential, and of depth rather than of the steps that go with it?

    The s of the fit is above 1 for all data, so that its interval cannot tell.
    """
    if found.rivals is None:
        return "unclear"
    verdict = found.rivals.less.verdict(below=True)
    if verdict != "holds":
        return verdict
    if found.alone is None:
        return "unclear"
    apart = found.s.low > found.alone.s.high or found.s.high < found.alone.s.low
    return "holds" if apart else "unclear"


def _alike(found: Envelope) -> Verdict:
    """Do all ratios that the two intervals allow lie within the factor, or none of them?"""
    assert found.measured is not None
    low = found.foretold.low / found.measured.high
    high = found.foretold.high / found.measured.low
    if not np.isfinite([low, high]).all() or found.measured.low <= 0:
        return "unclear"
    if low >= 1 / ALIKE and high <= ALIKE:
        return "holds"
    return "fails" if low > ALIKE or high < 1 / ALIKE else "unclear"
