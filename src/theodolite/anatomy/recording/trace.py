"""The dataflow of one forward pass, recorded operation by operation.

The pass runs on fake tensors, which have shapes but no storage, so that a network of any size can be traced.
A small network runs on real tensors, which takes a third of the time; so does one whose control flow depends
on values (experts that pick their tokens).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.anatomy.recording.undisturbed import named_tensors, undisturbed
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import call, described, logits, see_inside, with_tensors
from theodolite.core.errors import UseError

T = TypeVar("T")

# Multiplications in a forward pass that take as long as one without values does.
_MOST_REAL_PRODUCTS = 1_000_000_000


@dataclass(frozen=True)
class Ref:
    """A tensor among a node's arguments: the index of its value."""

    value: int


@dataclass(frozen=True)
class Node:
    """One operation: what it was called with and what it made."""

    index: int
    op: str
    """The operation's ATen name, without overload and without the underscore of the in-place form."""
    args: tuple[Any, ...]
    """Positional arguments, tensors replaced by Refs."""
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def read(self, position: int | None) -> int:
        """The value at a position of the arguments; -1 if there is none."""
        if position is None or position >= len(self.args) or not isinstance(self.args[position], Ref):
            return -1
        value: int = self.args[position].value
        return value


@dataclass
class Graph:
    """Values (tensors at one moment) and the nodes that made them, in the order of execution."""

    nodes: list[Node] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    """By value: can it carry a gradient? Indices and masks cannot."""
    maker: list[int | None] = field(default_factory=list)
    """By value: the node that made it; None for inputs and tensors of the network."""
    readers: list[list[int]] = field(default_factory=list)
    """By value: the nodes that read it."""
    parameters: dict[int, str] = field(default_factory=dict)
    """By value: canonical name."""
    aliases: dict[int, str] = field(default_factory=dict)
    """By value: the name by which the network holds the parameter; a tied one has a value for each name."""
    numbers: dict[int, float] = field(default_factory=dict)
    """By value of one element: its number, if it depends on no input and no trained parameter."""
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    """The logits where they can be identified, else every value that is returned."""
    returned: set[int] = field(default_factory=set)
    """Every value that is returned."""

    def add_value(self, tensor: Tensor, maker: int | None) -> int:
        """A new value."""
        self.shapes.append(tuple(tensor.shape))
        self.floating.append(tensor.is_floating_point() or tensor.is_complex())
        self.maker.append(maker)
        self.readers.append([])
        return len(self.shapes) - 1


def trace(model: nn.Module, inputs: Any) -> Graph:
    """Record one forward pass of the model in eval mode; the model is left as it was."""
    names = _names(model)
    # Values of a shard are in other processes too, and one of them may be the only one that calls this.
    hollow = any(tensor.is_meta or is_sharded(tensor) for tensor in (*model.parameters(), *model.buffers()))
    if hollow or sum(tensor.numel() for tensor in model.parameters()) > most_quick_parameters(inputs):
        try:
            return _trace_fake(model, inputs, names)
        except Exception:
            # Control flow that depends on values, or an operation without a fake implementation.
            if hollow:
                raise
    return _trace_real(model, inputs, names)


def most_quick_parameters(inputs: Any) -> int:
    """How many parameters a network may have whose forward pass is quicker with values than without.

    Most networks multiply each parameter by at most each element of the inputs.
    """
    elements = sum(leaf.numel() for leaf in tree_leaves(see_inside(inputs)) if isinstance(leaf, Tensor))
    return _MOST_REAL_PRODUCTS // max(1, elements)


def watch(model: nn.Module, inputs: Any, seen: Callable[[int, Tensor], None]) -> Graph:
    """Record one forward pass on the model's own weights; the model is left as it was.

    `seen(value, tensor)` is called as soon as an operation has made a value, before an in-place operation can
    overwrite it.
    """
    return _trace_real(model, inputs, _names(model), seen)


def _names(model: nn.Module) -> dict[int, str]:
    """By id of a parameter: its name. A frozen scalar is a constant and has none."""
    return {
        id(tensor): name
        for name, tensor in canonical_parameters(model)
        if tensor.requires_grad or tensor.numel() > 1
    }


