"""The signal against autograd: M is the gradient by what closes a block that is really inserted."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.core.calling import logits
from theodolite.probes import PointSignal, Signal, signal
from theodolite.surgery import InsertionPoints, find_points

from .growable import NETWORKS, batch_for, exactly, loss_for, network

EXAMPLES = 5
BARE = {"experts": 3, "parallel": 3, "encoder": 3, "turned encoder": 3, "Mixtral": 3}
"""Where some output tensors are not held by a module that is called: at so many points."""
BARE_TENSORS = {"self_attn.out_proj.weight", "self_attn.out_proj.bias"}


def gradients(model: nn.Module, name: str, one: PointSignal, points: InsertionPoints) -> dict[str, Tensor]:
    """By output tensor: autograd's gradient of the mean of the examples' losses, with a block inserted at the
    point."""
    inputs, targets = batch_for(name, EXAMPLES)
    grown, proof = th.surgery.insert_block(copy.deepcopy(model), inputs, one.point, points=points)
    assert proof.holds
    grown.eval()
    loss, found = loss_for(name), logits(grown(inputs))
    each = [loss(found[example : example + 1], targets[example : example + 1]) for example in range(EXAMPLES)]
    tensors = dict(grown.named_parameters())
    keys = [key.name for key in one.point.outputs]
    wanted = [tensors[f"{one.name}.{key}"] for key in keys]
    made = torch.autograd.grad(torch.stack(each).mean(), wanted)
    return dict(zip(keys, made, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_directions_are_the_gradient_by_the_output_tensors_of_an_inserted_block(name: str) -> None:
    model, batch = network(name), batch_for(name, EXAMPLES)
    parts = [(batch[0][:3], batch[1][:3]), (batch[0][3:], batch[1][3:])]
    with exactly(name):
        points = find_points(model, batch[0])
        found = signal(model, loss_for(name), parts, batch, points=points)
        assert [one.point for one in found.points] == list(points.found)
        for one in found.points[:2] if name == "pre" else found.points[1:2]:
            expected = gradients(model, name, one, points)
            assert set(one.directions) == set(expected)
            for key, gradient in expected.items():
                apart = (one.directions[key] - gradient).abs().max() / gradient.abs().max()
                assert apart < 1e-10, (one.name, key)
    for one in found.points:
        # Judged by the very examples it is the mean of, without forming the gradient of any.
        assert one.gain == pytest.approx(one.norm**2, rel=1e-9)
        assert sum(one.shares) == pytest.approx(one.gain, rel=1e-9)
        assert one.alignment == pytest.approx(one.gradient**2, rel=1e-9)
    noted = any("is not the weight of a linear map or norm" in note for note in found.notes)
    assert noted == (name in BARE)
    assert any("5 of the 5 held-out examples" in note for note in found.notes)


@pytest.mark.parametrize("name", ["pre", "gated", "peri", "maps", "turned encoder"])
def test_preconditioned_directions_solve_least_squares(name: str) -> None:
    """`M (S + ρI)⁻¹` of the features that a hook sees before the closing module of an inserted block."""
    model, batch = network(name), batch_for(name, EXAMPLES)
    ridge = 0.1
    points = find_points(model, batch[0])
    one = signal(model, loss_for(name), batch, batch, points=points, ridge=ridge).points[1]
    grown, _ = th.surgery.insert_block(copy.deepcopy(model), batch[0], one.point, points=points)
    seen: dict[str, Tensor] = {}
    block = grown.get_submodule(one.name)
    for module_name, module in block.named_modules():
        module.register_forward_hook(lambda module, args, output, at=module_name: seen.update({at: args[0]}))
    with torch.no_grad():
        grown.eval()(batch[0])
    assert set(one.preconditioned_directions) == set(one.directions)
    expected = square = 0.0
    for key, made in one.preconditioned_directions.items():
        mean, prefix = one.directions[key], key.rpartition(".")[0]
        if key in BARE_TENSORS:
            continue
        if key.endswith("bias"):
            solved = mean / (1 + ridge)
        elif "norm_out" in key:
            norm = block.get_submodule(prefix)
            squares = nn.functional.layer_norm(seen[prefix], (seen[prefix].shape[-1],), eps=norm.eps)
            moment = squares.detach().flatten(0, -2).square().mean(0)
            solved = mean / (moment + ridge * moment.mean())
        else:
            rows = seen[prefix].detach()
            rows = nn.functional.unfold(rows, 3, padding=1).transpose(1, 2) if name == "maps" else rows
            rows = rows.flatten(0, -2)
            moment = rows.T @ rows / len(rows)
            moment += ridge * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
            solved = torch.linalg.solve(moment, mean.flatten(1).T).T.view(mean.shape)
        torch.testing.assert_close(made, solved, rtol=1e-8, atol=1e-12)
        expected += float((mean * solved).sum())
        square += float(mean.square().sum())
    for key in BARE_TENSORS & set(one.directions):  # scaled as the others are on average
        mean = one.directions[key]
        solved = expected / square * mean
        torch.testing.assert_close(one.preconditioned_directions[key], solved, rtol=1e-8, atol=1e-12)
    expected += (
        expected
        / square
        * sum(float(one.directions[key].square().sum()) for key in BARE_TENSORS & set(one.directions))
    )
    assert one.preconditioned == pytest.approx(expected, rel=1e-9)


def test_halves_are_estimated_and_judged_by_the_other_half() -> None:
    model, (inputs, targets) = network("pre"), batch_for("pre", 9)
    loss = loss_for("pre")
    batches = [(inputs[:3], targets[:3]), (inputs[3:4], targets[3:4]), (inputs[4:], targets[4:])]
    halved = signal(model, loss, batches)
    first, second = (inputs[:5], targets[:5]), (inputs[5:], targets[5:])
    given = signal(model, loss, first, second)
    assert (halved.estimated_on, halved.judged_on) == (5, 4)
    assert not halved.notes
    for one, other in zip(halved.points, given.points, strict=True):
        assert one.gain == pytest.approx(other.gain)
        assert one.error == pytest.approx(other.error)
        assert one.covariance.trace == pytest.approx(other.covariance.trace)


def test_a_fresh_network_gives_the_candidates_its_weights() -> None:
    model, batch = network("pre"), batch_for("pre", EXAMPLES)
    torch.manual_seed(5)
    fresh = NETWORKS["pre"]().double()
    one = signal(model, loss_for("pre"), batch, batch, fresh=fresh, points=["blocks.1"]).points[0]
    grown, _ = th.surgery.insert_block(copy.deepcopy(model), batch[0], 1, fresh=fresh)
    loss = loss_for("pre")(grown(batch[0]), batch[1])
    key = "feed_forward.branch.down.weight"
    (expected,) = torch.autograd.grad(loss, [grown.get_parameter(f"blocks.1.{key}")])
    torch.testing.assert_close(one.directions[key], expected, rtol=1e-10, atol=1e-14)
    assert all(tensor.requires_grad for tensor in fresh.parameters())


def _with_gains(found: Signal, gains: list[float]) -> Signal:
    points = [
        replace(one, gain=gain, error=1.0, unsure=False)
        for one, gain in zip(found.points, gains, strict=True)
    ]
    return replace(found, points=tuple(points))


def test_no_point_above_its_noise_is_the_deepest() -> None:
    found = signal(network("pre"), loss_for("pre"), batch_for("pre", 40))
    weak, strong = _with_gains(found, [1.0, 2.0, 0.5]), _with_gains(found, [1.0, 2.0, 5.0])
    assert weak.deepest
    assert not weak.above
    assert "no point has a gain above its noise" in str(weak)
    # Below the threshold, Student's density with 19 degrees of freedom has the area 1 − 0.05/3.
    t = torch.linspace(0, strong.threshold, 10_001, dtype=torch.float64)
    scale = math.gamma(10) / (math.gamma(9.5) * math.sqrt(19 * math.pi))
    assert 0.5 + float(torch.trapezoid(scale * (1 + t**2 / 19) ** -10, t)) == pytest.approx(1 - 0.05 / 3)
    assert not strong.deepest
    assert [one.name for one in strong.above] == ["blocks.2"]
    assert [one.name for one in strong.ranked()] == ["blocks.2", "blocks.1", "blocks.0"]
    assert strong.best.name == "blocks.2"
    assert "1 of 3 points (*)" in str(strong)
    assert strong.figure().alt.startswith("The largest gain is at blocks.2")


def test_a_signal_is_read_back(tmp_path: Path) -> None:
    found = signal(network("pre"), loss_for("pre"), batch_for("pre", 4))
    assert Signal.load(found.save(tmp_path / "found.json")) == found
    assert found.save(tmp_path / "found.csv").read_text().splitlines()[1].startswith("blocks.0,")
    assert "Correlations of channels" in found.save(tmp_path / "found.html").read_text()
    assert PointSignal.load(found.best.save(tmp_path / "best.json")) == found.best
    assert str(found.best).startswith(f"{found.best.name}: gain")
