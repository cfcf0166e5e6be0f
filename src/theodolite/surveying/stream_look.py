"""Where the residual stream is looked at: on which network, and on how much data."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.specimen import shapes_of
from theodolite.fleet.training import targets_in
from theodolite.probes.stream import Stream, stream
from theodolite.size import Size
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site
from theodolite.surveying.spot import few
from theodolite.workloads import Batch

TARGETS, ENTRIES = 512, 65_536
"""In a batch, about: targets, and numbers in it."""
FEWEST = 16
"""Targets to which it is cut down."""
MOST_PARAMETERS = 30_000_000
"""Above this a small network of the trials is looked at instead."""
PATIENCE, DEEP_PATIENCE = 4.0, 120.0
"""Seconds that skipping blocks may take."""


@dataclass(frozen=True)
class Look:
    """What was seen, and on what."""

    stream: Stream
    size: Size
    where: str
    """To open a sentence with."""
    targets: int

    @property
    def ground(self) -> dict[str, Value]:
        """What is measured on, for the evidence."""
        return {
            "size": str(self.size),
            "blocks": len(self.stream.blocks),
            "targets in the batch": self.targets,
        }


def find_look(site: Site) -> Look:
    """The stream of the surveyed network if it is small, otherwise of the deepest of the trials."""
    size, where = site.size, f"At {site.size}"
    if sum(math.prod(shape) for shape in shapes_of(site.build_hollow(size)).values()) > MOST_PARAMETERS:
        trials = site.trials
        size = trials.depths[-1] if trials.depths else trials.base
        where = f"At {size}, a small network of the trials,"
    model, batch = site.build(size), _cut(site.batch)
    seen = _seen(site, model, batch, DEEP_PATIENCE if site.deep else PATIENCE)
    return Look(seen, size, where, targets_in(batch))


def _cut(batch: Batch) -> Batch:
    entries = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    wanted = min(TARGETS, int(targets_in(batch) * ENTRIES / max(1, entries)))
    return few(batch, max(FEWEST, wanted))


def _seen(site: Site, model: nn.Module, batch: Batch, patience: float) -> Stream:
    """Blocks are skipped if there is time: forward alone takes about a third of a look."""
    loss = site.workload.loss
    first = stream(model, loss, batch, skip=False)
    started = time.perf_counter()
    first = stream(model, loss, batch, skip=False, layout=first.layout)
    once = (time.perf_counter() - started) / 3
    passes = len(first.reaches) + len(first.blocks)
    return first if passes * once > patience else stream(model, loss, batch, layout=first.layout)
