"""The mixtures of the study, and their conditional and unconditional fields: exact ones and trained ones."""

# B points, D dimensions

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from theodolite.core.building import untouched_randomness
from theodolite.flows import Field, GaussianMixture, field_of, noisy, three_gaussians, velocity_loss
from theodolite.models import FlowMLP

EXACT, LABELS = "exact", "noisy labels"
NOISE = 0.2
"""Share of labels that are drawn anew in the data of `noisy labels`."""
BATCH, LR, LABEL_DROPOUT = 256, 3e-3, 0.1


def _layouts() -> dict[str, GaussianMixture]:
    three = three_gaussians()
    simplex = torch.eye(5, dtype=torch.float64) - 1 / 5
    basis_DK = torch.linalg.svd(simplex).Vh[:4]
    corners = torch.nn.functional.normalize(simplex @ basis_DK.T, dim=1)
    uneven = torch.tensor([[-1.2, 0.0], [1.0, 0.6], [0.8, -1.0]], dtype=torch.float64)
    return {
        "three": three,
        "overlap": GaussianMixture(three.centres, 0.5),
        "uneven": GaussianMixture(uneven, 0.3, [0.6, 0.3, 0.1]),
        "simplex": GaussianMixture(1.2 * corners, 0.3),
        "wide": GaussianMixture(three.centres, 0.8),
        "one": GaussianMixture(torch.tensor([[0.7, -0.4]]).double(), 0.3),
    }


LAYOUTS = _layouts()
"""Mixtures by name. `simplex` has five components in four dimensions, the others are in the plane."""
CLASSES = 3
"""The first classes of a layout, which guidance is judged by."""


@dataclass(frozen=True)
class Fields:
    """The velocity without a label, and for points of which an equal part, in order, is of each class."""

    unconditional: Field
    conditional: Field


def fields(layout: str, kind: str, seed: int, num_points: int) -> Fields:
    """The fields of a layout, for batches of so many points of each of `CLASSES` classes.

    Args:
        layout: of `LAYOUTS`.
        kind: `exact`; `noisy labels`, exact for data with such labels; or the number of training steps, such
            as `150 steps`.
        seed: of the training.
        num_points: of each class.
    """
    mixture = LAYOUTS[layout]
    if kind in (EXACT, LABELS):
        labelled = [
            labelled_data(mixture, label, NOISE if kind == LABELS else 0.0) for label in range(CLASSES)
        ]

        def conditional(x: Tensor, t: Tensor) -> Tensor:
            parts = zip(labelled, x.split(num_points), t.split(num_points), strict=True)
            return torch.cat([own.velocity(some, at) for own, some, at in parts])

        return Fields(mixture.field(), conditional)
    model = trained(layout, int(kind.split()[0]), seed)
    labels = torch.arange(CLASSES).repeat_interleave(num_points)
    return Fields(field_of(model, len(mixture.centres)), field_of(model, labels))


def labelled_data(mixture: GaussianMixture, label: int, noise: float) -> GaussianMixture:
    """The data that have a label, if this share of all labels is drawn anew from the classes."""
    if not noise:
        return GaussianMixture(mixture.centres[label : label + 1], mixture.std)
    weights = noise * mixture.weights
    weights[label] += 1 - noise
    return GaussianMixture(mixture.centres, mixture.std, weights)


@cache
def trained(layout: str, steps: int, seed: int) -> FlowMLP:
    """A network that has learned the velocity of a layout for so many steps, with dropped labels."""
    mixture = LAYOUTS[layout]
    classes, dimensions = mixture.centres.shape
    batches = noisy(
        partial(_draw, mixture), classes=classes, label_dropout=LABEL_DROPOUT, name=f"guidance {layout}"
    )
    with untouched_randomness(seed):
        model = FlowMLP(32, 2, dimensions=dimensions, classes=classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        inputs, target = batches(seed, step)
        optimizer.zero_grad()
        velocity_loss(model(*inputs), target).backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def _draw(mixture: GaussianMixture, seed: int, step: int) -> tuple[Tensor, Tensor]:
    return mixture.sample(BATCH, "training", seed, step)


@torch.no_grad()
def field_error(layout: str, given: Fields, num_points: int, seed: int) -> float:
    """The root mean square error of the conditional field, as a share of that of the velocity."""
    exact = fields(layout, EXACT, seed, num_points).conditional
    batches = noisy(lambda seed, step: (class_data(layout, num_points, "error", seed), None), name="error")
    (x, t), _ = batches(seed, 0)
    truth = exact(x, t)
    return math.sqrt((given.conditional(x, t) - truth).square().mean() / truth.square().mean())


def class_data(layout: str, num_points: int, *words: str | int) -> Tensor:
    """So many points of each class, one class after the other."""
    mixture = LAYOUTS[layout]
    parts = [
        labelled_data(mixture, label, 0.0).sample(num_points, label, *words)[0] for label in range(CLASSES)
    ]
    return torch.cat(parts)
