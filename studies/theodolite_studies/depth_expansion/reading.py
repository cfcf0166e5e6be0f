"""What a trained network's activation gradients are: their mean, their covariance, and how they align."""

# N images, B a batch, C channels or coordinates, S side of a map, K classes, R draws

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.models import ResNet
from theodolite.probes.signal.gradient_statistics import alignment_bound
from theodolite.probes.signal.signal import signal
from theodolite_studies.depth_expansion.training import Images

NEAR = 0.1
"""A correlation this small is near zero."""
BINS = 40
"""Of the histogram of correlations from −1 to 1."""
HEAT = 16
"""Coordinates up to which a whole matrix of correlations is kept."""


@dataclass(frozen=True)
class ReadingSize:
    """How much is looked at."""

    images: int
    """For gradients at blocks, of either split; losses and the last activations are read on all images."""
    entries: int
    """Single entries of a map, at random channels and positions, whose correlations are looked at."""
    sizes: tuple[int, ...]
    """Of samples whose mean gradients are compared."""
    draws: int
    """Pairs of samples of each size."""
    batch: int = 1000


@dataclass(frozen=True)
class SplitOutcome:
    """Of a split: loss and share right, and the gradients before the readout, (N, C)."""

    loss: float
    right: float
    gradients: Tensor
    bias: float
    """Norm of the readout bias's gradient."""


def read(model: ResNet, train: Images, test: Images, reader: ReadingSize, *, whole: bool) -> dict[str, Any]:
    """A record of a network in eval mode, its norms frozen; it is left as it was.

    Points are the ends of the first two stages, where the gradient of an image is that of a shift of its
    channels, summed over positions, and `pool`, the vector that the readout reads. At the end of the third
    stage the gradient of a shift is that at `pool`.

    Args:
        model: in eval mode.
        train: what it was trained on, not augmented.
        test: what it was not.
        reader: how much is looked at.
        whole: keep whole matrices of correlations, if they are small.
    """
    ended = {"train": outcome(model, train, reader.batch), "test": outcome(model, test, reader.batch)}
    depth = len(model.blocks) // 3
    seen = {
        split: block_gradients(model, images, reader) for split, images in (("train", train), ("test", test))
    }
    found: dict[str, Any] = {}
    for split, one in ended.items():
        found |= {f"{split}_loss": brief(one.loss), f"{split}_right": brief(one.right)}
        found |= {f"{split}_bias": brief(one.bias)}
    found["blocks"] = {split: _course(blocks) for split, (blocks, _) in seen.items()}
    points = {
        "stage1": tuple(seen[split][0][depth - 1] for split in ("train", "test")),
        "stage2": tuple(seen[split][0][2 * depth - 1] for split in ("train", "test")),
        "pool": tuple(ended[split].gradients for split in ("train", "test")),
    }
    found["points"] = {
        name: {
            "train": moments(trained).to_dict(),
            "test": moments(fresh).to_dict(),
            "pairs": correlations(trained, whole=whole),
            "alignment": alignment(trained, fresh, reader),
        }
        for name, (trained, fresh) in points.items()
    }
    ends = (depth - 1, 2 * depth - 1, 3 * depth - 1)
    found["entries"] = [correlations(seen["train"][1][end], whole=False) for end in ends]
    return found


@torch.no_grad()
def outcome(model: ResNet, images: Images, batch: int) -> SplitOutcome:
    """Losses, and the gradients `Wᵀ(p − y)` before the readout, in closed form.

    Their mean is `Wᵀ∇_b L`: where the readout's bias has no gradient left there is none here either, whatever
    the network.
    """
    losses, right, errors = [], [], []
    for rows in _batches(len(images), batch, images.labels.device):
        logits_BK = model(images.plain(rows))
        labels = images.labels[rows]
        losses.append(F.cross_entropy(logits_BK, labels, reduction="none"))
        right.append((logits_BK.argmax(1) == labels).double())
        errors.append(logits_BK.softmax(1) - F.one_hot(labels, logits_BK.shape[1]))
    error_NK = torch.cat(errors)
    return SplitOutcome(
        float(torch.cat(losses).double().mean()),
        float(torch.cat(right).mean()),
        error_NK @ model.readout.weight,
        float(error_NK.double().mean(0).norm()),
    )


