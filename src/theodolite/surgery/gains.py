"""Find the gains of norms that only linear maps read, and those maps, by dataflow."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters, unwrap
from theodolite.anatomy.recording.operations import CONVOLUTIONS, RESHAPES, VIEWS
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.specimen import examine
from theodolite.anatomy.structure.elements import row_blocks
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.norms import Read, Readings, follows_normalisation, read_by
from theodolite.anatomy.structure.uses import Use, product_operands
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Result
from theodolite.present.text import Table
from theodolite.surgery.vectors import WeightShape


class SurgeryError(UseError):
    """An edit that would change what the network computes; the network is as it was."""


@dataclass(frozen=True)
class GainReader:
    """A linear map that reads a gain."""

    weight: str
    shape: WeightShape
    channels: tuple[int, ...]
    """By input: the entry of the gain that multiplies it; -1 for none."""
    bias: str | None
    """Its bias, if nothing else uses it."""


@dataclass(frozen=True)
class NormGain:
    """A norm's gain that could be folded into the maps that read it."""

    name: str
    offset: float
    """What the norm adds to it: 1 if it is zero-centred."""
    shift: str | None
    """What the norm adds after multiplying by it."""
    readers: tuple[GainReader, ...]


@dataclass(frozen=True)
class NormGains(Result):
    """The gains of a network's norms. Made by `find_gains`."""

    kind: ClassVar[str] = "gains of norms"
    loads: ClassVar[bool] = True

    found: tuple[NormGain, ...]
    left: Mapping[str, str]
    """Gains that cannot be folded, and why."""
    offsets: Mapping[str, float]
    """What norms add to their gains, by name of the gain."""

    def table(self) -> Table:
        """A line for each gain."""
        rows = [(one.name, ", ".join(each.weight for each in one.readers), None) for one in self.found]
        left = [(name, None, reason) for name, reason in self.left.items()]
        return Table(("gain", "read by", "cannot be folded, because"), [*rows, *left])

    def chosen(self, patterns: Sequence[str] | None) -> tuple[NormGain, ...]:
        """The gains whose names match; without patterns, all that can be folded."""
        if patterns is None:
            return self.found
        if isinstance(patterns, str):
            raise UseError(f"gains is {patterns!r}: give a list of patterns, gains=[{patterns!r}]")
        names = [*(gain.name for gain in self.found), *self.left]
        wanted: set[str] = set()
        for pattern in patterns:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                some = ", ".join(names[:4]) or "none"
                raise UseError(f"gains: no norm's gain has a name that matches {pattern!r}; there are {some}")
            wanted.update(matching)
        refused = [f"{name}: {self.left[name]}" for name in self.left if name in wanted]
        if refused:
            raise SurgeryError("\n".join(refused))
        return tuple(gain for gain in self.found if gain.name in wanted)


@exclusive()
def find_gains(model: nn.Module, inputs: Any) -> NormGains:
    """Find every norm's gain, and whether it could be folded into the linear maps that read it.

    >>> import torch, theodolite as th
    >>> gains = find_gains(th.models.GPT(64, 1, tied=True), torch.zeros(1, 8, dtype=torch.long))
    >>> [reader.weight.split(".")[-2] for reader in gains.found[0].readers]
    ['query', 'key', 'value']
    >>> gains.left
    {'norm.weight': 'embed.weight, which reads it, is an embedding too'}
    """
    return GainFinder(model, inputs).gains()


_PASSING = RESHAPES | {"add", "clone", "contiguous", "_to_copy", "to", "type_as", "alias"}
"""Operations that may stand between a product and its bias."""


