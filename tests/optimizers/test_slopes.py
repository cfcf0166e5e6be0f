"""One step of any optimizer on any kind of tensor moves the network's function as far at every size.

Each kind is stepped alone, in all blocks, and the change of the outputs is measured: its log–log slope
against width and depth has to vanish. The updates are the optimizers' definitions in float64, not this
package's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap

import theodolite as th
from theodolite.anatomy.part import Part
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Ratios, Rule

from .parts import INPUTS, OUTPUTS, WIDTH
from .reference import references
from .residual import DEPTH, Network, batch, curvatures, gradients, sizes_of_gradients

pytestmark = pytest.mark.usefixtures("one_dissection")

WIDTHS = {64: 12, 384: 4}
DEPTHS = {4: 4, 64: 4}
"""Sizes, and how many networks to draw at each: a narrow one is noisy and cheap. Always four batches."""

AXES = {"width": WIDTHS, "depth": DEPTHS}
LAYERS = (1, 2, 3)
LR = 1e-3
CLIP = 0.01
"""Of Sophia: here nearly all entries are clipped, as its row supposes."""

Slopes = dict[tuple[str, ...], float]


# One test for all optimizers, since all are measured at once.
@pytest.mark.parametrize(
    "layers, axis", [(1, "width"), (1, "depth"), (2, "width"), (2, "depth"), (3, "width")]
)
def test_a_step_changes_the_outputs_as_much_at_every_size(layers: int, axis: str) -> None:
    found = measured(layers, axis)
    for optimizer in OPTIMIZERS:
        slopes = {k[2]: v for k, v in found.items() if k[:2] == ("change", optimizer)}
        assert slopes.keys() >= {"input", "output", "hidden 0", f"hidden {layers - 1}"}
        if not OPTIMIZERS[optimizer].matrices_only:
            assert slopes.keys() >= {"input bias", "bias 0", f"bias {layers - 1}", "readout bias"}
        assert not {kind: slope for kind, slope in slopes.items() if abs(slope) > 0.1}, optimizer
    assert_gradients_are_as_large_as_the_rows_of_eps_say(found, layers, axis, norms=False)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_same_for_the_gains_of_norms(layers: int, axis: str) -> None:
    slopes = measured(layers, axis, norms=True)
    for optimizer in sorted(name for name, spec in OPTIMIZERS.items() if not spec.matrices_only):
        for kind in ("block gain", "final gain"):
            assert abs(slopes["change", optimizer, kind]) < 0.1, (optimizer, kind)
    assert_gradients_are_as_large_as_the_rows_of_eps_say(slopes, layers, axis, norms=True)


@pytest.mark.parametrize("axis", AXES)
def test_sophia_where_not_everything_is_clipped(axis: str) -> None:
    slopes = measured(2, axis, optimizers=("sophia",), clip=1.0)
    assert not {k[2]: slope for k, slope in slopes.items() if k[0] == "change" and abs(slope) > 0.1}


def assert_gradients_are_as_large_as_the_rows_of_eps_say(
    slopes: Slopes, layers: int, axis: str, *, norms: bool
) -> None:
    # Exponents of the width and of the depth, from the table. The depth is that of the block's share of the
    # step: 1/L, of which one-layer blocks have already taken 1/√L.
    depth = -0.5 if layers == 1 else -1.0
    for kind in _kinds(Network(WIDTH, DEPTH, layers, norms), norms):
        inside = kind[-1].isdigit() or kind == "block gain"
        expected = {"width": 0.0 if kind == "readout bias" else -1.0, "depth": depth if inside else 0.0}
        exponent = expected[axis]
        # AdamW's eps stands beside an entry of the gradient, Sophia's beside one of the Hessian.
        assert slopes["entry", kind] == pytest.approx(exponent, abs=0.1), kind
        assert slopes["curvature", kind] == pytest.approx(2 * exponent, abs=0.2), kind
        if kind in ("input", "output") or kind.startswith("hidden"):
            # That of Muon, Shampoo and SOAP beside a norm of it: √(n_in·n_out) of an entry.
            fans = 0.0 if axis == "depth" else 1.0 if kind.startswith("hidden") else 0.5
            assert slopes["norm", kind] == pytest.approx(exponent + fans, abs=0.1), kind


# Controls: what must fail


def standard(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """Weights of variance 1/fan_in, one learning rate, no multipliers."""
    std = base.std / math.sqrt(ratios.fan_in)
    return Hyper(1.0, std, base.lr, base.weight_decay, base.eps)


def eps_left(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """AdamW's rule with one eps for all."""
    found = OPTIMIZERS["adamw"].rule(part, ratios, base)
    return Hyper(found.multiplier, found.std, found.lr, found.weight_decay, base.eps)


