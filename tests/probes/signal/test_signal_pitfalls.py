"""Networks and samples of which a signal could say something false."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.batches import Batch
from theodolite.probes import Signal, signal
from theodolite.surgery import find_points
from theodolite.workloads import next_token_loss

from .growable import Blocks, Branch, batch_for, network


class Normed(nn.Module):
    """`x + W relu(U N x)`, its output times a bare vector if so wanted."""

    def __init__(self, width: int, scaled: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.size = nn.Parameter(torch.ones(width)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + (grown if self.size is None else self.size * grown)


class Classes(nn.Module):
    """Classes of vectors."""

    def __init__(self, bias: float = 0.0, scaled: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Normed(8, scaled) for _ in range(depth))
        self.last.bias.data = torch.tensor([0.0, bias])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x)
        return found


def test_no_gradient_is_no_signal() -> None:
    model, tokens = th.models.GPT(32, 2, vocab=16, context=8), torch.randint(16, (80, 9))
    nn.init.zeros_(model.readout.weight)
    found = signal(model, next_token_loss, (tokens[:, :-1], tokens[:, 1:]))
    assert [(one.gain, one.error, one.significance) for one in found.points] == [(0.0, 0.0, 0.0)] * 3
    assert found.silent
    assert "no gradient reaches any point" in str(found)
    assert "no block helps" not in str(found)
    more = dataclasses.replace(found, left={"blocks.1": "its output is no tensor"}, notes=("an odd batch",))
    assert "left      blocks.1: its output is no tensor\nnote      an odd batch" in str(more)
    for nothing in ("branches  at", "aligned   "):
        assert nothing not in str(more)


@pytest.mark.parametrize(("bias", "judged"), [(-4.5, 16), (-4.5, 64)])
def test_rare_classes_are_seldom_taken_for_a_signal(bias: float, judged: int) -> None:
    """Labels are drawn from what the network itself says, so that M is exactly 0."""
    torch.manual_seed(2)
    model = Classes(bias, depth=1)
    points = find_points(model, torch.randn(2, 4))
    looks = [signal(model, F.cross_entropy, _own(model, 2 * judged), points=points) for _ in range(30)]
    assert sum(not look.deepest for look in looks) <= 3
    seeming = [look for look in looks if any(one.significance > look.threshold for one in look.points)]
    assert len(seeming) > 2, "Student's t alone is misled"
    assert all("seems to be above its noise (?), but" in str(look) for look in seeming if look.deepest)


def test_many_unskewed_products_are_sure() -> None:
    torch.manual_seed(1)
    x = torch.randn(200, 4)
    found = signal(Classes(), F.cross_entropy, (x, (x[:, 0] > 0).long()))
    assert not found.deepest
    assert not found.notes


def _own(model: nn.Module, examples: int) -> Batch:
    x = torch.randn(examples, 4)
    with torch.no_grad():
        return x, torch.distributions.Categorical(logits=model(x)).sample()


def test_classes_that_take_turns_are_in_both_samples() -> None:
    torch.manual_seed(0)
    y = torch.arange(256) % 2
    x = torch.randn(256, 4) + 0.7 * (2 * y[:, None] - 1)
    model = Classes()
    turns = signal(model, F.cross_entropy, (x, y))
    order = torch.randperm(256)
    mixed = signal(model, F.cross_entropy, (x[order], y[order]))
    for one, other in zip(turns.points, mixed.points, strict=True):
        assert abs(one.gain - other.gain) < 4 * math.hypot(one.error, other.error)
        assert one.gain > 0
    apart = signal(model, F.cross_entropy, (x[y == 0], y[y == 0]), (x[y == 1], y[y == 1]))
    assert any("standard errors below zero: do the two samples differ?" in note for note in apart.notes)
    assert not any("below zero" in note for note in turns.notes)


class Read(nn.Module):
    """Attention over positions, of which one is read; positions first if so wanted."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Mixing(turned) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.transpose(0, 1) if self.turned else x
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x[0] if self.turned else x[:, 0])
        return found


class Mixing(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.three, self.out = turned, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x.transpose(0, 1) if self.turned else x).chunk(3, -1)
        mixed = (q @ k.transpose(1, 2)).softmax(-1) @ v
        grown: Tensor = self.out(mixed.transpose(0, 1) if self.turned else mixed)
        return x + grown


def test_positions_are_not_taken_for_units() -> None:
    x = torch.randn(24, 4, 6, dtype=torch.float64)
    y = torch.randint(3, (24,))
    looks = []
    for turned in (False, True):
        torch.manual_seed(0)
        looks.append(signal(Read(turned).double(), F.cross_entropy, [(x[:12], y[:12]), (x[12:], y[12:])]))
    for one, other in zip(looks[0].points, looks[1].points, strict=True):
        for name in ("gain", "error", "preconditioned_error", "alignment"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), (one.name, name)
        assert one.alignment_interval == pytest.approx(other.alignment_interval, rel=1e-9)
        assert one.covariance.trace == pytest.approx(other.covariance.trace, rel=1e-9)


