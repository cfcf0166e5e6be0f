"""The health of the residual stream: how its size, its direction and its gradient change with depth.

With h the stream and f the branch that reads it, for every branch of every block:

    RMS(h), RMS(f), RMS(∂L/∂h), RMS(∂L/∂f),  ‖f‖/‖h‖ and cos(h, h + f),  L without f minus L,
    max|h|/median|h|

Three things go wrong with depth. The stream inflates, so that late branches change it by ever less. The
gradient explodes or fades on its way back. Blocks become redundant: the loss is the same without them.

Values and gradients are those of the network's own forward and backward pass (`anatomy.rerun`), in eval mode,
but that a batch norm in training mode uses the statistics of the batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.rerun import rerun
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss, described, require_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.figure import Figure
from theodolite.probes.scaling.activation_layout import ActivationLayout, find_layout
from theodolite.probes.stream.growth import Growth, fit_growth
from theodolite.probes.stream.headroom import Largest, Watch
from theodolite.probes.stream.reach import Reach, reaches, size_of

NOT_FINITE = "not finite"
"""How the note begins that says where the loss, the stream or a gradient is not finite."""
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""An entry is massive from this size on if it is so many times the median of the stream.

Sun et al., Massive activations in large language models, 2024."""


@dataclass(frozen=True)
class Stream:
    """One look at the stream. Made by `stream`."""

    loss: float
    start: float
    """RMS of the stream before the first branch."""
    start_gradient: float
    reaches: tuple[Reach, ...]
    blocks: tuple[float | None, ...]
    """By block: the loss without all of its branches minus the loss."""
    largest: Largest
    """The largest of all values that would be in half precision."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""
    layout: ActivationLayout = field(repr=False, compare=False)

    @property
    def finite(self) -> bool:
        """Are the loss, the stream and its gradients finite, as far as they were found?"""
        return not any(note.startswith(NOT_FINITE) for note in self.notes)

    @cached_property
    def profile(self) -> tuple[float, ...]:
        """RMS of the stream before the first block and after each."""
        return (self.start, *(reach.stream for reach in self._last))

    @cached_property
    def gradient_profile(self) -> tuple[float, ...]:
        """The same of its gradient."""
        return (self.start_gradient, *(reach.stream_gradient for reach in self._last))

    @cached_property
    def growth(self) -> Growth:
        """How the stream grows from the first block to the last."""
        return fit_growth(self.profile)

    @cached_property
    def backward(self) -> Growth:
        """How its gradient grows from the last block back to the first."""
        return fit_growth(self.gradient_profile[::-1])

    @property
    def massive(self) -> tuple[Reach, ...]:
        """Where the stream has massive entries."""
        return tuple(
            one for one in self.reaches if MASSIVE < one.largest < math.inf and one.peak > MASSIVE_RATIO
        )

    def figure(self) -> Figure:
        """Sizes, gradients and what each block is worth, against depth."""
        from theodolite.probes.stream.figures import profile_figure

        return profile_figure(self)

    def __str__(self) -> str:
        from theodolite.probes.stream.table import table

        return table(self)

    @property
    def _last(self) -> list[Reach]:
        """The last reach of each block."""
        return list({reach.block: reach for reach in self.reaches}.values())


@exclusive()
def stream(
    model: nn.Module, loss: Loss, batch: Batch, *, skip: bool = True, layout: ActivationLayout | None = None
) -> Stream:
    """Look at the residual stream of a network on a batch; the network is left as it was.

    Args:
        model: any module with residual branches, on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets).
        skip: also take the loss without each branch and without each block: a forward pass for each.
        layout: of an earlier look at the same model with inputs of the same shapes, which saves finding it.

    A branch is skipped by adding zeros in its place. What else stands on the way stays: the norm of a
    post-norm, the activation after a sum, the projection of a ResNet's shortcut. Where the stream is a
    mixture (routing), no branch is skipped: a mixture with zeros in it is not the one without them.

    A block whose branches end in zeros is not missed:

    >>> import theodolite as th
    >>> model = th.models.GPT(64, 2, vocab=16)
    >>> for residual in (model.blocks[1].attention.branch.out, model.blocks[1].feed_forward.branch.down):
    ...     _ = nn.init.zeros_(residual.weight)
    >>> found = stream(model, th.workloads.next_token_loss, (torch.arange(8)[None], torch.arange(8)[None]))
    >>> found.blocks[1], found.reaches[-1].cosine > 0.999, found.reaches[0].share > 0.01
    (0.0, True, True)
    """
    with torch.inference_mode(False), torch.enable_grad():
        return _stream(*_checked(model, loss, batch), skip, layout)


def _stream(
    model: nn.Module, batch: Batch, loss: Loss, skip: bool, layout: ActivationLayout | None
) -> Stream:
    inputs, targets = batch
    found = layout or find_layout(model, inputs)
    if not found.stream:
        raise UseError(
            f"{type(model).__name__} has no residual branches, so there is no stream to look at: nothing is "
            "added to what it was computed from"
        )
    notes: list[str] = []
    watch = Watch()
    values = {*found.stream, *found.starts, *(end for ends in found.branches for end in ends)}
    passed = rerun(model, inputs, found.graph, keep=values, gradients=True, seen=watch)
    if passed.lost and layout is not None:  # the network took another way than when its layout was found
        return _stream(model, batch, loss, skip, None)
    total = _loss(loss, passed.output, targets)
    gradients = passed.gradients(total)
    if passed.lost:
        notes.append(f"{len(passed.lost)} of {len(values)} values were not found again in a second pass")
    if not gradients:
        notes.append("autograd finds no way from the loss to the stream, so there are no gradients")
    notes += _not_finite(found, float(total.detach()), passed.values, gradients)
    number = found.places[-1][0] + 1
    without: tuple[list[float | None], list[float | None]] = [None] * len(found.stream), [None] * number
    if skip and found.is_routed:
        notes.append("the stream is a mixture, and zeros in it still have a weight: no branch was skipped")
    elif skip:
        without = _skipped(model, loss, batch, found, notes)
    return Stream(
        loss=float(total.detach()),
        start=size_of(found.starts[0], passed.values),
        start_gradient=size_of(found.starts[0], gradients),
        reaches=reaches(found, passed.values, gradients, without[0]),
        blocks=tuple(without[1]),
        largest=watch.largest(found),
        notes=tuple(dict.fromkeys(notes)),
        layout=found,
    )


def _not_finite(
    layout: ActivationLayout, loss: float, values: Mapping[int, Tensor], gradients: Mapping[int, Tensor]
) -> list[str]:
    """A note on what is not finite, if anything is: the first value, and the last gradient."""
    streams = {"before the first block": layout.starts[0]}
    for (block, branch), after in zip(layout.places, layout.stream, strict=True):
        streams[f"after block {block}, branch {branch}"] = after
    said = [] if math.isfinite(loss) else [f"the loss is {loss}"]
    for what, found, place in (
        ("the stream, first", values, 0),
        ("the gradient of the stream, last", gradients, -1),
    ):
        bad = [
            name
            for name, after in streams.items()
            if after in found and not bool(found[after].isfinite().all())
        ]
        if bad:
            said.append(f"{what} {bad[place]}")
    return [f"{NOT_FINITE}: {', '.join(said)}"] if said else []


def _skipped(
    model: nn.Module, loss: Loss, batch: Batch, layout: ActivationLayout, notes: list[str]
) -> tuple[list[float | None], list[float | None]]:
    """What the loss is more without each branch, and without each block."""
    inputs, targets = batch

    def without(branches: list[int]) -> float | None:
        ends = [end for index in branches for end in layout.branches[index]]
        try:
            found = rerun(model, inputs, layout.graph, zero=ends)
        except Exception as error:  # the network takes another way then, and may not know it
            notes.append(f"without a branch the network failed: {in_one_line(error)}")
            return None
        if found.lost:
            notes.append("without a branch the network runs other operations: it was not skipped")
            return None
        return float(_loss(loss, found.output, targets).detach())

    whole = without([])
    assert whole is not None
    each = [without([index]) for index in range(len(layout.places))]
    blocks: list[float | None] = []
    for block in dict.fromkeys(place[0] for place in layout.places):
        members = [index for index, place in enumerate(layout.places) if place[0] == block]
        blocks.append(each[members[0]] if len(members) == 1 else without(members))
    return _minus(each, whole), _minus(blocks, whole)


def _minus(losses: list[float | None], whole: float) -> list[float | None]:
    return [None if one is None else one - whole for one in losses]


def _loss(loss: Loss, found: Tensor, targets: Any) -> Tensor:
    """The loss of logits; of halves in float32, where small differences are not lost."""
    if found.dtype in (torch.float16, torch.bfloat16):
        found = found.float()
    value = loss(found, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UseError(
            f"loss(logits, targets) returned {described(value)}, not one number. Reduce it, as with .mean()"
        )
    return value.reshape(())


def _checked(model: nn.Module, loss: Loss, batch: Batch) -> tuple[nn.Module, Batch, Loss]:
    """The bare model, the batch on its device, and a loss that keeps no account of what it sees here.

    What was made in inference mode is copied: autograd takes none of it.
    """
    require_logits(loss, "A look at the stream")
    if not isinstance(model, nn.Module):
        raise UseError(f"model is {described(model)}, not a torch.nn.Module")
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise UseError(f"batch is {described(batch)}: give a pair (inputs, targets)")
    model = unwrap(model)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    copied = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        on_device((batch[0], batch[1]), str(device)),
    )
    return model, copied, own
