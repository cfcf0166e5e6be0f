"""The curvature in random directions against explicit matrices in float64, through every kind of layer."""

from __future__ import annotations

import copy
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import probes
from theodolite.probes.curvature.directions import draw

from .explicit import apart, explicit, explicit_of
from .networks import CASES, Case, case, next_token
from .test_score import CLASSES, LOSSES, closed_form, made, saturated

DIRECTIONS = 7
PARTS = ("hessian", "gauss_newton", "residual")


def directions(found, expected, seed=0, num=DIRECTIONS):
    """R (P × d), of the parameters that were measured, in the order of the explicit matrices."""
    shapes = {name: found[name].shape for name in expected.names if name in found}
    return draw(shapes, num, seed=seed, dtype=torch.float64).matrix


def parameters(model):
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def check(reading, expected, R, close=1e-6):
    assert apart(R.T @ R, torch.eye(R.shape[1], dtype=R.dtype)) < 1e-12
    for part in PARTS:
        matrix = R.T @ getattr(expected, part) @ R
        found = getattr(reading, part).matrix
        assert found.dtype is torch.float64
        assert apart(found, matrix, R.T @ expected.hessian @ R) < close, part
        assert getattr(reading, part).excess == pytest.approx(
            (matrix.trace() / matrix.norm()).item(), rel=1e-3
        )
    assert reading.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_projected_matrices_are_those_of_the_explicit_ones(name):
    one, expected = case(name), explicit_of(name)
    reading = probes.curvature(one.model, one.loss, one.batch, directions=DIRECTIONS, seed=3)
    assert reading.size == len(expected.hessian)
    check(reading, expected, directions(parameters(one.model), expected, seed=3))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("llama", "gpt2", "gpt")])
def test_a_batch_that_is_taken_apart_gives_the_same(name, monkeypatch):
    """With room for the tangents of one example only; where examples depend on each other it is not used."""
    one, expected = case(name), explicit_of(name)
    monkeypatch.setattr(import_module("theodolite.probes.curvature.fan"), "CACHED_BYTES", 1)
    reading = probes.curvature(one.model, one.loss, one.batch, directions=DIRECTIONS, seed=3)
    check(reading, expected, directions(parameters(one.model), expected, seed=3))


class Placed(nn.Module):
    """Takes tokens and, for all examples the same, positions: as many as there are examples, by chance."""

    def __init__(self, together):
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 4), nn.Embedding(7, 4)
        self.readout = nn.Linear(4, 7)
        self.together = together

    def forward(self, tokens, positions):
        stream = self.embed(tokens) * self.place(positions if self.together else positions.sum()).tanh()
        return self.readout(stream)


@pytest.mark.parametrize("together", [True, False])
def test_inputs_that_are_not_examples_are_not_taken_apart(together, monkeypatch):
    tokens = torch.randint(7, (4, 4))
    one = Case(
        Placed(together).double(), next_token, ((tokens, torch.arange(4).clamp(max=1)), tokens.flip(1))
    )
    monkeypatch.setattr(import_module("theodolite.probes.curvature.fan"), "CACHED_BYTES", 1)
    reading = probes.curvature(one.model, one.loss, one.batch, directions=DIRECTIONS)
    expected = explicit(one)
    check(reading, expected, directions(parameters(one.model), expected))


@pytest.mark.parametrize("name", ["tanh", "layer norm", "causal attention"])
def test_trace_norm_and_t_are_exact_or_within_their_errors(name):
    one, expected = case(name), explicit_of(name)
    readings = [
        probes.curvature(one.model, one.loss, one.batch, directions=25, seed=seed) for seed in range(20)
    ]
    for part in PARTS:
        matrix = getattr(expected, part)
        truth = {"trace": matrix.trace().item(), "frobenius": matrix.norm().item()}
        truth["t"] = truth["trace"] / truth["frobenius"]
        off = {key: [] for key in truth}
        for reading in readings:
            for key, value in truth.items():
                estimate = getattr(getattr(reading, part), key)
                assert estimate.error > 0 or estimate.value == pytest.approx(value, rel=1e-6)
                off[key].append((estimate.value - value) / (estimate.error or 1))
        for key, scores in off.items():
            # It is 1 where many parameters share a direction. With so few, errors are too large, and the norm
            # misses a part of the diagonal.
            assert 0.2 < torch.tensor(scores).square().mean().sqrt() < 2.5, (part, key)


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_of_the_logits(name):
    one = made(*LOSSES[name])
    expected = explicit(one)
    reading = probes.curvature(one.model, one.loss, one.batch, directions=DIRECTIONS)
    check(reading, expected, directions(parameters(one.model), expected))


@pytest.mark.parametrize("name", ["layer norm", "tied", "multihead attention"])
def test_some_parameters_are_a_block_of_all(name):
    one, expected = case(name), explicit_of(name)
    patterns = {"layer norm": ["1.*", "3.bias"], "tied": "readout.*", "multihead attention": "attention.*"}[
        name
    ]
    operator = probes.hessian(one.model, one.loss, one.batch, parameters=patterns)
    rows = expected.rows(operator.names)
    reading = probes.curvature(one.model, one.loss, one.batch, parameters=patterns, directions=DIRECTIONS)
    R = draw(operator.shapes, DIRECTIONS, dtype=torch.float64).matrix
    for part in PARTS:
        block = getattr(expected, part)[rows][:, rows]
        assert apart(getattr(reading, part).matrix, R.T @ block @ R) < 1e-6
    assert reading.size == len(rows)