class GainFinder:
    """The dataflow of a network, and what it says about gains."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = unwrap(model)
        self.flow: Flow = examine(model, inputs).flow
        self.tensors = dict(canonical_parameters(model))
        self.uses: dict[str, list[Use]] = {}
        for use in self.flow.uses.all:
            self.uses.setdefault(use.name, []).append(use)

    def gains(self) -> NormGains:
        """Every norm's gain."""
        found: list[NormGain] = []
        left: dict[str, str] = {}
        for name, uses in self.uses.items():
            if uses[0].kind == "gain" and follows_normalisation(self.flow, uses[0]):
                gain = self._gain(name, uses)
                if isinstance(gain, str):
                    left[name] = gain
                else:
                    found.append(gain)
        # A weight that reads two gains can take up neither.
        readers: dict[str, list[str]] = {}
        for gain in found:
            for reader in gain.readers:
                readers.setdefault(reader.weight, []).append(gain.name)
        kept = []
        for gain in found:
            clashing = [reader.weight for reader in gain.readers if len(readers[reader.weight]) > 1]
            if clashing:
                left[gain.name] = f"{clashing[0]} reads {' and '.join(readers[clashing[0]])}"
            else:
                kept.append(gain)
        offsets = {name: self.uses[name][0].offset for name in (*(one.name for one in kept), *left)}
        return NormGains(tuple(kept), left, offsets)

    def _gain(self, name: str, uses: list[Use]) -> NormGain | str:
        """The gain, or why it cannot be folded."""
        if strange := self.strange(name):
            return strange
        readings = read_by(self.flow, uses, returned=True)
        if readings.obstacle:
            return readings.obstacle
        readers: dict[str, GainReader] = {}
        for read in readings.reads:
            reader = self._reader(read, readings)
            if isinstance(reader, str):
                return reader
            if readers.setdefault(reader.weight, reader).channels != reader.channels:
                return f"{reader.weight} reads it in two different orders"
        channels = {channel for reader in readers.values() for channel in reader.channels if channel >= 0}
        size = self.tensors[name].numel()
        if channels != set(range(size)):
            return f"it has {size} entries, but {len(channels)} channels are read"
        shift = self._shift(readings, list(readers.values()))
        if shift is not None and shift not in self.tensors:
            return shift
        return NormGain(name, uses[0].offset, shift, tuple(readers.values()))

    def strange(self, name: str) -> str:
        """Why a gain is not the plain gain of one norm; empty if it is."""
        uses = self.uses[name]
        if len(self.owners[id(self.tensors[name])]) > 1:
            return f"it is shared by {' and '.join(self.owners[id(self.tensors[name])])}"
        if not all(use.kind == "gain" and follows_normalisation(self.flow, use) for use in uses):
            return "it is used for something else than a norm too"
        if not all(self._is_bare(name, value, added=True) for use in uses for value in self._others(use)):
            return "it is not a norm's gain as it is: something is computed with it first"
        return ""

    def _reader(self, read: Read, readings: Readings) -> GainReader | str:
        """The map that reads a gain, or why it cannot take it up."""
        flow = self.flow
        if len(read.weights) != 1:
            return f"{' and '.join(read.weights)}, which read it, are one weight together"
        (name,) = read.weights
        owners = self.owners[id(self.tensors[name])]
        if len(owners) > 1:
            return f"{name}, which reads it, is shared by {' and '.join(owners)}"
        nodes = {each.node for each in readings.reads}
        if any(use.node not in nodes for use in self.uses[name]):
            return f"{name}, which reads it, reads something else too"
        use = next(use for use in flow.uses.at(read.node) if use.name == name)
        if not any(self._is_bare(name, value) for value in flow.graph.nodes[read.node].inputs):
            return f"{name}, which reads it, is not a weight as it is: something is computed with it first"
        sizes = tuple(self.tensors[name].shape)
        wide_in = [axis for axis in use.in_axes if sizes[axis] == len(read.channels)]
        wide_out = [axis for axis in use.out_axes if sizes[axis] > 1] or list(use.out_axes)
        if not wide_in or not wide_out or (use.op == "conv" and wide_in[0] not in (0, 1)):
            return f"the inputs of {name}, shape {sizes}, which reads it, are not the gain's channels"
        in_axis, out_axis = wide_in[0], wide_out[-1]
        stack = tuple(axis for axis in range(len(sizes)) if axis not in {*use.in_axes, out_axis})
        rows = () if len(wide_out) > 1 else row_blocks(flow, [use])
        shape = WeightShape(in_axis, out_axis, stack, rows or (((0, sizes[out_axis]),),), sizes)
        return GainReader(name, shape, read.channels, self._bias(read.node, sizes[out_axis]))

    def _bias(self, node: int, size: int) -> str | None:
        """The bias of a product: added by the product itself, or to its result."""
        flow, current = self.flow, self.flow.graph.nodes[node]

        def keeps_rows(node: Node) -> bool:
            """Does only the product go through the node, with its rows last and in order?"""
            last = flow.graph.shapes[node.outputs[0]][-1:]
            return node.op in _PASSING and len(flow.signals(node)) == 1 and tuple(last) == (size,)

        while True:
            names = [use.name for use in flow.uses.at(current.index) if use.kind == "bias"]
            if names:
                (name, *others) = names
                alone = not others and len(self.uses[name]) == 1
                return name if alone and tuple(self.tensors[name].shape) == (size,) else None
            readers = flow.readers(current.outputs[0])
            if len(readers) != 1 or not keeps_rows(readers[0]):
                return None
            current = readers[0]

    def _shift(self, readings: Readings, readers: list[GainReader]) -> str | None:
        """The norm's shift, or why it cannot go into the maps' biases."""
        if not readings.shifts:
            return None
        (shift, *others) = readings.shifts
        if others or shift not in self.tensors:
            return f"{' and '.join(readings.shifts)} is added to it"
        if len(self.owners[id(self.tensors[shift])]) > 1:
            return f"the norm's shift {shift} is shared"
        if not readings.straight:
            return f"the norm's shift {shift} is multiplied or masked before it is read"
        without = [reader.weight for reader in readers if reader.bias is None or reader.shape.stack]
        if without:
            return f"{without[0]} has no bias that could take up the norm's shift {shift}"
        at_borders = [read.weights[0] for read in readings.reads if self._is_padded(read.node)]
        if at_borders:
            return f"{at_borders[0]} meets zeros at the borders, where the norm's shift {shift} is not"
        return shift

    def _is_padded(self, index: int) -> bool:
        """Is it a convolution whose sum has fewer terms in some places?"""
        node = self.flow.graph.nodes[index]
        if node.op not in CONVOLUTIONS:
            return False
        _, _, _, _, padding, _, transposed = node.args[:7]
        kernel = self.flow.graph.shapes[node.inputs[1]][2:]
        return math.prod(kernel) > 1 and (bool(transposed) or any(padding))

    def _others(self, use: Use) -> list[int]:
        """The values made of a parameter that meet the signal where it is used."""
        node = self.flow.graph.nodes[use.node]
        if product_operands(node) is not None:
            return []
        named = {value for value, name in self.flow.graph.parameters.items() if name == use.name}
        return [
            value
            for value in node.inputs
            if value not in self.flow.uses.signal and named & self._sources(value)
        ]

    def _is_bare(self, name: str, value: int, *, added: bool = False) -> bool:
        """Is the value that parameter, but for views, casts and, for a gain, an added number?"""
        while (node := self.flow.maker(value)) is not None and value not in self.flow.uses.signal:
            number = added and node.op in ("add", "sub") and len(node.inputs) == 1
            if not number and node.op not in VIEWS:
                return False
            value = node.inputs[0]
        return self.flow.graph.parameters.get(value) == name

    def _sources(self, value: int) -> set[int]:
        """What a value without signal was made of."""
        node = self.flow.maker(value)
        if node is None or value in self.flow.uses.signal:
            return {value}
        return set().union(*map(self._sources, node.inputs))

    @cached_property
    def owners(self) -> dict[int, list[str]]:
        """By id of a parameter: the names of its holders; a module with several names counts once."""
        found: dict[int, list[str]] = {}
        seen: set[tuple[int, str]] = set()
        for prefix, module in canonical_modules(self.model):
            for attribute, tensor in module._parameters.items():
                if tensor is not None and (id(module), attribute) not in seen:
                    seen.add((id(module), attribute))
                    found.setdefault(id(tensor), []).append(f"{prefix}.{attribute}" if prefix else attribute)
        return found