def _trace_fake(model: nn.Module, inputs: Any, names: Mapping[int, str]) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not (leaf.is_meta or is_sharded(leaf)):
            return mode.from_tensor(leaf, static_shapes=True)
        # Meta tensors count as CPU tensors, so that they can be combined with those the forward pass makes.
        # So do shards, with the shape of the whole.
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")

    state = {id(tensor): fake(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() == 1 and id(tensor) not in names and not (tensor.is_meta or is_sharded(tensor)):
            state[id(tensor)].constant = tensor.detach().cpu().clone()  # torch computes with it
            mode.fake_tensor_converter.add_constant_storage_mapping(state[id(tensor)])
    with mode, _silenced("torch._subclasses.fake_tensor"):
        return _record(model, tree_map(fake, inputs), names, state)


def _trace_real(
    model: nn.Module,
    inputs: Any,
    names: Mapping[int, str],
    seen: Callable[[int, Tensor], None] | None = None,
) -> Graph:
    # A forward pass may write to buffers and inputs, so it gets copies.
    state = {id(tensor): tensor.detach() for tensor in model.parameters()}
    state |= {id(tensor): tensor.clone() for tensor in model.buffers()}
    inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
    with untouched_randomness():
        return _record(model, inputs, names, state, seen)


def _record(
    model: nn.Module,
    inputs: Any,
    names: Mapping[int, str],
    state: Mapping[int, Tensor],
    seen: Callable[[int, Tensor], None] | None = None,
    gradients: bool = False,
) -> Graph:
    """Run the model with `state`, by id, in place of its own tensors, under a recorder."""
    recorder = _Recorder(seen)
    tensors = {name: state[id(tensor)] for name, tensor in named_tensors(model)}
    places = _one_for_each_place(model, tensors)
    parameters = {id(state[key]): name for key, name in names.items()}
    for name, tensor in tensors.items():
        separate, place = places.get(name, (tensor, name))
        value = recorder.value(separate)
        known = parameters.get(id(tensor))
        if known is None:
            recorder.note_number(separate)
        else:
            recorder.graph.parameters[value] = known
            recorder.graph.aliases.setdefault(value, place)
        tensors[name] = separate
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            recorder.graph.inputs.add(recorder.value(leaf))
    try:
        with undisturbed(model), torch.set_grad_enabled(gradients):
            if seen is None:
                _drop_collectives(model)
            with recorder:
                output = with_tensors(model, tensors, call, inputs, tied=False)
    except RuntimeError as error:
        if gradients or "require grad" not in str(error):
            raise
        return _record(model, inputs, names, state, seen, gradients=True)  # it takes derivatives itself
    recorder.graph.outputs = {recorder.value(leaf) for leaf in _results(output)}
    recorder.graph.returned = {recorder.value(leaf) for leaf in tensors_in(output)}
    if not recorder.graph.outputs:
        raise UseError(f"it returned {described(output)}, in which there is no tensor")
    return recorder.graph


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor, whose entries several processes may hold?"""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def _drop_collectives(model: nn.Module) -> None:
    """Drop the hooks with which torch.distributed gathers weights and moves inputs around a forward pass."""
    for module in model.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = vars(module)[kind]
            kept = {key: hook for key, hook in hooks.items() if not _is_distributed(hook)}
            if len(kept) < len(hooks):
                vars(module)[kind] = OrderedDict(kept)


def _is_distributed(hook: Any) -> bool:
    owner = type(hook.__self__) if hasattr(hook, "__self__") else inspect.unwrap(hook)
    return str(getattr(owner, "__module__", "")).startswith("torch.distributed.")


def _one_for_each_place(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
    """Give a tied parameter a separate tensor in each module that holds it, to distinguish its uses.

    By name of a parameter: the tensor, and the canonical name of the place.
    """
    canonical = {id(module): prefix for prefix, module in reversed(list(canonical_modules(model)))}
    places: dict[str, tuple[Tensor, str]] = {}
    by_place: dict[tuple[int, str], Tensor] = {}
    taken: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute in module._parameters:
            name, place = (f"{prefix}.{attribute}" if prefix else attribute), (id(module), attribute)
            if name in tensors:
                tensor = tensors[name]
                separate = by_place.setdefault(place, tensor.detach() if id(tensor) in taken else tensor)
                taken.add(id(tensor))
                places[name] = separate, f"{canonical.get(id(module), prefix)}.{attribute}".removeprefix(".")
    return places


class _Recorder(TorchDispatchMode):
    def __init__(self, seen: Callable[[int, Tensor], None] | None) -> None:
        super().__init__()
        self.seen = seen
        self.graph = Graph()
        self.values: dict[int, int] = {}
        self.kept: list[Tensor] = []  # an id is unique only while its tensor lives
        self.by_storage: dict[int, list[Tensor]] = {}

    def value(self, tensor: Tensor, maker: int | None = None) -> int:
        known = self.values.get(id(tensor))
        if known is not None:
            return known
        index = self.graph.add_value(tensor, maker)
        self.values[id(tensor)] = index
        self._keep(tensor)
        if self.seen is not None and maker is not None:
            self.seen(index, tensor)
        return index

    def note_number(self, tensor: Tensor) -> None:
        """Record the number of a constant with one element."""
        if tensor.numel() != 1 or tensor.is_complex():
            return
        held = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if held is not None and not held.is_meta:
            with torch._C._DisableTorchDispatch():
                self.graph.numbers[self.value(tensor)] = float(held.item())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _run(func, args, kwargs)
        made = list(flat(result, Tensor))
        if made:
            written = written_by(func, args, kwargs) if func._schema.is_mutable else []
            refs = tuple(self._ref(arg) for arg in args)
            self._add(
                op_name(func), refs, {key: self._ref(arg) for key, arg in kwargs.items()}, made, written
            )
            if len(made) == 1 and made[0].numel() == 1:
                self._note_made(func, args, kwargs, made[0])
        return result

    def _note_made(self, func: Any, args: Any, kwargs: Any, made: Tensor) -> None:
        """Record the number of a constant that was just made from a number or from other constants."""
        name, inputs = op_name(func), self.graph.nodes[-1].inputs
        drawn = torch.Tag.nondeterministic_seeded in func.tags or name.startswith("empty")
        if drawn or not all(value in self.graph.numbers for value in inputs):
            return
        if not inputs and isinstance(made, FakeTensor) and made.constant is None:
            filled = {"new_full": args[2:3], "full_like": args[1:2]}.get(name)
            if filled is None and any(isinstance(arg, Tensor) for arg in args):
                return
            with torch._C._DisableTorchDispatch():
                made.constant = (
                    torch.full(made.shape, *filled, dtype=made.dtype) if filled else func(*args, **kwargs)
                )
        self.note_number(made)

    def _ref(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            if id(arg) not in self.values:
                self._meet(arg)
            return Ref(self.value(arg))
        return [self._ref(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

    def _meet(self, tensor: Tensor) -> None:
        """Record a tensor that no operation made: one that the network holds, or a known one wrapped again.

        A slice of an `nn.ParameterList` wraps its parameters again.
        """
        for one in self.by_storage.get(_storage(tensor) or 0, ()):
            if id(one) in self.values and _layout(one) == _layout(tensor):
                self.values[id(tensor)] = self.values[id(one)]
                self._keep(tensor)
                return
        self.note_number(tensor)

    def _keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)
        if (key := _storage(tensor)) is not None:
            self.by_storage.setdefault(key, []).append(tensor)

    def _add(self, op: str, args: Any, kwargs: Any, made: list[Tensor], written: list[Tensor]) -> None:
        graph = self.graph
        inputs = tuple(ref.value for ref in flat((*args, *kwargs.values()), Ref))
        if op.startswith("new_") or op.endswith("_like"):
            inputs = ()  # only the shape is used
        index = len(graph.nodes)
        for tensor in written:
            del self.values[id(tensor)]  # from here on it holds another value
            for one in self.by_storage.get(_storage(tensor) or 0, ()):
                if isinstance(one, FakeTensor):
                    one.constant = None
        outputs = tuple(self.value(tensor, index) for tensor in dict.fromkeys([*written, *made]))
        graph.nodes.append(Node(index, op, args, kwargs, inputs, outputs))
        for value in dict.fromkeys(inputs):
            graph.readers[value].append(index)
        for tensor in written:
            self._spread(tensor)

    def _spread(self, tensor: Tensor) -> None:
        """Record a write into a tensor as a write into every view of the same storage."""
        views = self.by_storage.get(_storage(tensor) or 0, ())
        others = {id(other): other for other in views if other is not tensor}
        for other in others.values():
            args = (Ref(self.values.pop(id(other))), Ref(self.values[id(tensor)]))
            self._add("write", args, {}, [other], [])


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if func is torch.ops.aten._reshape_alias.default and isinstance(args[0], FakeTensor):
        return args[0].as_strided(args[1], args[2])  # the same view; torch's fake kernel is much slower
    if op_name(func) == "_grouped_mm" and isinstance(args[0], FakeTensor) and args[0].dim() < args[1].dim():
        return args[0].new_empty(args[0].shape[0], args[1].shape[-1])  # torch's fake kernel takes only bf16
    return func(*args, **kwargs)


@contextlib.contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """Silence a logger: a failed fake pass is followed by a real one and is worth no traceback."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True  # setting its level would clear the caches of all loggers
    try:
        yield
    finally:
        log.disabled = before


@functools.cache
def op_name(func: Any) -> str:
    """The operation's ATen name, without overload and without the underscore of the in-place form."""
    name: str = func._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors an in-place or out= operation writes to."""
    found = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    declared = enumerate(func._schema.arguments)
    return [(place, one.name) for place, one in declared if one.alias_info and one.alias_info.is_write]


def flat(value: Any, kind: type[T]) -> Iterator[T]:
    """The instances of a type among an operation's arguments or results, also in lists."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item, kind)


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _results(output: Any) -> list[Tensor]:
    """The logits where they can be identified, else every tensor in a model's output."""
    try:
        return [logits(output)]
    except UseError:
        return tensors_in(output)


def tensors_in(output: Any) -> list[Tensor]:
    """Every tensor in a model's output; of an object, those in its attributes."""
    found = []
    for leaf in tree_leaves(output):
        inside = [leaf] if isinstance(leaf, Tensor) else tree_leaves(dict(getattr(leaf, "__dict__", {})))
        found += [item for item in inside if isinstance(item, Tensor)]
    return found
