"""Where the residual stream is looked at: on which network, and on how much data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.specimen import shapes_of
from theodolite.core.batches import Batch
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.size import Size
from theodolite.fleet.training import targets_in
from theodolite.probes.stream.growth import GrowthLaw, fit_growth
from theodolite.probes.stream.stream import Stream, stream
from theodolite.surveying.batches import amount, examples_in, few, first_of
from theodolite.surveying.budget import pass_work
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site

TARGETS, ENTRIES = 512, 65_536
"""In a batch, about: targets, and numbers in it."""
FEWEST = 16
"""Targets to which it is cut down, …"""
MOST_PASS, FEWEST_EXAMPLES = 4e9, 4
"""… and examples, where a forward pass takes more multiplications than this."""
MOST_PARAMETERS = 30_000_000
"""Above this a small network of the trials is looked at instead."""
WORK, DEEP_WORK = 8e10, 2.4e12
"""Multiplications that skipping blocks may take, …"""
OPERATION = 3e6
"""… with what it takes to follow one operation: about 150 µs."""
DRAWS = 3
"""Initialisations over which the growth of the stream is averaged. In one draw of few blocks the last may add
more than the first by chance, and a stream that grows by additions looks like one that grows by factors: in 3
of 36 draws of a GPT with 4 blocks, and in none of 34 means over 3 of them."""


@dataclass(frozen=True)
class Look:
    """What was seen, and on what."""

    stream: Stream
    size: Size
    where: str
    """To open a sentence with."""
    targets: int | str
    """In the batch; and of how many, where it was cut."""
    growth: GrowthLaw
    """Of the stream, in the mean over a few initialisations."""

    @property
    def ground(self) -> dict[str, Value]:
        """What is measured on, for the evidence."""
        return {
            "size": str(self.size),
            "blocks": len(self.stream.skipped_blocks),
            "targets in the batch": self.targets,
        }


def find_look(site: Site) -> Look:
    """The stream of the surveyed network if it is small, otherwise of the deepest of the trials."""
    size, where = site.size, f"At {site.size}"
    if sum(math.prod(shape) for shape in shapes_of(site.build_hollow(size)).values()) > MOST_PARAMETERS:
        trials = site.trials
        size = trials.depths[-1] if trials.depths else trials.base
        where = f"At {size}, a small network of the trials,"
    model = site.build(size)
    batch = _affordable(site, model, _cut(site.batch))
    seen = _seen(site, model, batch)
    return Look(seen, size, where, amount(batch, site.whole_batch), _growth(site, size, batch, seen))


def _cut(batch: Batch) -> Batch:
    entries = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    wanted = min(TARGETS, int(targets_in(batch) * ENTRIES / max(1, entries)))
    return few(batch, max(FEWEST, wanted))


def _affordable(site: Site, model: nn.Module, batch: Batch) -> Batch:
    work, examples = _forward(site, model, batch), examples_in(batch)
    if site.deep or examples is None or work <= MOST_PASS:
        return batch
    return first_of(batch, max(FEWEST_EXAMPLES, int(examples * MOST_PASS / work)))


def _forward(site: Site, model: nn.Module, batch: Batch) -> float:
    """What a forward pass takes, in multiplications."""
    with untouched_randomness(site.seed), evaluated(model), torch.no_grad():
        return pass_work(lambda: site.workload.evaluate(model, batch)).total


def _seen(site: Site, model: nn.Module, batch: Batch) -> Stream:
    """Blocks are skipped if that is not too much work: a forward pass for each branch and for each block."""
    loss = site.workload.loss
    first = stream(model, loss, batch, skip=False)
    assert first.layout is not None
    each = _forward(site, model, batch) + OPERATION * len(first.layout.graph.nodes)
    passes = len(first.branches) + len(first.skipped_blocks)
    if passes * each > (DEEP_WORK if site.deep else WORK):
        return first
    return stream(model, loss, batch, layout=first.layout)


def _growth(site: Site, size: Size, batch: Batch, seen: Stream) -> GrowthLaw:
    """How the stream grows: the geometric mean over initialisations, of which one is seen already."""
    profiles = [seen.profile]
    for more in range(1, DRAWS):
        model = replace(site, seed=(site.seed + more) % 2**63).build(size)
        profiles.append(stream(model, site.workload.loss, batch, skip=False, layout=seen.layout).profile)
    same = [profile for profile in profiles if len(profile) == len(seen.profile)]
    with np.errstate(divide="ignore"):  # a stream that starts at zero has no growth
        return fit_growth(np.exp(np.log(np.asarray(same)).mean(0)).tolist())
