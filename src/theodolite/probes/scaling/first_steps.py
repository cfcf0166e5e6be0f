"""The first steps of one training run: how large the activations are, and how far they move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from theodolite.core.batches import on_device
from theodolite.core.building import untouched_randomness
from theodolite.core.size import Size
from theodolite.planning import Plan
from theodolite.planning.parameterization import with_zero_readout
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.scaling.activation_layout import ActivationLayout, Activations, record_activations
from theodolite.workloads import Workload

Status = Literal["finished", "diverged"]

LAYER = "layer."
"""Prefix of the quantities of layers outside every branch."""
PROBE_STEP = 10_000
"""The step whose batch is measured: one that is not trained on."""


@dataclass(frozen=True)
class Track(Result):
    """The root mean squares of one run, by step: `steps + 1` of each, the first before training.

    Quantities are `stream` (after the last block), `stream.first` and `stream.middle` (after the first and
    the middle one), `branch.0`, `branch.1`, … (each block's first branch, second branch, …; the root mean
    square over the blocks that repeat with depth; `branch.0 of stream 1` if it is added to another stream
    than the first), `layer.NAME` (the output of that weight with the numbers that multiply it, outside
    every branch and with outputs that grow with the width), `logits`, and `change of …` for the stream, the
    branches, the layers and the logits: the distance from their values before training.
    """

    kind: ClassVar[str] = "track"
    loads: ClassVar[bool] = True
    size: Size
    seed: int
    status: Status
    values: Mapping[str, tuple[float, ...]]
    """By quantity, by step. nan from where the run diverged."""
    expected: Mapping[str, float]
    """By quantity: what it should be proportional to as depth grows: 1/L for one of L branches of a stream.
    What is not in here should not depend on depth, and nothing should depend on width."""
    branches: tuple[tuple[float, ...], ...]
    """By step, by branch: what each branch adds to the stream."""
    stream: tuple[tuple[float, ...], ...]
    """By step, by branch: the stream after each branch."""

    def blocks(self) -> Iterator[Block]:
        """Every quantity before training and after each step."""
        yield f"{self.size}, seed {self.seed}: {self.status}"
        yield self.table()

    def table(self) -> Table:
        """One row for each quantity, one column for each step."""
        steps = range(len(next(iter(self.values.values()), ())))
        return Table(
            ("quantity", *map(str, steps)), [(name, *values) for name, values in self.values.items()]
        )


def follow(
    workload: Workload,
    plan: Plan,
    *,
    seed: int,
    steps: int,
    device: str = "cpu",
    lone: Collection[tuple[int, int]] = (),
) -> Track:
    """Build the network by the plan, train it for some steps, and measure it before and after each.

    Branches that do not repeat with depth (`lone`, as block and branch) are left out of the means. Training
    uses the batches `workload.batch(seed, step)`, measuring `workload.batch(seed, 10_000)`. The global
    random state is unchanged.
    """
    with untouched_randomness(seed), torch.enable_grad():
        probe = on_device(workload.draw(seed, PROBE_STEP), device)[0]
        model = plan.build(seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        first = last = record_activations(model, probe)
        sizes, branches, stream = [], [], []
        for step in range(steps + 1):
            changes = _sizes(_change(last, first), lone)
            moved = {
                f"change of {name}": size for name, size in changes.items() if not name.startswith("stream.")
            }
            sizes.append(_sizes(last, lone) | moved)
            branches.append(rms(*last.branches))
            stream.append(rms(*last.stream))
            if step == steps or not all(map(math.isfinite, sizes[-1].values())):
                break
            batch = on_device(workload.draw(seed, step), device)
            optimizer.zero_grad()
            workload.evaluate(model, batch).backward()
            optimizer.step()
            last = record_activations(model, probe, last.layout)
    finished = all(map(math.isfinite, sizes[-1].values()))
    missing = [math.nan] * (steps + 1 - len(sizes))
    # Not a router's scores or a bottleneck: narrow outputs may start smaller in a wider network, as logits
    # do, and a softmax ignores a number that is added to all scores.
    wide = {name for name, row in plan.rows.items() if row.role in ("input", "hidden")}
    names = [
        name
        for name in sizes[0]
        if all(name in one for one in sizes) and (LAYER not in name or name.partition(LAYER)[2] in wide)
    ]
    return Track(
        size=plan.size,
        seed=seed,
        status="finished" if finished else "diverged",
        values={name: (*(one[name] for one in sizes), *missing) for name in names},
        expected=_expected(first.layout, lone),
        branches=tuple(branches),
        stream=tuple(stream),
    )


def follow_from_zero(workload: Workload, plan: Plan, **options: Any) -> Track:
    """`follow`, with a readout that starts at zero.

    Some losses have no gradient there, such as those that ignore the length of the output: nothing moves.
    Then the readout starts as the plan has it.
    """
    found = follow(workload, with_zero_readout(plan), **options)
    changes = [values for name, values in found.values.items() if name.startswith("change of ")]
    if any(value != 0 for values in changes for value in values):
        return found
    return follow(workload, plan, **options)


def activation_sizes(model: nn.Module, inputs: Any) -> dict[str, float]:
    """The root mean squares of the stream, branches and logits of a network, named as in `Track`."""
    found = record_activations(model, inputs)
    return {name: size for name, size in _sizes(found).items() if not name.startswith(LAYER)}


def rms(*tensors: Tensor) -> tuple[float, ...]:
    """The root mean square of the entries of each tensor.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(3))
    (2.5, 1.0)
    >>> rms(torch.tensor([3 + 4j]))
    (5.0,)
    """
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    found = [tensor.double().square().mean().sqrt() for tensor in real]
    return tuple(torch.stack(found).tolist()) if found else ()  # one transfer from the device


def _sizes(found: Activations, lone: Collection[tuple[int, int]] = ()) -> dict[str, float]:
    sizes: dict[str, float] = {}
    if found.stream:
        middle = (len(found.stream) - 1) // 2
        chosen = rms(found.stream[0], found.stream[middle], found.stream[-1])
        sizes |= dict(zip(("stream.first", "stream.middle", "stream"), chosen, strict=True))
    each = rms(*found.branches)
    for kind, members in _kinds(found.layout, lone):
        sizes[f"branch.{kind}"] = math.sqrt(sum(each[index] ** 2 for index in members) / len(members))
    for name, values in found.outside.items():  # several of a recurrent weight: one for each time step
        (sizes[f"{LAYER}{name}"],) = rms(torch.cat([value.flatten() for value in values]))
    (sizes["logits"],) = rms(found.logits)
    return sizes


def _change(now: Activations, before: Activations) -> Activations:
    """The differences, of the stream only at its end."""

    def minus(values: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(one - other for one, other in zip(values, others, strict=True))

    def same_shapes(name: str) -> bool:  # they change where routing picks rows
        were = before.outside.get(name, ())
        return [one.shape for one in now.outside[name]] == [one.shape for one in were]

    return Activations(
        now.layout,
        branches=minus(now.branches, before.branches),
        stream=minus(now.stream[-1:], before.stream[-1:]),
        outside={
            name: minus(now.outside[name], before.outside[name]) for name in now.outside if same_shapes(name)
        },
        logits=now.logits - before.logits,
    )


def _expected(layout: ActivationLayout, lone: Collection[tuple[int, int]]) -> dict[str, float]:
    """One of L branches is 1/L of the stream (1/√L at first if it has one layer), and so is its change.

    A stream that is a mean of L values, one of which is the embedding, is 1/L of the sum.
    """
    kinds = dict(_kinds(layout, lone))
    lengths = Counter(layout.streams[index] for members in kinds.values() for index in members)
    names = ("stream.middle", "stream", "change of stream") if layout.is_routed else ()
    expected: dict[str, float] = dict.fromkeys(names, 1 / max(1, lengths.total()))
    for kind, (first, *_) in kinds.items():
        share = 1 / lengths[layout.streams[first]]
        one_layer = layout.layers[first] == 1
        expected |= {f"branch.{kind}": math.sqrt(share) if one_layer else share}
        expected |= {f"change of branch.{kind}": share}
    return expected


def _kinds(layout: ActivationLayout, lone: Collection[tuple[int, int]]) -> Iterator[tuple[str, list[int]]]:
    """Branches that repeat with depth, by their stream and their number within the block on that stream.

    In the last block of a network with two streams, one of them may have no branch: nothing reads it.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    met: Counter[tuple[int, int]] = Counter()
    for index, ((block, branch), stream) in enumerate(zip(layout.places, layout.streams, strict=True)):
        if (block, branch) not in lone:
            kinds.setdefault((stream, met[block, stream]), []).append(index)
        met[block, stream] += 1
    for (stream, number), members in sorted(kinds.items()):
        yield f"{number} of stream {stream}" if stream else str(number), members
