"""`fold` multiplies scale vectors and gains into the weights; `remove_gains` keeps gains at one for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.exclusive import exclusive
from theodolite.surgery.edits import Edits, Held, held, holders, scaled_gains, scaled_weights
from theodolite.surgery.fold_map import FoldMap
from theodolite.surgery.gains import GainReader, NormGain, SurgeryError, find_gains
from theodolite.surgery.optimizer_state import CarriedState
from theodolite.surgery.proof import Edited, Proof, operate, reasons
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

    Afterwards the names and shapes of the network's state are those of the plain architecture, without what
    `scale_vectors` added. Gains that only linear maps read are one (zero, if they are zero-centred), and
    shifts that went into biases are zero. Products are computed in float64 and rounded once. Gains that
    cannot be folded stay as they are, each with its reason in `proof.left`.

    Args:
        model: with scale vectors in it, or plain.
        inputs: what it is called with.
        gains: patterns of the names of norms' own gains to fold; by default all that can be folded. A gain
            that is named and cannot be folded is an error. Scale vectors are always folded.
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
    follow = None if optimizer is None else CarriedState(model, optimizer).folded
    return model, operate(model, inputs, "fold", partial(fold_gains, gains=gains), follow)


@exclusive()
def remove_gains(model: nn.Module, inputs: Any) -> tuple[nn.Module, Proof]:
    """Fold the gains of all norms into the weights and keep them at one for good, in place.

    They become buffers, which no optimizer trains. A gain that cannot be folded (Output-Norms) must be one
    already, as it is before training; otherwise an error names it.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model, proof = remove_gains(th.models.GPT(64, 1, norm_placement="peri"), tokens)
    >>> [name for name, _ in model.named_parameters() if "norm" in name]
    []
    """
    return model, operate(model, inputs, "remove_gains", _remove)


def fold_gains(model: nn.Module, inputs: Any, edits: Edits, gains: Sequence[str] | None = None) -> Edited:
    """The edits of `fold`."""
    before = dict(canonical_parameters(model))
    weights, own = scaled_weights(model), scaled_gains(model)
    _take_out_vectors(model, edits, weights, own)
    known = find_gains(model, inputs)
    chosen = {gain.name for gain in known.chosen(gains)}
    tensors = dict(canonical_parameters(model))
    maps: list[FoldMap] = []
    for gain in (*known.found, *_not_found(known.found, weights, own)):
        takes = gain.name in chosen
        vectors = {one.weight: weights[one.weight][1] for one in gain.readers if one.weight in weights}
        if not (takes or vectors or gain.name in own):
            continue
        scaled = own[gain.name][1] if gain.name in own else None
        maps.append(FoldMap(gain, {}, vectors, scaled, takes).given(before))
        for name, value in maps[-1].values().items():
            edits.write(tensors[name], value.view_as(tensors[name]))
        if takes:
            edits.write(tensors[gain.name], tensors[gain.name].new_tensor(1.0 - gain.offset))
            if gain.shift is not None:
                edits.write(tensors[gain.shift], tensors[gain.shift].new_tensor(0.0))
    if not maps:
        raise SurgeryError(f"nothing to fold: {reasons(known.left)}")
    return Edited(tuple(one.gain.name for one in maps if one.takes_gain), known.left, maps)


def _take_out_vectors(
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
                home = held(model, _renamed(other, how.weight, name))
                if home.attribute in home.module._buffers:
                    edits.thaw(home, how.norm, trained=trained)
    for where, _ in gains.values():
        edits.unparametrize(where)


def _renamed(other: str, weight: str, name: str) -> str:
    """The current name of a tensor, if the weight beside it was called `weight` and is called `name` now.

    The network may be part of a larger one by now, or a part of what was converted.

    >>> _renamed("norm.weight", "up.weight", "model.up.weight")
    'model.norm.weight'
    >>> _renamed("model.norm.weight", "model.up.weight", "up.weight")
    'norm.weight'
    """
    if name.endswith(weight):
        return name.removesuffix(weight) + other
    if weight.endswith(name) and other.startswith(weight.removesuffix(name)):
        return other.removeprefix(weight.removesuffix(name))
    raise SurgeryError(
        f"{name} was {weight} when it was converted, and the norm before it {other}: fold the whole"
    )


def _not_found(
    found: Sequence[NormGain],
    weights: Mapping[str, tuple[Held, ScaledWeight]],
    gains: Mapping[str, tuple[Held, ScaledGain]],
) -> list[NormGain]:
    """Weights and gains with vectors that were not found by dataflow, as gains that stay where they are."""
    read = {reader.weight for gain in found for reader in gain.readers}
    named = {gain.name for gain in found}
    return [
        NormGain(how.gain, 0.0, None, (GainReader(name, how.shape, (), None),))
        for name, (_, how) in weights.items()
        if name not in read
    ] + [NormGain(name, how.offset, None, ()) for name, (_, how) in gains.items() if name not in named]


def _remove(model: nn.Module, inputs: Any, edits: Edits) -> Edited:
    known = find_gains(model, inputs)
    scaled = scaled_weights(model) or scaled_gains(model)
    if not (known.found or known.left or scaled):
        raise SurgeryError("nothing to remove: the network has no norms with gains")
    done = fold_gains(model, inputs, edits) if known.found or scaled else Edited((), known.left)
    offsets = find_gains(model, inputs).offsets
    for name, tensor in list(canonical_parameters(model)):
        if name in offsets:
            one = 1.0 - offsets[name]
            if name in done.left and not tensor.is_meta and not bool((tensor == one).all()):
                raise SurgeryError(
                    f"{name} is not one everywhere and cannot be folded: {done.left[name]}. Remove the gains "
                    "before training"
                )
            for where in holders(model, tensor):
                edits.freeze(where, one)
    return Edited((*done.moved, *done.left), {}, done.maps)
