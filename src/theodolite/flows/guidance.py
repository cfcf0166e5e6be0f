"""Guidance: stronger conditioning by extrapolation, and by projection before each step.

`u` is the velocity without a condition, `c` the one with it. Guidance of scale w follows `u + w(c − u)`.
Guidance by manifold projection first moves the sample to where the two agree: before a step of size dt it
repeats `x ← G(x)` with

    G(x) = y + h c(y, t),   y = x − h u(x, t),   h = dt/2

a half step back along u and one forward along c, whose fixed points have `c(y, t) = u(x, t)`. Every iteration
costs two evaluations of a field beside the two of guidance itself, so compare at equal evaluations:
`CountedField` counts them.

References:
    Cai et al., Improving classifier-free guidance of flow matching via manifold projection, 2026.
    Walker, Ni, Anderson acceleration for fixed-point iterations, 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.core.arguments import number, one_of, positive, whole
from theodolite.core.errors import UseError
from theodolite.flows.fields import Field, PathField, check_field, check_shape, path_of
from theodolite.flows.interpolants import Interpolant
from theodolite.flows.sampling import BeforeStep

FixedPointMethod = Literal["picard", "anderson"]

EARLY = 1e-4
"""A step whose time is this share of its length before `until` counts as at `until`: times are rounded."""


def guided(unconditional: Field, conditional: Field, scale: float) -> Field:
    """The field `u + w(c − u)`: w = 0 has no condition, w = 1 is the conditional field, w > 1 exaggerates it.

    One evaluation is two of the given fields; at w = 0 and w = 1 it is one. The field has the path of the
    given ones.

    Args:
        unconditional: u, the field without a condition.
        conditional: c, the field with it.
        scale: w, zero or more.

    >>> field = guided(lambda x, t: 0 * x, lambda x, t: x, scale=3.0)
    >>> field(torch.ones(1, 2), torch.zeros(1))
    tensor([[3., 3.]])
    """
    scale = number("scale", scale, least=0)
    path = _common_path(unconditional, conditional)
    if scale in (0, 1):
        return conditional if scale else unconditional

    def field(x: Tensor, t: Tensor) -> Tensor:
        without = _velocity("unconditional", unconditional, x, t)
        return without + scale * (_velocity("conditional", conditional, x, t) - without)

    return field if path is None else PathField(field, path)


def projection(
    unconditional: Field,
    conditional: Field,
    *,
    iterations: int,
    until: float = 0.6,
    method: FixedPointMethod = "picard",
    window: int = 1,
    damping: float = 1.0,
    ridge: float = 1e-4,
) -> BeforeStep:
    """A `before_step` for `sample` that projects the sample in every step that starts before `until`.

    It costs `2·iterations` evaluations in each of these steps. With 10 steps, guidance and 2 iterations until
    0.6 that is 20 + 24 instead of 20. On exact fields it acts as a larger scale does: the gap `|c − u|` gets
    smaller, and the samples leave the conditional distribution.

    Args:
        unconditional: u, the field without a condition.
        conditional: c, the field with it.
        iterations: of the map G in each step; 2 or 3 are usual.
        until: no projection from this time on.
        method: `picard`, `x ← G(x)`, or `anderson`, see `fixed_point`.
        window: earlier iterates that Anderson's method uses.
        damping: see `fixed_point`.
        ridge: of Anderson's method.

    >>> pull = projection(lambda x, t: x, lambda x, t: 0 * x, iterations=1)
    >>> pull(torch.ones(1, 1), 0.0, 0.5), pull(torch.ones(1, 1), 0.6, 0.5)
    (tensor([[0.7500]]), tensor([[1.]]))
    """
    whole("iterations", iterations, least=1)
    until = number("until", until, least=0, most=1)
    one_of("method", method, get_args(FixedPointMethod))
    whole("window", window, least=1)
    positive("damping", number("damping", damping, least=0, most=1))
    number("ridge", ridge, least=0)
    _common_path(unconditional, conditional)
    kept = window if method == "anderson" else 0

    def before_step(x: Tensor, t: float, dt: float) -> Tensor:
        if until - t <= EARLY * abs(dt):
            return x
        kind, half = torch.promote_types(x.dtype, torch.float32), dt / 2
        times_B = torch.full((len(x),), t, dtype=kind, device=x.device)

        def towards_agreement(here: Tensor) -> Tensor:
            back = here - half * _velocity("unconditional", unconditional, here, times_B)
            return back + half * _velocity("conditional", conditional, back, times_B)

        return fixed_point(
            towards_agreement, x, iterations=iterations, window=kept, damping=damping, ridge=ridge
        )

    return before_step


def fixed_point(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    iterations: int,
    window: int = 0,
    damping: float = 1.0,
    ridge: float = 1e-4,
) -> Tensor:
    """Iterate towards `x = G(x)`, each example of the batch on its own: Picard's method, or Anderson's.

    With `F_k = G(x_k) − x_k` and the differences `dF_i = F_k − F_{k−i}` of the last m iterates, i = 1 … m,

        θ = argmin |F_k − Σ θ_i dF_i|² + ridge·|θ|²
        x_{k+1} = (1 − b)(x_k − Σ θ_i dx_i) + b (G_k − Σ θ_i dG_i)

    With m = 0 and b = 1 this is Picard's `x ← G(x)`. Half precision is mixed in float32. The ridge is
    absolute: it matters where |dF|² is not far above it.

    Args:
        function: G, of a batch (B, ...), one evaluation per iteration.
        x: where to start.
        iterations: at least 1.
        window: m; 0 for Picard's method.
        damping: b, above 0 and at most 1.
        ridge: zero or more.

    On a line, two points determine a linear G, and the third iterate is its fixed point:

    >>> fixed_point(lambda x: 0.9 * x + 1, torch.zeros(1, 1).double(), iterations=2, window=1, ridge=0.0)
    tensor([[10.0000]], dtype=torch.float64)
    """
    whole("iterations", iterations, least=1)
    whole("window", window, least=0)
    given, kind = x.dtype, torch.promote_types(x.dtype, torch.float32)
    points: list[Tensor] = []
    values: list[Tensor] = []
    for _ in range(iterations):
        value = check_shape("function", function(x), x, "give one that keeps the shape")
        points = [*points[max(len(points) - window, 0) :], x.to(kind).flatten(1)]
        values = [*values[max(len(values) - window, 0) :], value.to(kind).flatten(1)]
        point_BD, value_BD = _extrapolated(points, values, ridge)
        x = torch.lerp(point_BD, value_BD, damping).view_as(x).to(given)
    return x


def _extrapolated(points: list[Tensor], values: list[Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """The combinations of points and of their values with the least residual; each (B, D)."""
    point_BD, value_BD = points[-1], values[-1]
    if len(points) == 1:
        return point_BD, value_BD
    points_BDm, values_BDm = (
        torch.stack([rows[-1] - one for one in rows[:-1]], dim=-1) for rows in (points, values)
    )
    residual_BD1, differences_BDm = (value_BD - point_BD)[..., None], values_BDm - points_BDm
    gram_Bmm = differences_BDm.mT @ differences_BDm
    gram_Bmm = gram_Bmm + ridge * torch.eye(gram_Bmm.shape[-1], dtype=gram_Bmm.dtype, device=gram_Bmm.device)
    # The pseudo-inverse: differences are zero for an example that has converged.
    theta_Bm1 = torch.linalg.pinv(gram_Bmm, hermitian=True) @ (differences_BDm.mT @ residual_BD1)
    return point_BD - (points_BDm @ theta_Bm1)[..., 0], value_BD - (values_BDm @ theta_Bm1)[..., 0]


class CountedField:
    """A field that counts its evaluations, to compare ways of sampling at equal cost.

    >>> field = CountedField(lambda x, t: x)
    >>> _ = guided(field, field, 2.0)(torch.ones(4, 1), torch.zeros(4))
    >>> field.evaluations
    2
    """

    def __init__(self, field: Field) -> None:
        check_field("field", field)
        self.field = field
        self.path = path_of(field)
        self.evaluations = 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The velocity of the field."""
        self.evaluations += 1
        return self.field(x, t)


def _common_path(unconditional: Field, conditional: Field) -> Interpolant | None:
    """The path of two fields, if one of them knows it."""
    check_field("unconditional", unconditional)
    check_field("conditional", conditional)
    first, second = path_of(unconditional), path_of(conditional)
    if first is not None and second is not None and first != second:
        raise UseError(
            f"the unconditional field has the {first.name} path and the conditional one the {second.name} "
            "path: give two fields of one path"
        )
    return second if first is None else first


def _velocity(name: str, field: Field, x: Tensor, t: Tensor) -> Tensor:
    return check_shape(f"the {name} field", field(x, t), x, "return one velocity for each point")
