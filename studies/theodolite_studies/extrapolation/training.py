"""Networks that are trained on gaps with a hole, or on all gaps, and their errors over the gap."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.size import Size
from theodolite.data import CylinderFlows, cylinder_flows, generator
from theodolite.data.two_cylinders import GAPS, Region
from theodolite.planning import Plan, plan
from theodolite.workloads import workload
from theodolite.workloads.two_cylinders import batch_of, fluid_loss
from theodolite_studies.framework.records import Record, short

BASE = Size(16, 2)
RATE = -6.0
"""log2 of the learning rate at base size."""
BIN = 0.1
"""Of gaps, over which errors are averaged."""
LOW, HIGH = GAPS["all"][0]
BINS = round((HIGH - LOW) / BIN)
MIDDLES = [LOW + (place + 0.5) * BIN for place in range(BINS)]
TEST, MEMBER = 1000, 1000
"""Added to the seed of flows for those of a test, and to that of a start for each further member."""
REGIONS: tuple[Region, ...] = ("narrower", "trained", "hole", "wider")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained."""

    width: int
    steps: int
    octave: float = 0.0
    """log2 of its learning rate over that of the study."""
    flips: bool = False
    """Are flows of a batch mirrored at random?"""


def bins_of(region: Region) -> list[int]:
    """The places of a region's bins.

    >>> bins_of("narrower"), bins_of("trained")
    ([0, 1, 2], [3, 4, 5, 6, 7, 18, 19, 20, 21, 22])
    """
    return [
        place for place, gap in enumerate(MIDDLES) if any(low <= gap <= high for low, high in GAPS[region])
    ]


def errors_over_gaps(recipe: Recipe, region: Region, num: int, seed: int, each: int) -> Iterator[Record]:
    """Train one network, and measure it on test flows of all gaps.

    `errors` are mean squared errors by bin, `misses` those of a network that predicts 0: what interpolation
    misses. `fit` is the relative error on the flows that were trained on.
    """
    flows, test = cylinder_flows(num, region, seed=seed), held_out_flows(seed, each)
    model = trained(flows, recipe, seed)
    missed, there = (errors_of(predict(model, own), own) for own in (test, flows))
    yield {
        "errors": by_bin(missed),
        "misses": by_bin(errors_of(torch.zeros(()), test)),
        "fit": short((there.mean() / errors_of(torch.zeros(()), flows).mean()).sqrt().item()),
    }


def spread_of_members(
    recipe: Recipe, region: Region, num: int, seed: int, members: int, each: int
) -> Iterator[Record]:
    """Train networks from several starts on the same flows: their average and how far apart they are.

    `errors` are mean squared errors of single members, `average` those of their average, `spread` their
    variance about it, by bin. `ranks` are rank correlations over test flows with the error of the average: of
    the spread, and of the largest coarse speed, which is known without any network; over all flows and over
    those of each region.
    """
    flows, test = cylinder_flows(num, region, seed=seed), held_out_flows(seed, each)
    starts = [seed + MEMBER * member for member in range(members)]
    found = torch.stack([predict(trained(flows, recipe, start), test) for start in starts])
    average = errors_of(found.mean(0), test)
    spread = (found.var(0) * test.fluid).mean((1, 2, 3))
    speed = test.coarse[:, :2].square().sum(1).amax((1, 2))
    ranks = {
        name: {
            where: short(float(stats.spearmanr(values[rows], average[rows]).statistic), 4)
            for where, rows in _rows(each).items()
        }
        for name, values in {"spread": spread, "speed": speed}.items()
    }
    yield {
        "errors": by_bin(torch.stack([errors_of(one, test) for one in found]).mean(0)),
        "misses": by_bin(errors_of(torch.zeros(()), test)),
        "average": by_bin(average),
        "spread": by_bin(spread),
        "ranks": ranks,
    }


def trained(flows: CylinderFlows, recipe: Recipe, seed: int) -> nn.Module:
    """A network that was trained on some flows, by the plan from the base size and a cosine schedule."""
    found = plan_of(recipe.width, RATE + recipe.octave)
    with untouched_randomness(seed):
        model = found.build(seed)
    optimizer = found.optimizer(model, check_gradients=False)
    scheduler = found.schedule(optimizer, "cosine", steps=recipe.steps, warmup=recipe.steps // 20)
    for step in range(recipe.steps):
        batch = batch_of(flows, seed, step)
        coarse, targets = mirrored_at_random(batch, seed, step) if recipe.flips else batch
        optimizer.zero_grad()
        fluid_loss(model(coarse), targets).backward()
        optimizer.step()
        scheduler.step()
    return model


@functools.lru_cache(maxsize=32)
def plan_of(width: int, exponent: float) -> Plan:
    """The workload's network at a width, planned from the base size."""
    task = workload("two-cylinders")
    return plan(task.build, task.batch(0, 0)[0], base=BASE, size=Size(width, BASE.depth), lr=2.0**exponent)


def mirrored(maps: Tensor, axis: int) -> Tensor:
    """Maps (B, C, H, W) of mirrored flows: the axis, 0 for x and 1 for y, and the velocity along it turn.

    Maps of one channel have no velocity; in others channels 0 and 1 are the velocity.

    >>> mirrored(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]]), 0).tolist()
    [[[[-2.0, -1.0]], [[4.0, 3.0]]]]
    """
    found = maps.flip(3 - axis)
    if maps.shape[1] > 1:
        found[:, axis] *= -1
    return found


def mirrored_at_random(batch: Batch, seed: int, step: int) -> Batch:
    """Each flow of a batch as it is or mirrored, along x with a probability of 1/2, and along y."""
    coarse, (correction, fluid) = batch
    tosses = generator("mirrored flows", seed, step).random((2, len(coarse))) < 0.5
    found = [coarse, correction, fluid]
    for axis, toss in enumerate(torch.from_numpy(tosses)):
        found = [torch.where(toss[:, None, None, None], mirrored(maps, axis), maps) for maps in found]
    return found[0], (found[1], found[2])


def held_out_flows(seed: int, each: int) -> CylinderFlows:
    """`each` test flows of every bin, in the order of gaps."""
    return cylinder_flows(BINS * each, "all", seed=TEST + seed)


@torch.no_grad()
def predict(model: nn.Module, flows: CylinderFlows) -> Tensor:
    """The corrections (N, 2, H, W) that a network predicts."""
    return torch.cat([model(coarse) for coarse in flows.coarse.split(140)])


def errors_of(predicted: Tensor, flows: CylinderFlows) -> Tensor:
    """The mean squared error of each flow, in the unit of the loss."""
    return ((predicted - flows.correction) * flows.fluid).square().mean((1, 2, 3))


def by_bin(values: Tensor) -> list[float | None]:
    """The mean over the flows of each bin."""
    return [short(mean) for mean in values.view(BINS, -1).mean(1).tolist()]


def _rows(each: int) -> dict[str, Sequence[int]]:
    """The test flows of each region, and all."""
    rows = np.arange(BINS * each).reshape(BINS, each)
    found: dict[str, Sequence[int]] = {"all": rows.ravel().tolist()}
    return found | {region: rows[bins_of(region)].ravel().tolist() for region in REGIONS}