def block_gradients(model: ResNet, images: Images, reader: ReadingSize) -> tuple[list[Tensor], list[Tensor]]:
    """After each block: gradients of a shift of the channels, (N, C), and at some entries, (N, entries)."""
    outputs: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for block in model.blocks
    ]
    shifts: list[list[Tensor]] = [[] for _ in handles]
    entries: list[list[Tensor]] = [[] for _ in handles]
    try:
        num = min(reader.images, len(images))
        for rows in _batches(num, reader.batch, images.labels.device):
            outputs.clear()
            with torch.enable_grad():
                logits = model(images.plain(rows))
                loss = F.cross_entropy(logits, images.labels[rows], reduction="sum")
            for place, gradient in enumerate(torch.autograd.grad(loss, outputs)):
                shifts[place].append(gradient.sum((2, 3)))
                flat = gradient.flatten(1)
                entries[place].append(flat[:, _chosen(flat.shape[1], reader.entries, flat.device)])
    finally:
        for handle in handles:
            handle.remove()
    return [torch.cat(each) for each in shifts], [torch.cat(each) for each in entries]


@dataclass(frozen=True)
class Moments:
    """Of gradients (N, C): `‖v̄‖`, `trΣ` and the largest eigenvalue of Σ."""

    norm: float
    trace: float
    top: float
    dims: int
    num: int

    @property
    def spread(self) -> float:
        """The paper's C, at least: `λ_max/(trΣ/d)`."""
        return brief(self.top * self.dims / self.trace) if self.trace else math.nan

    def to_dict(self) -> dict[str, float]:
        """As values that JSON knows."""
        return {"norm": self.norm, "trace": self.trace, "top": self.top, "dims": self.dims, "num": self.num}


def moments(gradients_NC: Tensor) -> Moments:
    """In float64, rounded to five figures.

    >>> moments(torch.tensor([[1.0, 2.0], [1.0, -2.0]]))
    Moments(norm=1.0, trace=4.0, top=4.0, dims=2, num=2)
    """
    num, dims = gradients_NC.shape
    mean, covariance = _centred(gradients_NC)
    top = torch.linalg.eigvalsh(covariance)[-1]
    return Moments(brief(mean.norm()), brief(covariance.trace()), brief(top), dims, num)


def correlations(gradients_NC: Tensor, *, whole: bool) -> dict[str, Any]:
    """How the correlations of two coordinates are spread, over all pairs of coordinates that vary at all.

    `near`: the share of pairs within ±0.1; `beyond`: that beyond `2/√N`, which is one in twenty of pairs that
    are uncorrelated; quantiles of their size; a histogram from −1 to 1; the matrix, where it is small; and
    the largest eigenvalue over the mean one, beside the edge `(1 + √(d/N))²` that N vectors of uncorrelated
    coordinates of one variance would have.
    """
    num = len(gradients_NC)
    _, covariance = _centred(gradients_NC)
    scale = covariance.diagonal().sqrt()
    alive = scale > 1e-12 * scale.max()
    matrix = (covariance / scale / scale[:, None])[alive][:, alive]
    dims = len(matrix)
    pairs = matrix[tuple(torch.triu_indices(dims, dims, 1))].clamp(-1, 1)
    if not len(pairs):
        return {"alive": dims, "near": None}
    sizes = pairs.abs()
    middle = torch.tensor([0.5, 0.9, 0.99], dtype=sizes.dtype, device=sizes.device)
    found = {
        "alive": dims,
        "near": brief((sizes <= NEAR).double().mean()),
        "beyond": brief((sizes > 2 / math.sqrt(num)).double().mean()),
        "quantiles": [brief(value) for value in sizes.quantile(middle)],
        "counts": torch.histc(pairs.cpu(), BINS, -1, 1).long().tolist(),
        "top": brief(torch.linalg.eigvalsh(matrix)[-1]),
        "edge": brief((1 + math.sqrt(dims / num)) ** 2),
    }
    if whole and dims <= HEAT:
        found["matrix"] = [[round(float(value), 3) for value in row] for row in matrix]
    return found


