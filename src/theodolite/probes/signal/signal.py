"""Where one more block would help: the gradient by the output of blocks that are not there yet.

A block `h + Zφ(h)` with Z = 0 changes nothing, and the gradient of the loss by its Z is

    M = E[g φᵀ],   g = ∂ℓ/∂h

A step along −M lowers the loss by ‖M‖² for each unit of step, at first. M is not known, only a mean M̄ over
some units, and ‖M̄‖² has the noise of M̄ in it. So M̄ is judged by other units, the held-out ones: the mean of
`⟨M̄, M_u⟩` over them is the true slope along −M̄ without bias, and its spread gives the standard error.

The preconditioned direction is `M̄ (S + ρI)⁻¹`, `S = E[φφᵀ]`, judged in the same way.

References:
    A qualitative test-risk mechanism for scaling behavior in normalized residual networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from scipy.special import stdtrit
from torch import Tensor, nn

from theodolite.core.batches import Batch, Batches, device_of
from theodolite.core.calling import Loss, require_logits
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch, fingerprints
from theodolite.core.exclusive import exclusive
from theodolite.present.figure import Figure
from theodolite.probes.curvature.objective import without_checkpoints
from theodolite.probes.curvature.products import Progress
from theodolite.probes.eval_mode import at_rest
from theodolite.probes.signal.alignment import alignment_bound, mean_interval
from theodolite.probes.signal.candidates import Candidate, Candidates
from theodolite.probes.signal.diagnostics import misleads, notes
from theodolite.probes.signal.gradient_covariance import Covariance, describe
from theodolite.probes.signal.passes import (
    Estimated,
    Estimating,
    Judged,
    Judging,
    Runner,
    Uneven,
    refuse_not_finite,
)
from theodolite.probes.signal.preparing import Steps, checked, freeze, points_of, refuse_few, samples
from theodolite.probes.signal.sums import wide
from theodolite.probes.signal.trial import Trial
from theodolite.surgery import Point, Points

DELTA = 0.05
"""About how often a network without any signal may be said to have one: the level of Student's t."""
RIDGE = 1e-2


@dataclass(frozen=True)
class PointSignal:
    """What a block at a point could do at first."""

    point: Point
    norm: float
    """‖M̄‖, of all that closes the block."""
    gain: float
    """How fast the loss falls along −M̄, on held-out units: the mean of ⟨M̄, M_u⟩."""
    error: float
    """Its standard error, over units."""
    shares: tuple[float, ...]
    """The parts of the gain that are of the block's branches, in order."""
    preconditioned: float
    """How fast the loss falls along −M̄ (S + ρI)⁻¹."""
    preconditioned_error: float
    directions: Mapping[str, Tensor] = field(repr=False, compare=False)
    """M̄ by closer."""
    preconditioned_directions: Mapping[str, Tensor] = field(repr=False, compare=False)
    gradient: float
    """‖v̄‖, the mean gradient by a shift of the stream in all positions of a unit."""
    alignment: float
    """⟨v̄, v̄'⟩ of the units of both samples: an estimate of ‖E v‖² without bias."""
    alignment_interval: tuple[float, float]
    """Of the alignment, for the v̄ at hand, at 95 % by Student's t."""
    alignment_bound: float
    """At most how likely v̄ and v̄' are not to align (Theorem 5), with estimates in place of what it asks for:
    a diagnostic. 1 says nothing."""
    covariance: Covariance
    unsure: bool = False
    """Are the held-out products too few or too skewed for Student's t? Then the point is never `above`."""

    @property
    def name(self) -> str:
        """Of the point."""
        return self.point.name

    @property
    def significance(self) -> float:
        """The gain over its standard error; 0 where no unit has a gain at all."""
        if self.error == 0:
            return math.copysign(math.inf, self.gain) if self.gain else 0.0
        return self.gain / self.error

    @property
    def noise(self) -> float:
        """How much of ‖M̄‖² is noise: ‖M̄‖² minus the gain."""
        return self.norm**2 - self.gain


