"""`insert_block`: one more residual block, at first one that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.anatomy.dissection import dissect
from theodolite.anatomy.names import all_parameter_names, canonical_modules, unwrap
from theodolite.anatomy.recording.undisturbed import named_tensors
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.surgery.apply import Done, conduct
from theodolite.surgery.block_copies import Point, close, make_block
from theodolite.surgery.editing import Edits
from theodolite.surgery.groups import Groups
from theodolite.surgery.numbering import renumber
from theodolite.surgery.places import SurgeryError
from theodolite.surgery.points import Points, closing, find_points
from theodolite.surgery.proof import Evidence, Proof


@exclusive()
def insert_block(
    model: nn.Module,
    inputs: Any,
    at: int | str | Point,
    *,
    block: nn.Module | None = None,
    fresh: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    points: Points | None = None,
) -> tuple[nn.Module, Proof]:
    """Insert a residual block that adds nothing yet but can learn at once, in place.

    It is a copy of the block before the point, or of the one behind where that has another shape, with zeros
    in what ends its branches: the last projections, or the gains of norms behind them. The blocks behind it
    move up by one, and so do the numbers that Hugging Face models keep in their layers and config, so that
    `save_pretrained` and `from_pretrained` go on working, unless the config says something else of layers by
    number (which of them have experts): compare what was read again.

    Args:
        model: any module with its residual blocks in an nn.ModuleList or nn.Sequential.
        inputs: what it is called with, for the proof.
        at: a number in the list of blocks (0 is before the first), a name as `blocks.4`, or a Point.
        block: one of your own to insert. It is closed, as the copy is.
        fresh: a network built alike whose block is copied instead: one as it is before training.
        optimizer: the model's; the new tensors are trained in the groups of those they are copies of, and
            start without momentum. What it remembers of the others stays.
        points: of `find_points` for this model, which saves finding them.

    >>> import torch, theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model, proof = insert_block(th.models.GPT(64, 2), tokens, 1)
    >>> print(proof)
    insert_block: blocks.1 is a new block, a copy of blocks.0 that adds nothing
    outputs differ by 0.0e+00, gradients by 0.0e+00 (at most 1e-03), float32, on int64 (1, 8)
    >>> len(model.blocks), model.blocks[1].feed_forward.branch.down.weight.abs().max().item()
    (3, 0.0)

    Raises:
        SurgeryError: if the block would change what the network computes, or could never learn.
    """
    inner = unwrap(model)
    known = points or find_points(inner, inputs)
    point = known.at(at)
    groups = None if optimizer is None else _groups(inner, optimizer)
    given = block is not None

    def act(network: nn.Module, edits: Edits) -> Done:
        new = block if block is not None else make_block(network, point, fresh)
        if given:
            if any(each is new for each in network.modules()):
                raise SurgeryError("the block is in the network already: give a copy of it")
            _train_as(new, dict(canonical_modules(network))[point.like], edits)
        closers = put(network, point, new, edits)
        if given:
            closers = _close_given(network, point.name, inputs, edits)
        what = "a block of yours" if given else f"a copy of {point.like}"
        return Done(
            (point.name,),
            {},
            called=partial(moved, point),
            said=f"{point.name} is a new block, {what} that adds nothing",
            new=new,
            examine=lambda after: _alive(after, point.name, closers),
        )

    def follow(done: Done) -> None:
        if groups is not None:
            with groups.kept_on_failure():
                _join(inner, point, groups)
                groups.rename()

    return model, conduct(model, inputs, "insert_block", act, follow)


@contextmanager
def inserted(model: nn.Module, point: Point, fresh: nn.Module | None = None) -> Iterator[nn.Module]:
    """A closed block at a point for as long as this lasts."""
    inner, edits = unwrap(model), Edits()
    block = make_block(inner, point, fresh)
    try:
        put(inner, point, block, edits)
        yield block
    finally:
        edits.undo()


def put(network: nn.Module, point: Point, block: nn.Module, edits: Edits) -> list[str]:
    """Insert it, and count the blocks behind it anew. The closers' names."""
    holder = dict(canonical_modules(network))[point.holder]
    assert isinstance(holder, (nn.ModuleList, nn.Sequential))

    def undo() -> None:
        del holder[point.index]

    holder.insert(point.index, block)
    edits.undos.append(undo)
    renumber(network, point, holder, edits)
    return [f"{point.name}.{closer.name}" for closer in point.outputs]


