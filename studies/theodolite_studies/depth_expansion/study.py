"""Residual networks over depth and width: what is left of the signal for one more block?

The experiments on test risk under depth expansion: ResNets of 6n + 2 layers on CIFAR-10, their
activation gradients after training, and their test losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.models import ResNet
from theodolite_studies.depth_expansion.claims import CLAIMS
from theodolite_studies.depth_expansion.grid import Regimes
from theodolite_studies.depth_expansion.reading import ReadingSize, brief, candidates, read
from theodolite_studies.depth_expansion.report import figures, notes
from theodolite_studies.depth_expansion.training import Images, Recipe, images_of, layout_on, train
from theodolite_studies.framework.claims import decide
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study


@dataclass(frozen=True)
class Regime:
    """What is trained on, and how."""

    images: int
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class ExpansionSetting(Setting):
    """All that is run."""

    data: str
    test: int
    regimes: Mapping[str, Regime]
    order: tuple[tuple[str, tuple[int, ...]], ...]
    """Regimes and depths n, in the order of their worth; each over all widths."""
    widths: tuple[int, ...]
    """Channels of the first stage."""
    seeds: tuple[int, ...]
    reader: ReadingSize
    candidates: int
    """Images of either split that say what one more block would do."""


FULL = ExpansionSetting(
    data="cifar10",
    test=10_000,
    regimes={
        "augmented": Regime(50_000, Recipe(epochs=15, batch=512, lr=0.4, augmented=True)),
        "fitted": Regime(10_000, Recipe(epochs=60, batch=512, lr=0.4, augmented=False)),
    },
    order=(
        ("augmented", (1, 9, 3)),
        ("fitted", (1, 9, 3)),
        ("augmented", (5,)),
        ("fitted", (5,)),
        ("augmented", (2, 7)),
        ("fitted", (2, 7)),
    ),
    widths=(4, 16, 8, 32),
    seeds=(0, 1, 2),
    reader=ReadingSize(images=8192, entries=256, sizes=(16, 64, 256, 1024, 4096), draws=2000),
    candidates=2048,
)
SMALL = ExpansionSetting(
    small=True,
    data="templates",
    test=512,
    regimes={
        "augmented": Regime(2048, Recipe(epochs=4, batch=64, lr=0.1, augmented=True)),
        "fitted": Regime(256, Recipe(epochs=16, batch=64, lr=0.1, augmented=False)),
    },
    order=(("augmented", (1, 3)), ("fitted", (1, 3))),
    widths=(2, 8),
    seeds=(0, 1),
    reader=ReadingSize(images=512, entries=64, sizes=(16, 64, 256), draws=500),
    candidates=128,
)
"""For a CPU: computed images of 16 × 16, small networks and short runs, to see how it goes."""


def cells(setting: ExpansionSetting) -> list[Cell]:
    """A regime, depth and width each, the most telling first."""
    return [
        {"regime": regime, "depth": depth, "width": width, "small": setting.small}
        for regime, depths in setting.order
        for depth in depths
        for width in setting.widths
    ]


def run(cell: Cell, setting: ExpansionSetting, device: str) -> list[Record]:
    """A record for each seed."""
    return trained(setting, cell["regime"], cell["depth"], cell["width"], device=device)


def trained(
    setting: ExpansionSetting, regime: str, depth: int, width: int, *, device: str = "cpu"
) -> list[Record]:
    """Train the networks of all seeds together, and read each."""
    began = time.monotonic()
    chosen, on_gpu = setting.regimes[regime], torch.device(device).type == "cuda"
    images = images_of(setting.data, "train", num=chosen.images, device=device)
    test = images_of(setting.data, "test", num=setting.test, device=device)
    models = [_built(width, depth, seed, device) for seed in setting.seeds]
    with _exact(benchmark=on_gpu):
        losses = train(models, setting.seeds, images, chosen.recipe, half=on_gpu)
    used = time.monotonic() - began
    per_epoch = losses.reshape(chosen.recipe.epochs, -1, len(models)).mean(1)
    records: list[Record] = []
    with _exact(benchmark=False), untouched_randomness(0):
        for place, (seed, model) in enumerate(zip(setting.seeds, models, strict=True)):
            about = {"seed": seed, "training": brief(used)}
            course = per_epoch[:, place].tolist()
            if not math.isfinite(course[-1]):
                records.append({**about, "diverged": True})
                continue
            found = read(model, images, test, setting.reader, whole=place == 0)
            found["course"] = [brief(loss) for loss in course]
            found["candidates"] = _candidates(model, images, test, setting.candidates)
            records.append({**about, **found})
    if on_gpu:
        torch.cuda.empty_cache()  # a process beside this one may need it
    records[-1] = {**records[-1], "seconds": brief(time.monotonic() - began)}
    return records


def _built(width: int, depth: int, seed: int, device: str) -> ResNet:
    with untouched_randomness(seed):
        model = ResNet(width, depth)
    model.to(device)
    nn.utils.convert_conv2d_weight_memory_format(model, layout_on(device))
    return model


def _candidates(model: ResNet, images: Images, test: Images, num: int) -> Record:
    """What goes wrong here is noted: it is no reason to lose a network that took minutes to train."""
    try:
        return candidates(model, images, test, num)
    except (RuntimeError, UseError) as error:
        return {"failed": in_one_line(error)}


@contextmanager
def _exact(*, benchmark: bool) -> Iterator[None]:
    """float32 without TF32 on a GPU; with `benchmark` cuDNN tries its kernels and keeps the fastest."""
    chosen = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = chosen
        torch.set_float32_matmul_precision(precision)


STUDY = Study(
    "depth-expansion",
    cells,
    run,
    lambda regimes: [each for grid in regimes.grids for each in decide(CLAIMS, grid)],
    figures,
    notes,
    data=lambda records, setting: Regimes.of(records),
    full=FULL,
    small=SMALL,
)