@dataclass(frozen=True)
class Signal:
    """The signal at all points of a network. Made by `signal`."""

    points: tuple[PointSignal, ...]
    loss: float
    """Mean over all units."""
    estimated_on: int
    """Units that the directions are means over."""
    judged_on: int
    """Units that the gains are means over."""
    delta: float
    left: Mapping[str, str]
    """By name of a place where no block can be inserted: why."""
    notes: tuple[str, ...]
    """What could not be measured, or not as it should be."""

    @property
    def threshold(self) -> float:
        """How many standard errors a gain must be above zero: Student's t, δ shared among all points."""
        return float(stdtrit(self.judged_on - 1, 1 - self.delta / len(self.points)))

    @property
    def above(self) -> tuple[PointSignal, ...]:
        """The points whose gain is surely above its noise, in order."""
        return tuple(one for one in self.points if one.significance > self.threshold and not one.unsure)

    @property
    def deepest(self) -> bool:
        """Has no point a gain surely above its noise? Then to first order no block is seen to help."""
        return not self.above

    @property
    def best(self) -> PointSignal:
        """The point with the largest gain, above its noise or not."""
        return self.ranked()[0]

    def ranked(self, by: Literal["gain", "preconditioned"] = "gain") -> tuple[PointSignal, ...]:
        """The points, from the largest gain to the smallest."""
        if by not in ("gain", "preconditioned"):
            raise UseError(f"by is {by!r}: points are ranked by 'gain' or by 'preconditioned'")
        return tuple(sorted(self.points, key=lambda one: -getattr(one, by)))

    def at(self, name: str | Point) -> PointSignal:
        """The signal at one point."""
        wanted = name.name if isinstance(name, Point) else name
        for one in self.points:
            if one.name == wanted:
                return one
        raise UseError(f"{wanted!r} is not among the points: {', '.join(one.name for one in self.points)}")

    def figure(self) -> Figure:
        """Gain, gradient and covariance against depth."""
        from theodolite.probes.signal.figures import signal_figure

        return signal_figure(self)

    def __str__(self) -> str:
        from theodolite.probes.signal.table import table

        return table(self)


@exclusive(keep_autocast=True)
def signal(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    held_out: Batches | None = None,
    *,
    points: Points | Iterable[Point | str | int] | None = None,
    fresh: nn.Module | None = None,
    ridge: float = RIDGE,
    delta: float = DELTA,
    matrices: bool = False,
    progress: Progress | None = None,
) -> Signal:
    """Look at what a block would do at every point of a network; the network is left as it was.

    Every unit is run once, with a closed candidate block at each point, and gets one backward pass.

    Args:
        model: any module with its residual blocks in an nn.ModuleList or nn.Sequential, on any device.
        loss: `loss(logits, targets) -> scalar`, taken of each unit (an index of dimension 0) by itself.
        batches: pairs (inputs, targets) whose units the directions are estimated on.
        held_out: pairs whose units judge them, none of which is among the others. None: the second half of
            the units of `batches`, in order, so that neighbours, which may be alike, stay together; the first
            half estimates.
        points: which points; all by default. `find_points` has them.
        fresh: a network built alike whose blocks the candidates are copies of; by default copies of their
            neighbours.
        ridge: ρ of the preconditioned direction, in parts of the mean of S's diagonal.
        delta: the level of Student's t: how often a network without signal is said to have one, where the
            products `⟨M̄, M_u⟩` are not very skewed. Where they are, or are fewer than 30, the point is
            `unsure`.
        matrices: keep the covariance matrices of more than 128 channels.
        progress: is told which share of the work is done.

    >>> import torch, theodolite as th
    >>> model = th.models.GPT(64, 2, vocab=16, context=8)
    >>> tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
    >>> found = signal(model, th.workloads.next_token_loss, (tokens[:, :-1], tokens[:, 1:]))
    >>> [one.name for one in found.points], found.estimated_on, found.judged_on
    (['blocks.0', 'blocks.1', 'blocks.2'], 4, 4)

    Raises:
        UseError: if there are no residual blocks in a list, fewer than two held-out units, a loss that is no
            finite number, or one that cannot be taken of a unit by itself.
    """
    require_logits(loss, "The signal of a block")
    model = checked(model, ridge, delta)
    fresh = None if fresh is None else checked(fresh, ridge, delta)
    first = next(iter(each_batch(batches)))
    device = device_of(model)
    known = points_of(model, first, device, points)
    steps = Steps(progress, batches, held_out)
    with ExitStack() as stack:
        for network in (model,) if fresh is None else (model, fresh):
            stack.enter_context(at_rest(network))
            freeze(network)
        candidates = Candidates(model, known.found, fresh)
        stack.enter_context(candidates.in_stream())
        stack.enter_context(without_checkpoints())
        runner = Runner(model, loss, candidates, device)
        missed = Trial().run(runner, first)
        while True:
            try:
                passed = _passes(runner, *samples(batches, held_out), ridge, steps)
                break
            except Uneven as uneven:
                uneven.give_up()
    found = Signal(
        points=tuple(_point(one, passed, matrices) for one in candidates.each),
        loss=runner.total / runner.units,
        estimated_on=passed.estimating.units,
        judged_on=passed.judging.units,
        delta=delta,
        left=known.left,
        notes=(),
    )
    return replace(
        found, notes=tuple(notes(found, candidates, missed, passed.shared, passed.judging.one_class))
    )


