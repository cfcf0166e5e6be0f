"""By which law the network's own initialisation draws each tensor: read off the operations it consists of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import build_hollow, build_model
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning.law import Law
from theodolite.planning.recording import Recorder

QUICK_PARAMETERS = 16_000_000
"""Drawn in a moment. A larger network is read without its values first, in the time of a few operations."""
MOST_REAL_PARAMETERS = 250_000_000
"""A gigabyte in float32. A larger network is never built for real."""


def read_laws(build: Build, size: Size, among: Container[str] | None = None) -> dict[str, Law]:
    """The law of every tensor, or of those whose canonical names are `among` some, by name.

    The network is built once while its operations are watched: what `normal_`, `uniform_`, a factor, a
    constant or a truncation does to the distribution of the entries is known exactly, so a std is the number
    in the network's source and no estimate. A tensor filled in another way (orthogonal, a row of it zeroed,
    computed) is the network's `own`; its mean and std are measured.

    >>> from torch import nn
    >>> laws = read_laws(lambda width, depth: nn.Linear(width, width), Size(64, 1))
    >>> laws["weight"].kind, math.isclose(laws["weight"].std, 1 / (3 * 64) ** 0.5, rel_tol=1e-15)
    ('uniform', True)
    """
    count = sum(tensor.numel() for tensor in build_hollow(build, size).parameters())
    if count > QUICK_PARAMETERS:
        try:
            return laws_without_values(build, size, among)
        except UseError:
            if count > MOST_REAL_PARAMETERS:
                raise
    return laws_with_values(build, size, among)


def laws_with_values(build: Build, size: Size, among: Container[str] | None = None) -> dict[str, Law]:
    """Read off a real network; its values confirm what was read, or take its place."""
    with Recorder().with_truncation() as recorder:
        model = build_model(build, size, seed=0)
    laws = {}
    for name, tensor in _chosen(model, among):
        law = recorder.law(tensor)
        # Values may also be written where no operation shows, through numpy.
        if law is None or not _confirmed(law, tensor.detach()):
            law = _measured(name, tensor.detach())
        laws[name] = law
    return laws


def laws_without_values(build: Build, size: Size, among: Container[str] | None = None) -> dict[str, Law]:
    """Read off a network of fake tensors, which take no memory."""
    # Not on meta: transformers initialises nothing there.
    with (
        warnings.catch_warnings(action="ignore"),
        FakeTensorMode(allow_non_fake_inputs=True),
        Recorder().with_truncation() as recorder,
    ):
        try:
            model = build_model(build, size)
        except UseError as error:
            raise UseError(f"{_too_large(size)} Without values {error}") from error
        laws = {name: recorder.law(tensor) for name, tensor in _chosen(model, among)}
    unknown = [name for name, law in laws.items() if law is None]
    if unknown:
        raise UseError(
            f"{unknown[0]} is initialised in a way of its own ({len(unknown)} such tensors), which only the "
            f"values show. {_too_large(size)}"
        )
    return {name: law for name, law in laws.items() if law is not None}


def depth_in_init(build: Build, base: Size, among: Container[str] | None = None) -> dict[str, float]:
    """By what factor each tensor's own initial size changes at twice the depth; only where it does.

    GPT-2's `1/√(2L)` shows as `√½` on the projections that end a branch:

    >>> from functools import partial
    >>> from theodolite.models import GPT
    >>> found = depth_in_init(partial(GPT, scaled_init=True), Size(64, 2))
    >>> {name: round(factor, 3) for name, factor in found.items() if name.startswith("blocks.0")}
    {'blocks.0.attention.branch.out.weight': 0.707, 'blocks.0.feed_forward.branch.down.weight': 0.707}
    """
    shallow = read_laws(build, base, among)
    try:
        deep = read_laws(build, Size(base.width, 2 * base.depth), among)
    except UseError:  # cannot be built or read: then there is nothing to compare with
        return {}
    found = {}
    for name, law in shallow.items():
        if name not in deep or not law.size or not deep[name].size:
            continue
        factor = deep[name].size / law.size
        # A measured std is uncertain; one that was read is not.
        doubt = 0.1 if "own" in (law.kind, deep[name].kind) else 1e-6
        if abs(math.log(factor)) > doubt:
            found[name] = factor
    return found


def _chosen(model: nn.Module, among: Container[str] | None) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in canonical_parameters(model) if among is None or name in among]


def _measured(name: str, tensor: Tensor) -> Law:
    values = widened(tensor)
    if not values.isfinite().all():
        raise UseError(
            f"{name} starts with values that are not finite, as torch.empty may leave them: initialise it "
            "in build"
        )
    first = values.flatten()[0].item()
    if (values == first).all() and first == first.real:
        return Law("constant", mean=first.real)
    mean = values.mean().item()
    return Law("own", std=spread_of(values), mean=abs(mean) if values.is_complex() else mean)


def widened(values: Tensor) -> Tensor:
    """The values in float64 or complex128."""
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def spread_of(values: Tensor) -> float:
    """The root mean square of `|v − mean|`, of real or complex values."""
    return (values - values.mean()).abs().square().mean().sqrt().item()


def _confirmed(law: Law, values: Tensor) -> bool:
    """Are these values of the law, as far as mean, std and bounds tell? Eight standard errors are allowed."""
    if law.kind == "constant":
        return bool((values == torch.full_like(values, law.mean)).all())
    values, rounding = values.float(), torch.finfo(values.dtype).eps
    variance, mean = torch.var_mean(values, correction=0)
    doubt = 8 / math.sqrt(values.numel()) + rounding
    farthest = (values - law.mean).abs().max().item()
    bound = {"uniform": law.std * math.sqrt(3), "truncated": law.bound}.get(law.kind) or math.inf
    return (
        abs(mean.item() - law.mean) <= doubt * law.std + rounding * abs(law.mean)
        and abs(math.sqrt(variance.item()) / law.std - 1) <= doubt
        and farthest <= bound * (1 + 2 * rounding) + rounding * abs(law.mean)
    )


def _too_large(size: Size) -> str:
    return (
        f"With more than {MOST_REAL_PARAMETERS:,} parameters the network at {size} is not built for real: "
        "choose a smaller base size."
    )
