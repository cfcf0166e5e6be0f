"""Where the norms stand: pre, post and peri over depth, with the plan and without.

The claims of Peri-LN (Kim et al., 2025): with norms before the branches the variance of the stream grows
during training, up to massive activations; with norms after the sums gradients vanish; with norms on both
sides of a branch the variance grows moderately, gradients flow steadily, and training is more stable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from theodolite.core.batches import on_device
from theodolite.core.building import untouched_randomness
from theodolite.core.size import Size
from theodolite.fleet.program import Program
from theodolite.fleet.run import Precision, Run
from theodolite.fleet.stack import Stack, stack
from theodolite.fleet.training import LOOK_EVERY, arithmetic, precision_of
from theodolite.models import GPT
from theodolite.models.transformer import Placement
from theodolite.workloads import Workload, next_token_loss
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study
from theodolite_studies.framework.texts import batch_of
from theodolite_studies.norm_placement.claims import claims
from theodolite_studies.norm_placement.figures import figures
from theodolite_studies.norm_placement.reading import read_stream
from theodolite_studies.norm_placement.tables import notes
from theodolite_studies.norm_placement.values import BASE, KINDS


@dataclass(frozen=True)
class Setting:
    """How every network of the study is trained."""

    text: str
    """A data set of `theodolite.data`."""
    base: Size
    depths: tuple[int, ...]
    """In the order of their worth."""
    placements: tuple[Placement, ...]
    beside: tuple[tuple[Placement, int], ...]
    """Placements and depths that come after all others."""
    exponents: tuple[int, ...]
    """log2 of the learning rates."""
    below: tuple[int, ...]
    """Those that are tried with post in addition: from 8 blocks on it trained at none of the others."""
    read_at: int
    """log2 of the learning rate whose networks are read on the way."""
    seeds: tuple[int, ...]
    steps: int
    warmup: int
    num: int
    length: int
    held_out: int
    precision: Precision


FULL = Setting(
    text="enwik8",
    base=Size(128, 4),
    depths=(16, 4, 32, 8),
    placements=("pre", "post", "peri"),
    beside=(("out", 16), ("out", 4)),
    exponents=(-9, -8, -7, -6, -5, -4),
    below=(-12, -11, -10),
    read_at=-7,
    seeds=(0, 1, 2),
    steps=500,
    warmup=50,
    num=16,
    length=256,
    held_out=16,
    precision="bfloat16",
)
SMALL = Setting(
    text="sotu",
    base=Size(64, 4),
    depths=(4, 12),
    placements=("pre", "post", "peri"),
    beside=(),
    exponents=(-8, -6, -4),
    below=(),
    read_at=-6,
    seeds=(0, 1),
    steps=60,
    warmup=6,
    num=4,
    length=64,
    held_out=4,
    precision="float32",
)
"""For a CPU: the built-in text and short runs, to see how it goes."""
MOMENTS = (0.0, 0.04, 0.1, 0.2, 0.5, 1.0)
"""Parts of a run after which the stream is read."""


def cells(small: bool) -> list[Cell]:
    """A placement at a depth each, the most telling first."""
    setting = SMALL if small else FULL
    chosen = [(placement, depth) for depth in setting.depths for placement in setting.placements]
    return [
        {"placement": placement, "depth": depth, "small": small}
        for placement, depth in (*chosen, *setting.beside)
    ]


def run(cell: Cell, *, device: str = "cpu") -> Iterator[Record]:
    """All learning rates, seeds and parameterizations of a cell: at once, or in halves if memory is short."""
    setting, depth = (SMALL if cell["small"] else FULL), cell["depth"]
    workload = workload_of(setting, cell["placement"])
    kinds = (BASE,) if depth == setting.base.depth else KINDS
    exponents = (*(setting.below if cell["placement"] == "post" else ()), *setting.exponents)
    wanted = [(kind, seed, exponent) for kind in kinds for seed in setting.seeds for exponent in exponents]
    waiting = [wanted]
    while waiting:
        chunk = waiting.pop()
        try:
            yield from trained(setting, workload, depth, chunk, device)
        except torch.OutOfMemoryError:
            if len(chunk) == 1:
                raise
            middle = len(chunk) // 2
            waiting += [chunk[:middle], chunk[middle:]]


def trained(
    setting: Setting, workload: Workload, depth: int, wanted: Sequence[tuple[str, int, int]], device: str
) -> list[Record]:
    """A record for each of some networks of one shape, which are trained together."""
    runs = [run_of(setting, workload, depth, *each) for each in wanted]
    watched = [place for place, (_, _, exponent) in enumerate(wanted) if exponent == setting.read_at]
    moments = {round(part * setting.steps) for part in MOMENTS}
    readings: list[dict[str, Any]] = [{} for _ in runs]
    with untouched_randomness(runs[0].seed), arithmetic(runs[0], device):
        models = stack(runs, workload, device)
        program = Program(models, workload, device, compiled=torch.device(device).type == "cuda")
        alone = _first_loss(models, workload, device)
        for step in range(setting.steps + 1):
            if step in moments:
                _read(readings, watched, step, models, workload)
            if step == setting.steps or (step and step % LOOK_EVERY == 0 and not program.alive()):
                break
            program.step()
            if step == 0:
                _check_first(program, alone)
        held_out = program.held_out_losses()
        losses, gradients = (program.series[name].T.cpu() for name in ("loss", "gradient"))
    records: list[Record] = []
    for place, (kind, seed, exponent) in enumerate(wanted):
        finite = bool(losses[place].isfinite().all()) and math.isfinite(held_out[place])
        records.append(
            {
                "parameterization": kind,
                "lr": exponent,
                "seed": seed,
                "held_out": round(held_out[place], 5) if finite else None,
                "unrest": _unrest(gradients[place, setting.warmup :]) if finite else None,
                **readings[place],
            }
        )
    return records


def run_of(
    setting: Setting, workload: Workload, depth: int, parameterization: str, seed: int, exponent: int
) -> Run:
    """One network's training as the fleet knows it."""
    standard = parameterization == "standard"
    return Run(
        workload=workload.name,
        size=Size(setting.base.width, depth),
        lr=2.0**exponent,
        parameterization="standard" if standard else "plan",
        base=None if standard else setting.base,
        seed=seed,
        steps=setting.steps,
        warmup=setting.warmup,
        held_out=setting.held_out,
        precision=setting.precision,
        options={"betas": (0.9, 0.95)},
        probes=("gradient",),
    )


