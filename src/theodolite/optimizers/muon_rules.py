"""Updates that are orthogonal matrices: Muon with its four scales, Shampoo and SOAP.

With the singular value decomposition `∇W = UΣVᵀ`, all of them reduce to `A = s·UVᵀ` (without momentum), so
`‖A‖_R = s·√(n_in/n_out)`. The scales s by name:

    none       1
    original   √max(1, n_out/n_in)      Jordan et al., torch's default
    rms        0.2·√max(n_in, n_out)    Muon-Kimi, torch's match_rms_adamw
    spectral   √(n_out/n_in)            update of RMS norm one at every shape

The maxima are taken of the fans the tensor really has: an embedding stays on the side of its vocabulary until
the width has passed it.
"""

from __future__ import annotations

import math

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import gradient, meet
from theodolite.optimizers.hyper import Base, Hyper, Ratios


def muon(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Scale `none`. eps is added to `‖∇W‖_F` before the Newton–Schulz iteration."""
    return _orthogonal(part, ratios, base, scale=1.0)


def muon_original(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Scale `original`."""
    aspect = part.fan_out / part.fan_in
    aspect_at_base = aspect * ratios.fan_in / ratios.fan_out
    return _orthogonal(part, ratios, base, scale=math.sqrt(max(1.0, aspect) / max(1.0, aspect_at_base)))


def muon_kimi(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Scale `rms`."""
    larger = max(part.fan_in, part.fan_out)
    larger_at_base = max(part.fan_in / ratios.fan_in, part.fan_out / ratios.fan_out)
    return _orthogonal(part, ratios, base, scale=math.sqrt(larger / larger_at_base))


def muon_spectral(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Scale `spectral`."""
    return _orthogonal(part, ratios, base, scale=math.sqrt(ratios.fan_out / ratios.fan_in))


def soap(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Adam in the eigenbasis of Shampoo, where the gradient is diagonal: its sign there is `UVᵀ` here.

    eps meets the gradient's singular values.
    """
    return _orthogonal(part, ratios, base, scale=1.0)


def shampoo(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = (GGᵀ)^(−1/4) G (GᵀG)^(−1/4) = UVᵀ`; eps is added to `GGᵀ`, the square of the gradient."""
    floor = gradient(part, ratios) ** 2
    update = math.sqrt(ratios.fan_in / ratios.fan_out)
    return meet(part, ratios, base, update=update, floor=floor, floor_degree=2)


def _orthogonal(part: Part, ratios: Ratios, base: Base, *, scale: float) -> Hyper:
    update = scale * math.sqrt(ratios.fan_in / ratios.fan_out)
    return meet(part, ratios, base, update=update, floor=gradient(part, ratios))
