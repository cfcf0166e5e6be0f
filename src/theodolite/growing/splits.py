"""Three independent samples: to estimate a direction, to choose a step, to certify.

A certificate holds for examples that were not used to make the change. Examples that helped to choose a
block's place or the length of its step would make it look better than it is.

With discrete inputs, independent draws repeat. Repeats are kept: without them a sample no longer has the
distribution that it stands for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, ClassVar

import torch

from theodolite.core.batches import Batch, Batches
from theodolite.core.errors import UseError
from theodolite.core.examples import count_examples, each_batch, fingerprints, num_examples, take
from theodolite.present.result import Block, Result

SHARES = (0.5, 0.25, 0.25)


@dataclass(frozen=True)
class Splits(Result):
    """Three lists of batches. Made by `split`, or by hand: `check_disjoint` checks them."""

    kind: ClassVar[str] = "splits"

    estimate: Sequence[Batch]
    """For the signal."""
    choose: Sequence[Batch]
    """For the place, the length of the step and the clipping of the certificate."""
    certify: Sequence[Batch]
    """For the certificate."""
    repeated: frozenset[bytes] = field(default=frozenset(), repr=False)
    """Fingerprints of inputs that the sample has more than once: they may be in more than one split."""

    def blocks(self) -> Iterator[Block]:
        """The numbers of examples."""
        text = ", ".join(f"{number} to {name}" for name, number in self.sizes.items())
        if self.repeated:
            others = {*fingerprints(self.estimate), *fingerprints(self.choose)}
            again = sum(mark in others for mark in fingerprints(self.certify))
            text += f" ({again} of these have an input that is also in another split)"
        yield f"examples: {text}"

    @property
    def inputs(self) -> Any:
        """The inputs of two examples, to call the network with."""
        return take(next(iter(each_batch(self.choose))), slice(0, 2))[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of examples in each split."""
        return {name: count_examples(batches) for name, batches in self.named.items()}

    @property
    def named(self) -> dict[str, Sequence[Batch]]:
        """The splits by name."""
        return {name: getattr(self, name) for name in ("estimate", "choose", "certify")}

    def to_dict(self) -> dict[str, Any]:
        """The numbers of examples; data is not kept."""
        return {"examples": self.sizes, "repeated": len(self.repeated)}


def split(
    batches: Batches, shares: tuple[float, float, float] = SHARES, *, seed: int | None = None
) -> Splits:
    """Split a sample in three, example by example. Repeated inputs are kept.

    This is right for independent draws, in which inputs repeat by chance. It is wrong for copied rows: a
    sample in which every row, inputs and targets, occurs equally often is refused.

    Args:
        batches: a pair (inputs, targets), a list of pairs or a DataLoader.
        shares: of the examples to estimate, to choose and to certify.
        seed: shuffle the examples. None: the first ones estimate, the last ones certify. That is better for
            windows of one text, as neighbours stay together; shuffle data that is ordered, as by class.

    >>> rows = torch.arange(8.0)[:, None]
    >>> found = split([(rows[:5], rows[:5]), (rows[5:], rows[5:])])
    >>> print(found)
    examples: 4 to estimate, 2 to choose, 2 to certify
    >>> [inputs.flatten().tolist() for inputs, _ in found.choose]
    [[4.0], [5.0]]
    """
    if len(shares) != 3 or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1):
        raise UseError(f"shares are {shares}: give three numbers above 0 that sum to 1, as {SHARES}")
    kept = list(each_batch(batches))
    _refuse_copies(kept)
    places = [(index, row) for index, batch in enumerate(kept) for row in range(num_examples(batch))]
    if seed is not None:
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        places = [places[place] for place in order]
    ends = [0, *(round(sum(shares[: part + 1]) * len(places)) for part in range(3))]
    parts = [places[start:end] for start, end in pairwise(ends)]
    if not all(parts):
        raise UseError(f"there are {len(places)} examples, too few for shares of {shares}: give more")
    repeated = frozenset(mark for mark, times in Counter(fingerprints(kept)).items() if times > 1)
    estimate, choose, certify = (tuple(_gathered(kept, part)) for part in parts)
    return Splits(estimate, choose, certify, repeated)


def check_disjoint(splits: Splits) -> None:
    """Raise UseError if splits share examples.

    Two examples are the same if their inputs are equal, number for number. Near copies and overlapping
    windows of a text are not detected. Inputs that `split` found more than once in its sample may be shared,
    and an example may repeat within a split: independent draws do repeat.
    """
    marks = {name: fingerprints(batches) for name, batches in splits.named.items()}
    for (one, first), (other, second) in combinations(marks.items(), 2):
        where = dict(zip(first, range(len(first)), strict=True))
        shared = [
            (where[mark], place)
            for place, mark in enumerate(second)
            if mark in where and mark not in splits.repeated
        ]
        if shared:
            shown = "; ".join(f"example {a} of {one} is example {b} of {other}" for a, b in shared[:3])
            raise UseError(
                f"the examples to {one} and to {other} overlap: {len(shared)} of {len(second)} are shared "
                f"({shown}{'; …' if len(shared) > 3 else ''}). A certificate holds only for examples that "
                "were not used before: split one sample with theodolite.growing.split"
            )


def _refuse_copies(batches: Sequence[Batch]) -> None:
    """Refuse a sample in which every row occurs equally often: that does not happen by chance."""
    times = Counter(fingerprints([((inputs, targets), targets) for inputs, targets in batches]))
    least, most = min(times.values()), max(times.values())
    if least == most > 1:
        raise UseError(
            f"each of {len(times)} examples occurs {most} times, so no examples are left to certify on that "
            "were not used before. Give each once"
        )


def _gathered(batches: Sequence[Batch], places: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """Batches of these examples; only those of one batch go together, as shapes may differ."""
    chosen: dict[int, list[int]] = {}
    for index, row in places:
        chosen.setdefault(index, []).append(row)
    for index in sorted(chosen):
        yield take(batches[index], chosen[index])
