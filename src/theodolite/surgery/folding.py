"""`fold`: scale vectors and gains multiplied into the weights; the plain architecture again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.exclusive import exclusive
from theodolite.surgery.apply import Done, conduct, reasons
from theodolite.surgery.editing import Edits, scaled_gains, scaled_weights
from theodolite.surgery.folded import Folded, unplaced
from theodolite.surgery.holding import Held, held
from theodolite.surgery.places import Place, SurgeryError, find_places
from theodolite.surgery.proof import Proof
from theodolite.surgery.vectors import ScaledGain, ScaledWeight


@exclusive()
def fold(
    model: nn.Module,
    inputs: Any,
    *,
    gains: Sequence[str] | None = None,
    optimizer: Optimizer | None = None,
) -> tuple[nn.Module, Proof]:
    """Multiply scale vectors and the gains of norms into the weights that read them, in place.

    What `scale_vectors` added is gone afterwards: names and shapes of the network's state are those of the
    plain architecture, and it costs nothing more to run. Gains that only linear maps read are one (zero, if
    they are zero-centred), shifts that went into biases are zero. All is multiplied in float64 and rounded
    once. Gains that cannot be folded stay as they are, each with its reason in `proof.left`.

    Args:
        model: with scale vectors in it, or plain.
        inputs: what it is called with.
        gains: patterns of the names of norms' own gains to fold, all that can be if not given. One that is
            named and cannot be folded is an error. Scale vectors are folded in any case.
        optimizer: one that trains the model: Adam's moments follow, `m/γ` and `v/γ²`.

    Raises:
        SurgeryError: if there is nothing to fold, saying why, or if the function would change.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model = th.models.GPT(64, 2).double()
    >>> names = set(model.state_dict())
    >>> model, _ = th.surgery.scale_vectors(model, tokens)
    >>> model, proof = fold(model, tokens)
    >>> set(model.state_dict()) == names, proof.outputs < 1e-10
    (True, True)
    """
    state = None
    if optimizer is not None:
        from theodolite.surgery.state import State

        state = State(model, optimizer)

    def act(inner: nn.Module, edits: Edits) -> Done:
        return folding(inner, inputs, edits, gains)

    return model, conduct(model, inputs, "fold", act, None if state is None else state.folded)


def folding(model: nn.Module, inputs: Any, edits: Edits, gains: Sequence[str] | None = None) -> Done:
    """The edits of `fold`."""
    before = dict(canonical_parameters(model))
    weights, own = scaled_weights(model), scaled_gains(model)
    _open(model, edits, weights, own)
    places = find_places(model, inputs)
    chosen = {place.gain for place in places.chosen(gains)}
    tensors = dict(canonical_parameters(model))
    maps: list[Folded] = []
    for place in (*places.found, *_beside(places.found, weights, own)):
        takes = place.gain in chosen
        vectors = {r.weight: weights[r.weight][1] for r in place.readers if r.weight in weights}
        if not (takes or vectors or place.gain in own):
            continue
        bare = Folded(place, {}, vectors, own[place.gain][1] if place.gain in own else None, takes)
        given = {name: before[name].detach().clone() for name in bare.names if name in before}
        maps.append(dataclasses.replace(bare, tensors=given))
        for name, value in maps[-1].values().items():
            edits.write(tensors[name], value.view_as(tensors[name]))
        if takes:
            edits.write(tensors[place.gain], tensors[place.gain].new_tensor(1.0 - place.offset))
            if place.shift is not None:
                edits.write(tensors[place.shift], tensors[place.shift].new_tensor(0.0))
    if not maps:
        raise SurgeryError(f"nothing to fold: {reasons(places.left)}")
    return Done(tuple(one.place.gain for one in maps if one.takes_gain), places.left, maps)


def _open(
    model: nn.Module,
    edits: Edits,
    weights: Mapping[str, tuple[Held, ScaledWeight]],
    gains: Mapping[str, tuple[Held, ScaledGain]],
) -> None:
    """Take the scale vectors out, and make the norms' gains and shifts parameters again."""
    for name, (where, how) in weights.items():
        edits.unparametrize(where)
        trained = any(one.requires_grad for one in how.parameters())
        for other in (how.gain, how.shift):
            if other:
                home = held(model, _now(other, how.weight, name))
                if home.attribute in home.module._buffers:
                    edits.thaw(home, how.norm, trained=trained)
    for where, _ in gains.values():
        edits.unparametrize(where)


def _now(other: str, weight: str, name: str) -> str:
    """The name that a tensor has now, if a weight beside it has another name than it had.

    The network may be part of a larger one by now, or be a part of what was converted.

    >>> _now("norm.weight", "up.weight", "model.up.weight")
    'model.norm.weight'
    >>> _now("model.norm.weight", "model.up.weight", "up.weight")
    'norm.weight'
    """
    if name.endswith(weight):
        return name.removesuffix(weight) + other
    if weight.endswith(name) and other.startswith(weight.removesuffix(name)):
        return other.removeprefix(weight.removesuffix(name))
    raise SurgeryError(
        f"{name} was {weight} when it was converted, and the norm before it {other}: fold the whole"
    )


def _beside(
    found: Sequence[Place],
    weights: Mapping[str, tuple[Held, ScaledWeight]],
    gains: Mapping[str, tuple[Held, ScaledGain]],
) -> list[Place]:
    """Scale vectors at places that cannot be found again, as gains that stay where they are."""
    read = {reader.weight for place in found for reader in place.readers}
    named = {place.gain for place in found}
    alone = unplaced(
        {name: one for name, one in weights.items() if name not in read},
        {name: one for name, one in gains.items() if name not in named},
    )
    return [one.place for one in alone]