@pytest.mark.parametrize("name", ["layer norm", "batch norm, train", "causal attention"])
def test_several_batches_are_their_mean_by_examples(name):
    one = case(name)
    inputs, targets = one.batch
    half = len(targets) // 2
    more = (torch.roll(inputs, 1, 1)[:half], torch.roll(targets, 1, 0)[:half])
    first, second = explicit_of(name), explicit(Case(one.model, one.loss, more))
    reading = probes.curvature(one.model, one.loss, [one.batch, more], directions=DIRECTIONS)
    R = directions(parameters(one.model), first)
    for part in PARTS:
        mean = 2 / 3 * getattr(first, part) + 1 / 3 * getattr(second, part)
        assert apart(getattr(reading, part).matrix, R.T @ mean @ R) < 1e-6


TEMPERATURES = (0.05, 0.5, 1.0, 20.0)


@pytest.mark.parametrize("name", ["layer norm", "relu", "mean square", "causal attention", "own function"])
def test_along_temperature_is_one_reading_for_each(name):
    one = case(name)
    readings = probes.along_temperature(
        one.model, one.loss, one.batch, TEMPERATURES, directions=DIRECTIONS, seed=1
    )
    assert [reading.temperature for reading in readings] == list(TEMPERATURES)
    for temperature, reading in zip(TEMPERATURES, readings, strict=True):
        alone = probes.curvature(
            one.model, one.loss, one.batch, temperature=temperature, directions=DIRECTIONS, seed=1
        )
        agree(reading, alone)
    expected = explicit(one, temperature=TEMPERATURES[0])
    check(readings[0], expected, directions(parameters(one.model), expected, seed=1))


@pytest.mark.parametrize("name", ["layer norm", "relu", "group norm", "own function"])
def test_along_scale_is_one_reading_for_each(name):
    one, scales, temperatures = case(name), (0.5, 1.0, 3.0), (1.0, 2.0, 0.5)
    readings = probes.along_scale(
        one.model, one.loss, one.batch, scales, temperatures=temperatures, directions=DIRECTIONS, seed=1
    )
    norms = (nn.LayerNorm, nn.GroupNorm)
    for scale, temperature, reading in zip(scales, temperatures, readings, strict=True):
        other = copy.deepcopy(one.model)
        with torch.no_grad():
            for module in other.modules():
                for tensor in module.parameters(recurse=False):
                    tensor.mul_(1 if isinstance(module, norms) else scale)
        alone = probes.curvature(
            other, one.loss, one.batch, temperature=temperature, directions=DIRECTIONS, seed=1
        )
        agree(reading, alone)


@pytest.mark.parametrize("along", [probes.along_temperature, probes.along_scale])
def test_an_array_is_as_good_as_a_list(along):
    one, given = case("relu"), np.logspace(-1, 1, 3)
    readings = along(one.model, one.loss, one.batch, given, directions=DIRECTIONS)
    listed = along(one.model, one.loss, one.batch, [0.1, 1.0, 10.0], directions=DIRECTIONS)
    assert [reading.excess for reading in readings] == pytest.approx([reading.excess for reading in listed])


def agree(reading, alone):
    assert reading.loss == pytest.approx(alone.loss, rel=1e-12)
    for part in PARTS:
        one, other = getattr(reading, part), getattr(alone, part)
        assert apart(one.matrix, other.matrix, alone.hessian.matrix) < 1e-10
        for key in ("trace", "frobenius", "t"):
            assert getattr(one, key).value == pytest.approx(getattr(other, key).value, rel=1e-8, abs=1e-10)
            assert getattr(one, key).error == pytest.approx(getattr(other, key).error, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("name", ["layer norm", "batch norm, train", "causal attention"])
def test_lower_precision_is_accepted_and_near(name, dtype, close):
    one = case(name)
    model = copy.deepcopy(one.model).to(dtype)
    inputs, targets = one.batch
    drawn = inputs.to(dtype) if inputs.is_floating_point() else inputs
    exact = drawn.double() if inputs.is_floating_point() else inputs
    expected = probes.curvature(
        copy.deepcopy(model).double(), one.loss, (exact, targets), directions=DIRECTIONS
    )
    reading = probes.curvature(model, one.loss, (drawn, targets), directions=DIRECTIONS)
    for part in PARTS:
        assert apart(getattr(reading, part).matrix, getattr(expected, part).matrix) < close, part


@pytest.mark.parametrize("factor", [1e2, 1e3, 1e4])
def test_a_saturated_softmax_is_right_in_float32(factor):
    model, inputs = saturated(factor)
    exact = copy.deepcopy(model).double()
    targets = exact(inputs.double()).argmax(-1)
    R = draw({name: tensor.shape for name, tensor in model.named_parameters()}, DIRECTIONS).matrix.double()
    for row in range(len(inputs)):
        one = slice(row, row + 1)
        reading = probes.curvature(
            model, torch.nn.functional.cross_entropy, (inputs[one], targets[one]), directions=DIRECTIONS
        )
        _, first = closed_form(exact, inputs[row].double(), targets[row])
        assert apart(reading.gauss_newton.matrix, R.T @ first @ R) < 1e-4 + 2e-6 * factor


def test_a_clamped_loss_is_not_taken_for_a_cross_entropy():
    def clamped(logits, targets):
        return torch.nn.functional.cross_entropy(logits.clamp(-6, 6), targets)

    one = made(clamped, CLASSES)
    one.model[-1].weight.data *= 30
    one = Case(one.model, clamped, one.batch)
    expected = explicit(one)
    reading = probes.curvature(one.model, clamped, one.batch, directions=DIRECTIONS)
    check(reading, expected, directions(parameters(one.model), expected), close=1e-5)
