"""What an optimizer remembers, carried along with the tensors.

The gradient by a weight that was multiplied by s is 1/s of what it was, so its momentum is divided by s and
Adam's second moment by s². The gradient by a scale vector is a sum over the weight, `∂L/∂γ_j = Σ_i W_ij·G_ij`
for the gradient G by the product, and to first order in the learning rate so is its momentum; second moments
are added up as those of independent entries. The gain of a norm that a single map reads keeps its own. Where
a shift goes into a bias, its part of the weight's gradient goes too: exactly from the momentum, and from the
second moment by the same estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.errors import UseError
from theodolite.optimizers.planned import Planned
from theodolite.surgery.apply import Done
from theodolite.surgery.editing import scaled_gains, scaled_weights
from theodolite.surgery.folded import Folded, along, wide
from theodolite.surgery.groups import Groups
from theodolite.surgery.places import Reader
from theodolite.surgery.vectors import ScaledGain, ScaledWeight, Vector, joined

POWERS = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
"""What is remembered of a gradient, by the power of the gradient that it goes with."""

Moments = dict[str, Tensor]
"""By key of the optimizer's state."""


class State:
    """An optimizer and the network it trains, before an edit."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UseError(
                f"optimizer is a {type(optimizer).__name__}: give the torch optimizer of the model"
            )
        if isinstance(optimizer, Planned):
            raise UseError(
                "optimizer is a plan's, whose groups belong to the network before the edit: plan the edited "
                "build function, and make an optimizer of that plan"
            )
        self.model, self.optimizer = unwrap(model), optimizer
        self.before = dict(canonical_parameters(self.model))
        self.groups = Groups(self.model, optimizer)
        for name, tensor in self.before.items():
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1 and key not in POWERS:
                    raise UseError(
                        f"the optimizer keeps {key!r} of {name}, and what becomes of that is not known: "
                        "operate without it, and make a new one"
                    )

    def converted(self, done: Done) -> None:
        """After `scale_vectors`."""
        with self.groups.kept_on_failure():
            self._convert(done)
            self.groups.rename()

    def folded(self, done: Done) -> None:
        """After `fold`."""
        with self.groups.kept_on_failure():
            self._fold(done)
            self.groups.rename()

    def _convert(self, done: Done) -> None:
        moved = {one.place.gain: one for one in done.maps}
        for name, (_, how) in scaled_weights(self.model).items():
            if name not in self.before:
                continue  # it has had its vectors for longer
            weight = self.before[name]
            gain = self.before[how.gain]
            if how.gain in moved:
                self._unscale(moved[how.gain], name, weight)
            effective = self._moments(weight)
            single = how.gain in moved and _reads_alone(moved[how.gain], how, gain)
            for vector, moments in self._pulled(how, weight, effective).items():
                own = self._moments(gain) if single and vector in how.inputs else moments
                self._add(vector, own, like=weight, host=gain)
            if how.inputs:
                self._multiply(weight, how.inner([wide(one()) for one in how.inputs]))
        for name, (_, own_gain) in scaled_gains(self.model).items():
            if name in self.before:
                self._split_gain(self.before[name], own_gain)
        for one in done.maps:
            for gone in (one.place.gain, one.place.shift):
                if gone is not None:
                    self._drop(self.before[gone])

    def _fold(self, done: Done) -> None:
        after = dict(canonical_parameters(self.model))
        kept = {id(tensor) for tensor in after.values()}
        directions = {id(one) for name, one in self.before.items() if name.endswith(".direction")}
        for one in done.maps:
            gone = [self.before[name] for name in one.names if name in self.before]
            gone = [tensor for tensor in gone if id(tensor) not in kept]
            gone.sort(key=lambda tensor: id(tensor) in directions)
            for reader in one.place.readers:
                self._unscale(one, reader.weight, after[reader.weight])
            if one.takes_gain:
                self._fold_norm(one, after, gone)
            for tensor in gone:
                self._drop(tensor)

    def _fold_norm(self, one: Folded, after: Mapping[str, Tensor], gone: Sequence[Tensor]) -> None:
        """A gain that is one and a shift that is zero, where they are parameters again or still."""
        gain, value = after[one.place.gain], one.gain_value()
        if value is not None and one.gain is None:
            self._multiply(gain, value.view_as(gain))
        else:
            self._remember(gain, self._of_gain(one, after), like=after[one.place.readers[0].weight])
            self.groups.leave(gain)  # a direction, until now, which need not be where gains are
            self.groups.join(gain, gone)
        if one.place.shift is None:
            return
        shift = after[one.place.shift]
        if value is not None:
            self._multiply(shift, value.view_as(shift))
        else:
            self._remember(shift, self._of_shift(one, after), like=gain)
            self.groups.join(shift, [gain])

    def _unscale(self, one: Folded, name: str, weight: Tensor) -> None:
        """From the moments of W to those of diag(b)·W·diag(γ), which is what the network computes with."""
        reader = next(each for each in one.place.readers if each.weight == name)
        if one.place.shift is not None and one.place.shift in one.tensors and reader.bias is not None:
            shift = along(reader, wide(one.tensors[one.place.shift]), nothing=0.0)
            of_bias = self._moments(self.before[reader.bias])
            sizes = [1] * weight.dim()
            sizes[reader.shape.out_axis] = -1
            shift = shift * one.own_scale(name)  # ∂L/∂W is b·g·(γ∘n + β)ᵀ
            for key, value in self._moments(weight).items():
                if key in of_bias:
                    moved = of_bias[key].view(sizes) * shift ** POWERS[key]
                    rest = value - moved
                    if POWERS[key] == 2:  # an estimate, and Adam divides by it: never nothing
                        rest = torch.maximum(rest, 0.01 * value)
                    self._put(weight, key, rest)
        scale = one.scales()[name]
        self._multiply(weight, torch.where(scale == 0, 0.0, 1 / scale))

    def _pulled(
        self, how: ScaledWeight, weight: Tensor, effective: Mapping[str, Tensor]
    ) -> dict[Vector, Moments]:
        """The moments of scale vectors, from those of the product."""
        vectors: list[Vector] = [*how.inputs, *how.outputs]
        found: dict[Vector, Moments] = {vector: {} for vector in vectors}
        for key, value in effective.items():
            power = POWERS[key]
            with torch.enable_grad():
                given = [(wide(vector()) ** power).requires_grad_() for vector in vectors]
                count = len(how.inputs)
                made = how.scaled(wide(weight) ** power, given[:count], given[count:])
                pulled = torch.autograd.grad(made, given, value)
            for vector, one in zip(vectors, pulled, strict=True):
                found[vector][key] = one
        return found

    def _of_gain(self, one: Folded, after: Mapping[str, Tensor]) -> Moments:
        """The moments of a gain that is one, from those of the weights that read it."""
        found: Moments = {}
        for reader in one.place.readers:
            weight = after[reader.weight]
            for key, value in self._moments(weight).items():
                _gather(found, key, reader, wide(weight) ** POWERS[key] * value, after[one.place.gain])
        return found

    def _of_shift(self, one: Folded, after: Mapping[str, Tensor]) -> Moments:
        """The moments of a shift that is zero, from those of the biases it went into."""
        found: Moments = {}
        for reader in one.place.readers:
            assert reader.bias is not None
            weight = wide(after[reader.weight])
            sizes = [1] * weight.dim()
            sizes[reader.shape.out_axis] = -1
            for key, value in self._moments(after[reader.bias]).items():
                _gather(found, key, reader, weight ** POWERS[key] * value.view(sizes), after[one.place.gain])
        return found

    def _add(self, vector: Vector, moments: Moments, *, like: Tensor, host: Tensor) -> None:
        """Train a vector, in the group of the gain that it was; a direction there does not decay."""
        if vector.form == "plain":
            self._remember(vector.gain, moments, like=like)
            self.groups.join(vector.gain, [host])
            return
        of_direction, of_magnitude = _split(
            moments, vector.magnitude, vector.direction, vector.form, vector.dim
        )
        self._remember(vector.direction, of_direction, like=like)
        self._remember(vector.magnitude, of_magnitude, like=like)
        self.groups.join(vector.direction, [host], decays=vector.form != "direction")
        self.groups.join(vector.magnitude, [host])

    def _split_gain(self, gain: Tensor, own: ScaledGain) -> None:
        """The moments of a norm's own gain, which is a direction now, and of its magnitude."""
        parts = _split(self._moments(gain), own.magnitude, gain, own.form, -1)
        self._remember(own.magnitude, parts[1], like=gain)
        self._remember(gain, parts[0], like=gain)
        self.groups.join(own.magnitude, [gain])
        if own.form == "direction":
            self.groups.leave(gain)
            self.groups.join(gain, [own.magnitude], decays=False)

    def _moments(self, tensor: Tensor) -> Moments:
        held = self.optimizer.state.get(tensor, {})
        return {key: wide(held[key]) for key in POWERS if isinstance(held.get(key), Tensor)}

    def _multiply(self, tensor: Tensor, scale: Tensor) -> None:
        for key, value in self._moments(tensor).items():
            self._put(tensor, key, value * scale ** POWERS[key])

    def _put(self, tensor: Tensor, key: str, value: Tensor) -> None:
        """Another tensor in the place of a moment; the old one stays as it is, for an undoing."""
        held = self.optimizer.state[tensor]
        self.optimizer.state[tensor] = {**held, key: value.to(held[key].dtype).view_as(held[key])}

    def _remember(self, tensor: Tensor, moments: Moments, *, like: Tensor) -> None:
        """Put moments in place, with the count of steps of another tensor."""
        held: dict[str, Any] = self.optimizer.state.get(like, {})
        if not moments:
            return
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
        for key, value in moments.items():
            state[key] = value.to(held[key].dtype).view_as(tensor).contiguous()
        self.optimizer.state[tensor] = state

    def _drop(self, tensor: Tensor) -> None:
        """Train a tensor no longer."""
        self.groups.leave(tensor)
        self.optimizer.state.pop(tensor, None)


