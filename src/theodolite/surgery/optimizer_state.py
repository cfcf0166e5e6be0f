"""What an optimizer knows of the tensors that an edit changes: their groups and moments.

The gradient with respect to a weight that was multiplied by s is 1/s of what it was, so its momentum is
divided by s and Adam's second moment by s². The gradient with respect to a scale vector is a sum over the
weight, `∂L/∂γ_j = Σ_i W_ij·G_ij` for the gradient G with respect to the product, and to first order in the
learning rate so is its momentum; second moments are added up as those of independent entries. The gain of a
norm that a single map reads keeps its own. Where a shift goes into a bias, its part of the weight's gradient
goes too: exactly from the momentum, and from the second moment by the same estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.errors import UseError
from theodolite.optimizers.planned import Planned
from theodolite.surgery.edits import scaled_gains, scaled_weights
from theodolite.surgery.fold_map import FoldMap, along, wide
from theodolite.surgery.proof import Edited
from theodolite.surgery.vectors import GainVector, ScaledGain, ScaledWeight, joined

POWERS = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
"""Moments of a gradient, by the power of the gradient that they go with."""

Moments = dict[str, Tensor]
"""By key of the optimizer's state."""


@dataclass(frozen=True)
class ParamGroups:
    """The groups of an optimizer that trains a network. Lists are replaced, not written to."""

    model: nn.Module
    optimizer: Optimizer

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise UseError(
                f"optimizer is a {type(self.optimizer).__name__}: give the torch optimizer of the model"
            )

    def of(self, tensor: Tensor) -> dict[str, Any] | None:
        """The group that trains a tensor."""
        for group in self.optimizer.param_groups:
            if any(one is tensor for one in group["params"]):
                return group
        return None

    def join(self, tensor: Tensor, hosts: Sequence[Tensor], *, decays: bool = True) -> None:
        """Train a tensor in the group of the first host that has one; `decays=False`: in one without decay.

        A schedule has a number for each group: once there is a schedule, no group is added.
        """
        if self.of(tensor) is not None:
            return
        group = next((found for host in hosts if (found := self.of(host)) is not None), None)
        if group is None:
            return
        name = next(name for name, one in canonical_parameters(self.model) if one is tensor)
        if not decays and group.get("weight_decay"):
            options = {key: group[key] for key in group if key not in ("params", "param_names", "name")}
            options["weight_decay"] = 0.0
            others = [
                each
                for each in self.optimizer.param_groups
                if {key: each.get(key) for key in options} == options
            ]
            if not others and not getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
                params = [(name, tensor)] if "param_names" in group else [tensor]
                named = {"name": f"{group['name']}-undecayed"} if "name" in group else {}
                self.optimizer.add_param_group({**options, **named, "params": params})
                return
            group = others[0] if others else group
        group["params"] = [*group["params"], tensor]
        if "param_names" in group:
            group["param_names"] = [*group["param_names"], name]

    def leave(self, tensor: Tensor) -> None:
        """Take a tensor out of its group."""
        group = self.of(tensor)
        if group is not None:
            place = next(index for index, one in enumerate(group["params"]) if one is tensor)
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [one for index, one in enumerate(group[key]) if index != place]

    def rename(self) -> None:
        """Update the names of tensors in groups that have names."""
        names = {id(tensor): name for name, tensor in canonical_parameters(self.model)}
        for group in self.optimizer.param_groups:
            if "param_names" in group:
                known = zip(group["params"], group["param_names"], strict=True)
                group["param_names"] = [names.get(id(tensor), name) for tensor, name in known]

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Update the names at the end, or restore groups and state if something is raised.

        No tensor in them may be written to.
        """
        groups = [dict(group) for group in self.optimizer.param_groups]
        state = {tensor: dict(held) for tensor, held in self.optimizer.state.items()}
        try:
            yield
            self.rename()
        except BaseException:
            self.optimizer.param_groups[:] = groups
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            raise


class CarriedState:
    """An optimizer and the network it trains, before an edit; carries moments and groups over."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = unwrap(model), optimizer
        self.before = dict(canonical_parameters(self.model))
        self.groups = ParamGroups(self.model, optimizer)
        if isinstance(optimizer, Planned):
            raise UseError(
                "optimizer is a plan's, whose groups belong to the network before the edit: plan the edited "
                "build function, and make an optimizer of that plan"
            )
        for name, tensor in self.before.items():
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1 and key not in POWERS:
                    raise UseError(
                        f"the optimizer keeps {key!r} of {name}, and what becomes of that is not known: "
                        "operate without it, and make a new one"
                    )

    def converted(self, done: Edited) -> None:
        """After `scale_vectors`."""
        moved = {one.gain.name: one for one in done.maps}
        with self.groups.updated():
            for name, (_, how) in scaled_weights(self.model).items():
                if name in self.before:  # otherwise it had its vectors before
                    self._scale_weight(name, how, moved.get(how.gain))
            for name, (_, own_gain) in scaled_gains(self.model).items():
                if name in self.before:
                    self._split_gain(self.before[name], own_gain)
            for one in done.maps:
                for gone in (one.gain.name, one.gain.shift):
                    if gone is not None:
                        self._drop(self.before[gone])

    def folded(self, done: Edited) -> None:
        """After `fold`."""
        after = dict(canonical_parameters(self.model))
        kept = {id(tensor) for tensor in after.values()}
        directions = {id(one) for name, one in self.before.items() if name.endswith(".direction")}
        with self.groups.updated():
            for one in done.maps:
                gone = [self.before[name] for name in one.names if name in self.before]
                gone = [tensor for tensor in gone if id(tensor) not in kept]
                gone.sort(key=lambda tensor: id(tensor) in directions)
                for reader in one.gain.readers:
                    self._unscale(one, reader.weight, after[reader.weight])
                if one.takes_gain:
                    self._fold_norm(one, after, gone)
                for tensor in gone:
                    self._drop(tensor)

    def _scale_weight(self, name: str, how: ScaledWeight, moved: FoldMap | None) -> None:
        """The moments of a weight and of its new scale vectors; `moved` if the gain became one of them."""
        weight, gain = self.before[name], self.before[how.gain]
        if moved is not None:
            self._unscale(moved, name, weight)
        single = moved is not None and _reads_alone(moved, how, gain)
        for vector, moments in self._pulled(how, weight, self._moments(weight)).items():
            own = self._moments(gain) if single and vector in how.inputs else moments
            self._add(vector, own, like=weight, host=gain)
        if how.inputs:
            self._multiply(weight, how.spread([wide(one()) for one in how.inputs], how.shape.in_axis))

    def _fold_norm(self, one: FoldMap, after: Mapping[str, Tensor], gone: Sequence[Tensor]) -> None:
        """A gain that is one and a shift that is zero, where they are parameters."""
        gain, value = after[one.gain.name], one.gain_value()
        if value is not None and one.scaled_gain is None:
            self._multiply(gain, value.view_as(gain))
        else:
            first = after[one.gain.readers[0].weight]
            self._remember(gain, self._summed(one, after, of_shift=False), like=first)
            self.groups.leave(gain)  # until now a direction, which need not be where gains are
            self.groups.join(gain, gone)
        if one.gain.shift is None:
            return
        shift = after[one.gain.shift]
        if value is not None:
            self._multiply(shift, value.view_as(shift))
        else:
            self._remember(shift, self._summed(one, after, of_shift=True), like=gain)
            self.groups.join(shift, [gain])

    def _unscale(self, one: FoldMap, name: str, weight: Tensor) -> None:
        """From the moments of W to those of diag(b)·W·diag(γ), which is what the network computes with."""
        reader = next(each for each in one.gain.readers if each.weight == name)
        if one.gain.shift is not None and one.gain.shift in one.tensors and reader.bias is not None:
            shift = along(reader, wide(one.tensors[one.gain.shift]), nothing=0.0)
            shift = shift * one.scale(name, with_gain=False)  # ∂L/∂W is b·g·(γ∘n + β)ᵀ
            of_bias = self._moments(self.before[reader.bias])
            for key, value in self._moments(weight).items():
                if key in of_bias:
                    by_output = reader.shape.spread(of_bias[key], reader.shape.out_axis)
                    rest = value - by_output * shift ** POWERS[key]
                    if POWERS[key] == 2:  # an estimate, and Adam divides by it: never nothing
                        rest = torch.maximum(rest, 0.01 * value)
                    self._put(weight, key, rest)
        scale = one.scale(name)
        self._multiply(weight, torch.where(scale == 0, 0.0, 1 / scale))

    def _pulled(
        self, how: ScaledWeight, weight: Tensor, effective: Mapping[str, Tensor]
    ) -> dict[GainVector, Moments]:
        """The moments of scale vectors, from those of the product."""
        vectors: list[GainVector] = [*how.inputs, *how.outputs]
        found: dict[GainVector, Moments] = {vector: {} for vector in vectors}
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

    def _summed(self, one: FoldMap, after: Mapping[str, Tensor], *, of_shift: bool) -> Moments:
        """The moments of a gain that is one, or a shift that is zero, from those of what took it up.

        Terms for each entry of a weight are added up by the channel of the gain that the entry reads.
        """
        found: Moments = {}
        for reader in one.gain.readers:
            weight = after[reader.weight]
            source = after[reader.bias] if of_shift and reader.bias is not None else weight
            channels = torch.tensor(reader.channels, device=weight.device)
            others = [axis for axis in range(weight.dim()) if axis != reader.shape.in_axis]
            for key, value in self._moments(source).items():
                if of_shift:
                    value = reader.shape.spread(value, reader.shape.out_axis)
                term = wide(weight) ** POWERS[key] * value
                summed = torch.where(channels < 0, 0.0, term.sum(others))
                total = found.setdefault(key, summed.new_zeros(after[one.gain.name].numel()))
                total.index_add_(0, channels.clamp(min=0), summed)
        return found

    def _add(self, vector: GainVector, moments: Moments, *, like: Tensor, host: Tensor) -> None:
        """Train a vector in the group of the gain that it was; a direction there does not decay."""
        if vector.form == "plain":
            self._remember(vector.gain, moments, like=like)
            self.groups.join(vector.gain, [host])
            return
        split = _split(moments, vector.magnitude, vector.direction, vector.form, vector.dim)
        for tensor, own in zip((vector.direction, vector.magnitude), split, strict=True):
            self._remember(tensor, own, like=like)
        self.groups.join(vector.direction, [host], decays=vector.form != "direction")
        self.groups.join(vector.magnitude, [host])

    def _split_gain(self, gain: Tensor, own: ScaledGain) -> None:
        """The moments of a norm's own gain, which is a direction now, and of its magnitude."""
        of_direction, of_magnitude = _split(self._moments(gain), own.magnitude, gain, own.form, -1)
        self._remember(own.magnitude, of_magnitude, like=gain)
        self._remember(gain, of_direction, like=gain)
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
        """Replace a moment; the old tensor is not written to, so that it can be restored."""
        held = self.optimizer.state[tensor]
        self.optimizer.state[tensor] = {**held, key: value.to(held[key].dtype).view_as(held[key])}

    def _remember(self, tensor: Tensor, moments: Moments, *, like: Tensor) -> None:
        """Give a tensor moments, with the count of steps of another tensor."""
        if not moments:
            return
        held: dict[str, Any] = self.optimizer.state[like]
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
        for key, value in moments.items():
            state[key] = value.to(held[key].dtype).view_as(tensor).contiguous()
        self.optimizer.state[tensor] = state

    def _drop(self, tensor: Tensor) -> None:
        """Stop training a tensor."""
        self.groups.leave(tensor)
        self.optimizer.state.pop(tensor, None)


def _reads_alone(one: FoldMap, how: ScaledWeight, gain: Tensor) -> bool:
    """Is a vector the gain itself: read by one map, entry by entry?"""
    (reader, *others) = one.gain.readers
    alone = not others and len(how.inputs) == 1 and not how.shape.stack
    return alone and reader.channels == tuple(range(gain.numel()))


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
