"""Where the norms stand: pre, post and peri over depth, with the plan and without.

The claims of Peri-LN (Kim et al., 2025): with norms before the branches the variance of the stream grows
during training, up to massive activations; with norms after the sums gradients vanish; with norms on both
sides of a branch the variance grows moderately, gradients flow steadily, and training is more stable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.batches import on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import logits
from theodolite.core.size import Size
from theodolite.fleet.program import Program
from theodolite.fleet.run import Precision, Run
from theodolite.fleet.stack import Stack, stack
from theodolite.fleet.training import LOOK_EVERY, arithmetic, precision_of
from theodolite.models import GPT
from theodolite.models.transformer import Placement
from theodolite.workloads import Workload, next_token_loss
from theodolite_studies.framework.networks import batch_of
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.norm_placement.claims import CLAIMS
from theodolite_studies.norm_placement.report import figures, notes
from theodolite_studies.norm_placement.runs import BASE, KINDS, RunTable


@dataclass(frozen=True, kw_only=True)
class PlacementSetting(Setting):
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


FULL = PlacementSetting(
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
SMALL = PlacementSetting(
    small=True,
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


def cells(setting: PlacementSetting) -> list[Cell]:
    """A placement at a depth each, the most telling first."""
    chosen = [(placement, depth) for depth in setting.depths for placement in setting.placements]
    return [
        {"placement": placement, "depth": depth, "small": setting.small}
        for placement, depth in (*chosen, *setting.beside)
    ]


def run(cell: Cell, setting: PlacementSetting, device: str) -> Iterator[Record]:
    """All learning rates, seeds and parameterizations of a cell: at once, or in halves if memory is short."""
    depth = cell["depth"]
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
    setting: PlacementSetting,
    workload: Workload,
    depth: int,
    wanted: Sequence[tuple[str, int, int]],
    device: str,
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
    setting: PlacementSetting, workload: Workload, depth: int, parameterization: str, seed: int, exponent: int
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


def workload_of(setting: PlacementSetting, placement: Placement) -> Workload:
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


def _one_of(models: Stack, place: int) -> dict[str, Tensor]:
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


def _unrest(norms: Tensor) -> float:
    """How much the gradient's norm jumps from step to step: the mean of |Δ log₂‖g‖|."""
    return round(float(norms.log2().diff().abs().mean()), 4)


def read_stream(model: nn.Module, tensors: Mapping[str, Tensor], workload: Workload) -> dict[str, Any]:
    """Size, gradient and peak of the stream before the first block and after each, on one held-out batch.

    Args:
        model: a GPT: the function, which is read in eval mode. It is left as it was.
        tensors: its parameters and buffers.
        workload: the batch and the loss.

    Returns:
        `stream`: root mean squares of h_0 … h_L. `gradient`: those of ∂loss/∂h_l, for the loss summed over
        all tokens. `peak`: the largest |h| of all of them over the median |h| of its own block. A value that
        is not finite is None.
    """
    device = next(iter(tensors.values())).device
    inputs, targets = (tensor.to(device) for tensor in workload.draw_held_out(0))
    stream: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        if not stream:
            stream.append(given[0])
        stream.append(made)

    blocks = model.get_submodule("blocks")
    hooks = [block.register_forward_hook(keep) for block in blocks.children()]
    # Leaves that want gradients, so that the stream does; theirs are not computed.
    own = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()
    }
    try:
        with evaluated(model), torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):
            output = logits(functional_call(model, own, (inputs,)))
            loss = workload.loss(output, targets) * targets.numel()
            gradients = torch.autograd.grad(loss, stream)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [_rms(value) for value in stream]
    peaks = [short(float(value.detach().abs().max() / value.detach().abs().median()), 4) for value in stream]
    return {
        "stream": sizes,
        "gradient": [_rms(value) for value in gradients],
        "peak": None if None in peaks else max(peak for peak in peaks if peak is not None),
    }


def _rms(value: Tensor) -> float | None:
    return short(float(value.detach().float().square().mean().sqrt()), 4)


STUDY = Study(
    "norm-placement",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    data=lambda records, setting: RunTable(records),
    full=FULL,
    small=SMALL,
)
