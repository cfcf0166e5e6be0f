"""Built-in generative workloads: networks that learn the velocity of a flow from noise to data.

A batch is `((x_t, t, labels), velocity)` with `x_t = (1 − t)·noise + t·data`, and the loss the mean squared
error. Times, noise and dropped labels depend on the seed and the step alone. One label in ten is replaced by
the number of classes, which stands for no label, so that a trained network can be guided
(`theodolite.flows.guided`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from theodolite import data
from theodolite.core.calling import Build
from theodolite.core.size import Size
from theodolite.flows.mixture import three_gaussians
from theodolite.flows.training import Draw, noisy, velocity_loss
from theodolite.models import DiT, FlowMLP, UNet
from theodolite.workloads.definition import Workload

NUM_IMAGES, NUM_POINTS = 128, 256
LABEL_DROPOUT = 0.1


def _images(name: str, split: data.Split, seed: int, step: int) -> tuple[Tensor, Tensor]:
    load = {"fashion": data.fashion_mnist, "cifar10": data.cifar10}[name]
    return data.draw_examples(load(split), num=NUM_IMAGES, seed=seed, step=step)


def _points(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return three_gaussians().sample(NUM_POINTS, seed, step)


def _flow(name: str, build: Build, size: Size, classes: int, draw: Draw, held_out: Draw | None) -> Workload:
    """A workload whose held-out batches, if any, have noise of their own."""
    noised = partial(noisy, classes=classes, label_dropout=LABEL_DROPOUT)
    unseen = None if held_out is None else noised(held_out, name=f"{name} held out")
    return Workload(name, build, noised(draw, name=name), velocity_loss, size, held_out=unseen)


def _image_flow(name: str, build: Build, size: Size, images: str) -> Workload:
    return _flow(name, build, size, 10, partial(_images, images, "train"), partial(_images, images, "test"))


WORKLOADS = (
    _image_flow("dit-fashion", DiT, Size(128, 4), "fashion"),
    _image_flow("dit-cifar10", partial(DiT, channels=3, side=32), Size(128, 4), "cifar10"),
    _image_flow("unet-fashion", UNet, Size(16, 1), "fashion"),
    _flow("flow-mixture", partial(FlowMLP, classes=3), Size(64, 3), 3, _points, None),
)