def test_bare_tensors_have_a_preconditioned_direction() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64)
    batch = x, (x[:, 0] > 0).long()
    for one in signal(Classes(scaled=True).double(), F.cross_entropy, batch, batch).points:
        assert set(one.preconditioned_directions) == {key.name for key in one.point.outputs} == {"size"}
        assert one.preconditioned == pytest.approx(one.norm**2, rel=1e-9)
    both = signal(network("parallel"), next_token_loss, *(batch_for("parallel", 8, seed) for seed in (0, 1)))
    true = signal(network("parallel"), next_token_loss, *(batch_for("parallel", 8, 1) for _ in (0, 1)))
    for one, other in zip(both.points, true.points, strict=True):
        assert set(one.preconditioned_directions) == {key.name for key in one.point.outputs}
        # Along exactly these directions, by the gradient of the held-out examples.
        slope = sum(
            float((made * other.directions[name]).sum())
            for name, made in one.preconditioned_directions.items()
        )
        assert one.preconditioned == pytest.approx(slope, rel=1e-9)


class Turned(nn.Module):
    """A stream of images whose branches have their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(self.up(x.permute(0, 2, 3, 1)).tanh())
        return x + grown.permute(0, 3, 1, 2)


def test_channels_are_those_of_the_stream() -> None:
    model = Blocks(Turned, nn.Conv2d(3, 8, 1)).double()
    images = torch.randn(10, 3, 6, 5, dtype=torch.float64)
    targets = torch.randint(16, (10,))
    one = signal(model, F.cross_entropy, (images, targets)).points[2]
    assert one.covariance.channels == 8
    stream = model.blocks[1](model.blocks[0](model.first(images))).detach().requires_grad_()
    loss = F.cross_entropy(model.last(stream.mean((2, 3))), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, stream)
    assert one.covariance.trace == pytest.approx(float(gradient.sum((2, 3)).var(0).sum()), rel=1e-9)


class Experts(nn.Module):
    """Each called on the tokens that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        grown = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            rows = (shares.argmax(-1) == at).nonzero().flatten()
            grown = grown.index_add(0, rows, expert(flat[rows]) * shares[rows, at, None])
        return x + grown.view_as(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(x).tanh())
        return found


@pytest.mark.parametrize("first", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_experts_with_tokens_of_their_own_are_left_to_autograd(first: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = Blocks(Experts, nn.Embedding(16, 8)).double()
    (x, y), (others, answers) = batch_for("pre", 8, seed), batch_for("pre", 6, seed + 10)
    parts = [(x[:first], y[:first])] + ([(x[first:], y[first:])] if first < 8 else [])
    one = signal(model, next_token_loss, parts, (others, answers)).points[1]
    grown, _ = th.surgery.insert_block(copy.deepcopy(model), x, one.point)
    names = [key.name for key in one.point.outputs]
    wanted = [grown.get_parameter(f"{one.name}.{name}") for name in names]

    def gradient(inputs: Tensor, targets: Tensor) -> Tensor:
        made = torch.autograd.grad(next_token_loss(grown(inputs), targets), wanted, materialize_grads=True)
        return torch.cat([part.flatten() for part in made])

    mean = gradient(x, y)
    assert torch.cat([one.directions[name].flatten() for name in names]).allclose(mean, rtol=1e-9, atol=1e-14)
    products = torch.stack(
        [
            mean @ gradient(others[example : example + 1], answers[example : example + 1])
            for example in range(6)
        ]
    )
    assert one.gain == pytest.approx(float(products.mean()), rel=1e-9)
    assert one.error == pytest.approx(float(products.std()) / 6**0.5, rel=1e-9)


def test_a_loss_that_is_not_that_of_its_units_is_told() -> None:
    def skipping(found: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=0)

    torch.manual_seed(0)
    model = Blocks(Branch, nn.Embedding(16, 8))
    x, y = batch_for("pre", 8)
    told = _notes(signal(model, skipping, (x, y.where(torch.arange(8)[:, None] % 6 < torch.arange(1, 7), 0))))
    assert "differs from the loss of the batch" in told
    assert "differs from the loss of the batch" not in _notes(signal(model, next_token_loss, (x, y)))


def _notes(found: Signal) -> str:
    return " ".join(found.notes)


def test_workloads_are_there_at_first_use() -> None:
    assert "workloads" in dir(th)
    assert th._HOMES["workloads"] is None
    assert th.workloads.next_token_loss is next_token_loss
