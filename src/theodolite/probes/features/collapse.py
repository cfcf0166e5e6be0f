"""Neural collapse by depth: the spread of features within classes, and the geometry of the class means.

With h a feature vector, μ_c the mean of class c of K, and S_W, S_B as in `class_spread`:

    NC1  spread within classes over the spread between them: Tr S_W/Tr S_B, and Tr(S_W S_B⁺)/K
    NC2  are centred class means of equal length and at equal angles, as the corners of a simplex are?
    NC3  does the classifier's weight W point along them? ‖WMᵀ/‖WMᵀ‖ − (I − 11ᵀ/K)/√(K−1)‖
    NC4  the share of samples for which the nearest class mean and the head agree

In full collapse NC1 to NC3 are 0, and NC4 is 1. The two forms of NC1 differ: the second sees only the spread
within the span of the class means, and can be 0 where the first is not.

References:
    Papyan, Han and Donoho, Prevalence of neural collapse, 2020. Zhu et al., A geometric analysis of neural
    collapse, 2021 (NC2 and NC3 in this form). Galanti et al., On the role of neural collapse in transfer
    learning, 2022 (CDNV). Tirer et al., Perturbation analysis of neural collapse, 2023 (the first NC1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss, described, require_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, silent
from theodolite.core.replicas import on_all_ranks
from theodolite.present.figure import Figure, Panel, frame, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, listed, number
from theodolite.probes.features.class_passes import ClassifiedPass, ClassPasses
from theodolite.probes.features.class_spread import (
    ClassGeometry,
    ClassMeans,
    ClassSpread,
    distance_from_simplex,
)

FEWEST = 2
"""Fewest samples of a class: with one, it has no spread."""


@dataclass(frozen=True)
class CollapseAt:
    """How far classes have collapsed in one place of the network."""

    name: str
    block: int | None
    """The residual block it is after; −1 before the first one, None for other places."""
    features: int
    geometry: ClassGeometry


@dataclass(frozen=True)
class Collapse(Result):
    """Neural collapse along the depth of a classifier. Made by `collapse`."""

    kind: ClassVar[str] = "neural collapse"
    loads: ClassVar[bool] = True

    places: tuple[CollapseAt, ...]
    """From the first to the last."""
    loss: float
    """The mean over the samples with a target."""
    accuracy: float
    classes: tuple[int, ...]
    """The classes that were measured: those with at least two samples."""
    samples: int
    """Of these classes."""
    head: str
    """The weight of the linear map that makes the logits; empty if there is none."""
    nc3: float
    """nan without a head."""
    nc4: float
    """nan without a head."""
    notes: tuple[str, ...]

    @property
    def profile(self) -> tuple[float, ...]:
        """NC1 (quotient) over depth: before the first and after each residual block, or in every place."""
        blocks = [place for place in self.places if place.block is not None]
        return tuple(place.geometry.quotient for place in blocks or self.places)

    def blocks(self) -> Iterator[Block]:
        """The table over depth, the head, and notes."""
        yield self.table()
        said = [
            f"loss      {number(self.loss, 4)}, accuracy {self.accuracy:.1%}, on "
            f"{counted(self.samples, 'sample')} of {len(self.classes)} classes"
        ]
        if self.head:
            said.append(
                f"head      {self.head}: NC3 {number(self.nc3)}; it agrees with the nearest class mean for "
                f"{self.nc4:.1%} of the samples (NC4)"
            )
        yield "\n".join([*said, *(f"note      {note}" for note in self.notes)])
        yield self.figure()

    def table(self) -> Table:
        """A row for each place."""
        columns = ("place", "features", "NC1", "NC1 pinv", "CDNV", "NC2", "norms", "angles")
        rows = [
            (
                *(place.name, place.features, place.geometry.quotient, place.geometry.pinv),
                *(place.geometry.cdnv, place.geometry.nc2, place.geometry.equinorm),
                *(place.geometry.equiangle, place.geometry.nearest),
            )
            for place in self.places
        ]
        return Table((*columns, Column("nearest", "{:.1%}".format)), rows)

    def figure(self) -> Figure:
        """NC1 in both forms, and NC2, over depth."""
        at = list(range(len(self.places)))
        names = [place.name for place in self.places]

        def values(name: str) -> list[float | None]:
            found = [getattr(place.geometry, name) for place in self.places]
            return [one if math.isfinite(one) and one > 0 else None for one in found]

        def drawn(name: str, **more: Any) -> dict[str, Any]:
            return line(at, values(name), hover="%{customdata}: %{y:.3g}", customdata=names, **more)

        panels = []
        for title, lines in (
            (
                "NC1: quotient (line) and pseudo-inverse (dots)",
                (drawn("quotient"), drawn("pinv", mode="markers", marker={"size": 5})),
            ),
            ("NC2: distance of the class means from a simplex", (drawn("nc2"),)),
        ):
            layout = frame(height=220, x="place")
            layout["yaxis"] |= {"type": "log", "exponentformat": "power", "nticks": 5}
            panels.append(Panel(title, lines, layout))
        first, last = self.places[0], self.places[-1]
        return Figure(
            caption="Spread within classes over the spread between them, and the distance of the class means "
            "from a simplex, along the depth of the network.",
            alt=f"NC1 is {number(first.geometry.quotient)} {first.name} and "
            f"{number(last.geometry.quotient)} {last.name}.",
            panels=tuple(panels),
        )


@on_all_ranks
@exclusive()
def collapse(model: nn.Module, loss: Loss, batches: Batches, *, progress: Progress | None = None) -> Collapse:
    """Measure neural collapse in a classifier. The network is left unchanged.

    Args:
        model: any module that returns logits, on any device, wrapped or not. Dropout is off. Batch norms use
            the statistics of each batch if the model is in training mode: call `model.eval()` first.
        loss: `loss(logits, targets) -> scalar`; its mean is reported.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader. Targets are classes: integers,
            one for each row of logits. Those below zero (as cross_entropy's ignore_index −100) are left out.
            Under DistributedDataParallel each process brings its own batches.
        progress: called with a title and the fraction done.

    The targets are read once, the network runs twice over all batches: for the class means, and for the
    spread around them. Memory does not grow with the number of samples; it is that for two K×D matrices in
    each place.

    Features with positions (sequences, images) are averaged over them where an example has one target. Where
    each position has a target, each position is a sample.

    Class means weigh the same in S_B, whatever the number of their samples; S_W is a mean over samples. With
    n samples in each class, S_B holds the sampling error S_W/n, so NC1 stays below n·K/(K−1). Classes with
    fewer than two samples are left out, and named in `notes`.

    Two classes at (1, 0) and (0, 1), spread by ±0.1, and a head along them:

    >>> points = torch.eye(2).repeat_interleave(2, 0)
    >>> points[:, 0] += torch.tensor([0.1, -0.1, 0.1, -0.1])
    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(head.weight)
    >>> found = collapse(head, nn.functional.cross_entropy, (points, torch.tensor([0, 0, 1, 1])))
    >>> round(found.profile[0], 6), found.nc4, found.accuracy  # 0.1² over 0.5
    (0.02, 1.0, 1.0)
    """
    require_logits(loss, "Neural collapse")
    if not isinstance(model, nn.Module):
        raise UseError(f"model is {described(model)}, not a torch.nn.Module")
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may have state
    with torch.inference_mode(False), torch.no_grad():
        return _measured(ClassPasses(model, own, batches, progress or silent))


def _measured(passes: ClassPasses) -> Collapse:
    """Count classes, find their means, measure the spread around them."""
    every = passes.count()
    classes, notes = _chosen(every)
    counts = every[classes]
    index = torch.full_like(every, -1)
    index[classes] = torch.arange(len(classes), device=passes.device)
    spreads, lost = _spreads(passes, index, counts)
    if lost:
        notes.append(f"left out, as its positions are not those of the targets: {listed(lost)}")
    # Losses, samples with a target, those classified correctly, those where head and nearest mean agree.
    sums = torch.zeros(4, dtype=torch.float64, device=passes.device)
    last: ClassifiedPass | None = None
    for one in passes.run("spread", 0.5, 1.0):
        chosen = index[one.labels]
        known = chosen >= 0
        if len(one.labels):  # the loss of none is nan
            sums[0] += one.loss * len(one.labels)
        sums[1] += len(one.labels)
        sums[2] += (one.logits.argmax(1) == one.labels).sum()
        for at, place in enumerate(one.layout.places):
            rows = one.features(place) if place.name in spreads else None
            if rows is None:
                continue
            nearest = spreads[place.name].add(rows[known], chosen[known])
            if one.layout.head is not None and one.layout.head.place == at:
                sums[3] += (nearest == one.logits[known][:, classes].argmax(1)).sum()
        last = one
    assert last is not None
    loss, samples, right, agreeing = passes.shared(sums).tolist()
    places = tuple(
        CollapseAt(
            place.name,
            place.block,
            spreads[place.name].centred.shape[1],
            spreads[place.name].geometry(passes.shared),
        )
        for place in last.layout.places
        if place.name in spreads
    )
    if same := [place.name for place in places if math.isinf(place.geometry.quotient)]:
        notes.append(f"class means do not differ, so NC1 and CDNV are infinite: {listed(same)}")
    name, missing = _head(last, spreads)
    nc3 = nc4 = math.nan
    if missing:
        notes.append(f"no NC3 and NC4: {missing}")
    else:
        assert last.layout.head is not None
        assert last.weight is not None
        at_head = spreads[last.layout.places[last.layout.head.place].name]
        nc3 = distance_from_simplex(last.weight[classes] @ at_head.centred.T)
        nc4 = agreeing / int(counts.sum())
    return Collapse(
        places, loss / samples, right / samples, tuple(classes.tolist()), int(counts.sum()), name, nc3, nc4,
        tuple(notes),
    )  # fmt: skip


def _chosen(counts: Tensor) -> tuple[Tensor, list[str]]:
    """The classes with enough samples, and notes on the others."""
    classes = (counts >= FEWEST).nonzero().flatten()
    notes = []
    for what, some in (("no sample", counts == 0), ("one sample", counts == 1)):
        if names := some.nonzero().flatten().tolist():
            notes.append(
                f"left out: {counted(len(names), 'class')} with {what} ({listed([*map(str, names)])})"
            )
    if len(classes) < 2:
        beside = f" ({'; '.join(notes)})" if notes else ""
        raise UseError(
            f"the targets have {counted(len(classes), 'class')} with {FEWEST} samples or more{beside}: the "
            "spread within classes, and between them, takes two. Give more examples"
        )
    return classes, notes


def _spreads(passes: ClassPasses, index: Tensor, counts: Tensor) -> tuple[dict[str, ClassSpread], list[str]]:
    """By place, what the second pass adds to; and the places whose positions are not those of the targets."""
    means: dict[str, ClassMeans] = {}
    lost: dict[str, None] = {}
    eps = torch.finfo(torch.float32).eps
    for one in passes.run("class means", 0.0, 0.5):
        chosen = index[one.labels]
        known = chosen >= 0
        eps = min(eps, torch.finfo(one.logits.dtype).eps)
        for place in one.layout.places:
            rows = one.features(place)
            if rows is None:
                lost[place.name] = None
            else:
                means.setdefault(place.name, ClassMeans(counts, rows)).add(rows[known], chosen[known])
    if not means and not lost:
        raise UseError(
            f"the network has no features to measure: {one.layout.no_head}, there are no residual blocks, "
            "and all layers read the data"
        )
    spreads = {}
    for name in [name for name in means if name not in lost]:
        found = means.pop(name)  # one by one: each is K×D
        passes.shared(found.sums)
        if not bool(found.sums.isfinite().all()):
            raise UseError(f"the features {name} are not finite, so they have no spread")
        spreads[name] = ClassSpread(found.means, counts, eps)
    if not spreads:
        raise UseError(
            f"the features have other positions than the targets ({listed(list(lost))}): give one target "
            "for each example, or one for each position"
        )
    return spreads, list(lost)


def _head(one: ClassifiedPass, spreads: Mapping[str, ClassSpread]) -> tuple[str, str]:
    """The name of the head's weight, or why there is none."""
    head = one.layout.head
    if head is None:
        return "", one.layout.no_head
    place = one.layout.places[head.place].name
    if place not in spreads:
        return "", f"what {head.name} reads has other positions than the targets"
    if one.weight is None:
        return "", f"{head.name}, the last weight, does not map features to the classes"
    return head.name, ""