def alignment(train_NC: Tensor, test_NC: Tensor, reader: ReadingSize) -> dict[str, Any]:
    """How often two mean gradients do not align, `⟨v̄_n, v̄_m⟩ ≤ 0` with n = m, by the samples' size.

    Samples are drawn with replacement, so that the images are the whole population: its mean and covariance
    are known, and the bound of Theorem 5 is one, not an estimate. `fresh` draws both samples from the test
    images, as the theorem has it; `crossed` draws the first from the images that were trained on.
    """
    random = torch.Generator(test_NC.device).manual_seed(0)
    known = moments(test_NC)
    found: dict[str, Any] = {"sizes": [], "fresh": [], "crossed": [], "bound": [], "draws": reader.draws}
    for size in reader.sizes:
        judging = _means(test_NC, size, reader.draws, random)
        for name, chosen in (("fresh", test_NC), ("crossed", train_NC)):
            products = (_means(chosen, size, reader.draws, random) * judging).sum(1)
            found[name].append(brief((products <= 0).double().mean()))
        found["sizes"].append(size)
        found["bound"].append(brief(alignment_bound(size, size, known.norm, known.top, known.trace)))
    return found


def brief(value: float | Tensor) -> float:
    """Five figures.

    >>> brief(1.23456789e-7)
    1.2346e-07
    """
    return float(f"{float(value):.5g}")


BATCH = 256


def candidates(model: nn.Module, train: Images, test: Images, num: int) -> dict[str, Any]:
    """By point: ‖M̄‖², and the gains along −M̄ and −M̄S⁻¹ with their standard errors.

    The directions are estimated on `num` images that were trained on, and judged by as many that were not.
    """
    found = signal(model, F.cross_entropy, _some(train, num), _some(test, num))
    names = ("gain", "error", "preconditioned", "preconditioned_error")
    return {
        "points": [one.name for one in found.points],
        "squared": [brief(one.norm**2) for one in found.points],
        **{name: [brief(getattr(one, name)) for one in found.points] for name in names},
        "above": len(found.above),
    }


def _some(images: Images, num: int) -> list[Batch]:
    rows = torch.arange(min(num, len(images)), device=images.labels.device)
    return [(images.plain(some), images.labels[some]) for some in rows.split(BATCH)]


def _course(blocks: Sequence[Tensor]) -> dict[str, list[float]]:
    """Over the blocks: norm of the mean, trace of the covariance, and C."""
    known = [moments(block) for block in blocks]
    return {name: [getattr(one, name) for one in known] for name in ("norm", "trace", "spread")}


def _means(values_NC: Tensor, size: int, draws: int, random: torch.Generator) -> Tensor:
    """Of so many samples, (R, C)."""
    at_once = max(1, 2**20 // size)
    found = []
    for start in range(0, draws, at_once):
        shape = (min(at_once, draws - start), size)
        rows = torch.randint(len(values_NC), shape, generator=random, device=values_NC.device)
        found.append(values_NC[rows].mean(1))
    return torch.cat(found)


def _centred(values_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance."""
    values_NC = values_NC.double()
    mean_C = values_NC.mean(0)
    centred_NC = values_NC - mean_C
    return mean_C, centred_NC.T @ centred_NC / len(values_NC)


@cache
def _chosen(total: int, num: int, device: torch.device) -> Tensor:
    """Some places of a map, the same for every batch."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    return order[:num].to(device)


def _batches(num: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    yield from torch.arange(num, device=device).split(batch)
