"""What is left of scale vectors when they are multiplied into the weights: one function, and its chain rule.

The weights W, biases c, gains γ, shifts β and scale vectors of a network become

    W' = diag(b)·W·diag(γ)·…,    c' = c + W β,    γ' = 1,    β' = 0

which computes the same. Folding evaluates this in float64; the gradients by what went in are those by what
came out, pulled back through it, which is how an edit is proved in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.surgery.holding import Held
from theodolite.surgery.places import Place, Reader
from theodolite.surgery.vectors import ScaledGain, ScaledWeight


@dataclass(frozen=True)
class Folded:
    """One gain, the linear maps that read it, and the scale vectors that are in them already."""

    place: Place
    tensors: Mapping[str, Tensor]
    """What goes in, by canonical name: W, c, γ and β as far as they are parameters, and vectors."""
    weights: Mapping[str, ScaledWeight] = field(default_factory=dict)
    """By name of a weight: the vectors in it."""
    gain: ScaledGain | None = None
    """The magnitude of the norm's own gain, if it has one."""
    takes_gain: bool = True
    """Does the norm's own gain go into the weights, rather than stay where it is?"""

    def values(self) -> dict[str, Tensor]:
        """What comes out: by the names that weights, biases and gains have in the plain network."""
        with torch.no_grad():
            return self._evaluate({name: wide(tensor) for name, tensor in self.tensors.items()})

    def pull(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients by what goes in, from those by what comes out."""
        with torch.enable_grad():
            given = {name: wide(tensor).requires_grad_() for name, tensor in self.tensors.items()}
            made = {name: value for name, value in self._evaluate(given).items() if name in gradients}
            made = {name: value for name, value in made.items() if value.requires_grad}
            found = torch.autograd.grad(
                list(made.values()),
                list(given.values()),
                [gradients[name].to(made[name]) for name in made],
                allow_unused=True,
            )
        return {name: one for name, one in zip(given, found, strict=True) if one is not None}

    def scales(self) -> dict[str, Tensor]:
        """By weight: what its entries are multiplied by, up to broadcasting."""
        with torch.no_grad():
            given = {name: wide(tensor) for name, tensor in self.tensors.items()}
            gain, _ = self._gain_and_shift(given)
            return {reader.weight: self._scale(reader, given, gain) for reader in self.place.readers}

    def own_scale(self, name: str) -> Tensor:
        """What a weight's entries are multiplied by the vectors that are in it."""
        reader = next(each for each in self.place.readers if each.weight == name)
        with torch.no_grad():
            return self._scale(reader, {key: wide(tensor) for key, tensor in self.tensors.items()}, None)

    def gain_value(self) -> Tensor | None:
        """γ as the norm applies it; None if that is one for good."""
        with torch.no_grad():
            return self._gain_and_shift({name: wide(tensor) for name, tensor in self.tensors.items()})[0]

    def _evaluate(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gain, shift = self._gain_and_shift(given)
        made: dict[str, Tensor] = {}
        for reader in self.place.readers:
            weight = given[self.held_name(reader)]
            made[reader.weight] = weight * self._scale(reader, given, gain)
            if shift is not None and reader.bias is not None:
                shifted = weight * self._scale(reader, given, None) * along(reader, shift, nothing=0.0)
                others = [axis for axis in range(weight.dim()) if axis != reader.shape.out_axis]
                made[reader.bias] = given[reader.bias] + shifted.sum(others)
        if not self.takes_gain and gain is not None:
            made[self.place.gain] = gain - self.place.offset
        return made

    def _gain_and_shift(self, given: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as the norm applies them; None if they are constant: one and zero."""
        held = given.get(self.gain_name)
        if held is None:
            return None, None
        raw = held
        if self.gain is not None:
            raw = _called(self.gain, f"{prefix_of(self.place.gain)}0.", given, held)
        shift = given.get(self.place.shift) if self.place.shift and self.takes_gain else None
        return raw.reshape(-1) + self.place.offset, shift

    def _scale(self, reader: Reader, given: Mapping[str, Tensor], gain: Tensor | None) -> Tensor:
        """The factor on a weight's entries: the vectors that are in it, and the gain."""
        weight = given[self.held_name(reader)]
        scale = weight.new_ones([1] * weight.dim())
        if reader.weight in self.weights:
            prefix = f"{prefix_of(reader.weight)}0."
            scale = _called(self.weights[reader.weight], prefix, given, torch.ones_like(weight))
        if gain is not None and self.takes_gain:
            scale = scale * along(reader, gain, nothing=1.0)
        return scale

    @property
    def names(self) -> tuple[str, ...]:
        """What may go in, by canonical name."""
        found = [self.gain_name, *_names(self.place.gain, self.gain)]
        if self.place.shift is not None and self.takes_gain:
            found += [self.place.shift, *(r.bias for r in self.place.readers if r.bias is not None)]
        for reader in self.place.readers:
            found += [self.held_name(reader), *_names(reader.weight, self.weights.get(reader.weight))]
        return tuple(found)

    def held_name(self, reader: Reader) -> str:
        """The canonical name of the parameter that W is."""
        if reader.weight in self.weights:
            return f"{prefix_of(reader.weight)}original"
        return reader.weight

    @property
    def gain_name(self) -> str:
        """The canonical name of the parameter that the gain is."""
        return f"{prefix_of(self.place.gain)}original" if self.gain is not None else self.place.gain


def unplaced(
    weights: Mapping[str, tuple[Held, ScaledWeight]], gains: Mapping[str, tuple[Held, ScaledGain]]
) -> list[Folded]:
    """Scale vectors by themselves, without the norms before them: tensors are still to be given."""
    alone = [
        Folded(Place(how.gain, 0.0, None, (Reader(name, how.shape, (), None),)), {}, {name: how}, None, False)
        for name, (_, how) in weights.items()
    ]
    return alone + [
        Folded(Place(name, how.offset, None, ()), {}, {}, how, False) for name, (_, how) in gains.items()
    ]


def prefix_of(name: str) -> str:
    """What the names of a parametrized tensor's parts begin with.

    >>> prefix_of("up.weight")
    'up.parametrizations.weight.'
    """
    module, _, attribute = name.rpartition(".")
    return f"{module}.parametrizations.{attribute}." if module else f"parametrizations.{attribute}."


def along(reader: Reader, gain: Tensor, *, nothing: float) -> Tensor:
    """The entries of a gain by input of a weight, with the weight's dimensions."""
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


def _called(how: nn.Module, prefix: str, given: Mapping[str, Tensor], tensor: Tensor) -> Tensor:
    """What a parametrization makes of a tensor with other vectors in it."""
    named = {name: given[prefix + name] for name, _ in how.named_parameters()}
    made: Tensor = functional_call(how, named, (tensor,))
    return made
