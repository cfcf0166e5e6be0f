"""A trial on two units, before any pass over the data."""

from __future__ import annotations

from torch import Tensor

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples, take
from theodolite.probes.signal.candidates import Candidate
from theodolite.probes.signal.passes import Runner, left_by_autograd, refuse_not_finite
from theodolite.probes.signal.sites import Site


class Trial:
    """Learns in which dimension units run: the loss of one of two has no gradient by the other.

    The first is in the first half of that dimension, the second in the second. One of them alone would not
    do: a loss that reads the first of many positions has no gradient by the second half of positions either.
    """

    def __init__(self) -> None:
        self.unit = 0
        self.dimensions: dict[tuple[Candidate, Site | None], set[int]] = {}
        self.sizes: dict[tuple[Candidate, Site | None], tuple[int, ...]] = {}

    def run(self, runner: Runner, batch: Batch) -> str | None:
        """Two units, or the only one twice; what the losses of units leave out of that of the batch."""
        missed = runner.missed(batch)
        pair = take(batch, [0, 1] if num_examples(batch) > 1 else [0, 0])
        for self.unit in (0, 1):
            with runner.candidates.heard_by(self):
                runner.run(pair, 0, only=self.unit)
        for candidate in runner.candidates.each:
            for _ in left_by_autograd(candidate):
                pass  # what autograd left there is of the trial
        for (candidate, site), found in self.dimensions.items():
            if found:
                place = candidate if site is None else site
                place.unit = _likely(found, self.sizes[candidate, site])
            elif site is None:
                raise UseError(
                    f"at {candidate.point.name} the loss of a unit depends on another unit of its batch, or "
                    "units run in neither of the first two dimensions of the stream: units have no gradients "
                    "of their own"
                )
            else:  # called on rows of its own choice, as an expert is
                candidate.give_up(next(one for one, known in candidate.known.items() if known is site))
        for candidate in runner.candidates.each:
            candidate.settle()
        return missed

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """A gradient of one unit."""
        self._look(candidate, site, gradient)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """A gradient of one unit."""
        self._look(candidate, None, gradient)

    def _look(self, candidate: Candidate, site: Site | None, gradient: Tensor) -> None:
        refuse_not_finite(candidate.point.name, gradient)
        found = set()
        for dim in range(min(2, gradient.ndim)):
            half, odd = divmod(gradient.shape[dim], 2)
            if not odd and not bool(gradient.narrow(dim, 0 if self.unit else half, half).any()):
                found.add(dim)
        place = candidate, site
        self.sizes[place] = tuple(gradient.shape)
        self.dimensions[place] = self.dimensions.get(place, found) & found


def _likely(dimensions: set[int], shape: tuple[int, ...]) -> int:
    """Of the dimensions in which two units may run, one of two indices, if there is one."""
    return min(dimensions, key=lambda dim: (shape[dim] != 2, dim))
