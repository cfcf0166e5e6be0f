"""`rebuild`: what a grown network computes, by one that was built at its depth.

A build function knows of the depth. It may multiply branches by 1/L or 1/√L, and at one block more each of
them adds less. The weights that end the branches are multiplied by what is missing, and their moments by its
inverse, so that the function stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.dissection import dissect
from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.exclusive import exclusive
from theodolite.surgery.apply import refuse_shards
from theodolite.surgery.places import SurgeryError
from theodolite.surgery.proof import TOLERANCE, Proof, apart, farthest, gathered, said
from theodolite.surgery.state import POWERS

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

    Args:
        model: the grown network.
        target: what `build(width, depth)` makes at its depth; its weights are overwritten.
        inputs: what both are called with, for the proof.
        optimizer: the model's; with it goes `into`.
        into: the target's, as of the plan for the new depth: it takes over what the other remembers of each
            tensor.

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
        _load(old, new, ratios)
        proof = _proved(old, new, inputs, ratios)
        if optimizer is not None and into is not None:
            _carry(old, new, optimizer, into, ratios)
    except BaseException:
        new.load_state_dict(kept)
        raise
    return target, proof


def _ratios(old: nn.Module, new: nn.Module, inputs: Any) -> dict[str, float]:
    """By tensor: what it has to be multiplied by; what is not named stays."""
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()} for each in (old, new)
    ]
    if shapes[0] != shapes[1]:
        odd = sorted(
            set(shapes[0]) ^ set(shapes[1])
            or {name for name in shapes[0] if shapes[0][name] != shapes[1][name]}
        )
        where = "the grown network" if odd[0] in shapes[0] else "the target"
        if odd[0] in shapes[0] and odd[0] in shapes[1]:
            where = f"both, with the shapes {shapes[0][odd[0]]} and {shapes[1][odd[0]]}"
        raise SurgeryError(
            f"the target is not built as the grown network is: {odd[0]} is in {where} ({len(odd)} tensors "
            "differ). Build it at the new depth; a network with a norm behind each sum has none behind the "
            "new block, and cannot be built so"
        )
    before, after = dissect(old, inputs), dissect(new, inputs)
    return {
        name: part.factor / after[name].factor
        for name, part in before.items()
        if name in after and part.factor != after[name].factor
    }


@torch.no_grad()
def _load(old: nn.Module, new: nn.Module, ratios: Mapping[str, float]) -> None:
    held = new.state_dict()
    for name, tensor in old.state_dict().items():
        held[name].copy_(tensor)
    for name, tensor in canonical_parameters(new):
        if name in ratios:
            tensor.mul_(ratios[name])


def _proved(old: nn.Module, new: nn.Module, inputs: Any, ratios: Mapping[str, float]) -> Proof:
    before, after = gathered(old, inputs), gathered(new, inputs)
    outputs = gradients = None
    dtype = torch.float64
    if before is not None and after is not None:
        dtype = before.dtype
        expected = {name: one * ratios.get(name, 1.0) for name, one in after.gradients.items()}
        outputs, gradients = apart(before.outputs, after.outputs), farthest(before.gradients, expected, dtype)
    if outputs is not None and not ratios and outputs > EXACT:
        raise SurgeryError(
            f"rebuild would change the network: outputs differ by {outputs:.1e} of themselves, though no "
            "branch is multiplied by another number. The target does something else with its depth; its "
            "weights are as they were"
        )
    many = f", {len(ratios)} tensors rescaled" if ratios else ""
    proof = Proof(
        "rebuild",
        outputs,
        gradients,
        str(dtype).removeprefix("torch."),
        said(inputs),
        TOLERANCE[dtype],
        tuple(ratios),
        said=f"the target computes what the grown network does{many}",
    )
    if not proof.holds:
        raise SurgeryError(
            f"rebuild would change the network: outputs differ by {outputs:.1e} and gradients by "
            f"{gradients:.1e} of themselves. The target does something with its depth besides multiplying "
            "branches by a number; its weights are as they were"
        )
    return proof


def _carry(
    old: nn.Module, new: nn.Module, optimizer: Optimizer, into: Optimizer, ratios: Mapping[str, float]
) -> None:
    """What one optimizer remembers, for the other: a gradient by a weight times c is 1/c of what it was."""
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
