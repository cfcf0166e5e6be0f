"""FLOP of a forward pass and of a training step, counted from the recorded operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.recording.trace import Graph, Node, Ref, trace
from theodolite.core.building import build_hollow, build_model, in_one_line
from theodolite.core.calling import Build, described, see_inside
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.present.result import Result
from theodolite.present.text import Table

MOST_REAL_PARAMETERS = 500_000_000
"""A network whose control flow depends on values is built for real up to this size."""


@dataclass(frozen=True)
class FlopCount(Result):
    """Floating-point operations on one batch; a multiplication and an addition are two. Made by `flop`."""

    kind: ClassVar[str] = "FLOP count"
    loads: ClassVar[bool] = True

    forward: int
    """Of one forward pass."""
    training: int
    """Of the forward and the backward pass together."""
    parameters: int

    def table(self) -> Table:
        """The three numbers."""
        rows = [("forward", self.forward), ("training", self.training), ("parameters", self.parameters)]
        return Table(("", "number"), rows)


@exclusive()
def flop(build: Build | nn.Module, inputs: Any, *, size: Size | None = None) -> FlopCount:
    """Count the FLOP of matrix products, attention scores and convolutions on a batch of inputs.

    A product of an (n, k) and a (k, m) matrix is 2nkm. The backward pass has the same again for each of its
    two factors that depends on a trained tensor. Lookups of embeddings are no FLOP; elementwise operations,
    norms and softmaxes are not counted. Attention counts all pairs of positions, masked ones too.

    `build(width, depth)` is built at `size` without memory for its weights; where the control flow depends
    on values, for real. A ready module is left as it was.

    >>> import torch
    >>> flop(nn.Linear(8, 4), torch.ones(10, 8))  # no gradient of the inputs is needed
    FlopCount(forward=640, training=1280, parameters=36)
    """
    inputs = see_inside(inputs)
    if isinstance(build, nn.Module):
        return _count(unwrap(build), inputs)
    if size is None:
        raise UseError("size is None: the FLOP of a build function need one. Give size=Size(256, 4)")
    model = build_hollow(build, size.network)
    try:
        return _count(model, inputs)
    except UseError:
        num = _num_parameters(model)
        if not any(tensor.is_meta for tensor in model.parameters()) or num > MOST_REAL_PARAMETERS:
            raise
    return _count(build_model(build, size.network), inputs)


def _count(model: nn.Module, inputs: Any) -> FlopCount:
    try:
        graph = trace(model, inputs)
    except Exception as error:
        raise UseError(
            f"the forward pass of {type(model).__name__} failed: {in_one_line(error).rstrip('.')}. It was "
            f"called with {described(inputs)}. Check that the model runs on these inputs"
        ) from error
    trained = {name for name, tensor in canonical_parameters(model) if tensor.requires_grad}
    learns = _depends_on_trained(graph, trained)
    forward = backward = 0
    for node in graph.nodes:
        product = PRODUCTS.get(node.op)
        if product is None:
            continue
        first, size = product
        num = 2 * size(graph, node)
        factors = [node.read(place) for place in (first, first + 1)]
        forward += num
        backward += num * sum(learns[value] for value in factors if value >= 0)
    return FlopCount(forward, forward + backward, _num_parameters(model))


def _num_parameters(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.parameters())


def _depends_on_trained(graph: Graph, trained: set[str]) -> list[bool]:
    """By value: does a gradient flow through it to a trained tensor?"""
    found = [graph.parameters.get(value) in trained for value in range(len(graph.shapes))]
    for node in graph.nodes:
        if node.op == "detach":
            continue
        if any(found[value] for value in node.inputs):
            for value in node.outputs:
                found[value] = graph.floating[value]
    return found


def _shape(graph: Graph, node: Node, place: int) -> tuple[int, ...]:
    argument = node.args[place]
    assert isinstance(argument, Ref)
    return graph.shapes[argument.value]


def _matrices(first: int) -> Callable[[Graph, Node], int]:
    """Of one or a batch of products (…, n, k) @ (…, k, m) or @ (k,): n·k·m for each."""

    def size(graph: Graph, node: Node) -> int:
        left, right = _shape(graph, node, first), _shape(graph, node, first + 1)
        return math.prod(left) * (right[-1] if len(right) > 1 else 1)

    return size


def _convolution(graph: Graph, node: Node) -> int:
    """An output of a convolution takes each weight of its channel once; a transposed one, each input."""
    inputs, weight = _shape(graph, node, 0), _shape(graph, node, 1)
    is_transposed = bool(node.args[6])
    places = inputs if is_transposed else graph.shapes[node.outputs[0]]
    return math.prod(places[:1] + places[2:]) * math.prod(weight)


PRODUCTS: dict[str, tuple[int, Callable[[Graph, Node], int]]] = {
    "mm": (0, _matrices(0)),
    "bmm": (0, _matrices(0)),
    "mv": (0, _matrices(0)),
    "dot": (0, _matrices(0)),
    "addmm": (1, _matrices(1)),
    "baddbmm": (1, _matrices(1)),
    "addmv": (1, _matrices(1)),
    "_grouped_mm": (0, _matrices(0)),
    "convolution": (0, _convolution),
}
"""By ATen name: the place of the first of its two factors among the arguments, and the multiplications."""
