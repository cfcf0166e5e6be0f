"""`FoldMap`: the weights of a plain network as a function of weights, gains and scale vectors.

The weights W, biases c, gains γ, shifts β and scale vectors of a network become

    W' = diag(b)·W·diag(γ)·…,    c' = c + W β,    γ' = 1,    β' = 0

which computes the same. Folding evaluates this in float64. The gradients with respect to what goes in are
those with respect to what comes out, by the chain rule; this proves an edit in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.surgery.gains import GainReader, NormGain
from theodolite.surgery.vectors import ScaledGain, ScaledWeight


@dataclass(frozen=True)
class FoldMap:
    """One gain, the linear maps that read it, and the scale vectors that are in them already."""

    gain: NormGain
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """What goes in, by canonical name: vectors, and W, c, γ and β as far as they are parameters."""
    weights: Mapping[str, ScaledWeight] = field(default_factory=dict)
    """By name of a weight: the vectors in it."""
    scaled_gain: ScaledGain | None = None
    """The magnitude of the norm's own gain, if it has one."""
    takes_gain: bool = True
    """Does the norm's own gain go into the weights, or stay where it is?"""

    def given(self, tensors: Mapping[str, Tensor]) -> FoldMap:
        """The map with copies of what goes in, among the parameters of a network."""
        kept = {name: tensors[name].detach().clone() for name in self.names if name in tensors}
        return replace(self, tensors=kept)

    def values(self) -> dict[str, Tensor]:
        """What comes out: by the names that weights, biases and gains have in the plain network."""
        return self._evaluate(self._given())

    def pull(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients with respect to what goes in, from those with respect to what comes out."""
        with torch.enable_grad():
            given = {name: one.requires_grad_() for name, one in self._given().items()}
            made = {
                name: value
                for name, value in self._evaluate(given).items()
                if name in gradients and value.requires_grad
            }
            found = torch.autograd.grad(
                list(made.values()),
                list(given.values()),
                [gradients[name].to(made[name]) for name in made],
                allow_unused=True,
            )
        return {name: one for name, one in zip(given, found, strict=True) if one is not None}

    def scale(self, weight: str, *, with_gain: bool = True) -> Tensor:
        """The factor on a weight's entries, up to broadcasting: its vectors, and the norm's gain."""
        reader = next(each for each in self.gain.readers if each.weight == weight)
        given = self._given()
        return self._scale(reader, given, self._gain_and_shift(given)[0] if with_gain else None)

    def gain_value(self) -> Tensor | None:
        """γ as the norm applies it; None if it is constantly one."""
        return self._gain_and_shift(self._given())[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names of what may go in."""
        found = [self._gain_name, *_names(self.gain.name, self.scaled_gain)]
        if self.gain.shift is not None and self.takes_gain:
            found += [self.gain.shift, *(one.bias for one in self.gain.readers if one.bias is not None)]
        for reader in self.gain.readers:
            found += [self._weight_name(reader), *_names(reader.weight, self.weights.get(reader.weight))]
        return tuple(found)

    def _given(self) -> dict[str, Tensor]:
        """What goes in as copies, without gradients."""
        return {name: wide(tensor) for name, tensor in self.tensors.items()}

    def _evaluate(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gain, shift = self._gain_and_shift(given)
        made: dict[str, Tensor] = {}
        for reader in self.gain.readers:
            weight = given[self._weight_name(reader)]
            made[reader.weight] = weight * self._scale(reader, given, gain)
            if shift is not None and reader.bias is not None:
                shifted = weight * self._scale(reader, given, None) * along(reader, shift, nothing=0.0)
                others = [axis for axis in range(weight.dim()) if axis != reader.shape.out_axis]
                made[reader.bias] = given[reader.bias] + shifted.sum(others)
        if not self.takes_gain and gain is not None:
            made[self.gain.name] = gain - self.gain.offset
        return made

    def _gain_and_shift(self, given: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as the norm applies them; None if they are constantly one and zero."""
        gain = given.get(self._gain_name)
        if gain is None:
            return None, None
        if self.scaled_gain is not None:
            gain = _called(self.scaled_gain, self.gain.name, given, gain)
        shift = given.get(self.gain.shift) if self.gain.shift and self.takes_gain else None
        return gain.reshape(-1) + self.gain.offset, shift

    def _scale(self, reader: GainReader, given: Mapping[str, Tensor], gain: Tensor | None) -> Tensor:
        weight = given[self._weight_name(reader)]
        scale = weight.new_ones([1] * weight.dim())
        if reader.weight in self.weights:
            scale = _called(self.weights[reader.weight], reader.weight, given, torch.ones_like(weight))
        if gain is not None and self.takes_gain:
            scale = scale * along(reader, gain, nothing=1.0)
        return scale

    def _weight_name(self, reader: GainReader) -> str:
        """The canonical name of the parameter that W is."""
        parametrized = reader.weight in self.weights
        return f"{prefix_of(reader.weight)}original" if parametrized else reader.weight

    @property
    def _gain_name(self) -> str:
        """The canonical name of the parameter that the gain is."""
        return self.gain.name if self.scaled_gain is None else f"{prefix_of(self.gain.name)}original"


def prefix_of(name: str) -> str:
    """The prefix of the names of a parametrized tensor's parts.

    >>> prefix_of("up.weight")
    'up.parametrizations.weight.'
    """
    module, _, attribute = name.rpartition(".")
    return f"{module}.parametrizations.{attribute}." if module else f"parametrizations.{attribute}."


def along(reader: GainReader, gain: Tensor, *, nothing: float) -> Tensor:
    """The entries of a gain by input of a weight, shaped to be multiplied with the weight."""
    channels = torch.tensor(reader.channels, device=gain.device)
    entries = gain[channels.clamp(min=0)]
    if min(reader.channels) < 0:
        entries = torch.where(channels < 0, torch.full_like(entries, nothing), entries)
    sizes = [1] * len(reader.shape.sizes)
    sizes[reader.shape.in_axis] = -1
    return entries.view(sizes)


def wide(tensor: Tensor) -> Tensor:
    """A copy in float64."""
    return tensor.detach().to(torch.float64, copy=True)


def _names(name: str, how: nn.Module | None) -> list[str]:
    """The canonical names of the parameters that a parametrization of a tensor adds."""
    return [] if how is None else [f"{prefix_of(name)}0.{each}" for each, _ in how.named_parameters()]


def _called(how: nn.Module, name: str, given: Mapping[str, Tensor], tensor: Tensor) -> Tensor:
    """What the parametrization of the tensor called `name` makes of a tensor, with the given vectors."""
    vectors = {each: given[f"{prefix_of(name)}0.{each}"] for each, _ in how.named_parameters()}
    made: Tensor = functional_call(how, vectors, (tensor,))
    return made
