"""The stream in groups of examples: that of each group alone, with closed forms of a time."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.core.examples import take
from theodolite.probes.stream.along import StreamAlong, _split
from theodolite.probes.stream.stream import stream

from .toy_networks import DIFFUSION, Amplifier, noisy_images, timed_rows

DEPTH = 3


def amplified(t: Tensor, **options: Any) -> StreamAlong:
    torch.manual_seed(0)
    (x, _), targets = timed_rows(0, 0, len(t))
    model = Amplifier(8, DEPTH).double()
    batch = (x.double(), t.double()), targets.double()
    return stream(model, F.mse_loss, batch, along=t, skip=False, **options)


def test_every_group_grows_as_its_time_says() -> None:
    """`(1 + t)^L`, forwards and backwards; f is t times h, and points the same way."""
    found = amplified(torch.tensor([0.5, 2.0, 0.0, 1.0] * 3))
    assert [(group.low, group.examples) for group in found.groups] == [(0, 3), (0.5, 3), (1, 3), (2, 3)]
    for group in found.groups:
        expected = (1 + group.low) ** DEPTH
        assert group.stream.growth.ratio == pytest.approx(expected, rel=1e-12)
        assert group.stream.backward.ratio == pytest.approx(expected, rel=1e-12)
        assert group.stream.branches[-1].share == pytest.approx(group.low, rel=1e-12)
        assert group.cosines == pytest.approx((1.0, 1.0), rel=1e-12)
    assert found.growth_span == pytest.approx((1.0, 27.0), rel=1e-12)
    assert found.gradient_span == pytest.approx((1.0, 27.0), rel=1e-12)
    assert found.values("share")[-1] == pytest.approx((2.0, 2.0, 2.0), rel=1e-12)


@pytest.mark.parametrize("skip", [False, True])
def test_a_group_is_measured_as_if_it_were_the_batch(skip: bool) -> None:
    torch.manual_seed(0)
    model = DIFFUSION.build(32, 2)
    for tensor in model.parameters():
        nn.init.normal_(tensor, std=0.1)
    batch = noisy_images(0, 0, 11)
    found = stream(model, DIFFUSION.loss, batch, along=batch[0][1], groups=3, skip=skip)
    assert [group.examples for group in found.groups] == [4, 3, 4]
    order = batch[0][1].argsort().tolist()
    for chosen, group in zip((order[:4], order[4:7], order[7:]), found.groups, strict=True):
        assert group.stream == stream(model, DIFFUSION.loss, take(batch, sorted(chosen)), skip=skip)
        cosines = [one.cosine for one in group.stream.branches]
        assert group.cosines == (min(cosines), max(cosines))
        assert (group.low, group.high) == (batch[0][1][chosen[0]].item(), batch[0][1][chosen[-1]].item())


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_ranges_of_about_as_many_examples(seed: int) -> None:
    """Without equal numbers they differ by one; with them, equal numbers stay together."""
    draw = random.Random(seed)
    number, groups = draw.randint(12, 60), draw.randint(2, 6)
    distinct = [draw.random() for _ in range(number)]
    sizes = [len(some) for some in _split(distinct, groups)]
    assert len(sizes) == groups
    assert max(sizes) - min(sizes) <= 1
    tied = [float(draw.randint(0, 9)) for _ in range(number)]
    found = _split(tied, groups) if len(set(tied)) > groups else _split([*tied, *tied], groups)
    values = tied if len(set(tied)) > groups else [*tied, *tied]
    assert sorted(index for some in found for index in some) == list(range(len(values)))
    assert min(map(len, found)) >= 2
    for before, after in pairwise(found):
        assert max(values[index] for index in before) < min(values[index] for index in after)


def test_an_example_that_would_be_alone_joins_its_neighbours() -> None:
    """Between many equal numbers, one other number is the middle of a group of its own."""
    values = [0.0] * 10 + [1.0] + [2.0] * 10 + [3.0] + [4.0] * 10 + [5.0]
    assert [len(some) for some in _split(values, 5)] == [11, 11, 11]


def test_few_examples_make_fewer_groups() -> None:
    assert [len(some) for some in _split([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 6)] == [2, 3, 2]


def test_equal_numbers_are_one_group_and_said_so() -> None:
    found = amplified(torch.full((4,), 0.25))
    assert [group.examples for group in found.groups] == [4]
    assert "all 4 numbers are 0.25, so there is one group" in str(found)


@pytest.mark.parametrize(
    "along, groups, message",
    [
        (torch.zeros(3), 6, r"along has the shape \(3,\), but the batch has 4 examples: give one number"),
        (torch.zeros(4, 1), 6, r"along has the shape \(4, 1\)"),
        ([0.0, 1.0, float("nan"), 1.0], 6, "along is nan for example 2: give finite numbers"),
        ([0.0, 0.0, float("inf"), 1.0], 6, "along is inf for example 2"),
        (["a", "b", "c", "d"], 6, r"along is a list of 4 \(str, str, str, str\): give one number"),
        (torch.zeros(4, dtype=torch.complex64), 6, "along is a tensor of shape"),
        ([0.0, 0.0, 1.0, 2.0], 6, "only 1 example of the batch has the number 1: .* groups=1"),
        (torch.zeros(4), 0, "groups is 0: give an integer, at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(along: Any, groups: int, message: str) -> None:
    batch = timed_rows(0, 0, 4)
    with pytest.raises(UseError, match=message):
        stream(Amplifier(8, 2), F.mse_loss, batch, along=along, groups=groups)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    tokens = torch.randint(16, (4, 8))
    model = th.models.GPT(64, 2, vocab=16)

    def flat_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)

    with pytest.raises(
        UseError, match=r"the targets have a tensor of shape \(32,\) and the inputs 4 examples"
    ):
        stream(model, flat_loss, (tokens, tokens.flatten()), along=[0, 0, 1, 1])
    with pytest.raises(UseError, match="the batch has 1 example: give at least 2"):
        stream(Amplifier(8, 2), F.mse_loss, timed_rows(0, 0, 1), along=[0.0])
    layout = stream(Amplifier(8, 2), F.mse_loss, timed_rows(0, 0, 4)).layout
    with pytest.raises(UseError, match="layout is given together with along"):
        stream(Amplifier(8, 2), F.mse_loss, timed_rows(0, 0, 4), along=[0, 0, 1, 1], layout=layout)


class Named(nn.Module):
    """Inputs by name, one of which is not one of the examples'."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, rows: Tensor, shift: Tensor) -> Tensor:
        x = self.enter(rows) + shift
        return self.leave(x + torch.tanh(self.block(x)))


