"""Passes of a classifier over its batches: the samples that have a class, their logits and their features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.rerun import rerun
from theodolite.core.batches import Batch, Batches, device_of, differentiable
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, each_batch
from theodolite.core.progress import Progress
from theodolite.core.replicas import group_of, together
from theodolite.probes.example_losses import HALVES, scalar_loss
from theodolite.probes.features.feature_layout import FeatureLayout, FeaturePlace, find_features, rows_of


@dataclass(frozen=True)
class ClassifiedPass:
    """One batch in a classifier: the samples with a target of zero or more."""

    layout: FeatureLayout
    values: Mapping[int, Tensor]
    logits: Tensor
    """(n, K)"""
    labels: Tensor
    """(n,)"""
    loss: float
    _targets: tuple[int, ...]
    _known: Tensor
    """Which rows have a target of zero or more."""

    def features(self, place: FeaturePlace) -> Tensor | None:
        """(n, D) in float64; None if their positions are not those of the targets."""
        rows = rows_of(self.values[place.value], place.channels, self._targets)
        return None if rows is None else rows[self._known]

    @property
    def weight(self) -> Tensor | None:
        """The weight of the head (K, D) in float64; None without a head, or with one of another shape."""
        head = self.layout.head
        if head is None:
            return None
        matrix = head.matrix(self.values[head.weight]).double()
        place = self.layout.places[head.place]
        features = self.values[place.value].shape[place.channels]
        return matrix if matrix.shape == (self.logits.shape[1], features) else None


class ClassPasses:
    """A classifier and its batches. Passes leave the network as it was."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, tell: Progress) -> None:
        self._given, self._model, self._group = model, unwrap(model), group_of(model)
        self._loss, self._batches, self._tell = loss, batches, tell
        self._layouts: dict[object, FeatureLayout] = {}
        self._counts: Tensor | None = None
        """By class, in this process."""
        self.device = device_of(model)

    def count(self) -> Tensor:
        """Samples by class, of all processes, from the targets alone."""
        found = torch.zeros(0, dtype=torch.long, device=self.device)
        for _, targets in each_batch(self._batches):
            labels = _checked(targets).flatten().to(self.device)
            new = torch.bincount(labels[labels >= 0])
            found = _padded(found, len(new)) + _padded(new, len(found))
        self._counts = found
        length = torch.tensor(len(found), device=self.device)
        if self._group is not None:
            self.shared(length, torch.distributed.ReduceOp.MAX)
        return self.shared(_padded(found.clone(), int(length)))

    def run(self, title: str, start: float, end: float) -> Iterator[ClassifiedPass]:
        """Run the network on every batch, in the same order each time, after `count`."""
        assert self._counts is not None
        left = self._counts.clone()
        for index, batch in enumerate(each_batch(self._batches)):
            found = self._pass(differentiable(batch, str(self.device)))
            new = torch.bincount(found.labels, minlength=len(left))
            if len(new) > len(left) or bool((new > left).any()):
                raise UseError(
                    "the batches have other targets each time they are read: neural collapse takes three "
                    "passes over the same examples. Draw the batches once, and give them as a list"
                )
            left -= new
            yield found
            if isinstance(self._batches, Sized):
                done = (index + 1) / len(batches_of(self._batches))
                self._tell(title, start + (end - start) * done)

    def shared(self, tensor: Tensor, op: Any = None) -> Tensor:
        """The sum over the processes of DistributedDataParallel, or what `op` says, in place."""
        if self._group is not None:
            together(self._given, lambda: None)  # if another process failed, this one raises here
            torch.distributed.all_reduce(tensor, op or torch.distributed.ReduceOp.SUM, group=self._group)
        return tensor

    def _pass(self, batch: Batch) -> ClassifiedPass:
        inputs, targets = batch
        key = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        layout = self._layouts.get(key)
        passed = None if layout is None else rerun(self._model, inputs, layout.graph, keep=layout.values)
        if layout is None or passed is None or passed.lost:  # new, or by other operations than recorded
            layout = find_features(self._model, inputs)
            passed = rerun(self._model, inputs, layout.graph, keep=layout.values)
        if passed.lost:
            raise UseError(
                f"two forward passes of {type(self._model).__name__} on the same inputs ran different "
                "operations, so its features cannot be found again. Make it deterministic in eval mode"
            )
        self._layouts[key] = layout
        found = passed.output.float() if passed.output.dtype in HALVES else passed.output
        class_dim = -1 if layout.head is None else layout.head.class_dim
        logits, labels = _rows(found, targets, class_dim)
        loss = float(scalar_loss(self._loss(found, targets)))
        known = labels >= 0
        shape = tuple(targets.shape)
        return ClassifiedPass(layout, passed.values, logits[known], labels[known], loss, shape, known)


def _checked(targets: Any) -> Tensor:
    """Targets that are classes."""
    is_tensor = isinstance(targets, Tensor) and targets.ndim > 0
    if not is_tensor or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        kind = (
            f"{described(targets)} of {targets.dtype}" if isinstance(targets, Tensor) else described(targets)
        )
        raise UseError(
            f"the targets are {kind}: neural collapse is measured for classifiers. Give one integer, the "
            "class, for each row of logits"
        )
    assert isinstance(targets, Tensor)
    return targets.long()


def _rows(logits: Tensor, targets: Any, class_dim: int) -> tuple[Tensor, Tensor]:
    """Logits as rows (n, K), and the class of each (n,)."""
    labels = _checked(targets)
    shape, wanted = tuple(logits.shape), tuple(labels.shape)
    last = shape[:-1] == wanted or (len(shape) == 2 and shape[0] == labels.numel())
    first = len(shape) > 2 and (shape[0], *shape[2:]) == wanted
    if not last and not first:
        raise UseError(
            f"logits of shape {shape} and targets of shape {wanted} are not one target for each row of "
            f"logits: give targets of shape {shape[:-1]}, each a class"
        )
    dim = 1 if first and (not last or class_dim == 1) else -1
    rows = logits.movedim(dim, -1).flatten(0, -2)
    if rows.shape[1] < 2:
        raise UseError(
            f"the logits have {rows.shape[1]} column: neural collapse takes two classes or more. For a "
            "binary classifier with one logit z give logits (0, z)"
        )
    labels = labels.flatten()
    if len(labels) and int(labels.max()) >= rows.shape[1]:
        raise UseError(
            f"a target is {int(labels.max())}, but the logits have {rows.shape[1]} classes: 0 to "
            f"{rows.shape[1] - 1}"
        )
    return rows, labels


def _padded(counts: Tensor, length: int) -> Tensor:
    """The counts with zeros behind, to a length."""
    return torch.nn.functional.pad(counts, (0, max(0, length - len(counts))))
