"""Three samples that know nothing of each other: to estimate a direction, to choose a step, to certify.

A certificate holds for units that had no part in what it certifies. A unit that helped to find a block's
place or the length of its step is one of those the block was fitted to.

Where inputs are discrete, independent draws repeat. Every one of them is kept where it falls: without its
repeats a sample is not drawn from the distribution that it is to speak of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import torch

from theodolite.core.batches import Batch, Batches
from theodolite.core.errors import UseError
from theodolite.core.examples import count_examples, each_batch, fingerprints, num_examples, take

SHARES = (0.5, 0.25, 0.25)


@dataclass(frozen=True)
class Splits:
    """Three lists of batches. Made by `split`, or by hand: `check_disjoint` says whether they may be used."""

    estimate: Sequence[Batch]
    """Where the signal is measured."""
    choose: Sequence[Batch]
    """Where the place, the length of the step and the certificate's clipping are chosen."""
    certify: Sequence[Batch]
    """Where the result is certified."""
    repeated: frozenset[bytes] = field(default=frozenset(), repr=False)
    """Fingerprints of inputs that one sample has more than once: they may be in more than one split."""

    def __str__(self) -> str:
        parts = (f"{count_examples(batches)} to {name}" for name, batches in _named(self))
        text = f"units: {', '.join(parts)}"
        if self.repeated:
            others = {*fingerprints(self.estimate), *fingerprints(self.choose)}
            again = sum(mark in others for mark in fingerprints(self.certify))
            text += f" ({again} of these have an input that is in another split too)"
        return text


def split(
    batches: Batches, shares: tuple[float, float, float] = SHARES, *, seed: int | None = None
) -> Splits:
    """Cut a sample in three, unit by unit. All units are kept, those that repeat an input too.

    That is right for independent draws, in which inputs repeat by chance. Rows that were copied are not such:
    a sample of which every row, inputs and targets, is there equally often is refused.

    Args:
        batches: a pair (inputs, targets), a list of pairs or a DataLoader.
        shares: of the units to estimate, to choose and to certify.
        seed: draw which unit goes where. None: the first units estimate, the last certify. For windows of one
            text that is better, as neighbours stay together; for data in some order, as by class, draw.

    >>> units = torch.arange(8.0)[:, None]
    >>> found = split([(units[:5], units[:5]), (units[5:], units[5:])])
    >>> print(found)
    units: 4 to estimate, 2 to choose, 2 to certify
    >>> [inputs.flatten().tolist() for inputs, _ in found.choose]
    [[4.0], [5.0]]
    """
    if len(shares) != 3 or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1):
        raise UseError(f"shares are {shares}: give three numbers above 0 with the sum 1, as {SHARES}")
    kept = list(each_batch(batches))
    _refuse_copies(kept)
    places = [(index, unit) for index, batch in enumerate(kept) for unit in range(num_examples(batch))]
    if seed is not None:
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        places = [places[place] for place in order]
    ends = [0, *(round(sum(shares[: part + 1]) * len(places)) for part in range(3))]
    parts = [places[start:end] for start, end in pairwise(ends)]
    if not all(parts):
        raise UseError(f"there are {len(places)} units, too few for shares of {shares}: give more")
    repeated = frozenset(mark for mark, times in Counter(fingerprints(kept)).items() if times > 1)
    estimate, choose, certify = (tuple(_gathered(kept, part)) for part in parts)
    return Splits(estimate, choose, certify, repeated)


def check_disjoint(splits: Splits) -> None:
    """Refuse splits that share units.

    Two units are the same if their inputs are, number for number. Near copies, and windows of one text that
    overlap, are not seen. Inputs that `split` found more than once in its sample may be shared, and a unit
    may come again within a split: independent draws do repeat.
    """
    marks = {name: fingerprints(batches) for name, batches in _named(splits)}
    for (one, first), (other, second) in combinations(marks.items(), 2):
        where = dict(zip(first, range(len(first)), strict=True))
        shared = [
            (where[mark], place)
            for place, mark in enumerate(second)
            if mark in where and mark not in splits.repeated
        ]
        if shared:
            shown = "; ".join(f"unit {a} of {one} is unit {b} of {other}" for a, b in shared[:3])
            raise UseError(
                f"the units to {one} and to {other} overlap: {len(shared)} of {len(second)} are shared "
                f"({shown}{'; …' if len(shared) > 3 else ''}). A certificate holds for units that had no "
                "part in what it certifies: cut one sample by theodolite.growing.split"
            )


def _named(splits: Splits) -> Iterator[tuple[str, Sequence[Batch]]]:
    return ((name, getattr(splits, name)) for name in ("estimate", "choose", "certify"))


def _refuse_copies(batches: Sequence[Batch]) -> None:
    """By chance not every row of a sample comes equally often."""
    times = Counter(fingerprints([((inputs, targets), targets) for inputs, targets in batches]))
    least, most = min(times.values()), max(times.values())
    if least == most > 1:
        raise UseError(
            f"each of {len(times)} units is there {most} times: a sample that is given more than once has no "
            "units that had no part in what they certify. Give each once"
        )


def _gathered(batches: Sequence[Batch], places: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """Batches of these units, each of units that came together: others may have other shapes."""
    chosen: dict[int, list[int]] = {}
    for index, unit in places:
        chosen.setdefault(index, []).append(unit)
    for index in sorted(chosen):
        yield take(batches[index], chosen[index])
