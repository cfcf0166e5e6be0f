"""Each planted mistake is one fault, of the right kind and size; right recipes have none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from theodolite.core.size import Size
from theodolite.surveying.auditing.exponents import Series, TensorScaling, scalings
from theodolite.surveying.auditing.faults import (
    decay_excess,
    find_faults,
    over_eps_at,
    start_excess,
    step_excess,
    steps_limited,
)
from theodolite.surveying.auditing.reading import read
from theodolite.workloads import Workload

from .hand_made import batch, building, loss, make_optimizer, recipe

SIZES = {
    "width": [Size(32, 2), Size(64, 2), Size(128, 2)],
    "depth": [Size(32, 2), Size(32, 4), Size(32, 8)],
}
HIDDEN = {f"blocks.*.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")}
ENDS = {"blocks.*.attn.proj.weight", "blocks.*.mlp.down.weight"}
READOUT, TABLES = {"head.weight"}, {"wte.weight", "wpe.weight"}
FLAT = (1.0, 1.0, 1.0)


def faults_of(made):
    workload = Workload("mine", building(made), batch, loss)
    found = set()
    for axis, sizes in SIZES.items():
        readings = [read(workload, make_optimizer, size, batch=batch(0, 0)) for size in sizes]
        for fault in find_faults(scalings(readings, axis), axis):
            names = frozenset(one.name for one in fault.scalings)
            found.add((axis, fault.cause, round(fault.excess, 3), names))
    return found


def fault(axis, cause, excess, names):
    return {(axis, cause, excess, frozenset(names))}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "muon-rms"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "layer", "bias": True, "fused": False}, {"tied": True}, {"multiply": "in place"}],
    ids=str,
)
def test_a_right_recipe_has_no_fault(optimizer, options):
    assert faults_of(recipe(optimizer=optimizer, **options)) == set()


@pytest.mark.parametrize(
    ("mistake", "options", "expected"),
    [
        ("readout not multiplied", {}, fault("width", "multiplier", 1, READOUT)),
        ("readout multiplied twice", {}, fault("width", "multiplier", -1, READOUT)),
        ("readout not multiplied", {"optimizer": "sgd"}, fault("width", "multiplier", 1, READOUT)),
        ("readout not multiplied", {"tied": True}, fault("width", "readout", 1, {"wte.weight"})),
        ("branch not multiplied", {}, fault("depth", "multiplier", 1, ENDS)),
        ("branch not multiplied", {"optimizer": "sgd"}, fault("depth", "multiplier", 1, ENDS)),
        ("depth in init and branch", {}, fault("depth", "start", -0.5, ENDS)),
        ("constant std", {}, fault("width", "start", 0.5, HIDDEN)),
        ("hidden lr not divided", {}, fault("width", "step", 1, HIDDEN)),
        ("hidden lr not divided", {"optimizer": "muon-rms"}, fault("width", "step", 0.5, HIDDEN)),
        ("embedding lr divided", {}, fault("width", "step", -1, TABLES)),
        ("readout lr divided", {}, fault("width", "step", -1, READOUT)),
        ("decay times lr twice", {}, fault("width", "decay", -2, HIDDEN)),
        ("decay left alone", {}, fault("width", "decay", -1, HIDDEN)),
        ("tied as hidden", {"tied": True}, fault("width", "step", -1, {"wte.weight"})),
        ("tied std as hidden", {"tied": True}, fault("width", "start", -0.5, {"wte.weight"})),
        ("eps left alone", {}, set()),
    ],
)
def test_a_mistake_is_one_fault(mistake, options, expected):
    assert faults_of(recipe(mistake, **options)) == expected


def test_two_mistakes_are_two_faults():
    found = faults_of(recipe("readout not multiplied", "depth in init and branch"))
    assert found == fault("width", "multiplier", 1, READOUT) | fault("depth", "start", -0.5, ENDS)


def test_a_recipe_without_depth_is_one_fault_along_the_depth():
    assert faults_of(recipe(depth=False)) == fault("depth", "multiplier", 1, ENDS)


def weight(**changes):
    made = TensorScaling(
        name="w",
        tensors=("w",),
        role="hidden",
        class_name="AdamW",
        rule="adamw",
        degree=0,
        in_block=True,
        ends_branch=False,
        scale_free=False,
        decoupled=True,
        sizes=(64, 128, 256),
        growth=(1.0, 2.0, 4.0),
        multiplier=FLAT,
        lr=Series(FLAT, FLAT),
        init=Series(FLAT, FLAT),
        noise=0.0,
    )
    return replace(made, **changes)


def as_power(own, rule=0.0):
    return Series(tuple(g**own for g in (1.0, 2.0, 4.0)), tuple(g**rule for g in (1.0, 2.0, 4.0)))


def test_a_direction_is_judged_by_its_steps_in_units_of_its_size():
    """W/‖W‖: twice the size with twice the Adam step is the same training; with SGD it is four times."""
    traded = weight(scale_free=True, init=as_power(1), lr=as_power(1))
    assert step_excess(traded) == pytest.approx(0)
    assert math.isnan(start_excess(traded))
    assert find_faults([traded], "width") == ()
    by_sgd = replace(traded, degree=1, lr=as_power(2))
    assert step_excess(by_sgd) == pytest.approx(0)
    (found,) = find_faults([replace(traded, lr=as_power(0))], "width")
    assert (found.cause, round(found.excess, 6)) == ("step", -1)


def test_zeros_biases_and_readouts_may_start_small():
    assert math.isnan(start_excess(weight(init=Series((0, 0, 0), (0, 0, 0)))))
    small = as_power(-0.5)
    assert start_excess(weight(role="bias", init=small)) == 0
    assert start_excess(weight(role="output", in_block=False, init=small)) == 0
    assert start_excess(weight(init=small)) == pytest.approx(-0.5)
    assert start_excess(weight(role="bias", init=as_power(0.5))) == pytest.approx(0.5)


def test_keys_of_a_fixed_number_of_heads_may_start_as_hidden_weights_do():
    """1/√width keeps their size at the start, where the rule of outputs asks for 1/width."""
    assert start_excess(weight(role="output", init=as_power(-0.5, -1.0))) == 0
    assert start_excess(weight(role="output", init=as_power(0.0, -1.0))) == pytest.approx(1)


def test_noise_of_a_measured_start_is_no_fault():
    off = weight(init=as_power(0.1))
    assert find_faults([off], "width")
    assert not find_faults([replace(off, noise=0.1)], "width")


def test_a_bias_that_shares_a_wrong_multiplier_is_not_a_fault_of_its_own():
    matrix = weight(ends_branch=True, multiplier=as_power(-2).own, init=as_power(0, 1), lr=as_power(0, 1))
    zeros = Series((0, 0, 0), (0, 0, 0))
    bias = replace(matrix, name="b", tensors=("b",), role="bias", init=zeros)
    (found,) = find_faults([matrix, bias], "depth")
    assert (found.cause, found.excess, len(found.scalings)) == ("multiplier", -1, 2)


@pytest.mark.parametrize("degree", [0, 1])
def test_zeros_have_the_multiplier_of_others_whatever_the_degree_of_the_step(degree):
    """A multiplier that is too small by 1/n moves steps by 1/n, and by 1/n² those that follow gradients."""
    matrix = weight(
        degree=degree,
        ends_branch=True,
        multiplier=as_power(-2).own,
        init=as_power(0, 1),
        lr=as_power(0, 1 + degree),
    )
    bias = replace(matrix, name="b", tensors=("b",), role="bias", init=Series((0, 0, 0), (0, 0, 0)))
    (found,) = find_faults([matrix, bias], "depth")
    assert (found.cause, found.excess, len(found.scalings)) == ("multiplier", -1, 2)


def test_a_decay_that_is_off_as_the_learning_rate_is_no_fault_of_its_own():
    one = weight(lr=as_power(-1), decay=as_power(-1))
    assert [found.cause for found in find_faults([one], "width")] == ["step"]
    assert [found.cause for found in find_faults([replace(one, lr=as_power(0))], "width")] == ["decay"]


def test_tensors_that_are_off_alike_but_not_by_the_same_numbers_are_told_apart():
    """An input whose rate should grow and does not, and a weight whose rate should not fall and does."""
    table, matrix = weight(name="t", lr=as_power(0, 1)), weight(name="w", lr=as_power(-1, 0))
    found = find_faults([table, matrix], "width")
    assert [(one.cause, one.excess, len(one.scalings)) for one in found] == [("step", -1, 1)] * 2
    assert len(find_faults([table, replace(table, name="u")], "width")) == 1
    by_two_rules = find_faults([matrix, replace(matrix, name="u", rule="muon")], "width")
    assert len(by_two_rules) == 2


def test_multipliers_that_are_off_alike_from_different_numbers_are_told_apart():
    missing = weight(ends_branch=True, init=as_power(0, -1), lr=as_power(0, -1))
    halfway = replace(missing, name="u", multiplier=as_power(-1).own)
    assert [one.cause for one in find_faults([missing, halfway], "depth")] == ["multiplier"] * 2


def test_a_decay_that_adam_adds_to_the_gradient_is_not_judged():
    assert math.isnan(decay_excess(weight(decay=as_power(-1), decoupled=False)))
    assert decay_excess(weight(decay=as_power(-1), decoupled=False, degree=1)) == -1


def test_eps_is_judged_by_the_gradient_at_ten_times_the_size():
    """Entries of the gradient fall as 1/width, eps stays: 50 times eps is 5 times at ten times the width."""
    one = weight(eps=as_power(0, -1), over_eps=50.0)
    assert over_eps_at(one, 10.0) == pytest.approx(5)
    assert steps_limited(one, 10.0, 10.0)
    assert not steps_limited(replace(one, over_eps=1e4), 10.0, 10.0)
    assert not steps_limited(replace(one, eps=as_power(-1, -1)), 10.0, 10.0)
    assert not steps_limited(replace(one, over_eps=math.nan), 10.0, 10.0)


def test_a_readout_that_starts_small_needs_no_other_start_once_its_multiplier_is_right():
    readout = weight(role="output", in_block=False, lr=as_power(0, -1), init=as_power(0, -0.5))
    (found,) = find_faults([readout], "width")
    assert (found.cause, found.excess, math.isnan(found.also)) == ("multiplier", 1, True)


def test_along_the_depth_steps_of_branches_are_compared_with_those_of_other_weights_in_blocks():
    """Weights outside of the blocks, however many, do not follow the depth."""
    fast = weight(lr=as_power(0, -1))
    closing = replace(fast, name="e", tensors=("e",), ends_branch=True, init=as_power(0, -1))
    outside = [weight(name=name, tensors=(name,), in_block=False) for name in "ab"]
    found = find_faults([fast, closing, *outside], "depth")
    assert sorted((one.cause, len(one.scalings)) for one in found) == [("start", 1), ("step", 2)]