def moved(point: Point, name: str) -> str:
    """What a tensor is called after an insertion.

    >>> point = Point("blocks.1", "blocks", 1, "blocks.0", True, ())
    >>> moved(point, "blocks.0.weight"), moved(point, "blocks.1.weight"), moved(point, "head.weight")
    ('blocks.0.weight', 'blocks.2.weight', 'head.weight')
    """
    prefix = f"{point.holder}." if point.holder else ""
    number, _, rest = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or not number.isdigit() or int(number) < point.index:
        return name
    return f"{prefix}{int(number) + 1}.{rest}"


def _close_given(network: nn.Module, name: str, inputs: Any, edits: Edits) -> list[str]:
    """Close a block of the user's own: what ends its branches is found where it stands."""
    block = dict(canonical_modules(network))[name]
    try:
        anatomy = dissect(network, inputs)
    except UseError as error:
        raise SurgeryError(f"the network cannot be looked at with the block in it: {error}") from error
    branches = [one for one in anatomy.branches if all(part.startswith(f"{name}.") for part in one.parts)]
    if not branches or not all(branch.ends for branch in branches):
        raise SurgeryError(
            f"the block, a {type(block).__name__}, adds nothing to the stream it is given by a tensor that "
            "could be zero: give one that returns x + f(x), f ending with a projection or a norm with a gain"
        )
    closers, removed = closing(anatomy, name, branches)
    tensors = dict(all_parameter_names(block))
    values = [(tensors[closer.name], tensors[closer.name].detach().clone()) for closer in closers]
    modules = [(block.get_submodule(each.rpartition(".")[0]), each.rpartition(".")[2]) for each in removed]
    norms = [(holder, attribute, getattr(holder, attribute)) for holder, attribute in modules]

    def undo() -> None:
        for tensor, value in values:
            tensor.data.copy_(value)
        for holder, attribute, norm in norms:
            setattr(holder, attribute, norm)

    edits.undos.append(undo)
    close(block, closers, removed)
    return [f"{name}.{closer.name}" for closer in closers]


def _train_as(block: nn.Module, like: nn.Module, edits: Edits) -> None:
    """On the device, in the dtype and in the mode of its neighbour."""
    held = [(tensor, tensor.data) for _, tensor in named_tensors(block)]
    modes = [(module, module.training) for module in block.modules()]

    def undo() -> None:
        for one, data in held:
            one.data = data
        for module, mode in modes:
            module.training = mode

    edits.undos.append(undo)
    tensor = next(like.parameters())
    block.to(device=tensor.device, dtype=tensor.dtype if tensor.is_floating_point() else None)
    block.train(like.training)


def _alive(after: Evidence, name: str, closers: list[str]) -> None:
    """Raise if the block could never learn: the gradient by all that is zero is zero."""
    found = [after.gradients[each] for each in closers if each in after.gradients]
    if not any(bool(each.abs().max() > 0) for each in found):
        raise SurgeryError(
            f"{name} could never learn: the gradient by {', '.join(closers)} is zero as well. Its branches "
            "are zero before what ends them; give a block whose features are not"
        )


def _groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    if not isinstance(optimizer, Optimizer):
        raise SurgeryError(
            f"optimizer is a {type(optimizer).__name__}: give the torch optimizer of the model"
        )
    groups = Groups(model, optimizer)
    if all(groups.of(tensor) is None for tensor in model.parameters()):
        raise SurgeryError("the optimizer trains no tensor of this model: give the model's own")
    return groups


def _join(model: nn.Module, point: Point, groups: Groups) -> None:
    """Train each new tensor where that is trained which it is a copy of; others with the first of these."""
    modules = dict(canonical_modules(model))
    block, like = modules[point.name], dict(all_parameter_names(modules[moved(point, f"{point.like}.")[:-1]]))
    trained = [one for one in (*like.values(), *model.parameters()) if groups.of(one) is not None]
    for name, tensor in all_parameter_names(block):
        same = [like[name]] if name in like else []
        groups.join(tensor, [*same, *(one for one in trained if one.dim() == tensor.dim()), *trained])
