"""Find where a block could be inserted: the lists of residual blocks in a network, by dataflow.

A new block goes between two children of a ModuleList or a Sequential, and is a copy of the one before (or of
the one behind, where that cannot be). It is closed: what ends its branches is zero, so that it returns the
stream it is given, while the gradient with respect to what is zero is not. Which tensor that is depends on
where the norms are. In `x + f(N x)` it is the last projection. In `x + N f(x)` it is the norm's gain: with a
projection of zeros the norm would divide by its ε alone. In `N(x + f(x))` it is the projection, and the copy
leaves out the norm of the sum, since a second norm is not the identity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.dissection import both_views
from theodolite.anatomy.names import all_parameter_names, canonical_modules, unwrap
from theodolite.anatomy.part import Anatomy, Branch
from theodolite.anatomy.recording.trace import tensors_in
from theodolite.anatomy.recording.undisturbed import undisturbed
from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.calling import call as call_network
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Result
from theodolite.present.text import Table
from theodolite.surgery.blocks import (
    BlockCall,
    InsertionPoint,
    OutputTensor,
    close,
    copied,
    inserted,
    shared,
    uncached,
    watched,
)
from theodolite.surgery.gains import SurgeryError
from theodolite.surgery.proof import noise
from theodolite.surgery.randomness import change_randomness, isolated, kept_randomness, remembered

MOST_PASSES = 32
"""Points of a list that are tried one by one, each in a forward pass."""
CHANGED = "with one block more the network computes something else"


@dataclass(frozen=True)
class InsertionPoints(Result):
    """The points between the blocks of a network, in the order of its modules. Made by `find_points`."""

    kind: ClassVar[str] = "insertion points"
    loads: ClassVar[bool] = True

    found: tuple[InsertionPoint, ...]
    left: Mapping[str, str]
    """Points where no block can be inserted, and why."""

    def table(self) -> Table:
        """A line for each point."""
        rows = [
            (point.name, point.like, ", ".join(output.name for output in point.outputs), None)
            for point in self.found
        ]
        left = [(name, None, None, reason) for name, reason in self.left.items()]
        return Table(("point", "copy of", "zero", "no block here, because"), [*rows, *left])

    def at(self, where: int | str | InsertionPoint) -> InsertionPoint:
        """A point by name, by number in a network with one list of blocks, or itself."""
        name = where.name if isinstance(where, InsertionPoint) else where
        if not self.found:
            reasons = "; ".join(f"{place}: {why}" for place, why in list(self.left.items())[:2])
            raise SurgeryError(f"no block can be inserted anywhere: {reasons}")
        if isinstance(name, int):
            if len(holders := list(dict.fromkeys(point.holder for point in self.found))) > 1:
                raise SurgeryError(
                    f"at is {name}, and there are {len(holders)} lists of blocks, {', '.join(holders)}: say "
                    f"which, as in at={self.found[0].name!r}"
                )
            name = f"{holders[0]}.{name}" if holders[0] else str(name)
        for point in self.found:
            if point.name == name:
                return point
        if name in self.left:
            raise SurgeryError(f"no block can be inserted at {name}: {self.left[name]}")
        names = [point.name for point in self.found]
        listed = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])} … {names[-1]}"
        raise SurgeryError(f"{where!r} is no point: there are {listed}")


@exclusive()
def find_points(model: nn.Module, inputs: Any) -> InsertionPoints:
    """Find every point where a copy of a block could be inserted without changing what is computed.

    >>> import theodolite as th
    >>> points = find_points(th.models.GPT(64, 2), torch.zeros(1, 8, dtype=torch.long))
    >>> [str(point) for point in points.found]
    ['blocks.0 before blocks.0', 'blocks.1 after blocks.0', 'blocks.2 after blocks.1']
    >>> [output.name for output in points.found[0].outputs]
    ['attention.branch.out.weight', 'feed_forward.branch.down.weight']

    Raises:
        SurgeryError: if the network has no list of residual blocks.
    """
    inner = unwrap(model)
    with kept_randomness(inner):
        anatomies = both_views(inner, inputs)
        blocks: dict[str, _Block] = {}
        for anatomy in anatomies:
            blocks = dict(_blocks(inner, anatomy)) | blocks
        if not blocks:
            raise SurgeryError(_no_blocks(inner, anatomies[0]))
        _try(inner, inputs, blocks)
        found = first = _points(inner, inputs, kept := _repeated(blocks))
        while not found.found and len(kept) < len(blocks):  # as where a network takes its stages by number
            blocks = {name: block for name, block in blocks.items() if name not in kept}
            found = _points(inner, inputs, kept := _repeated(blocks))
        return found if found.found else first


@dataclass
class _Block:
    """A child of a list, what it holds, and what is found out about it."""

    module: nn.Module
    branches: list[Branch]
    outputs: tuple[OutputTensor, ...]
    removed: tuple[str, ...]
    calls: int = 0
    before: str | None = "it was not called with a stream of numbers"
    """Why a closed copy does not pass on the stream that comes into the block; None if it does."""
    behind: str | None = "it was not called with a stream of numbers"
    """The same for the stream that comes out of it."""

    def refuse(self, reason: str) -> None:
        """No copy of it can be inserted."""
        self.before = self.behind = reason


def _blocks(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, _Block]]:
    """The children of lists that contain whole branches."""
    for prefix, module in canonical_modules(model):
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child_name, child in module.named_children():
                name = f"{prefix}.{child_name}" if prefix else child_name
                branches = branches_in(anatomy, name)
                if branches:
                    yield name, _Block(unwrap(child), branches, *closing(anatomy, name, branches))


def branches_in(anatomy: Anatomy, name: str) -> list[Branch]:
    """The branches whose tensors are all inside a module."""
    return [
        one
        for one in anatomy.branches
        if one.parts and all(part.startswith(f"{name}.") for part in one.parts)
    ]


def closing(
    anatomy: Anatomy, name: str, branches: list[Branch]
) -> tuple[tuple[OutputTensor, ...], tuple[str, ...]]:
    """What closes a block, and what a copy of it leaves out."""
    outputs = tuple(
        OutputTensor(end.removeprefix(f"{name}."), 0.0 - anatomy[end].offset, number)
        for number, branch in enumerate(branches)
        for end in branch.ends
        if end in anatomy
    )
    inside = {part for branch in branches for part in branch.parts}
    if not any(branch.placement == "post" for branch in branches):
        return outputs, ()
    sums = [
        part.removeprefix(f"{name}.").rpartition(".")[0]
        for part in anatomy
        if part.startswith(f"{name}.") and part not in inside and anatomy[part].kind != "weight"
    ]
    return outputs, tuple(dict.fromkeys(sums))


def _try(model: nn.Module, inputs: Any, blocks: Mapping[str, _Block]) -> None:
    """Run the network once, and a closed copy of each block on what comes in and on what comes out."""

    def trying(block: _Block) -> Any:
        def look(call: BlockCall, stream: Tensor) -> None:
            block.calls += 1
            if block.calls == 1:
                closed = copied(model, block.module)
                close(closed, block.outputs, block.removed)
                block.before = _passes(call, closed, call.stream_in)
                block.behind = _passes(call, closed, stream)
                closed.train()
                trained = _passes(call, closed, call.stream_in if block.behind else stream)
                if trained is not None and (block.before is None or block.behind is None):
                    block.refuse(f"in training it is another one: {trained}")

        return look

    with untouched_randomness(), undisturbed(model), uncached(model), ExitStack() as stack:
        for block in blocks.values():
            tensors, known = dict(all_parameter_names(block.module)), shared(model, block.module)
            if ends := [one for one in block.branches if not one.ends]:
                block.refuse(f"no tensor sets the size of what its branch {ends[0].branch} adds")
            elif block.removed and isinstance(block.module, nn.TransformerEncoderLayer):
                block.refuse(
                    "torch's encoder layer reads the norms behind its sums by itself, which a copy of it "
                    "would have to go without: build it with norm_first=True"
                )
            elif names := [one.name for one in block.outputs if id(tensors[one.name]) in known]:
                block.refuse(f"{names[0]}, which would be zero, is used elsewhere too")
            else:
                stack.enter_context(watched(block.module, trying(block), follows=True))
        if any(tensor.is_meta for tensor in model.parameters()):
            inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
        call_network(model, inputs)
    for block in blocks.values():
        if block.calls > 1:
            block.refuse(f"it is called {block.calls} times in one pass")


def _passes(call: BlockCall, closed: nn.Module, stream: Tensor | None) -> str | None:
    """None if a closed block returns the stream it is given; otherwise why not."""
    if stream is None:
        return "it is not called with a stream of numbers"
    try:
        returned = call.run(closed, stream)
    except Exception as error:
        return f"a copy of it cannot be called there: {in_one_line(error)}"
    if returned is None or returned.shape != stream.shape:
        return "it changes the shape of the stream"
    if not stream.is_meta and not returned.any() and stream.any():
        return "it returns what it adds, and the sum is outside of it: let it return the sum"
    if not stream.is_meta and not torch.equal(returned, stream):
        return "with closed branches it still changes the stream: it does more than add them"
    return None


def _repeated(blocks: Mapping[str, _Block]) -> dict[str, _Block]:
    """Of children inside one another, the most frequent; of equally frequent ones, the innermost.

    A stage of blocks, a block of two branches and a branch may all be children of lists.
    """
    kinds = {
        name: (
            name.rpartition(".")[0],
            tuple((each, tensor.shape) for each, tensor in all_parameter_names(block.module)),
        )
        for name, block in blocks.items()
    }
    alike = Counter(kinds.values())
    kept: set[str] = set()
    for branch in {id(one): one for block in blocks.values() for one in block.branches}.values():
        around = [name for name, block in blocks.items() if any(one is branch for one in block.branches)]
        good = [name for name in around if blocks[name].before is None or blocks[name].behind is None]
        kept.add(max(good or around, key=lambda name: (alike[kinds[name]], len(name))))
    return {name: block for name, block in blocks.items() if name in kept}


def _points(model: nn.Module, inputs: Any, blocks: Mapping[str, _Block]) -> InsertionPoints:
    found: list[InsertionPoint] = []
    left: dict[str, str] = {}
    modules = dict(canonical_modules(model))
    is_meta = any(tensor.is_meta for tensor in model.parameters())
    for holder in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        names = [name for name, _ in modules[holder].named_children()]
        prefix = f"{holder}." if holder else ""
        if names != [str(index) for index in range(len(names))]:
            left[holder] = "the children of the list have names of their own, not numbers"
            continue
        here: list[InsertionPoint] = []
        for index in range(len(names) + 1):
            name, reasons = f"{prefix}{index}", []
            for like, follows in ((f"{prefix}{index - 1}", True), (name, False)):
                block = blocks.get(like)
                if block is None:
                    continue
                reason = block.behind if follows else block.before
                if reason is None:
                    point = InsertionPoint(name, holder, index, like, follows, block.outputs, block.removed)
                    here.append(point)
                    break
                reasons.append(f"{like}: {reason}")
            else:
                if reasons:
                    left[name] = "; ".join(reasons)
        # A network need not just run through a list: it may take blocks by number, or keep what some return.
        refused = {} if is_meta else _refused(model, inputs, here)
        left |= refused
        found += [point for point in here if point.name not in refused]
    return InsertionPoints(tuple(found), left)


def _refused(model: nn.Module, inputs: Any, points: Sequence[InsertionPoint]) -> dict[str, str]:
    """By point where a closed block changes what the network computes, or is not called once: why.

    Each point is tried by itself, in a pass of its own. In a long list some neighbours are tried together,
    and by halves if that fails.
    """
    with untouched_randomness(0), undisturbed(model), uncached(model):
        restore = remembered(model)

        def passes(others: bool) -> list[Tensor]:
            restore()
            if others:
                change_randomness(model)
            return tensors_in(call_network(model.eval(), inputs))

        before = passes(False) if points else []
        together = math.ceil(len(points) / MOST_PASSES)
        waiting = [points[at : at + together] for at in range(0, len(points), max(1, together))]
        refused: dict[str, str] = {}
        while waiting:
            some = waiting.pop()
            if not (reason := _refusal(model, some, before, lambda: passes(False))):
                continue
            if len(some) == 1:
                refused[some[0].name] = reason
            else:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
        if CHANGED in refused.values() and (drawn := noise(passes, 0.0, "with one block more")):
            refused = {name: drawn if reason == CHANGED else reason for name, reason in refused.items()}
        return {point.name: refused[point.name] for point in points if point.name in refused}


def _refusal(
    model: nn.Module,
    points: Sequence[InsertionPoint],
    before: Sequence[Tensor],
    again: Callable[[], list[Tensor]],
) -> str:
    """Why no closed block can be at one of the points, or not at all of them; empty if they can."""
    calls: Counter[nn.Module] = Counter()
    with ExitStack() as stack:
        blocks = []
        for point in reversed(points):  # from behind, so that the points before stay where they are
            block = stack.enter_context(inserted(model, point))
            block.register_forward_pre_hook(lambda block, args: calls.update([block]))
            stack.enter_context(isolated(block, model))
            blocks.append(block)
        try:
            after = again()
        except Exception as error:
            return f"the network cannot be called with one block more: {in_one_line(error)}"
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            return CHANGED
        odd = [calls[block] for block in blocks if calls[block] != 1]
        return f"a block there would be called {odd[0]} times in one pass, not once" if odd else ""


def _no_blocks(model: nn.Module, anatomy: Anatomy) -> str:
    kind = type(model).__name__
    if not anatomy.branches:
        return (
            f"{kind} has no residual stream: nothing is added to what it was computed from, so there is no "
            "place where a block that adds nothing would change nothing"
        )
    names = [part for branch in anatomy.branches for part in branch.parts][:1]
    return (
        f"{kind} has {len(anatomy.branches)} residual branches ({', '.join(names)} …), but not in an "
        "nn.ModuleList or nn.Sequential, so there is no list that a block could be inserted into: keep its "
        "blocks in one"
    )
