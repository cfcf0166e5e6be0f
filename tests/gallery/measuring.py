"""What a plan does to a network, measured by hooks of our own: nothing here uses the library's probes.

Under a right plan each module's output changes by as much in a wide or deep network as in a small one. So the
slope of log₂ RMS(change) against log₂ size is 0.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import theodolite
from theodolite import Size
from theodolite.anatomy import Anatomy
from theodolite.core.calling import call

from .exhibit import Exhibit

SEEDS = (0, 1, 2)
STEPS = 3
TOLERANCE = 0.15
ROUNDING = 2.0**-20
"""Changes below this fraction of the value are rounding."""

Outputs = dict[str, Tensor]
Changes = dict[str, float]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Slope:
    """How the change of one module's output goes with width or depth.

    Args:
        module: its name; `""` is the whole network, and in slopes over depth `blocks.-1` the last block.
        slope: of log₂ RMS(change) on log₂ size, the mean over seeds.
        error: the standard error of that mean.
        reason: why it need not be 0, if there is a reason.
    """

    module: str
    slope: float
    error: float
    reason: str | None = None

    @property
    def right(self) -> bool:
        """Is it within ±0.15, or is there a reason why not?"""
        return self.reason is not None or abs(self.slope) <= TOLERANCE


def wrong_roles(exhibit: Exhibit) -> list[str]:
    """Where `dissect` differs from the truth about roles and branches, one sentence each."""
    inputs, _ = exhibit.batch(0)
    size = Size(exhibit.widths[0], 2)
    anatomy = theodolite.dissect(exhibit.build, inputs, size=size, roles=dict(exhibit.hints))
    return [*_wrong_roles(exhibit, anatomy), *_wrong_branches(exhibit, anatomy)]


def over_width(exhibit: Exhibit, *, seeds: Sequence[int] = SEEDS, tell: Tell = lambda _: None) -> list[Slope]:
    """The slope of every module's change over the exhibit's widths, under the plan."""
    sizes = [Size(width, exhibit.base.depth) for width in exhibit.widths]
    changes = _changes(exhibit, sizes, seeds, tell)
    return _slopes(exhibit, exhibit.widths, changes)


def over_depth(exhibit: Exhibit, *, seeds: Sequence[int] = SEEDS, tell: Tell = lambda _: None) -> list[Slope]:
    """The same over its depths: of modules outside the repeated blocks, of the last block, of the network.

    Within a branch the change goes as 1/depth, so that is not measured.
    """
    if not exhibit.depths:
        return []
    sizes = [Size(exhibit.base.width, depth) for depth in exhibit.depths]
    lists = _repeated(exhibit)
    changes = [[_outside(one, lists) for one in of_size] for of_size in _changes(exhibit, sizes, seeds, tell)]
    return _slopes(exhibit, exhibit.depths, changes)


def change(exhibit: Exhibit, plan: theodolite.Plan, seed: int) -> Changes:
    """By module, the RMS change of its output on one batch by three steps of training."""
    model = plan.build(seed)
    optimizer = plan.optimizer(model)
    probe, _ = exhibit.batch(0)
    before = outputs(model, probe)
    for step in range(STEPS):
        inputs, targets = exhibit.batch(1 + seed * STEPS + step)
        optimizer.zero_grad()
        torch.manual_seed(1 + seed * STEPS + step)
        exhibit.loss(call(model, inputs), targets).backward()
        optimizer.step()
    after = outputs(model, probe)
    return {name: _rms_change(before[name], after[name]) for name in before if name in after}


def outputs(model: nn.Module, inputs: Any) -> Outputs:
    """By name, what every module returned when it was last called; random numbers are the same each time."""
    found: Outputs = {}
    torch.manual_seed(0)
    with _watched(model, found):
        call(model, inputs)
    return found


@contextmanager
def _watched(model: nn.Module, found: Outputs) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        # A parametrization returns a weight, which has a scale of its own.
        if ".parametrizations" not in name:
            handles.append(module.register_forward_hook(_keep(name, found)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(name: str, found: Outputs) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = _first(output)
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            found[name] = tensor.detach().clone()

    return hook


def _first(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    return output if isinstance(output, Tensor) else None


def _rms_change(before: Tensor, after: Tensor) -> float:
    """0 where it is rounding."""
    size = before.abs().double().square().mean().sqrt().item()
    changed = (after - before).abs().double().square().mean().sqrt().item()
    return changed if changed > ROUNDING * size else 0.0


def _changes(
    exhibit: Exhibit, sizes: Sequence[Size], seeds: Sequence[int], tell: Tell
) -> list[list[Changes]]:
    """By size and seed, the change of every module."""
    inputs, _ = exhibit.batch(0)
    hints = dict(exhibit.hints)
    base = theodolite.dissect(exhibit.build, inputs, size=exhibit.base, roles=hints)
    changes = []
    for size in sizes:
        tell(f"{exhibit.name}: {size.width} × {size.depth}")
        plan = theodolite.plan(
            exhibit.build,
            inputs,
            size=size,
            base=exhibit.base,
            optimizer=exhibit.optimizer,
            lr=exhibit.lr,
            roles=hints,
            anatomies={exhibit.base: base},
        )
        changes.append([change(exhibit, plan, seed) for seed in seeds])
    return changes


def _slopes(exhibit: Exhibit, sizes: Sequence[int], changes: Sequence[Sequence[Changes]]) -> list[Slope]:
    names = [name for name in changes[0][0] if all(name in one for of_size in changes for one in of_size)]
    slopes = []
    for name in names:
        by_seed = [[of_size[seed][name] for of_size in changes] for seed in range(len(changes[0]))]
        if all(value == 0 for values in by_seed for value in values):
            continue  # frozen, or not reached by anything that trains
        mean, error = _mean([_slope(sizes, values) for values in by_seed])
        slopes.append(Slope(name, mean, error, _reason(exhibit, name)))
    return slopes


def _slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """By least squares, of log₂ values on log₂ sizes; nan where one is 0 or not finite."""
    if not all(0 < value < math.inf for value in values):
        return math.nan
    x = torch.tensor(sizes, dtype=torch.double).log2()
    y = torch.tensor(values, dtype=torch.double).log2()
    x = x - x.mean()
    return ((x * y).sum() / x.square().sum()).item()


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    drawn = torch.tensor(values, dtype=torch.double)
    error = drawn.std() / math.sqrt(len(values)) if len(values) > 1 else torch.tensor(math.nan)
    return drawn.mean().item(), error.item()


def _reason(exhibit: Exhibit, module: str) -> str | None:
    return next(
        (why for pattern, why in exhibit.exceptions.items() if fnmatch.fnmatchcase(module, pattern)), None
    )


def _wrong_roles(exhibit: Exhibit, anatomy: Anatomy) -> Iterator[str]:
    matched = set()
    for name, part in anatomy.items():
        pattern = next((one for one in exhibit.roles if fnmatch.fnmatchcase(name, one)), None)
        matched.add(pattern)
        if pattern is None:
            yield f"{name}: the exhibit says nothing of it, dissect says {part.role}"
        elif part.role != exhibit.roles[pattern]:
            yield f"{name}: it is {exhibit.roles[pattern]}, dissect says {part.role} ({part.op})"
    for pattern in exhibit.roles:
        if pattern not in matched:
            yield f"{pattern}: no tensor has such a name"


def _wrong_branches(exhibit: Exhibit, anatomy: Anatomy) -> Iterator[str]:
    if len(anatomy.branches) != exhibit.branches:
        yield f"there are {exhibit.branches} residual branches, dissect finds {len(anatomy.branches)}"


def _repeated(exhibit: Exhibit) -> set[str]:
    """The lists of modules that are longer in a deeper network."""
    shallow, deep = (
        {name for name, _ in exhibit.build(exhibit.base.width, depth).named_modules()}
        for depth in (exhibit.depths[0], exhibit.depths[-1])
    )
    added = (name.rpartition(".") for name in deep - shallow)
    return {parent for parent, _, last in added if last.isdigit() and parent in shallow}


def _outside(changes: Changes, lists: set[str]) -> Changes:
    """Without what is in the repeated blocks, and with the last one as `-1`."""
    kept: Changes = {}
    last: dict[str, int] = {}
    for name, value in changes.items():
        inside = next((one for one in lists if re.match(rf"{re.escape(one)}\.?\d+(\.|$)", name)), None)
        if inside is None:
            kept[name] = value
            continue
        number = name.removeprefix(inside).removeprefix(".")
        if number.isdigit() and int(number) >= last.get(inside, 0):
            last[inside] = int(number)
            kept[f"{inside}.-1".removeprefix(".")] = value
    return kept
