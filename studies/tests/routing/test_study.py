"""The routing study: its batches, readings and runs, on tiny networks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite import data
from theodolite.core.examples import take
from theodolite.core.size import Size
from theodolite.fleet.training import train
from theodolite.models import DiT
from theodolite_studies.framework.records import Record, Records
from theodolite_studies.framework.study import report
from theodolite_studies.routing.study import (
    FULL,
    HALVES,
    SMALL,
    STUDY,
    RoutingSetting,
    cells,
    network_of,
    read,
    reading_batch,
    run,
    run_of,
    times_of,
)

pytestmark = pytest.mark.skipif(not data.present("fashion-mnist"), reason="needs Fashion-MNIST")

TINY = dataclasses.replace(
    SMALL,
    size=Size(32, 3),
    base=Size(32, 2),
    exponents=dict.fromkeys(("add", "routed", "time-routed"), (-6.0,)),
    seeds=(0,),
    steps=4,
    warmup=1,
    num=4,
    held_out=4,
    images=2,
    times=2,
)


def test_whatever_is_there_can_be_compared():
    order = [(cell["seed"], cell["residual"], cell["lr"]) for cell in cells(FULL)]
    first = [residual for seed, residual, _ in order if seed == 0]
    assert first == ["add"] * 3 + ["routed"] * 3 + ["time-routed"] * 4
    assert sorted(order, key=lambda one: one[0]) == order
    assert len(set(order)) == len(order) == 5 * len(first)


def test_settings_are_told_apart():
    for setting in (FULL, SMALL):
        assert STUDY.setting_of(json.loads(json.dumps(STUDY.about(setting)))) is setting
    more = dataclasses.replace(FULL, seeds=(0, 1, 2, 3, 4, 5), exponents={"add": (-9.0,)})
    assert STUDY.about(more) == STUDY.about(FULL)


def test_all_times_of_a_reading_have_the_same_images_and_noise():
    network = network_of("add", TINY.num)
    ((x, t, labels), velocity), along = reading_batch(TINY, network)
    num = HALVES * TINY.images
    (given, before, kept), _ = take(network.draw_held_out(TINY.held_out), slice(num))
    images = given + (1 - before)[:, None, None, None] * velocity[:num]
    noise = given - before[:, None, None, None] * velocity[:num]
    for place, time in enumerate(times_of(TINY)):
        rows = slice(place * num, (place + 1) * num)
        assert t[rows].tolist() == pytest.approx([time] * num)
        assert torch.allclose(x[rows], (1 - time) * noise + time * images, atol=1e-5)
        assert torch.equal(labels[rows], kept)
        assert along[rows] == [2 * place, 2 * place, 2 * place + 1, 2 * place + 1]


def _awake(residual: str) -> DiT:
    torch.manual_seed(0)
    model = DiT(32, 2, residual=residual, modulation="random")
    for name, tensor in model.named_parameters():
        if "route." in name:
            torch.nn.init.normal_(tensor, std=0.3)
    return model


def _by_hand(model: DiT, batch) -> dict[str, list[float]]:
    """What hooks see of a forward and a backward pass: the values v_i, and the streams that are read."""
    values, streams, hooks = [], [], []

    def mixed(module, given, made):
        streams.append(made)

    original = type(model.blocks[0].attention)._added
    for block in model.blocks:
        for branch in (block.attention, block.feed_forward):

            def remember(h, condition, branch=branch):
                if branch.route is None:
                    streams.append(h)
                made = original(branch, h, condition)
                made.retain_grad()
                values.append(made)
                return made

            branch._added = remember
            if branch.route is not None:
                hooks.append(branch.route.register_forward_hook(mixed))
    if model.route is not None:
        hooks.append(model.route.register_forward_hook(mixed))
    output = model(*batch[0])
    (output - batch[1]).square().mean().backward()
    if model.route is None:
        streams.append(streams[-1] + values[-1])
    for hook in hooks:
        hook.remove()
    for block in model.blocks:
        del block.attention._added, block.feed_forward._added

    def rms(tensor):
        return tensor.detach().double().square().mean().sqrt().item()

    pairs = list(itertools.pairwise(streams))
    return {
        "start": rms(streams[0]),
        "stream": [rms(one) for one in streams[1:]],
        "added": [rms(one) for one in values],
        "gradient": [rms(one.grad) for one in values],
        "cosine": [torch.cosine_similarity(one, other, dim=-1).mean().item() for one, other in pairs],
    }


@pytest.mark.parametrize("residual", ["add", "routed", "time-routed"])
def test_a_reading_is_what_hooks_see(residual):
    network = network_of(residual, TINY.num)
    batch, along = reading_batch(TINY, network)
    found = read(_awake(residual), network, batch, along, HALVES)
    for place in range(TINY.times):
        for half in range(HALVES):
            rows = [row for row, group in enumerate(along) if group == HALVES * place + half]
            expected = _by_hand(_awake(residual), take(batch, rows))
            for name, values in expected.items():
                assert found[name][half][place] == pytest.approx(values, rel=1e-3), name


def _ran(setting: RoutingSetting, residual: str, lr: float, seed: int = 0) -> Record:
    (record,) = run({"residual": residual, "seed": seed, "lr": lr}, setting, "cpu")
    return record


@pytest.mark.parametrize("residual", ["add", "time-routed"])
def test_networks_come_out_as_the_fleet_trains_them_alone(residual):
    network = network_of(residual, TINY.num)
    low, high = (_ran(TINY, residual, exponent, seed=3) for exponent in (-7.0, -5.0))
    for record, exponent in ((low, -7.0), (high, -5.0)):
        alone = train(run_of(TINY, network, 3, exponent), network)
        assert (record["validation"] + record["test"]) / 2 == pytest.approx(alone.held_out, rel=1e-3)
        assert record["course"] == pytest.approx([loss for _, loss in alone.metrics["loss"]], rel=1e-3)
    assert ("early" in low) == (residual == "add")
    assert low["late"] != high["late"]


def test_early_readings_are_of_the_half_that_late_ones_begin_with():
    setting = dataclasses.replace(TINY, steps=2)  # so small that the second reading is as the first
    record = _ran(setting, "add", -40.0)
    early, late = (np.array(record[name]["stream"]) for name in ("early", "late"))
    assert early == pytest.approx(late[:1], rel=1e-3)
    assert not np.allclose(early, late[1:], rtol=1e-3)


def test_a_network_that_diverges_is_a_result():
    record = _ran(dataclasses.replace(TINY, steps=30), "routed", 60.0)
    assert record["validation"] is None
    assert record["test"] is None
    assert "late" not in record


def test_a_tiny_study_from_end_to_end(tmp_path: Path):
    exponents = dict.fromkeys(TINY.exponents, (-6.0, -5.0))
    setting = dataclasses.replace(TINY, exponents=exponents, steps=2)
    study = dataclasses.replace(STUDY, small=setting)
    records = Records(tmp_path / "records.jsonl", study.about(setting))
    for cell in cells(setting):
        records.append({**cell, **record} for record in run(cell, setting, "cpu"))
    assert len(records.all) == 6
    said = report(study, tmp_path)
    assert "routing lowers the loss at equal tokens" in said
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["losses.svg", "maps.svg"]