def _reads_alone(one: Folded, how: ScaledWeight, gain: Tensor) -> bool:
    """Is a vector the gain itself: read by one map, entry by entry?"""
    (reader, *others) = one.place.readers
    alone = not others and len(how.inputs) == 1 and not how.shape.stack
    return alone and reader.channels == tuple(range(gain.numel()))


def _gather(found: Moments, key: str, reader: Reader, terms: Tensor, gain: Tensor) -> None:
    """Add up terms, one for each entry of a weight, by the channel of the gain that the entry reads."""
    summed = terms.sum([axis for axis in range(terms.dim()) if axis != reader.shape.in_axis])
    channels = torch.tensor(reader.channels, device=terms.device)
    total = found.setdefault(key, summed.new_zeros(gain.numel()))
    total.index_add_(0, channels.clamp(min=0), torch.where(channels < 0, 0.0, summed))


def _split(
    moments: Moments, magnitude: Tensor, direction: Tensor, form: Any, dim: int
) -> tuple[Moments, Moments]:
    """The moments of a direction and of its magnitude, from those of γ."""
    of_direction: Moments = {}
    of_magnitude: Moments = {}
    with torch.enable_grad():
        given = wide(magnitude).requires_grad_(), wide(direction).requires_grad_()
        gain = joined(*given, form, dim)
        for key, value in moments.items():
            if POWERS[key] == 1:
                pulled = torch.autograd.grad(gain, given, value.view_as(gain), retain_graph=True)
                of_magnitude[key], of_direction[key] = pulled
                continue
            # Each entry's own derivative alone: a direction's pull on the others is one part in their number.
            ones = joined(given[0], torch.ones_like(given[1]), form, dim)
            size = given[1].square().mean(dim, keepdim=True) if form == "direction" else torch.ones(())
            of_direction[key] = (value.view_as(gain) * ones.square() / size.to(ones)).detach()
            by_magnitude = gain if form == "exp" else gain / given[0]
            of_magnitude[key] = (value.view_as(gain) * by_magnitude.square()).sum(dim, keepdim=True).detach()
    return of_direction, of_magnitude
