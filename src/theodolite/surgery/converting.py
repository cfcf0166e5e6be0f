"""`scale_vectors`: separate scale vectors for every linear map that reads a norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.arguments import one_of
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.surgery.edits import Edits, held, order_of, scaled_weights
from theodolite.surgery.fold_map import FoldMap, along
from theodolite.surgery.gains import GainReader, NormGain, SurgeryError, find_gains
from theodolite.surgery.optimizer_state import CarriedState
from theodolite.surgery.proof import Edited, Proof, operate, reasons
from theodolite.surgery.vectors import Form, GainVector, ScaledGain, ScaledWeight

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
    """Give every linear map that reads a norm its own scale vectors, in place; the function stays the same.

    A norm's gain γ that only linear maps read becomes part of them, `diag(b)·W·diag(γ)`. The norm is computed
    once, its gain is a constant, and each map (q, k and v, gate and up, each expert, also where they are one
    fused tensor) has its own γ and b. A LayerNorm's shift becomes part of the maps' biases.

    Args:
        model: any module that `theodolite.dissect` understands; it is edited, and returned.
        inputs: what it is called with.
        heterogeneous: a γ for each map; otherwise the norm keeps the one it has.
        placement: `input` for γ alone; `output` for b alone, γ is multiplied into W; or `both`.
        reparameterization: `direction` for vectors β·α/rms(α), `product` for β·α, `exp` for e^β·α, None for
            plain ones.
        gains: patterns of the names of gains to move; by default all that can be moved.
        optimizer: one that trains the model: the vectors replace the gains in it, and the moments of Adam and
            momentum follow.

    Returns:
        The model, and a Proof: by how much outputs and gradients differ.

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
    conversion = _Conversion(heterogeneous, placement, reparameterization)
    follow = None if optimizer is None else CarriedState(model, optimizer).converted
    return model, operate(model, inputs, "scale_vectors", partial(conversion.apply, gains=gains), follow)


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
    """`scale_vectors` without the proof, for build functions, which make many networks of one kind."""
    conversion = _Conversion(heterogeneous, placement, reparameterization)
    with Edits().undone_on_failure() as edits:
        conversion.apply(unwrap(model), inputs, edits, gains)
    return model


class _Conversion:
    """What `scale_vectors` does, by its options."""

    def __init__(self, heterogeneous: bool, placement: Placement, reparameterization: str | None) -> None:
        one_of("placement", placement, get_args(Placement))
        one_of("reparameterization", reparameterization, (*get_args(Reparameterization), None))
        if not heterogeneous and placement == "input" and reparameterization is None:
            raise UseError(
                "heterogeneous=False, placement='input' and reparameterization=None is what the network has "
                "already: there is nothing to do"
            )
        self.form: Form = reparameterization or "plain"  # type: ignore[assignment]
        self.has_inputs, self.has_outputs = placement != "output", placement != "input"
        self.moves_gain = heterogeneous or placement == "output"
        """Does the norm's gain go into the maps?"""

    def apply(self, model: nn.Module, inputs: Any, edits: Edits, gains: Sequence[str] | None) -> Edited:
        """Edit all gains whose names match the patterns."""
        known = find_gains(model, inputs)
        tensors = dict(canonical_parameters(model))
        left = dict(known.left)
        chosen = []
        for gain in known.chosen(gains):
            tensor = tensors[gain.name]
            if not tensor.requires_grad:
                if gains is not None:
                    raise SurgeryError(f"{gain.name}: it is frozen (requires_grad is False)")
                left[gain.name] = "it is frozen (requires_grad is False)"
                continue
            if self.form == "direction" and not tensor.is_meta and not (tensor.detach() + gain.offset).any():
                raise SurgeryError(
                    f"{gain.name} is zero, which has no direction: use reparameterization='product' or None, "
                    "or leave it out with gains=[patterns]"
                )
            chosen.append(gain)
        if not chosen:
            if scaled_weights(model):
                raise SurgeryError("nothing to do: the network's weights have scale vectors already")
            raise SurgeryError(f"nothing to do: {reasons(left)}")
        maps = [self._edit(model, gain, tensors, edits) for gain in chosen]
        return Edited(tuple(gain.name for gain in chosen), left, [one for one in maps if one is not None])

    def _edit(
        self, model: nn.Module, gain: NormGain, tensors: dict[str, Tensor], edits: Edits
    ) -> FoldMap | None:
        """Edit one gain; return the map from the tensors before, if the gain went into the maps."""
        tensor = tensors[gain.name]
        before = FoldMap(gain).given(tensors) if self.moves_gain else None
        value = (tensor.detach().double().reshape(-1) + gain.offset).to(tensor.dtype)
        for reader in gain.readers:
            inputs = self._inputs(reader, value) if self.moves_gain and self.has_inputs else []
            outputs = self._outputs(reader, tensor) if self.has_outputs else []
            if self.moves_gain and not self.has_inputs:
                weight = tensors[reader.weight]
                edits.write(weight, weight.detach().double() * along(reader, value.double(), nothing=1.0))
            if inputs or outputs:
                how = ScaledWeight(
                    reader.shape,
                    inputs,
                    outputs,
                    weight=reader.weight,
                    gain=gain.name,
                    shift=gain.shift if self.moves_gain else None,
                    norm=order_of(held(model, gain.name).module),
                )
                edits.parametrize(held(model, reader.weight), how)
        if before is None:
            if self.form != "plain":
                edits.write(tensor, value.view_as(tensor))
                scaled = ScaledGain(value.view_as(tensor), self.form, gain.offset)
                edits.parametrize(held(model, gain.name), scaled)
            return None
        if gain.shift is not None:
            made = before.values()
            for reader in gain.readers:
                assert reader.bias is not None
                edits.write(tensors[reader.bias], made[reader.bias])
            edits.freeze(held(model, gain.shift), 0.0)
        edits.freeze(held(model, gain.name), 1.0 - gain.offset)
        return before

    def _inputs(self, reader: GainReader, gain: Tensor) -> list[GainVector]:
        """A γ for each block of rows."""
        shape = reader.shape
        start = along(reader, gain, nothing=1.0).reshape(-1)
        sizes = shape.vector_sizes(shape.in_axis, len(start))
        dim = shape.dim(shape.in_axis)
        spread = start.view([-1 if one == dim else 1 for one in range(len(sizes))]).expand(sizes)
        return [GainVector(spread, self.form, dim) for _ in shape.rows]

    def _outputs(self, reader: GainReader, gain: Tensor) -> list[GainVector]:
        """A b for each block of rows, all ones."""
        shape = reader.shape
        lengths = [sum(high - low for low, high in rows) for rows in shape.rows]
        sizes = [shape.vector_sizes(shape.out_axis, length) for length in lengths]
        dim = shape.dim(shape.out_axis)
        return [GainVector(gain.detach().new_ones(one), self.form, dim) for one in sizes]