@dataclass(frozen=True)
class _Passed:
    """Both passes over the data."""

    estimating: Estimating
    judging: Judging
    estimated: Mapping[Candidate, Estimated]
    judged: Mapping[Candidate, Judged]
    shared: int
    """Held-out units that are among the others."""


def _passes(
    runner: Runner, estimating_on: Iterable[Batch], judging_on: Iterable[Batch], ridge: float, steps: Steps
) -> _Passed:
    runner.total, runner.units = 0.0, 0
    seen: set[bytes] = set()
    shared = 0
    estimating = Estimating(runner)
    for index, batch in enumerate(estimating_on):
        estimating.add(batch, index)
        seen.update(fingerprints([batch]))
        steps.took_one()
    estimated = estimating.settle(ridge)
    judging = Judging(runner, estimated)
    for index, batch in enumerate(judging_on):
        judging.add(batch, index)
        shared += sum(one in seen for one in fingerprints([batch]))
        steps.took_one()
    refuse_few(judging.units)
    return _Passed(estimating, judging, estimated, judging.settle(), shared)


def _point(candidate: Candidate, passed: _Passed, matrices: bool) -> PointSignal:
    estimated, judged = passed.estimated[candidate], passed.judged[candidate]
    refuse_not_finite(candidate.point.name, judged.values, judged.alignments, *estimated.directions.values())
    plain, preconditioned = judged.values.sum(1).unbind(1)
    both = estimated.gradients.joined(judged.gradients)
    covariance = describe(both.covariance, both.units, keep=matrices)
    aligned = mean_interval(judged.alignments)
    units = len(judged.alignments)
    return PointSignal(
        point=candidate.point,
        norm=math.sqrt(sum(float(one.double().square().sum()) for one in estimated.directions.values())),
        gain=float(plain.mean()),
        error=_error(plain),
        shares=tuple(judged.values[..., 0].mean(0).tolist()),
        preconditioned=float(preconditioned.mean()),
        preconditioned_error=_error(preconditioned),
        directions=_rounded(candidate, estimated.directions),
        preconditioned_directions=_rounded(candidate, estimated.preconditioned),
        gradient=float(estimated.gradients.mean.norm()),
        alignment=aligned.mean,
        alignment_interval=(aligned.low, aligned.high),
        alignment_bound=alignment_bound(
            estimated.gradients.units,
            units,
            norm_mu=math.sqrt(max(aligned.mean, 0.0)),
            lambda_max=covariance.largest,
            trace=covariance.trace,
        ),
        covariance=covariance,
        unsure=passed.judging.one_class or misleads(plain),
    )


def _error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _rounded(candidate: Candidate, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the precision of the tensors that they are directions of, but no halves; in the order of closers."""
    dtype = wide(next(iter(candidate.block.parameters())).dtype)
    names = [closer.name for closer in candidate.point.closers]
    return {name: directions[name].to(dtype) for name in names if name in directions}
