"""The tables of width–depth muP: every optimizer, every kind of tensor, both kinds of block.

The rows are in the test file of each optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from math import sqrt

import pytest

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Ratios
from theodolite.optimizers.decay_policies import decayed

from .parts import COLUMNS, VECTORS, WEIGHTS, tensor
from .reference import Factors, references

RATIOS = [(8.0, 4.0), (2.0, 16.0), (0.5, 0.25), (1.0, 1.0)]
BASE = Base(lr=3e-3, weight_decay=0.2, eps=1e-6, std=0.05)


def factors(hyper: Hyper) -> Factors:
    # Sophia's entries are as large as its clip: a factor on the clip is one on the step.
    lr, decay = hyper.lr * hyper.extent, hyper.weight_decay / hyper.extent
    return lr / BASE.lr, decay / BASE.weight_decay, hyper.eps / BASE.eps


def kinds(optimizer: str) -> list[str]:
    # What a matrix optimizer leaves alone follows the rows of AdamW.
    covered = WEIGHTS if OPTIMIZERS[optimizer].matrices_only else COLUMNS.keys()
    return [kind for kind in COLUMNS if kind in covered]


@pytest.mark.parametrize("r_n, r_L", RATIOS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_blocks_of_several_layers(optimizer: str, r_n: float, r_L: float) -> None:
    expected = references()[optimizer].rows(r_n, r_L)
    for layers in (2, 3):
        for kind in kinds(optimizer):
            hyper = OPTIMIZERS[optimizer].rule(*tensor(kind, r_n, r_L, layers=layers), BASE)
            assert factors(hyper) == pytest.approx(expected[COLUMNS[kind]], rel=1e-12), kind


@pytest.mark.parametrize("r_n, r_L", RATIOS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_blocks_of_one_layer(optimizer: str, r_n: float, r_L: float) -> None:
    expected = references()[optimizer].rows_alone(r_n, r_L)
    seen = 0
    for kind in kinds(optimizer):
        if COLUMNS[kind] in expected:
            hyper = OPTIMIZERS[optimizer].rule(*tensor(kind, r_n, r_L, layers=1), BASE)
            assert factors(hyper) == pytest.approx(expected[COLUMNS[kind]], rel=1e-12), kind
            seen += 1
    assert seen >= 4


MULTIPLIERS_AND_DEVIATIONS = {
    "input": ("1", "1"),
    "embedding": ("1", "1"),
    "input bias": ("1", "1"),
    "final gain": ("1", "1"),
    "first hidden": ("1", "1/√n"),
    "last hidden": ("1/L", "1/√n"),
    "experts": ("1", "1/√n"),
    "convolution": ("1", "1/√n"),
    "output": ("1/n", "1"),
    "first bias": ("1", "1"),
    "last bias": ("1/L", "1"),
    "block gain": ("1", "1"),
    "depthwise": ("1", "1"),
    "router": ("1/n", "1"),
    "fixed keys": ("1/n", "1"),
    "fixed gain": ("1", "1"),
    "readout bias": ("1", "1"),
}


@pytest.mark.parametrize("r_n, r_L", RATIOS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_multipliers_and_initial_values_are_the_same_for_every_optimizer(
    optimizer: str, r_n: float, r_L: float
) -> None:
    value = {"1": 1.0, "1/n": 1 / r_n, "1/L": 1 / r_L, "1/√n": 1 / sqrt(r_n), "1/√L": 1 / sqrt(r_L)}
    for kind, (multiplier, deviation) in MULTIPLIERS_AND_DEVIATIONS.items():
        for layers in (1, 2, 3):
            hyper = OPTIMIZERS[optimizer].rule(*tensor(kind, r_n, r_L, layers=layers), BASE)
            alone = layers == 1 and kind.split()[0] in ("first", "last")
            assert hyper.multiplier == pytest.approx(value["1/√L" if alone else multiplier]), (kind, layers)
            assert hyper.std == pytest.approx(BASE.std * value[deviation]), (kind, layers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lr_times_decay_follows_depth_only_in_blocks_of_one_layer(optimizer: str) -> None:
    # The fraction of itself that a tensor loses per step; absorbing a multiplier must not change it.
    for layers, in_block in ((1, 1 / sqrt(16)), (2, 1.0), (3, 1.0)):
        for kind in kinds(optimizer):
            part, ratios = tensor(kind, 8, 16, layers=layers)
            hyper = OPTIMIZERS[optimizer].rule(part, ratios, BASE)
            expected = BASE.lr * BASE.weight_decay * (1.0 if part.block is None else in_block)
            expected *= OPTIMIZERS[optimizer].decays
            assert hyper.lr * hyper.weight_decay == pytest.approx(expected), (kind, layers)
            absorbed = hyper.absorbed()
            assert absorbed.lr * absorbed.weight_decay == pytest.approx(expected), (kind, layers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fans_that_grow_unequally(optimizer: str) -> None:
    # From 64 → 128 to 512 → 2048: the larger fan stays the input's.
    part = Part(
        "down", (512, 2048), "linear", "hidden", 2048, 512, True, True, (1,), (0,), (), 0, 0, False, 2
    )
    hyper = OPTIMIZERS[optimizer].rule(part, Ratios(16, 8, 4), BASE)
    assert factors(hyper) == pytest.approx(references()[optimizer].unequal(16, 8, 4))
    assert hyper.std == pytest.approx(BASE.std / 4)


@pytest.mark.parametrize(
    "shape, ratios",
    [
        ((512, 1000), (1, 8)),  # more inputs than the width at both sizes
        ((512, 256), (1, 8)),  # the width passes the inputs on the way
        ((512, 32), (1, 8)),  # wider than the inputs at both sizes
        ((1000, 512), (8, 1)),
        ((256, 512), (8, 1)),
        ((2048, 512), (2, 16)),  # the output fan passes the input fan
    ],
)
def test_scales_of_muon_are_those_of_the_shapes_the_tensor_really_has(
    shape: tuple[int, int], ratios: tuple[float, float]
) -> None:
    (n_out, n_in), (r_in, r_out) = shape, ratios
    small = n_out / r_out, n_in / r_in
    scale = {
        "muon": lambda out, in_: 1.0,
        "muon-original": lambda out, in_: sqrt(max(1.0, out / in_)),
        "muon-kimi": lambda out, in_: 0.2 * sqrt(max(out, in_)),
        "muon-spectral": lambda out, in_: sqrt(out / in_),
    }
    role = "hidden" if min(ratios) > 1 else "input" if r_in == 1 else "output"
    part = Part("w", shape, "linear", role, n_in, n_out, r_in > 1, r_out > 1, (1,), (0,))
    for optimizer, of in scale.items():
        hyper = OPTIMIZERS[optimizer].rule(part, Ratios(r_in, r_out, 1), BASE)
        # ‖A‖_R = s·√(in/out), and α·lr·‖A‖_R has to stay.
        norms = [of(out, in_) * sqrt(in_ / out) for out, in_ in ((n_out, n_in), small)]
        assert hyper.multiplier * hyper.lr * norms[0] == pytest.approx(BASE.lr * norms[1]), optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_base_size_changes_nothing(optimizer: str) -> None:
    for kind in kinds(optimizer):
        for layers in (1, 2):
            hyper = OPTIMIZERS[optimizer].rule(*tensor(kind, layers=layers), BASE)
            values = hyper.multiplier, hyper.std, hyper.lr, hyper.weight_decay, hyper.eps
            # Exactly: at ratio one the plan must be the plain optimizer, bit for bit.
            decay = BASE.weight_decay * OPTIMIZERS[optimizer].decays
            assert values == (1, BASE.std, BASE.lr, decay, BASE.eps), (kind, layers)
            assert hyper.absorbed() == hyper


# Policies of decay


def test_independent_decay_takes_the_same_fraction_of_every_tensor() -> None:
    for optimizer, spec in OPTIMIZERS.items():
        for kind in set(kinds(optimizer)) - {"fixed gain"}:
            part, ratios = tensor(kind, 8, 4)
            hyper = spec.rule(part, ratios, BASE)
            taken = hyper.lr * decayed("independent", part, hyper, 1e-4)
            assert taken == pytest.approx(1e-4 * spec.decays), (optimizer, kind)


def test_paper_decay_is_the_rules_own_and_none_is_none() -> None:
    part, ratios = tensor("last hidden", 8, 4)
    hyper = OPTIMIZERS["adamw"].rule(part, ratios, BASE)
    assert decayed("paper", part, hyper, BASE.weight_decay) == pytest.approx(8 * BASE.weight_decay)
    assert decayed("none", part, hyper, BASE.weight_decay) == 0


@pytest.mark.parametrize("norm, share", [("input", 1.0), ("output", 0.0), (None, 0.0)])
def test_only_the_gains_of_input_norms_decay(norm: str | None, share: float) -> None:
    gain = Part("g", (64,), "norm", "gain", 1, 64, False, True, (), (0,), norm=norm)  # type: ignore[arg-type]
    hyper = OPTIMIZERS["adamw"].rule(gain, Ratios(1, 8, 4), BASE)
    assert decayed("paper", gain, hyper, BASE.weight_decay) == share * BASE.weight_decay
    assert decayed("independent", gain, hyper, 1e-4) == pytest.approx(share * 1e-4 / hyper.lr)


@pytest.mark.parametrize("kind", sorted(VECTORS - {"block gain", "final gain", "fixed gain"}))
def test_biases_decay(kind: str) -> None:
    part, ratios = tensor(kind, 8, 4)
    hyper = OPTIMIZERS["adamw"].rule(part, ratios, BASE)
    assert decayed("paper", part, hyper, BASE.weight_decay) == BASE.weight_decay


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon-kimi"])
@pytest.mark.parametrize("norm", ["input", "output", None])
def test_the_two_usual_policies_ask_for_no_norm(optimizer: str, norm: str | None) -> None:
    """`matrices`: weights as in `paper` and no vector; `everything`: every tensor, λ as the rule has it."""
    for kind in kinds(optimizer):
        part, ratios = tensor(kind, 8, 4)
        if part.role == "gain":
            part = dataclasses.replace(part, norm=norm)  # type: ignore[arg-type]
        hyper = OPTIMIZERS[optimizer].rule(part, ratios, BASE)
        weight = part.role in ("input", "hidden", "output")
        assert decayed("matrices", part, hyper, 0.3) == (hyper.weight_decay if weight else 0), kind
        assert decayed("everything", part, hyper, 0.3) == hyper.weight_decay > 0, kind


# Bad input


def test_an_unknown_policy_is_named() -> None:
    part, ratios = tensor("input")
    with pytest.raises(UseError, match=r"'papers'.*paper, independent, none, matrices, everything"):
        decayed("papers", part, OPTIMIZERS["sgd"].rule(part, ratios, BASE), 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fan_in", "fan_out", "depth"])
def test_a_ratio_that_is_none_is_named(name: str, value: float) -> None:
    with pytest.raises(UseError, match=rf"ratio of {name} is {value!r}"):
        Ratios(**{name: value})
