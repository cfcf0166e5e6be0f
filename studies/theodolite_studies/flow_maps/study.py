"""Does one network that jumps replace many steps of a sampler, and which self-distillation loss is best?

Five parts:

    mixture      a residual MLP on three Gaussians, whose exact flow map is known: every loss, with gradients
                 stopped or not
    exact        samplers on the exact velocity of the same mixture
    cost         processor time of a training step of each loss, over that of flow matching
    dit-fashion  a diffusion transformer on Fashion-MNIST, judged by feature distances; for a GPU
    dit-widths   pictures: samples of plain diffusion transformers of several widths as they train; for a GPU

References:
    Boffi, Albergo, Vanden-Eijnden, How to build a consistency model: learning flow maps via
    self-distillation, 2025. Ronai, Kulikov, Michaeli, FlowOpt: fast optimization through whole flow processes
    for training-free editing, 2025 (the step bound).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from theodolite_studies.flow_maps.claims import CLAIMS
from theodolite_studies.flow_maps.images import map_of_images, samples_at_width
from theodolite_studies.flow_maps.report import figures, notes
from theodolite_studies.flow_maps.setting import ARMS, FULL, SMALL, FlowMapSetting
from theodolite_studies.flow_maps.training import costs, exact_field, map_of_mixture
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study


def cells(setting: FlowMapSetting) -> list[Cell]:
    """Those of the CPU first, a whole seed after the other."""
    found: list[Cell] = [
        {"part": "mixture", "kind": kind, "seed": seed} for seed in range(setting.seeds) for kind in ARMS
    ]
    found += [{"part": "exact", "seed": seed} for seed in range(setting.seeds)]
    found += [
        {"part": "cost", "width": width, "num": num, "seed": seed}
        for width, num in setting.cost_sizes
        for seed in range(setting.seeds)
    ]
    most = max(setting.image_seeds.values(), default=0)
    found += [
        {"part": "dit-fashion", "kind": kind, "seed": seed}
        for seed in range(most)
        for kind, seeds in setting.image_seeds.items()
        if seed < seeds
    ]
    return found + [{"part": "dit-widths", "width": width, "seed": 0} for width in setting.widths]


def run(cell: Cell, setting: FlowMapSetting, device: str) -> Iterator[Record]:
    """The records of one cell. Cells of the mixture stay on the CPU, where they are faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _run(cell, setting, device)
    finally:
        torch.set_num_threads(threads)


def _run(cell: Cell, setting: FlowMapSetting, device: str) -> Iterator[Record]:
    if cell["part"] == "mixture":
        return map_of_mixture(cell["kind"], cell["seed"], setting)
    if cell["part"] == "exact":
        return exact_field(cell["seed"], setting.points)
    if cell["part"] == "cost":
        return costs(cell["width"], cell["num"])
    if cell["part"] == "dit-fashion":
        return map_of_images(cell["kind"], cell["seed"], setting, device)
    return samples_at_width(cell["width"], cell["seed"], setting, device)


STUDY = Study("flow-maps", cells, run, CLAIMS, figures, notes, full=FULL, small=SMALL)