@pytest.mark.parametrize("axis", AXES)
def test_the_standard_parameterization_fails_for_hidden_weights_of_every_optimizer(axis: str) -> None:
    slopes = measured(2, axis, scheme=standard, kinds="hidden")
    for optimizer in OPTIMIZERS:
        # Wider: h moves by up to n times as much, and a readout of variance 1/n reads √n of it.
        # Deeper: L blocks push the same way.
        assert slopes["change", optimizer, "hidden 1"] > 0.4, optimizer


def test_one_eps_for_all_fails_in_width_and_depth() -> None:
    for axis in AXES:
        slopes = measured(2, axis, scheme=eps_left, optimizers=("adamw",), kinds="hidden")
        assert slopes["change", "adamw", "hidden 0"] < -0.25, axis


# The same on the package's own network, by the rows of a plan


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_of_a_plan_are_the_absorbed_rules(optimizer: str, layers: int) -> None:
    network = Network(4 * WIDTH, 3 * DEPTH, layers)
    plan = planned(network.width, network.depth, layers, optimizer)
    for name, row in plan.rows.items():
        kind = kind_of(name)
        rule = (
            optimizer
            if not OPTIMIZERS[optimizer].matrices_only or row.role in ("input", "hidden", "output")
            else "adamw"
        )
        assert row.rule == rule
        explicit = network.hyper(
            kind, OPTIMIZERS[rule].rule, lr=LR, eps=plan.eps if rule == optimizer else 1e-8
        )
        expected = explicit.absorbed()
        assert (row.lr, row.eps, row.extent) == pytest.approx((expected.lr, expected.eps, expected.extent))
        if row.init.std:
            assert row.init.std == pytest.approx(expected.std, rel=0.1), name  # read off 512 drawn values
        assert row.multiplier == 1


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("optimizer, layers", [("adamw", 2), ("sgd", 1), ("muon-kimi", 2)])
def test_residual_mlp_by_a_plan(optimizer: str, layers: int, axis: str) -> None:
    slopes = slopes_by_plan(optimizer, layers, axis)
    assert not {kind: slope for kind, slope in slopes.items() if abs(slope) > 0.1}


def slopes_by_plan(optimizer: str, layers: int, axis: str) -> dict[str, float]:
    """By kind of tensor, of the change that one step of it by the rows of a plan makes."""
    changes: dict[str, dict[int, list[float]]] = {}
    for size in AXES[axis]:
        shape = (size, DEPTH) if axis == "width" else (WIDTH, size)
        plan = planned(*shape, layers, optimizer)
        model = build(layers)(*shape).double()
        rng = torch.Generator()

        def network(values: Mapping[str, Tensor], x: Tensor, model: torch.nn.Module = model) -> Tensor:
            return functional_call(model, dict(values), (x,))

        for seed in range(AXES[axis][size]):
            x, pull = batch(seed % 4)
            rng.manual_seed(seed)
            values = {name: row.init.draw(row.shape, rng).double() for name, row in plan.rows.items()}
            found = gradients(network, values, x, pull)
            before = network(values, x)
            for kind in {kind_of(name) for name in values}:
                moved = dict(values)
                for name in (name for name in values if kind_of(name) == kind):
                    row = plan[name]
                    known = {"weight": values[name], "lr": row.lr, "eps": row.eps}
                    step = references()[row.rule].first(found[name], **known)
                    moved[name] = values[name] - row.lr * step
                change = (network(moved, x) - before).square().mean().sqrt().log().item()
                changes.setdefault(kind, {}).setdefault(size, []).append(change)
    return {kind: slope(found) for kind, found in changes.items()}


# Measuring


def measured(
    layers: int,
    axis: str,
    *,
    norms: bool = False,
    scheme: Rule | None = None,
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS),
    kinds: str = "",
    clip: float = CLIP,
) -> Slopes:
    """Log–log slopes of changes and gradients.

    `scheme` takes the place of every optimizer's rule; `kinds` is how the kinds to step begin.
    """
    return _measured(layers, axis, norms, scheme, optimizers, kinds, clip)


