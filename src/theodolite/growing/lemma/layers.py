"""A network cut in layers as the theory of depth expansion has them: `x_k = N_k(x_{k−1} + F_k(x_{k−1}))`.

Branches that read the same stream are one layer: `N(x + F + G)`. N is what stands between a sum and the next
layer: a norm (post), an activation (ResNet) or nothing (pre).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.structure.branches import names_in, streams_of
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.residual import TracedBranch, find_residuals
from theodolite.anatomy.structure.uses import find_uses
from theodolite.core.errors import UseError
from theodolite.probes.scaling.activation_layout import ActivationLayout, find_layout

Step = tuple[Literal["norm", "shortcut", "top", "branch"], int]
"""`norm` or `shortcut` of a layer, a `branch`, or the `top`: from the last stream to the logits."""


@dataclass(frozen=True)
class Cut:
    """A recorded pass, cut in layers. Made by `cut_in_layers`."""

    model: nn.Module
    layout: ActivationLayout
    flow: Flow
    residuals: tuple[TracedBranch, ...]
    layers: tuple[tuple[int, ...], ...]
    """By layer: its branches."""
    parameters: Mapping[str, Tensor]

    def steps(self) -> Iterator[Step]:
        """All maps that the network is made of, behind its first stream."""
        for layer in range(len(self.layers)):
            yield "norm", layer
            yield "shortcut", layer
        for branch in range(len(self.residuals)):
            yield "branch", branch
        yield "top", 0

    def ends(self, step: Step) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
        """The value that a map reads, and those whose weighted sum it makes."""
        kind, index = step
        if kind == "branch":
            residual = self.residuals[index]
            return residual.start, residual.ends, self.layout.factors[index]
        if kind == "top":
            return self._last_stream, self.layout.outputs, (1.0,)
        if kind == "shortcut":
            return self._start(index), (self._skipped(index),), (1.0,)
        is_last = index == len(self.layers) - 1
        behind = self._last_stream if is_last else self._start(index + 1)
        return self._total(index), (behind,), (1.0,)

    def layer_of(self, branch: int) -> int:
        """The layer that a branch is in."""
        return next(layer for layer, members in enumerate(self.layers) if branch in members)

    def names(self, branch: int) -> list[str]:
        """The parameters of a branch."""
        return [name for name in names_in(self.flow, self.residuals[branch]) if name in self.parameters]

    @property
    def is_post_norm(self) -> bool:
        """Is the stream normalised between its layers?"""
        sums = [self.flow.graph.nodes[residual.addition].outputs[0] for residual in self.residuals]
        return list(self.layout.stream) != sums

    @property
    def _last_stream(self) -> int:
        """What the top reads; of a post-norm what the last norm made of the sum."""
        return self.layout.stream[max(self.layers[-1], key=lambda one: self.residuals[one].addition)]

    def _start(self, layer: int) -> int:
        return self.residuals[self.layers[layer][0]].start

    def _total(self, layer: int) -> int:
        """The sum of the stream and all branches of a layer."""
        addition = max(self.residuals[one].addition for one in self.layers[layer])
        return self.flow.graph.nodes[addition].outputs[0]

    def _skipped(self, layer: int) -> int:
        """What the branches of a layer are added to: the stream, or what a projection makes of it."""
        members = [self.residuals[one] for one in self.layers[layer]]
        first = min(members, key=lambda one: one.addition)
        inside = 0
        for one in members:
            inside |= one.region
        others = [value for value in self.flow.graph.nodes[first.addition].inputs if not inside >> value & 1]
        # A projection lies between the branch's start and the sum too, but no branch ends in it.
        return others[0] if others else first.start


def cut_in_layers(model: nn.Module, inputs: Any) -> Cut:
    """Record a forward pass and cut it."""
    layout = find_layout(model, inputs)
    flow = Flow(find_uses(layout.graph))
    residuals = tuple(find_residuals(flow))
    name = type(model).__name__
    if not residuals:
        raise UseError(f"{name} has no residual branches, and the theory is about layers x + F(x)")
    if layout.is_routed:
        raise UseError(f"the stream of {name} is a mixture, and the theory is about sums x + F(x)")
    if len(set(streams_of(flow, list(residuals)))) > 1:
        raise UseError(f"{name} has several residual streams, and the theory is about one")
    by_start: dict[int, list[int]] = {}
    for index, residual in enumerate(residuals):
        by_start.setdefault(flow.back(residual.start), []).append(index)
    layers = sorted(by_start.values(), key=lambda members: max(residuals[one].addition for one in members))
    return Cut(model, layout, flow, residuals, tuple(map(tuple, layers)), dict(canonical_parameters(model)))
