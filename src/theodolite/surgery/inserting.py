"""`insert_block`: one more residual block, at first without effect; `rebuild`: the same in a deeper build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.dissection import both_views
from theodolite.anatomy.names import all_parameter_names, canonical_modules, canonical_parameters, unwrap
from theodolite.anatomy.recording.undisturbed import named_tensors
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.surgery.blocks import InsertionPoint, close, make_block, put_block
from theodolite.surgery.edits import Edits
from theodolite.surgery.gains import SurgeryError
from theodolite.surgery.insertion_points import InsertionPoints, branches_in, closing, find_points
from theodolite.surgery.optimizer_state import POWERS, ParamGroups
from theodolite.surgery.proof import Edited, Proof, Response, compare, operate, refuse_shards, respond


@exclusive()
def insert_block(
    model: nn.Module,
    inputs: Any,
    at: int | str | InsertionPoint,
    *,
    block: nn.Module | None = None,
    fresh: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    points: InsertionPoints | None = None,
) -> tuple[nn.Module, Proof]:
    """Insert a residual block that adds nothing yet but can learn at once, in place.

    It is a copy of the block before the point, or of the one behind where that has another shape, with zeros
    in what ends its branches: the last projections, or the gains of norms behind them. The blocks behind it
    move up by one, and so do the numbers that Hugging Face models keep in their layers and config, so that
    `save_pretrained` and `from_pretrained` keep working, unless the config says something else of layers by
    number (which of them have experts): compare what was read again.

    Args:
        model: any module with its residual blocks in an nn.ModuleList or nn.Sequential.
        inputs: what it is called with, for the proof.
        at: a number in the list of blocks (0 is before the first), a name as `blocks.4`, or a point.
        block: a block of your own to insert. It is closed, as the copy is.
        fresh: a network built alike whose block is copied instead: one as it is before training.
        optimizer: the model's; the new tensors join the groups of their originals, and start without
            momentum. The state of the other tensors stays.
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
    point = (points or find_points(inner, inputs)).at(at)
    groups = None if optimizer is None else ParamGroups(inner, optimizer)
    if groups is not None and all(groups.of(tensor) is None for tensor in inner.parameters()):
        raise SurgeryError("the optimizer trains no tensor of this model: give the model's own")

    def edit(network: nn.Module, inputs: Any, edits: Edits) -> Edited:
        if block is None:
            new, what = make_block(network, point, fresh), f"a copy of {point.like}"
            outputs = put_block(network, point, new, edits)
        else:
            new, what = block, "a block of yours"
            if any(each is new for each in network.modules()):
                raise SurgeryError("the block is in the network already: give a copy of it")
            _train_as(new, dict(canonical_modules(network))[point.like], edits)
            put_block(network, point, new, edits)
            outputs = _close_given(network, point.name, inputs, edits)
        return Edited(
            (point.name,),
            {},
            renamed=point.renamed,
            said=f"{point.name} is a new block, {what} that adds nothing",
            new=new,
            examine=lambda after: _check_gradients(after, point.name, outputs),
        )

    def follow(done: Edited) -> None:
        if groups is not None:
            with groups.updated():
                _join(inner, point, groups)

    return model, operate(model, inputs, "insert_block", edit, follow)


def _close_given(network: nn.Module, name: str, inputs: Any, edits: Edits) -> list[str]:
    """Close a block of the user's: what ends its branches is found where it stands."""
    block = dict(canonical_modules(network))[name]
    try:
        anatomies = both_views(network, inputs)
    except UseError as error:
        raise SurgeryError(f"the network cannot be looked at with the block in it: {error}") from error
    anatomy = next((one for one in anatomies if branches_in(one, name)), anatomies[0])
    branches = branches_in(anatomy, name)
    if not branches or not all(branch.ends for branch in branches):
        raise SurgeryError(
            f"the block, a {type(block).__name__}, adds nothing to the stream it is given by a tensor that "
            "could be zero: give one that returns x + f(x), f ending with a projection or a norm with a gain"
        )
    outputs, removed = closing(anatomy, name, branches)
    close(block, outputs, removed, edits)
    return [f"{name}.{output.name}" for output in outputs]


def _train_as(block: nn.Module, like: nn.Module, edits: Edits) -> None:
    """Put a block on the device, in the dtype and in the mode of its neighbour."""
    for _, one in named_tensors(block):
        edits.undos.append(lambda one=one, data=one.data: setattr(one, "data", data))  # type: ignore[misc]
    for module in block.modules():
        edits.set(module, "training", module.training)
    tensor = next(like.parameters())
    block.to(device=tensor.device, dtype=tensor.dtype if tensor.is_floating_point() else None)
    block.train(like.training)


def _check_gradients(after: Response, name: str, outputs: list[str]) -> None:
    """Refuse a block that could never learn: the gradient with respect to all that is zero is zero."""
    found = [after.gradients[each] for each in outputs if each in after.gradients]
    if not any(bool(each.abs().max() > 0) for each in found):
        raise SurgeryError(
            f"{name} could never learn: the gradient by {', '.join(outputs)} is zero as well. Its branches "
            "are zero before what ends them; give a block whose features are not"
        )