@cache
def _measured(
    layers: int,
    axis: str,
    norms: bool,
    scheme: Rule | None,
    optimizers: tuple[str, ...],
    kinds: str,
    clip: float,
) -> Slopes:
    found: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for size, seeds in AXES[axis].items():
        width, depth = (size, DEPTH) if axis == "width" else (WIDTH, size)
        network = Network(width, depth, layers, norms, scheme or OPTIMIZERS["sgd"].rule)
        for seed in range(seeds):
            for key, value in _readings(network, seed, scheme, optimizers, kinds, clip):
                found.setdefault(key, {}).setdefault(size, []).append(math.log(value))
    return {key: slope(values) for key, values in found.items()}


def slope(values: Mapping[int, list[float]]) -> float:
    """Of the means of logarithms against the logarithm of the size."""
    return float(np.polyfit(np.log(list(values)), [np.mean(value) for value in values.values()], 1)[0])


def _readings(
    network: Network, seed: int, scheme: Rule | None, optimizers: tuple[str, ...], kinds: str, clip: float
) -> Iterator[tuple[tuple[str, ...], float]]:
    x, pull = batch(seed % 4)
    values = network.draw(seed)
    found = gradients(network, values, x, pull)
    curved = curvatures(network, values, x) if "sophia" in optimizers else {}
    before = network(values, x)
    for kind in (kind for kind in _kinds(network, network.norms) if kind.startswith(kinds)):
        entry, norm = sizes_of_gradients(found[kind])
        yield ("entry", kind), entry
        yield ("norm", kind), norm
        if curved:
            yield ("curvature", kind), curved[kind].mean().item()
        matrix = kind in ("input", "output") or kind.startswith("hidden")
        steps = {}
        for optimizer in optimizers:
            if matrix or not OPTIMIZERS[optimizer].matrices_only:
                hyper = _hyper(network, kind, optimizer, scheme)
                known = {"curvature": curved.get(kind), "weight": values[kind], "lr": hyper.lr}
                limit = clip * hyper.extent
                step = references()[optimizer].first(found[kind], eps=hyper.eps, clip=limit, **known)
                steps[optimizer] = values[kind] - hyper.lr * step
        # All of them at once: a forward pass of so few samples is little more than reading the weights.
        stacked = {**dict.fromkeys(values), kind: 0}
        after = vmap(network, (stacked, None))({**values, kind: torch.stack(list(steps.values()))}, x)
        changes = (after - before).square().mean((1, 2)).sqrt().tolist()
        for optimizer, change in zip(steps, changes, strict=True):
            yield ("change", optimizer, kind), change


@cache
def _hyper(network: Network, kind: str, optimizer: str, scheme: Rule | None) -> Hyper:
    rule = scheme or OPTIMIZERS[optimizer].rule
    return network.hyper(kind, rule, lr=LR, eps=_eps(optimizer, network, kind))


def _kinds(network: Network, norms: bool) -> list[str]:
    return [kind for kind in network.kinds() if kind.endswith("gain") == norms]


@cache
def _base_gradients(layers: int, norms: bool) -> dict[str, tuple[float, float]]:
    network = Network(WIDTH, DEPTH, layers, norms)
    found = gradients(network, network.draw(0), *batch(0))
    return {kind: sizes_of_gradients(gradient) for kind, gradient in found.items()}


def _eps(optimizer: str, network: Network, kind: str) -> float:
    """At base size as large as what it is added to, so that its row matters."""
    entry, norm = _base_gradients(network.layers, network.norms)[kind]
    return references()[optimizer].eps(entry, norm)


# The package's own network


def build(layers: int) -> partial[th.models.ResidualMLP]:
    return partial(th.models.ResidualMLP, inputs=INPUTS, outputs=OUTPUTS, block_layers=layers, bias=True)


def planned(width: int, depth: int, layers: int, optimizer: str) -> th.Plan:
    base = Network(WIDTH, DEPTH, layers)
    last = f"blocks.*.layers.{layers - 1}.weight"
    return th.plan(
        build(layers),
        torch.zeros(2, INPUTS),
        size=th.Size(width, depth),
        base=th.Size(WIDTH, DEPTH),
        optimizer=optimizer,
        lr=LR,
        covers="all",
        # Branches that start small, as in `Network`.
        init={last: base.deviation(f"hidden {layers - 1}")},
    )


def kind_of(name: str) -> str:
    """`blocks.3.layers.1.weight` is `hidden 1`."""
    place, _, what = name.rpartition(".")
    if place.startswith("blocks"):
        return f"{'hidden' if what == 'weight' else 'bias'} {place[-1]}"
    return {
        "embed.weight": "input",
        "embed.bias": "input bias",
        "readout.weight": "output",
        "readout.bias": "readout bias",
    }[name]
