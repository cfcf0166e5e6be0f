"""`grow`: measure the signal at all points, insert a block, move it, certify."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import unwrap
from theodolite.core import arguments
from theodolite.core.calling import Loss
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, part
from theodolite.growing.certificate import Certificate, Method, certificate, clip_from, require_examples
from theodolite.growing.grown import Contender, Grown, GrowthStep, SplitLosses
from theodolite.growing.line_search import jump, length_of, longest_step, move, moving_tensors
from theodolite.growing.splits import Splits, check_disjoint
from theodolite.planning.readout_multiplier import warn_of_missing
from theodolite.probes.example_losses import losses_of
from theodolite.probes.signal.result import PointSignal
from theodolite.probes.signal.signal import signal
from theodolite.surgery.blocks import blocks_kept_on_failure, inserted, make_block, put_block
from theodolite.surgery.inserting import insert_block
from theodolite.surgery.insertion_points import InsertionPoints, find_points
from theodolite.surgery.optimizer_state import ParamGroups

Along = Literal["gradient", "preconditioned"]
Losses = Mapping[str, Tensor]
"""By split: the loss of each of its examples."""


@exclusive()
def grow(
    model: nn.Module,
    loss: Loss,
    splits: Splits,
    *,
    blocks: int = 1,
    at: int | str | Sequence[int | str] | None = None,
    along: Along = "preconditioned",
    contenders: int = 3,
    delta: float = 0.05,
    method: Method = "bernstein",
    reach: float = 8.0,
    fresh: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
) -> Grown:
    """Insert blocks where the signal says they help, move them, and certify the effect; in place.

    For each block: measure the signal at every point, on the first split. At the points where it is above its
    noise and promises most within the longest step, insert a block and move it along the signal, on the
    second split; keep the best. Certify the result, on the third. If no block helps, or if something fails,
    the network is left as it was.

    Args:
        model: any module with its residual blocks in a list.
        loss: `loss(logits, targets) -> scalar`, which must be computable for single examples.
        splits: three disjoint samples, from `split`.
        blocks: how many to insert, one after the other.
        at: points to choose from, by number or name in the network as it is now; all by default.
        along: move along the `gradient`, or along the `preconditioned` one.
        contenders: at how many points a jump is tried.
        delta: the probability that any of the certificates is wrong.
        method: of the certificates, see `certificate`; `betting` needs fewer examples.
        reach: the longest jump in units of the step radius, which is the least over many rows: the loss
            often falls beyond it.
        fresh: an untrained network of the same architecture, whose blocks are copied instead.
        optimizer: the model's; it gets the new parameters.
        progress: called with what is being done and the fraction done.
    """
    arguments.whole("blocks", blocks, least=1)
    arguments.whole("contenders", contenders, least=1)
    arguments.one_of("along", along, get_args(Along))
    check_disjoint(splits)
    warn_of_missing(unwrap(model))
    candidates = 1 if blocks == 1 else blocks + 1  # each block, and all of them together
    require_examples(splits.sizes["certify"], delta, candidates, method)
    inner = unwrap(model)
    trial = _Trial(inner, loss, splits, at, along, contenders, reach, copy.deepcopy(fresh))
    losses = [trial.losses()]
    steps: list[GrowthStep] = []
    groups = nullcontext() if optimizer is None else ParamGroups(inner, optimizer).updated()
    with blocks_kept_on_failure(inner), groups:
        for number in range(blocks):
            inside = part(progress, number / blocks, (number + 1) / blocks)

            def tell(title: str, done: float, number: int = number, inside: Progress = inside) -> None:
                inside(f"block {number + 1} of {blocks}: {title}", done)

            step = trial.step(losses[-1], tell)
            if step.chosen is None:
                steps.append(step)
                break
            _, proof = insert_block(
                model,
                splits.inputs,
                step.chosen.point,
                fresh=trial.fresh,
                optimizer=optimizer,
                points=trial.points,
            )
            trial.move(step.chosen)
            tell("certifying", 0.95)
            losses.append(trial.losses())
            made = _certified(losses[-2], losses[-1], delta, candidates, method)
            steps.append(dataclasses.replace(_light(step), proof=proof, certificate=made))
    overall = steps[0].certificate
    if len(losses) > 2:
        overall = _certified(losses[0], losses[-1], delta, candidates, method)
    return Grown(
        model=model,
        steps=tuple(steps),
        certificate=overall,
        before=_means(losses[0]),
        after=_means(losses[-1]),
        examples=tuple(len(each) for each in losses[0].values()),
    )


def _light(step: GrowthStep) -> GrowthStep:
    """Drop the directions of all points, which are as large as the network; contenders keep theirs."""
    points = tuple(
        dataclasses.replace(one, directions={}, preconditioned_directions={}) for one in step.signal.points
    )
    return dataclasses.replace(step, signal=dataclasses.replace(step.signal, points=points))


@dataclass
class _Trial:
    """The network that grows, and the options of all steps."""

    model: nn.Module
    loss: Loss
    splits: Splits
    at: int | str | Sequence[int | str] | None
    along: Along
    contenders: int
    reach: float
    fresh: nn.Module | None
    points: InsertionPoints = field(default_factory=lambda: InsertionPoints((), {}))

    def losses(self) -> Losses:
        """Of the network as it is now."""
        return {name: losses_of(self.model, self.loss, each) for name, each in self.splits.named.items()}

    def step(self, before: Losses, tell: Progress) -> GrowthStep:
        """Measure the points and try the best of them; the network is left as it was."""
        tell("finding the points", 0.0)
        self.points = find_points(self.model, self.splits.inputs)
        wanted = self.points
        if self.at is not None:
            names = [self.at] if isinstance(self.at, int | str) else self.at
            chosen_points = dict.fromkeys(self.points.at(each) for each in names)
            self.at = tuple(point.name for point in chosen_points)
            wanted = InsertionPoints(tuple(chosen_points), {})
        found = signal(
            self.model,
            self.loss,
            self.splits.estimate,
            points=wanted,
            fresh=self.fresh,
            progress=lambda _, done: tell("the signal at all points", 0.05 + 0.5 * done),
        )
        tell("the longest steps", 0.55)
        caps, promises = {}, {}
        for one in found.above:
            slope, _, directions = self._way(one)
            with inserted(self.model, one.point, self.fresh):
                caps[one.name] = cap = longest_step(
                    self.model, self.loss, self.splits.choose, one.name, directions, reach=self.reach
                )
            # The first-order gain of the longest step: a slope alone depends on the scale of the stream.
            promises[one.name] = slope * cap / length_of(directions) if math.isfinite(cap) else slope
        ranked = sorted(found.above, key=lambda one: -promises[one.name])[: self.contenders]
        tried: list[Contender] = []
        for number, one in enumerate(ranked):
            tell(f"a jump at {one.name}", 0.6 + 0.35 * number / len(ranked))
            slope, error, directions = self._way(one)
            with inserted(self.model, one.point, self.fresh):
                made = jump(
                    self.model,
                    self.loss,
                    self.splits.choose,
                    one.name,
                    directions,
                    slope=slope,
                    cap=caps[one.name],
                )
                after = float(losses_of(self.model, self.loss, self.splits.estimate).mean())
            train_gain = float(before["estimate"].mean()) - after
            tried.append(Contender(one.point, one, slope, error, made, train_gain))
        good = [one for one in tried if one.jump.gain > 0 and one.train_gain > 0]
        chosen = max(good, key=lambda one: one.jump.gain, default=None)
        return GrowthStep(found, tuple(tried), chosen, None, None)

    def move(self, chosen: Contender) -> None:
        """Move the inserted block as when it was tried; `fresh` gets a block too."""
        if self.at is not None and not isinstance(self.at, int | str):
            self.at = tuple(chosen.point.renamed(str(each)) for each in self.at)
        if self.fresh is not None:
            put_block(self.fresh, chosen.point, make_block(self.fresh, chosen.point))
        directions = self._way(chosen.signal)[2]
        tensors, moving = moving_tensors(self.model, chosen.point.name, directions)
        move(tensors, tensors, moving, chosen.jump.step)

    def _way(self, one: PointSignal) -> tuple[float, float, Mapping[str, Tensor]]:
        """The slope of a block's jump, its standard error, and the directions."""
        if self.along == "gradient":
            return one.gain, one.error, one.directions
        return one.preconditioned, one.preconditioned_error, one.preconditioned_directions


def _means(losses: Losses) -> SplitLosses:
    return SplitLosses(**{name: float(each.mean()) for name, each in losses.items()})


def _certified(before: Losses, after: Losses, delta: float, candidates: int, method: Method) -> Certificate:
    return certificate(
        before["certify"],
        after["certify"],
        bound=clip_from(before["choose"], after["choose"]),
        delta=delta,
        candidates=candidates,
        method=method,
    )
