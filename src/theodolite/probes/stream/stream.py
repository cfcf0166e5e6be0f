"""The residual stream: how its size, its direction and its gradient change with depth.

With h the stream and f the branch that reads it, for every branch of every block:

    RMS(h), RMS(f), RMS(∂L/∂h), RMS(∂L/∂f),  ‖f‖/‖h‖ and cos(h, h + f),  L without f minus L,
    max|h|/median|h|

Three things go wrong with depth. The stream grows, so that late branches change it less and less. The
gradient explodes or vanishes on its way back. Blocks become redundant: the loss is the same without them.

Values and gradients are those of the network's own forward and backward pass (`anatomy.recording.rerun`), in
eval mode, except that a batch norm in training mode uses the statistics of the batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.rerun import rerun
from theodolite.core.batches import Batch, device_of, differentiable
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss, described, require_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.example_losses import HALVES, scalar_loss
from theodolite.probes.scaling.activation_layout import ActivationLayout, find_layout
from theodolite.probes.stream.along import GROUPS, StreamAlong, measure_groups
from theodolite.probes.stream.readings import HeadroomWatch, read_branch, size_of
from theodolite.probes.stream.result import NOT_FINITE, Stream


@overload
def stream(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    skip: bool = True,
    layout: ActivationLayout | None = None,
    along: None = None,
) -> Stream: ...
@overload
def stream(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    skip: bool = True,
    along: Tensor | Sequence[float],
    groups: int = GROUPS,
) -> StreamAlong: ...
@exclusive()
def stream(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    skip: bool = True,
    layout: ActivationLayout | None = None,
    along: Tensor | Sequence[float] | None = None,
    groups: int = GROUPS,
) -> Stream | StreamAlong:
    """Measure the residual stream of a network on a batch; the network is left unchanged.

    Args:
        model: any module with residual branches, on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets).
        skip: also measure the loss without each branch and without each block: a forward pass for each.
        layout: of an earlier call with the same model and inputs of the same shapes, to save finding it.
        along: a number for each example, such as a time, a length or a class. The examples are measured in
            groups of similar numbers, and the result is a `StreamAlong`.
        groups: with `along`, most groups: one for each distinct number if there are no more, otherwise
            groups of about as many examples each.

    A branch is skipped by adding zeros in its place. Everything else stays: the norm of a post-norm, the
    activation after a sum, the projection of a ResNet's shortcut. If the stream is a mixture (routing), no
    branch is skipped: a mixture with zeros in it is not the mixture without them.

    A block whose branches end in zeros is not missed:

    >>> import theodolite as th
    >>> model = th.models.GPT(64, 2, vocab=16)
    >>> for residual in (model.blocks[1].attention.branch.out, model.blocks[1].feed_forward.branch.down):
    ...     _ = nn.init.zeros_(residual.weight)
    >>> found = stream(model, th.workloads.next_token_loss, (torch.arange(8)[None], torch.arange(8)[None]))
    >>> found.skipped_blocks[1], found.branches[-1].cosine > 0.999, found.branches[0].share > 0.01
    (0.0, True, True)

    Do short sequences differ from long ones? By example, how many tokens come before the padding:

    >>> tokens, lengths = torch.randint(1, 16, (8, 8)), [2, 2, 4, 4, 6, 6, 8, 8]
    >>> found = stream(model, th.workloads.next_token_loss, (tokens, tokens), along=lengths)
    >>> [(group.low, group.examples) for group in found.groups]
    [(2.0, 2), (4.0, 2), (6.0, 2), (8.0, 2)]
    """
    require_logits(loss, "The residual stream")
    if along is not None and layout is not None:
        raise UseError("layout is given together with along, but groups have layouts of their own: give one")
    if not isinstance(model, nn.Module):
        raise UseError(f"model is {described(model)}, not a torch.nn.Module")
    model = unwrap(model)
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may have state
    with torch.inference_mode(False), torch.enable_grad():
        given = differentiable(batch, str(device_of(model)))
        if along is None:
            return _stream(model, own, given, skip, layout)
        return measure_groups(
            lambda part, found: _stream(model, own, part, skip, found), given, along, groups
        )


def _stream(
    model: nn.Module, loss: Loss, batch: Batch, skip: bool, layout: ActivationLayout | None
) -> Stream:
    inputs, targets = batch
    found = layout or find_layout(model, inputs)
    if not found.stream:
        raise UseError(
            f"{type(model).__name__} has no residual branches, so it has no stream: nothing is added to the "
            "value it was computed from"
        )
    notes: list[str] = []
    watch = HeadroomWatch()
    values = {*found.stream, *found.starts, *(end for ends in found.branches for end in ends)}
    passed = rerun(model, inputs, found.graph, keep=values, gradients=True, seen=watch)
    if passed.lost and layout is not None:  # the network ran other operations than those of the layout
        return _stream(model, loss, batch, skip, None)
    total = _loss(loss, passed.output, targets)
    gradients = passed.gradients(total)
    if passed.lost:
        notes.append(f"{len(passed.lost)} of {len(values)} values were not found again in a second pass")
    if not gradients:
        notes.append("no gradient reaches the stream from the loss")
    notes += _not_finite(found, float(total.detach()), passed.values, gradients)
    number = found.places[-1][0] + 1
    skipped: tuple[list[float | None], list[float | None]] = [None] * len(found.stream), [None] * number
    if skip and found.is_routed:
        notes.append("the stream is a mixture, and zeros in it still have a weight: no branch was skipped")
    elif skip:
        skipped = _skipped(model, loss, batch, found, notes)
    return Stream(
        loss=float(total.detach()),
        start=size_of(found.starts[0], passed.values),
        start_gradient=size_of(found.starts[0], gradients),
        branches=tuple(
            read_branch(found, index, passed.values, gradients, without)
            for index, without in enumerate(skipped[0])
        ),
        skipped_blocks=tuple(skipped[1]),
        largest=watch.largest(found),
        notes=tuple(dict.fromkeys(notes)),
        layout=found,
    )


def _not_finite(
    layout: ActivationLayout, loss: float, values: Mapping[int, Tensor], gradients: Mapping[int, Tensor]
) -> list[str]:
    """A note on the first value and the last gradient that are not finite, if any."""
    streams = {"before the first block": layout.starts[0]}
    for (block, branch), after in zip(layout.places, layout.stream, strict=True):
        streams[f"after block {block}, branch {branch}"] = after

    def bad(found: Mapping[int, Tensor]) -> list[str]:
        return [name for name, at in streams.items() if at in found and not bool(found[at].isfinite().all())]

    said = [] if math.isfinite(loss) else [f"the loss is {loss}"]
    said += [f"the stream, first {name}" for name in bad(values)[:1]]
    said += [f"the gradient of the stream, last {name}" for name in bad(gradients)[-1:]]
    return [f"{NOT_FINITE}: {', '.join(said)}"] if said else []


def _skipped(
    model: nn.Module, loss: Loss, batch: Batch, layout: ActivationLayout, notes: list[str]
) -> tuple[list[float | None], list[float | None]]:
    """The increase of the loss without each branch, and without each block."""
    inputs, targets = batch

    def without(branches: list[int]) -> float | None:
        ends = [end for index in branches for end in layout.branches[index]]
        try:
            found = rerun(model, inputs, layout.graph, zero=ends)
        except Exception as error:  # the network may fail on zeros
            notes.append(f"without a branch the network failed: {in_one_line(error)}")
            return None
        if found.lost:
            notes.append("without a branch the network runs other operations: it was not skipped")
            return None
        return float(_loss(loss, found.output, targets).detach())

    whole = without([])
    assert whole is not None
    each = [without([index]) for index in range(len(layout.places))]
    members: dict[int, list[int]] = {}
    for index, (block, _) in enumerate(layout.places):
        members.setdefault(block, []).append(index)
    blocks = [each[some[0]] if len(some) == 1 else without(some) for some in members.values()]
    added, added_blocks = ([None if one is None else one - whole for one in some] for some in (each, blocks))
    return added, added_blocks


def _loss(loss: Loss, found: Tensor, targets: Any) -> Tensor:
    """The loss of logits; half precision in float32, where small differences are not lost."""
    return scalar_loss(loss(found.float() if found.dtype in HALVES else found, targets))
