"""`rerun`: a recorded forward pass once more, to keep values, take their gradients, or set them to zero.

The second pass runs the network itself, with its autograd, under a dispatch mode that finds recorded values
among the arguments of each operation. There a tensor has its autograd history, also if a view or an in-place
operation made it.

An operation is identified as the n-th of its kind, where a kind is a name and the shapes of the arguments.
This tolerates differences between the passes: autograd saves copies, products are folded in another way,
experts get other tokens. Values of a kind that the passes run a different number of times count as lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.operations import PRODUCTS, VIEWS
from theodolite.anatomy.recording.trace import Graph, Node, flat, op_name, written_by
from theodolite.anatomy.recording.undisturbed import run_under
from theodolite.core.calling import logits
from theodolite.core.errors import UseError

Kind = tuple[str, tuple[tuple[int, ...], ...]]
"""An operation's name and the shapes of its tensors."""

Seen = Callable[[str, tuple[Any, ...], Tensor, "int | None"], None]
"""Called with an operation, its arguments, a tensor it made, and the last kept value that was read before."""


@dataclass(frozen=True)
class Rerun:
    """The result of `rerun`."""

    output: Tensor
    """The logits, with their autograd history if gradients were asked for."""
    values: Mapping[int, Tensor]
    """Copies of the kept values that were found."""
    edges: Mapping[int, GradientEdge | Tensor]
    """The gradient edge of each value, or the parameter itself; missing where there is no gradient."""
    lost: frozenset[int]
    """Values that were not found."""

    def gradients(self, loss: Tensor) -> dict[int, Tensor]:
        """`∂loss/∂value` for each value that the loss depends on."""
        if not self.edges or not loss.requires_grad:
            return {}
        edges: Any = list(self.edges.values())
        try:
            found = torch.autograd.grad(loss, edges, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise UseError(
                "the network is checkpointed with use_reentrant=True, which hides its values from autograd: "
                "checkpoint it with use_reentrant=False, or not at all"
            ) from error
        return {value: one for value, one in zip(self.edges, found, strict=True) if one is not None}


def rerun(
    model: nn.Module,
    inputs: Any,
    graph: Graph,
    *,
    keep: Collection[int] = (),
    zero: Collection[int] = (),
    gradients: bool = False,
    seen: Seen | None = None,
) -> Rerun:
    """Run the model again; it is left as it was.

    Args:
        model: the recorded one.
        inputs: of the recorded shapes, on the model's device.
        graph: the recording, made by `watch`.
        keep: values to copy, and to take gradients of.
        zero: values that every operation reads as zeros.
        gradients: whether autograd records the pass.
        seen: with gradients, called for every floating-point tensor that depends on a parameter.

    Dropout is off, and a batch norm in training mode uses the statistics of the batch.
    """
    kinds = {
        node.index: (node.op, tuple(graph.shapes[value] for value in node.inputs))
        for node in graph.nodes
        if node.op != "write"
    }
    totals = Counter(kinds.values())
    places = _places(graph, kinds, keep, zero)
    mode = _Mode(places, seen, gradients)
    output = logits(run_under(mode, unwrap(model), inputs, gradients=gradients))
    for value in keep:
        if not graph.readers[value] and value in graph.outputs:
            mode.take(value, output)
    unsure = {place.value for place in places if totals[place.kind] != mode.counts[place.kind]}
    sure = {place.value for place in places if totals[place.kind] == mode.counts[place.kind]}
    kept = {value: one for value, one in mode.values.items() if value in sure or value in graph.outputs}
    edges = {value: edge for value, edge in mode.edges.items() if value in kept}
    lost = {value for value in keep if value not in kept} | {value for value in zero if value in unsure}
    return Rerun(output, kept, edges, frozenset(lost))


class _Place(NamedTuple):
    """Where a value is read: by the n-th operation of a kind, as one of its tensors."""

    kind: Kind
    ordinal: int
    argument: int
    value: int
    act: str
    """`keep`, `zero` or `mark`, which only records the progress of the pass."""


class _Mode(TorchDispatchMode):
    def __init__(self, places: Iterable[_Place], seen: Seen | None, gradients: bool) -> None:
        super().__init__()
        self.seen, self.with_gradients = seen, gradients
        self.waiting: dict[tuple[Kind, int], list[_Place]] = {}
        for place in places:
            self.waiting.setdefault((place.kind, place.ordinal), []).append(place)
        self.counts: Counter[Kind] = Counter()
        self.values: dict[int, Tensor] = {}
        self.edges: dict[int, GradientEdge | Tensor] = {}
        self.last: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(flat((*args, *kwargs.values()), Tensor))
        kind = op_name(func), tuple(tuple(tensor.shape) for tensor in tensors)
        blank = set()
        for place in self.waiting.get((kind, self.counts[kind]), ()):
            if place.act == "zero":
                blank.add(place.argument)
                continue
            self.last = place.value
            if place.act == "keep":
                self.take(place.value, tensors[place.argument])
        if blank:
            written = {id(one) for one in written_by(func, args, kwargs)}
            for at in blank:  # a tensor that the operation writes to is zeroed itself
                one = tensors[at]
                tensors[at] = one.detach().zero_() if id(one) in written else torch.zeros_like(one)
            given = iter(tensors)
            args = tuple(_exchanged(arg, given) for arg in args)
            kwargs = {key: _exchanged(arg, given) for key, arg in kwargs.items()}
        result = func(*args, **kwargs)
        made = list(flat(result, Tensor))
        if made:
            self.counts[kind] += 1
        if self.seen is not None and any(tensor.requires_grad for tensor in tensors):
            for tensor in made:
                if tensor.is_floating_point():
                    self.seen(kind[0], (*args, *kwargs.values()), tensor.detach(), self.last)
        return result

    def take(self, value: int, tensor: Tensor) -> None:
        if self.with_gradients and tensor.requires_grad:
            self.edges[value] = tensor if tensor.is_leaf else get_gradient_edge(tensor)
        self.values[value] = tensor.detach().clone()


def _places(
    graph: Graph, kinds: Mapping[int, Kind], keep: Iterable[int], zero: Iterable[int]
) -> list[_Place]:
    ordinals: dict[int, int] = {}
    met: Counter[Kind] = Counter()
    for index, kind in kinds.items():
        ordinals[index] = met[kind]
        met[kind] += 1

    def place(node: Node, argument: int, value: int, act: str) -> _Place:
        return _Place(kinds[node.index], ordinals[node.index], argument, value, act)

    found: list[_Place] = []
    for value in keep:
        read = _as_read(graph, value)
        readers = list(_readers(graph, read))
        if readers:
            first, chosen = readers[0], min(readers, key=_may_be_recounted)
            found.append(place(first, first.inputs.index(read), value, "mark"))
            found.append(place(chosen, chosen.inputs.index(read), value, "keep"))
    for value in zero:
        for node in _readers(graph, value):
            at = [index for index, read in enumerate(node.inputs) if read == value]
            found += [place(node, index, value, "zero") for index in at]
    return found


def _as_read(graph: Graph, value: int) -> int:
    """The value, or the one that holds the same after a write through a view, if only that is read."""
    if any(True for _ in _readers(graph, value)):
        return value
    for index in graph.readers[value]:
        for other in graph.nodes[index].outputs:
            if math.prod(graph.shapes[other]) == math.prod(graph.shapes[value]) and graph.readers[other]:
                return other
    return value


def _readers(graph: Graph, value: int) -> Iterator[Node]:
    """The operations that read a value, in order, without those that only mark a write."""
    for index in dict.fromkeys(graph.readers[value]):
        if graph.nodes[index].op != "write":
            yield graph.nodes[index]


def _may_be_recounted(node: Node) -> bool:
    """May there be more or fewer of its kind under autograd, which folds products in another way?"""
    return node.op in VIEWS or node.op in PRODUCTS


def _exchanged(arg: Any, given: Iterator[Tensor]) -> Any:
    """The argument with its tensors replaced by the given ones, in order."""
    if isinstance(arg, Tensor):
        return next(given)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_exchanged(item, given) for item in arg)
    return arg