def test_inputs_may_be_named_and_shared_ones_stay_whole() -> None:
    rows, shift = torch.randn(6, 4), torch.randn(8)
    batch = {"rows": rows, "shift": shift}, torch.randn(6, 1)
    found = stream(Named(), F.mse_loss, batch, along=torch.tensor([0, 1, 0, 1, 0, 1]))
    assert [group.examples for group in found.groups] == [3, 3]


def test_it_is_saved_loaded_and_drawn(tmp_path: Path) -> None:
    found = amplified(torch.linspace(0, 1, 12), groups=3)
    loaded = StreamAlong.load(found.save(tmp_path / "along.json"))
    assert loaded == found
    assert str(loaded) == str(found)
    lines = found.save(tmp_path / "along.csv").read_text().splitlines()
    assert lines[0] == "number,examples,loss,stream,gradient,f/h,least cosine,largest cosine"
    assert len(lines) == 4
    assert "RMS of the stream" in found.save(tmp_path / "along.html").read_text()
    shown = found.figure(("stream", "cosine"))
    assert [panel.title for panel in shown.panels] == ["RMS of the stream", "Cosine of neighbours"]
    (drawn,) = shown.panels[0].data
    assert (len(drawn["x"]), len(drawn["y"])) == (3, DEPTH)
    assert drawn["z"][-1][-1] == pytest.approx(torch.tensor(found.values("stream")[-1][-1]).log10().item())


def test_ranges_that_are_close_have_labels_of_their_own() -> None:
    (drawn, *_) = (
        panel.data[0] for panel in amplified(1000 + 1e-3 * torch.arange(12), groups=3).figure().panels
    )
    assert len(set(drawn["x"])) == 3


def test_the_network_and_the_random_state_are_left_alone() -> None:
    model = Amplifier(8, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    stream(model, F.mse_loss, timed_rows(0, 0), along=timed_rows(0, 0)[0][1])
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_groups_without_a_gradient_are_named() -> None:
    batch = noisy_images(0, 0, 8)
    found = str(stream(DIFFUSION.build(32, 2), DIFFUSION.loss, batch, along=[0] * 4 + [1] * 4, skip=False))
    assert "nan" not in found
    assert "number 0 and 1: gradient, no gradient yet" in found.replace("\n  ", " ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    model, batch = Amplifier(8, DEPTH), timed_rows(0, 0)
    plain = stream(model, F.mse_loss, batch, along=batch[0][1])
    found = stream(model.cuda(), F.mse_loss, batch, along=batch[0][1].cuda())
    for one, other in zip(found.groups, plain.groups, strict=True):
        assert (one.low, one.high, one.examples) == (other.low, other.high, other.examples)
        assert one.stream.growth.ratio == pytest.approx(other.stream.growth.ratio, rel=1e-3)
