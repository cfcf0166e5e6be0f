"""Is there anything to survey? What is wrong with the workload itself is an error of use, said at once."""

from __future__ import annotations

import math

import torch

from theodolite.anatomy.specimen import shapes_of
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying.site import Site

TRIAL_PARAMETERS = 50_000_000
"""Up to this size the model is built for real and called once before anything else is done."""


def check_usable(site: Site) -> bool:
    """Is the loss of a new network finite, as far as it was looked at?

    Raises UseError if the workload gives no batch, cannot be built, fails when called or ignores width."""
    _ = site.inputs
    name, size = site.workload.name, site.size
    here = shapes_of(site.build_hollow(size))
    if not here:
        raise UseError(f"workload {name!r}: build({size.width}, {size.depth}) has no parameters")
    wider = Size(2 * size.width, size.depth)
    if shapes_of(site.build_hollow(wider)) == here:
        raise UseError(
            f"workload {name!r}: build ignores width: build({size.width}, {size.depth}) and "
            f"build({wider.width}, {wider.depth}) have the same {len(here)} shapes. "
            "Let the first argument of build set the size of the hidden layers"
        )
    if sum(math.prod(shape) for shape in here.values()) <= TRIAL_PARAMETERS:
        return math.isfinite(_loss(site))
    return True


def _loss(site: Site) -> float:
    loss = site.evaluate(site.build())
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UseError(
            f"workload {site.workload.name!r}: loss returned {described(loss)}, not a tensor with one number"
        )
    return float(loss)
