"""Is there anything to survey? What is wrong with the workload itself is an error of use, said at once."""

from __future__ import annotations

import math

from torch import nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.errors import UseError
from theodolite.size import Size
from theodolite.surveying.site import Site

TRIAL_PARAMETERS = 50_000_000
"""Up to this size the model is built for real and called once before anything else is done."""


def check_usable(site: Site) -> None:
    """Raise UseError if the workload gives no batch, cannot be built, fails when called or ignores width."""
    _ = site.inputs
    name, size = site.workload.name, site.size
    here = shapes(site, size)
    if not here:
        raise UseError(f"workload {name!r}: build({size.width}, {size.depth}) has no parameters")
    wider = Size(2 * size.width, size.depth)
    if shapes(site, wider) == here:
        raise UseError(
            f"workload {name!r}: build ignores width: build({size.width}, {size.depth}) and "
            f"build({wider.width}, {wider.depth}) have the same {len(here)} shapes. "
            "Let the first argument of build set the size of the hidden layers"
        )
    if sum(math.prod(shape) for shape in here.values()) <= TRIAL_PARAMETERS:
        loss = site.evaluate(site.build())
        if loss.numel() != 1:
            raise UseError(f"workload {name!r}: loss returned shape {tuple(loss.shape)}, not a single number")


def shapes(site: Site, size: Size) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter at a size; nothing is allocated unless build insists on it."""
    return {key: tuple(tensor.shape) for key, tensor in canonical_parameters(_hollow(site, size))}


def _hollow(site: Site, size: Size) -> nn.Module:
    try:
        return site.build(size, device="meta")
    except UseError:
        # Some builds read a tensor's value. If it fails for real as well, that is the exception to show.
        return site.build(size)
