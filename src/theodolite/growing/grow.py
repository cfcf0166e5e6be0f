"""`grow`: survey the points, insert a block, jump, certify."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import all_parameter_names, unwrap
from theodolite.core.batches import Batch
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.examples import count_examples, each_batch, take
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress
from theodolite.growing.certificate import Certificate, certificate, clip_from
from theodolite.growing.concentration import Method, least_units
from theodolite.growing.grown import Contender, Grown, Means, Stage
from theodolite.growing.line_search import jump, length_of, longest_step
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
    """Insert blocks where the signal says they help, jump, and certify what that did; in place.

    For each block: the signal at every point, on the first split; where it is above its noise and promises
    most within the longest step allowed, a block is inserted and jumps, on the second split, and the best of
    these stays; a certificate, on the third. A network to which no block helps is left as it was, and so is
    one with which something fails on the way.

    Args:
        model: any module with its residual blocks in a list.
        loss: `loss(logits, targets) -> scalar`, of which each unit's own can be taken.
        splits: three samples without a unit in common, as of `split`.
        blocks: how many to insert, one after the other.
        at: points to choose from, by number or name in the network as it is now; all if not given.
        along: jump along the signal, or along the preconditioned one.
        contenders: at how many points a jump is tried.
        delta: the chance that any of the certificates is wrong.
        method: of the certificates, see `certificate`; `betting` needs fewer units.
        reach: the longest jump in units of the step radius, which is the least over many rows: the loss
            often goes on falling beyond it.
        fresh: a network built alike whose blocks are copied, as before training.
        optimizer: the model's, which is to train the new blocks too.
        progress: is told what goes on and which share of all work is done.
    """
    _check(blocks, contenders, along)
    check_disjoint(splits)
    warn_of_missing(unwrap(model))
    _require_units(splits.certify, delta, _candidates(blocks), method)
    inner = unwrap(model)
    inputs = take(next(iter(each_batch(splits.choose))), slice(0, 2))[0]
    trial = _Trial(inner, loss, splits, inputs, at, along, contenders, reach, copy.deepcopy(fresh))
    losses = [trial.losses()]
    stages: list[Stage] = []
    with blocks_kept_on_failure(inner), _kept_groups(inner, optimizer):
        for number in range(blocks):

            def told(title: str, share: float, number: int = number) -> None:
                if progress is not None:
                    progress(f"block {number + 1} of {blocks}: {title}", (number + share) / blocks)

            stage = trial.stage(losses[-1], told)
            if stage.chosen is None:
                stages.append(stage)
                break
            _, proof = insert_block(
                model, inputs, stage.chosen.point, fresh=trial.fresh, optimizer=optimizer, points=trial.points
            )
            trial.move(stage.chosen)
            told("certifying", 0.95)
            losses.append(trial.losses())
            made = _certified(losses[-2], losses[-1], delta, _candidates(blocks), method)
            stages.append(dataclasses.replace(_light(stage), proof=proof, certificate=made))
    overall = stages[0].certificate
    if len(losses) > 2:
        overall = _certified(losses[0], losses[-1], delta, _candidates(blocks), method)
    return Grown(
        model=model,
        stages=tuple(stages),
        certificate=overall,
        before=losses[0].means,
        after=losses[-1].means,
        units=losses[0].units,
    )


def _light(stage: Stage) -> Stage:
    """Without the directions of all points, which are as large as the network; those tried keep theirs."""
    points = tuple(
        dataclasses.replace(one, directions={}, preconditioned_directions={}) for one in stage.signal.points
    )
    return dataclasses.replace(stage, signal=dataclasses.replace(stage.signal, points=points))


def _kept_groups(model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
    return nullcontext() if optimizer is None else ParamGroups(model, optimizer).kept_on_failure()


@dataclass(frozen=True)
class _Losses:
    """The losses of all units of the three splits."""

    estimate: Tensor
    choose: Tensor
    certify: Tensor

    @property
    def means(self) -> Means:
        return Means(*(float(each.mean()) for each in (self.estimate, self.choose, self.certify)))

    @property
    def units(self) -> tuple[int, int, int]:
        return len(self.estimate), len(self.choose), len(self.certify)


@dataclass
class _Trial:
    """The network that grows, and what all its stages have in common."""

    model: nn.Module
    loss: Loss
    splits: Splits
    inputs: Any
    at: int | str | Sequence[int | str] | None
    along: Along
    contenders: int
    reach: float
    fresh: nn.Module | None
    points: InsertionPoints = field(default_factory=lambda: InsertionPoints((), {}))

    def losses(self) -> _Losses:
        """Of the network as it is."""
        splits = (self.splits.estimate, self.splits.choose, self.splits.certify)
        return _Losses(*(losses_of(self.model, self.loss, each) for each in splits))

    def stage(self, before: _Losses, tell: Progress) -> Stage:
        """Survey the points and try the best of them; the network is as before at the end."""
        tell("looking for points", 0.0)
        self.points = find_points(self.model, self.inputs)
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
            progress=lambda _, share: tell("the signal at all points", 0.05 + 0.5 * share),
        )
        tell("how far each may jump", 0.55)
        caps = {one.name: self._cap(one) for one in found.above}
        ranked = sorted(found.above, key=lambda one: -self._promise(one, caps[one.name]))[: self.contenders]
        tried: list[Contender] = []
        for number, one in enumerate(ranked):
            tell(f"a jump at {one.name}", 0.6 + 0.35 * number / len(ranked))
            slope, error = self._slope(one)
            with inserted(self.model, one.point, self.fresh):
                made = jump(
                    self.model,
                    self.loss,
                    self.splits.choose,
                    one.name,
                    self._directions(one),
                    slope=slope,
                    cap=caps[one.name],
                )
                after = float(losses_of(self.model, self.loss, self.splits.estimate).mean())
            tried.append(Contender(one.point, one, slope, error, made, before.means.estimate - after))
        good = [one for one in tried if one.jump.gain > 0 and one.train_gain > 0]
        chosen = max(good, key=lambda one: one.jump.gain, default=None)
        return Stage(found, tuple(tried), chosen, None, None)

    @torch.no_grad()
    def move(self, chosen: Contender) -> None:
        """Let the block that was inserted jump as it did when it was tried; what is fresh grows along."""
        if self.at is not None and not isinstance(self.at, int | str):
            self.at = tuple(chosen.point.renamed(str(each)) for each in self.at)
        if self.fresh is not None:
            put_block(self.fresh, chosen.point, make_block(self.fresh, chosen.point))
        tensors = dict(all_parameter_names(self.model))
        for name, direction in self._directions(chosen.signal).items():
            tensor = tensors[f"{chosen.point.name}.{name}"]
            step = chosen.jump.step * direction.double().to(tensor.device)
            tensor.copy_(tensor.double() - step)

    def _cap(self, one: PointSignal) -> float:
        directions = self._directions(one)
        with inserted(self.model, one.point, self.fresh):
            return longest_step(
                self.model, self.loss, self.splits.choose, one.name, directions, reach=self.reach
            )

    def _promise(self, one: PointSignal, cap: float) -> float:
        """What the longest step would gain if the loss went on falling as it begins.

        A slope alone says nothing: it changes with the units that a stream is measured in.
        """
        slope, _ = self._slope(one)
        return slope * cap / length_of(self._directions(one)) if math.isfinite(cap) else slope

    def _slope(self, one: PointSignal) -> tuple[float, float]:
        if self.along == "gradient":
            return one.gain, one.error
        return one.preconditioned, one.preconditioned_error

    def _directions(self, one: PointSignal) -> Mapping[str, Tensor]:
        return one.directions if self.along == "gradient" else one.preconditioned_directions


def _certified(before: _Losses, after: _Losses, delta: float, candidates: int, method: Method) -> Certificate:
    bound = clip_from(before.choose, after.choose)
    return certificate(
        before.certify, after.certify, bound=bound, delta=delta, candidates=candidates, method=method
    )


def _candidates(blocks: int) -> int:
    """Certificates that are made of one sample: of each block, and of all of them together."""
    return 1 if blocks == 1 else blocks + 1


def _require_units(certify: Sequence[Batch], delta: float, candidates: int, method: Method) -> None:
    """Refuse a third split that is too small to certify anything, before any work is done."""
    there, least = count_examples(certify), least_units(delta, candidates, method)
    if there < least:
        raise UseError(
            f"the split to certify has {there} units, too few to certify anything: at delta {delta} for "
            f"{candidates} certificate(s) it takes at least {least}, if every one of them gains the most, "
            "and usually some hundreds or thousands. Give more data"
        )


def _check(blocks: int, contenders: int, along: str) -> None:
    for name, value in (("blocks", blocks), ("contenders", contenders)):
        if not (isinstance(value, int) and value > 0):
            raise UseError(f"{name} is {value!r}: give a whole number above 0")
    if along not in get_args(Along):
        raise UseError(f"along is {along!r}: jump along the 'gradient' or the 'preconditioned' signal")
