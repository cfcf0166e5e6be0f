"""The built-in workload of super-resolution: potential flow around two cylinders.

Inputs are flows on a coarse grid. The network predicts what bicubic interpolation misses of the velocity on
the fine grid, in a unit in which the loss of a network that predicts 0 is about 1. Metrics are errors over
those of interpolation, for gaps inside the trained range, in a hole of it, and beyond its ends.
"""

# B batch, H and W points of the fine grid

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, device_of
from theodolite.core.size import Size
from theodolite.data import CylinderFlows, cylinder_flows, generator
from theodolite.data.two_cylinders import Region
from theodolite.models import Upsampler
from theodolite.workloads.definition import Workload

NUM_TRAINED, NUM_HELD_OUT, NUM_BATCH = 256, 128, 32
"""Flows that are trained on, flows of each held-out set, and flows in a batch."""
HELD_OUT_SEED = 1
"""The seed of held-out flows; that of flows that are trained on is 0."""
METRICS: Mapping[str, Region] = {
    "error inside": "trained",
    "error in the hole": "hole",
    "error narrower": "narrower",
    "error wider": "wider",
}
"""Metrics, and the gaps on which they are measured."""


def batch_of(flows: CylinderFlows, seed: int, step: int, *, num: int = NUM_BATCH) -> Batch:
    """`num` of the flows: coarse maps, and corrections with the mask of fluid points.

    >>> coarse, (correction, fluid) = batch_of(cylinder_flows(4), seed=0, step=0, num=2)
    >>> coarse.shape, correction.shape, fluid.shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 2, 64, 64]), torch.Size([2, 1, 64, 64]))
    """
    rows = generator("batch of cylinder flows", seed, step).choice(len(flows.flows), num, replace=False)
    chosen = torch.from_numpy(rows)
    return flows.coarse[chosen], (flows.correction[chosen], flows.fluid[chosen])


def fluid_loss(predicted_B2HW: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error of a correction, with no error at points inside the cylinders.

    >>> fluid_loss(torch.ones(1, 2, 1, 2), (torch.zeros(1, 2, 1, 2), torch.tensor([[[[1.0, 0.0]]]])))
    tensor(0.5000)
    """
    correction_B2HW, fluid_B1HW = targets
    return ((predicted_B2HW - correction_B2HW) * fluid_B1HW).square().mean()


def relative_error(model: nn.Module, flows: CylinderFlows) -> float:
    """The root mean squared error of a network over that of interpolation; both over all fluid points.

    >>> class Nothing(nn.Module):
    ...     def forward(self, coarse_B3hw):
    ...         return torch.zeros(len(coarse_B3hw), 2, 64, 64)
    >>> relative_error(Nothing(), cylinder_flows(4))
    1.0
    """
    device = device_of(model)
    correction = flows.correction.to(device)
    with torch.no_grad():
        missed = fluid_loss(model(flows.coarse.to(device)), (correction, flows.fluid.to(device)))
    return math.sqrt(missed.item() / correction.square().mean().item())


def _draw(seed: int, step: int) -> Batch:
    return batch_of(cylinder_flows(NUM_TRAINED), seed, step)


def _draw_held_out(seed: int, step: int) -> Batch:
    return batch_of(cylinder_flows(NUM_HELD_OUT, seed=HELD_OUT_SEED), seed, step)


def _error(region: Region, model: nn.Module) -> float:
    return relative_error(model, cylinder_flows(NUM_HELD_OUT, region, seed=HELD_OUT_SEED))


WORKLOADS = (
    Workload(
        "two-cylinders",
        Upsampler,
        _draw,
        fluid_loss,
        Size(32, 3),
        held_out=_draw_held_out,
        metrics={name: partial(_error, region) for name, region in METRICS.items()},
    ),
)
