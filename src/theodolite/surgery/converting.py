"""`scale_vectors`: gains of their own for every linear map that reads a norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.surgery.apply import Done, conduct, reasons
from theodolite.surgery.editing import Edits, order_of, scaled_weights
from theodolite.surgery.folded import Folded, along
from theodolite.surgery.holding import held
from theodolite.surgery.places import Place, Reader, SurgeryError, find_places
from theodolite.surgery.proof import Proof
from theodolite.surgery.vectors import FORMS, Form, ScaledGain, ScaledWeight, Vector

Placement = Literal["input", "output", "both"]
Reparameterization = Literal["direction", "product", "exp"]


@exclusive()
def scale_vectors(
    model: nn.Module,
    inputs: Any,
    *,
    heterogeneous: bool = True,
    placement: Placement = "both",
    reparameterization: Reparameterization | None = "direction",
    gains: Sequence[str] | None = None,
    optimizer: Optimizer | None = None,
) -> tuple[nn.Module, Proof]:
    """Give every linear map that reads a norm scale vectors of its own, in place; the function stays.

    A norm's gain γ that only linear maps read becomes part of them, `diag(b)·W·diag(γ)`: the norm is computed
    once, its gain is a constant, and each map (each of q, k and v, of gate and up, of the experts, also where
    they are one fused tensor) has its own γ and b. A LayerNorm's shift becomes part of the maps' biases.

    Args:
        model: any module that `theodolite.dissect` understands; it is edited, and returned.
        inputs: what it is called with.
        heterogeneous: a γ for each map; otherwise the norm keeps the one it has.
        placement: `input` for γ alone; `output` for b alone, γ is multiplied into W; or `both`.
        reparameterization: `direction` for vectors β·α/rms(α), `product` for β·α, `exp` for e^β·α, None for
            plain ones.
        gains: patterns of the names of gains to move; all that can be moved if not given.
        optimizer: one that trains the model: the vectors take the place of the gains in it, and the moments
            of Adam and momentum follow.

    Returns:
        The model, and the proof: by how much outputs and gradients differ from what they were.

    Raises:
        SurgeryError: if there is nothing to do, saying why, or if the function would change.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model, proof = scale_vectors(th.models.GPT(64, 2).double(), tokens)
    >>> len(proof.moved), proof.outputs < 1e-10, proof.gradients < 1e-10
    (5, True, True)

    References:
        Negligible in size, significant in effect: on scale vectors in large language models, 2026.
    """
    form = _form(heterogeneous, placement, reparameterization)
    state = None
    if optimizer is not None:
        from theodolite.surgery.state import State

        state = State(model, optimizer)

    def act(inner: nn.Module, edits: Edits) -> Done:
        return _convert(inner, inputs, edits, heterogeneous, placement, form, gains)

    proof = conduct(model, inputs, "scale_vectors", act, None if state is None else state.converted)
    return model, proof


@exclusive()
def convert(
    model: nn.Module,
    inputs: Any,
    *,
    heterogeneous: bool = True,
    placement: Placement = "both",
    reparameterization: Reparameterization | None = "direction",
    gains: Sequence[str] | None = None,
) -> nn.Module:
    """The same without the proof: for build functions, which make many networks of one kind."""
    form = _form(heterogeneous, placement, reparameterization)
    edits = Edits()
    try:
        _convert(unwrap(model), inputs, edits, heterogeneous, placement, form, gains)
    except BaseException:
        edits.undo()
        raise
    return model


def _form(heterogeneous: bool, placement: str, reparameterization: str | None) -> Form:
    if placement not in get_args(Placement):
        raise UseError(f"placement is {placement!r}: it is {', '.join(get_args(Placement))}")
    form = "plain" if reparameterization is None else reparameterization
    if form not in FORMS or reparameterization == "plain":
        kinds = ", ".join(get_args(Reparameterization))
        raise UseError(f"reparameterization is {reparameterization!r}: it is {kinds} or None")
    if not heterogeneous and placement == "input" and form == "plain":
        raise UseError(
            "heterogeneous=False, placement='input' and reparameterization=None is what the network has "
            "already: there is nothing to do"
        )
    return form


def _convert(
    model: nn.Module,
    inputs: Any,
    edits: Edits,
    heterogeneous: bool,
    placement: Placement,
    form: Form,
    gains: Sequence[str] | None,
) -> Done:
    places = find_places(model, inputs)
    tensors = dict(canonical_parameters(model))
    left = dict(places.left)
    chosen = []
    for place in places.chosen(gains):
        if tensors[place.gain].requires_grad:
            chosen.append(place)
        elif gains is not None:
            raise SurgeryError(f"{place.gain}: it is frozen (requires_grad is False)")
        else:
            left[place.gain] = "it is frozen (requires_grad is False)"
    if not chosen:
        if scaled_weights(model):
            raise SurgeryError("nothing to do: the network's weights have scale vectors already")
        raise SurgeryError(f"nothing to do: {reasons(left)}")
    own = heterogeneous or placement == "output"
    if form == "direction":
        _refuse_zeros(chosen, tensors)
    maps = [_operate(model, place, tensors, edits, own, placement, form) for place in chosen]
    return Done(tuple(place.gain for place in chosen), left, [one for one in maps if one is not None])


def _operate(
    model: nn.Module,
    place: Place,
    tensors: dict[str, Tensor],
    edits: Edits,
    own: bool,
    placement: Placement,
    form: Form,
) -> Folded | None:
    """Edit one place; the map from what was there before, unless that is what is there now."""
    gain = tensors[place.gain]
    before = _before(place, tensors) if own else None
    size = (gain.detach().double().reshape(-1) + place.offset).to(gain.dtype)
    for reader in place.readers:
        weight = tensors[reader.weight]
        inputs = _inputs(reader, size, form) if own and placement != "output" else []
        outputs = _outputs(reader, gain, form) if placement != "input" else []
        if own and placement == "output":
            edits.write(weight, weight.detach().double() * along(reader, size.double(), nothing=1.0))
        if inputs or outputs:
            how = ScaledWeight(
                reader.shape,
                inputs,
                outputs,
                weight=reader.weight,
                gain=place.gain,
                shift=place.shift if own else None,
                norm=order_of(held(model, place.gain).module),
            )
            edits.parametrize(held(model, reader.weight), how)
    if before is None:
        if form != "plain":
            edits.write(gain, size.view_as(gain))
            edits.parametrize(held(model, place.gain), ScaledGain(size.view_as(gain), form, place.offset))
        return None
    if place.shift is not None:
        made = before.values()
        for reader in place.readers:
            assert reader.bias is not None
            edits.write(tensors[reader.bias], made[reader.bias])
        edits.freeze(held(model, place.shift), 0.0)
    edits.freeze(held(model, place.gain), 1.0 - place.offset)
    return before


def _before(place: Place, tensors: Mapping[str, Tensor]) -> Folded:
    """The place as it is before it is edited."""
    bare = Folded(place, {})
    return dataclasses.replace(bare, tensors={name: tensors[name].detach().clone() for name in bare.names})


def _inputs(reader: Reader, gain: Tensor, form: Form) -> list[Vector]:
    """A γ for each block of rows."""
    shape = reader.shape
    start = along(reader, gain, nothing=1.0).reshape(-1)
    sizes = shape.vector_sizes(shape.in_axis, len(start))
    dim = shape.dim(shape.in_axis)
    spread = start.view([-1 if one == dim else 1 for one in range(len(sizes))]).expand(sizes)
    return [Vector(spread, form, dim) for _ in shape.rows]


def _outputs(reader: Reader, gain: Tensor, form: Form) -> list[Vector]:
    """A b for each block of rows, all ones."""
    shape = reader.shape
    lengths = [sum(high - low for low, high in rows) for rows in shape.rows]
    sizes = [shape.vector_sizes(shape.out_axis, length) for length in lengths]
    return [Vector(gain.detach().new_ones(one), form, shape.dim(shape.out_axis)) for one in sizes]


def _refuse_zeros(places: Sequence[Place], tensors: Mapping[str, Tensor]) -> None:
    for place in places:
        gain = tensors[place.gain]
        if not gain.is_meta and not bool((gain.detach() + place.offset).any()):
            raise SurgeryError(
                f"{place.gain} is zero, which has no direction: use reparameterization='product' or None, or "
                "leave it out with gains=[patterns]"
            )
