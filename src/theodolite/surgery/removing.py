"""`remove_gains`: a network without scale vectors, to see what they are good for."""

from __future__ import annotations

from typing import Any

from torch import nn

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.exclusive import exclusive
from theodolite.surgery.apply import Done, conduct
from theodolite.surgery.editing import Edits, scaled_gains, scaled_weights
from theodolite.surgery.folding import folding
from theodolite.surgery.holding import holders
from theodolite.surgery.places import SurgeryError, find_places
from theodolite.surgery.proof import Proof


@exclusive()
def remove_gains(model: nn.Module, inputs: Any) -> tuple[nn.Module, Proof]:
    """Fold the gains of all norms into the weights and keep them at one for good, in place.

    They are buffers afterwards, which no optimizer trains. A gain that cannot be folded (Output-Norms) has to
    be one already, as it is before training; another is an error that names it.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model, proof = remove_gains(th.models.GPT(64, 1, norm_placement="peri"), tokens)
    >>> [name for name, _ in model.named_parameters() if "norm" in name]
    []
    """

    def act(inner: nn.Module, edits: Edits) -> Done:
        return _remove(inner, inputs, edits)

    return model, conduct(model, inputs, "remove_gains", act)


def remove(model: nn.Module, inputs: Any) -> nn.Module:
    """The same without the proof: for build functions, which make many networks of one kind."""
    edits = Edits()
    try:
        _remove(unwrap(model), inputs, edits)
    except BaseException:
        edits.undo()
        raise
    return model


def _remove(model: nn.Module, inputs: Any, edits: Edits) -> Done:
    places = find_places(model, inputs)
    scaled = scaled_weights(model) or scaled_gains(model)
    if not (places.found or places.left or scaled):
        raise SurgeryError("nothing to remove: the network has no norms with gains")
    done = folding(model, inputs, edits) if places.found or scaled else Done((), places.left)
    offsets = find_places(model, inputs).offsets
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
    return Done((*done.moved, *done.left), {}, done.maps)
