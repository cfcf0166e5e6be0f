"""Ways to grow spend alike, and start where they should."""

import json

import numpy as np
import pytest
import torch

from theodolite.models import GPT
from theodolite_studies.growing.training import flops_of
from theodolite_studies.growing.ways import grown_in_all_ways, looked_at, stacked, stream_squares

from .tiny import LESSON, TINY, pupil_of


@pytest.fixture(scope="module")
def grown():
    return list(grown_in_all_ways(TINY, 0, 2, "cpu"))


def test_all_ways_spend_the_same(grown):
    step = flops_of(TINY, TINY.width, 4)
    ways = {one["way"]: one for one in grown[1:]}
    budget = 4 * flops_of(TINY, TINY.width, 2) + 12 * step
    for way, one in ways.items():
        depth = 2 if way == "none" else 4
        spent = one["curve"][-1][0]
        assert budget - flops_of(TINY, TINY.width, depth) < spent * (1 + 1e-4), way
        assert spent <= budget * (1 + 1e-4), way
    assert ways["even"]["steps"] == ways["random"]["steps"] == 12
    assert ways["scratch"]["steps"] == int(budget / step)
    # 8 sequences, 5/3 of a training step each, at half the depth.
    assert ways["signal"]["steps"] == int(12 - 8 / 4 * 5 / 3 * flops_of(TINY, TINY.width, 2) / step)
    assert ways["jump"]["steps"] < ways["tried"]["steps"] <= ways["signal"]["steps"]


def test_closed_blocks_start_where_the_network_was(grown):
    base, ways = grown[0], {one["way"]: one for one in grown[1:]}
    for way in ("none", "signal", "even", "random", "weakest", "tried"):
        assert ways[way]["first"] == pytest.approx(base["loss"], abs=2e-6), way
    assert abs(ways["stack"]["first"] - base["loss"]) > 1e-4
    assert abs(ways["jump"]["first"] - base["loss"]) > 1e-6


def test_places_are_those_of_the_signal(grown):
    base, ways = grown[0], {one["way"]: one for one in grown[1:]}
    order = np.argsort(base["gains"])
    assert ways["signal"]["places"] == sorted(order[-2:])
    assert ways["weakest"]["places"] == sorted(order[:2])
    assert ways["tried"]["places"] == ways["jump"]["places"] == sorted(np.argsort(base["jumps"])[-2:])
    assert ways["even"]["places"] == [1, 2]


def test_stacking_repeats_the_last_blocks():
    pupil = pupil_of(3)
    tokens = LESSON.batches("x", 2)[0][0]
    names = [name for name, _ in pupil.model.named_parameters()]
    old = GPT(TINY.width, 5, context=TINY.length)
    state = pupil.model.state_dict()
    state |= {
        name.replace(f"blocks.{k}.", f"blocks.{k + 2}."): state[name]
        for k in (1, 2)
        for name in names
        if name.startswith(f"blocks.{k}.")
    }
    old.load_state_dict(state)
    stacked(pupil, 2)
    torch.testing.assert_close(pupil.model(tokens), old(tokens))
    held = {id(one) for group in pupil.optimizer.param_groups for one in group["params"]}
    assert held == {id(one) for one in pupil.model.parameters()}


def test_the_relative_gain_does_not_see_the_scale_of_the_stream():
    """Doubled throughout, a pre-norm network computes the same: its gains are a quarter."""
    pupil, doubled = pupil_of(), pupil_of()
    with torch.no_grad():
        doubled.model.embed.weight.mul_(2)
        for block in doubled.model.blocks:
            block.attention.branch.out.weight.mul_(2)
            block.feed_forward.branch.down.weight.mul_(2)
    one, other = (looked_at(each, LESSON, 0) for each in (pupil, doubled))
    for first, second in zip(one.signal.points, other.signal.points, strict=True):
        assert second.gain == pytest.approx(first.gain / 4, rel=1e-2)
        assert other.relative(second) == pytest.approx(one.relative(first), rel=1e-2)
    embedded = pupil.model.embed(LESSON.batches("estimate 0", 4)[0][0])
    assert one.squares[0] == pytest.approx(embedded.square().mean().item(), rel=1e-5)
    assert len(stream_squares(pupil, LESSON.batches("x", 2)[0][0])) == 3


def test_a_file_of_records_is_one_of_json(tmp_path, grown):
    for one in grown:
        assert json.loads(json.dumps(one, allow_nan=False)) == one