def workload_of(setting: Setting, placement: Placement) -> Workload:
    """The byte-level GPT with its norms in one place.

    >>> workload_of(SMALL, "peri").batch(0, 0)[0].shape
    torch.Size([4, 64])
    """
    draw = partial(batch_of, setting.text, "train", setting.num, setting.length)
    judge = partial(batch_of, setting.text, "validation", setting.num, setting.length)
    build = partial(GPT, vocab=256, context=setting.length, norm_placement=placement)
    return Workload(f"gpt-{placement}", build, draw, next_token_loss, setting.base, held_out=judge)


def _read(
    readings: list[dict[str, Any]], watched: Sequence[int], step: int, models: Stack, workload: Workload
) -> None:
    """Add what the streams of the watched networks are at a step to what is known of them."""
    for place in watched:
        reading = read_stream(models.model, _one_of(models, place), workload)
        for name, value in reading.items():
            readings[place].setdefault(name, {})[str(step)] = value


def _one_of(models: Stack, place: int) -> dict[str, torch.Tensor]:
    """The parameters and buffers of one network."""
    tensors = {one.name: one.values[place] for one in models.tensors}
    return {**tensors, **{name: values[place] for name, values in models.buffers.items()}}


@torch.no_grad()
def _first_loss(models: Stack, workload: Workload, device: str) -> float:
    """The loss of the first network on its first batch, by itself."""
    run = models.runs[0]
    inputs, targets = on_device(workload.draw(run.seed, 0), device)
    with precision_of(run, device):
        return float(workload.loss(functional_call(models.model, _one_of(models, 0), (inputs,)), targets))


def _check_first(program: Program, alone: float) -> None:
    """A compiler is not to be trusted with all that code may do: see the first loss."""
    together = float(program.series["loss"][0, 0])
    if not math.isclose(together, alone, rel_tol=3e-2):
        raise RuntimeError(f"together the first loss is {together:.6g}, and alone {alone:.6g}")


def _unrest(norms: torch.Tensor) -> float:
    """How much the gradient's norm jumps from step to step: the mean of |Δ log₂‖g‖|."""
    return round(float(norms.log2().diff().abs().mean()), 4)


STUDY = Study("norm-placement", cells, run, claims, figures, notes)