def _join(model: nn.Module, point: InsertionPoint, groups: ParamGroups) -> None:
    """Put each copy into its original's parameter group, and other tensors into the first that fits."""
    modules = dict(canonical_modules(model))
    block, like = modules[point.name], dict(all_parameter_names(modules[point.renamed(point.like)]))
    trained = [one for one in (*like.values(), *model.parameters()) if groups.of(one) is not None]
    for name, tensor in all_parameter_names(block):
        same = [like[name]] if name in like else []
        groups.join(tensor, [*same, *(one for one in trained if one.dim() == tensor.dim()), *trained])


EXACT = 1e-6
"""Where nothing is rescaled, outputs may not differ by more than the order of sums explains."""


@exclusive()
def rebuild(
    model: nn.Module,
    target: nn.Module,
    inputs: Any,
    *,
    optimizer: Optimizer | None = None,
    into: Optimizer | None = None,
) -> tuple[nn.Module, Proof]:
    """Give a network that was built at the new depth what a grown one has learned.

    A build function may multiply branches by 1/L or 1/√L, so that at one block more each of them adds less.
    The weights that end the branches are multiplied by what is missing, and their moments by its inverse, so
    that the function stays the same.

    Args:
        model: the grown network.
        target: what `build(width, depth)` makes at its depth; its weights are overwritten.
        inputs: what both are called with, for the proof.
        optimizer: the model's; give `into` with it.
        into: the target's, as of the plan for the new depth: it takes over the state of each tensor.

    >>> import theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> grown, _ = th.surgery.insert_block(th.models.GPT(64, 2), tokens, 1)
    >>> deep, proof = rebuild(grown, th.models.GPT(64, 3), tokens)
    >>> proof.outputs
    0.0

    Raises:
        SurgeryError: if the target has other tensors, or would compute something else.
    """
    if (optimizer is None) != (into is None):
        raise SurgeryError("give optimizer, the model's, and into, the target's, together or neither")
    old, new = unwrap(model), unwrap(target)
    for each in (model, target):
        refuse_shards(each)
    ratios = _ratios(old, new, inputs)
    kept = {name: tensor.detach().clone() for name, tensor in new.state_dict().items()}
    try:
        new.load_state_dict(old.state_dict())
        with torch.no_grad():
            for name, tensor in canonical_parameters(new):
                if name in ratios:
                    tensor.mul_(ratios[name])
        proof = _prove_rebuilt(old, new, inputs, ratios)
        if optimizer is not None and into is not None:
            _carry(old, new, optimizer, into, ratios)
    except BaseException:
        new.load_state_dict(kept)
        raise
    return target, proof


def _ratios(old: nn.Module, new: nn.Module, inputs: Any) -> dict[str, float]:
    """By tensor that must be multiplied: the factor."""
    ours, theirs = (
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()} for each in (old, new)
    )
    if ours != theirs:
        odd = sorted(set(ours) ^ set(theirs) or {name for name in ours if ours[name] != theirs[name]})
        where = "the grown network" if odd[0] in ours else "the target"
        if odd[0] in ours and odd[0] in theirs:
            where = f"both, with the shapes {ours[odd[0]]} and {theirs[odd[0]]}"
        raise SurgeryError(
            f"the target is not built as the grown network is: {odd[0]} is in {where} ({len(odd)} tensors "
            "differ). Build it at the new depth; a network with a norm behind each sum has none behind the "
            "new block, and cannot be built so"
        )
    ratios: dict[str, float] = {}
    for before, after in zip(both_views(old, inputs), both_views(new, inputs), strict=False):
        for name, part in before.items():
            if name in after and part.factor != after[name].factor:
                ratios.setdefault(name, part.factor / after[name].factor)
    return ratios


def _prove_rebuilt(old: nn.Module, new: nn.Module, inputs: Any, ratios: Mapping[str, float]) -> Proof:
    before, after = respond(old, inputs), respond(new, inputs)
    gradients = {} if after is None else after.gradients
    expected = {name: one * ratios.get(name, 1.0) for name, one in gradients.items()}
    many = f", {len(ratios)} tensors rescaled" if ratios else ""
    said = f"the target computes what the grown network does{many}"
    proof = compare("rebuild", inputs, before, after, expected, Edited(tuple(ratios), {}, said=said))
    exact = bool(ratios) or proof.outputs is None or proof.outputs <= EXACT
    if not (proof.holds and exact):
        raise SurgeryError(
            f"rebuild would change the network: outputs differ by {proof.outputs:.1e} and gradients by "
            f"{proof.gradients:.1e} of themselves. The target does something with its depth besides "
            "multiplying branches by a number; its weights are as they were"
        )
    return proof


def _carry(
    old: nn.Module, new: nn.Module, optimizer: Optimizer, into: Optimizer, ratios: Mapping[str, float]
) -> None:
    """Copy one optimizer's state to the other: the gradient by a weight times c is 1/c of what it was."""
    tensors = dict(canonical_parameters(new))
    trained = {id(one) for group in into.param_groups for one in group["params"]}
    made: dict[Tensor, Any] = {}
    for name, tensor in canonical_parameters(old):
        state = optimizer.state.get(tensor)
        if not state or id(tensors[name]) not in trained:
            continue
        ratio = ratios.get(name, 1.0)
        carried = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                carried[key] = value
                continue
            if value.numel() > 1 and key not in POWERS and ratio != 1:
                raise SurgeryError(
                    f"the optimizer keeps {key!r} of {name}, which is rescaled, and what becomes of that is "
                    "not known: rebuild without it, and make a new one"
                )
            carried[key] = value.detach().clone() / ratio ** POWERS.get(key, 0)
        made[tensors[name]] = carried
    into.state.update(made)
