"""Scale vectors and their columns in unusual networks, and during training against gradient flow."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from theodolite.core.errors import UseError
from theodolite.probes.gains.preconditioning import preconditioning
from theodolite.probes.gains.scale_vectors import amplification
from theodolite.surgery.converting import convert


class Fused(nn.Module):
    """GPT-2's way: one weight for q, k and v, stored (in, out); experts in one tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.fused = nn.Parameter(torch.randn(4, 9) / 2)
        self.experts = nn.Parameter(torch.randn(2, 3, 4) / 2)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (normed @ self.fused).split(3, -1)
        mixed = torch.bmm(normed.expand(2, *normed.shape), self.experts.mT).sum(0)
        return torch.softmax(q @ k.T, -1) @ v + torch.tanh(mixed)


@pytest.mark.parametrize("converted", [False, True])
def test_fused_rows_and_experts_are_read_by_their_columns(converted):
    model = Fused().double()
    nn.init.uniform_(model.norm.weight, 0.5, 1.5)
    x, target = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    weight, experts, gamma = (
        each.detach().clone() for each in (model.fused, model.experts, model.norm.weight)
    )
    if converted:
        convert(model, x, placement="input", reparameterization=None)
    found = preconditioning(model, F.mse_loss, (x, target)).vectors
    blocks = [weight[:, start : start + 3].square().sum(1) for start in (0, 3, 6)]
    if converted:
        by_name = {vector.name: vector for vector in found}
        for place, block in enumerate(blocks):
            torch.testing.assert_close(by_name[f"fused[{place}]"].weight_squares, block)
            torch.testing.assert_close(by_name[f"fused[{place}]"].gain_squares, gamma**2)
        torch.testing.assert_close(by_name["experts"].weight_squares, experts.square().sum(1))
    else:
        (vector,) = found
        torch.testing.assert_close(vector.weight_squares, sum(blocks) + experts.square().sum((0, 1)))


def two_maps():
    torch.manual_seed(0)
    layers = [nn.RMSNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    for norm in (model[0], model[3]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


BATCH = torch.randn(16, 4).double(), torch.randn(16, 2).double()


def test_a_frozen_map_does_not_move_and_the_others_do_as_before():
    whole = preconditioning(two_maps(), F.mse_loss, BATCH)
    model = two_maps()
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = preconditioning(model, F.mse_loss, BATCH, optimizer=optimizer)
    assert (found.maps[0].move, found.maps[0].fall, found.maps[0].step) == (0.0, 0.0, 0.0)
    assert found.maps[1].move == pytest.approx(whole.maps[1].move, rel=1e-12)
    assert found.maps[1].step > found.maps[1].step_by_weight > 0
    assert [bool(one.obstacle) for one in found.vectors] == [True, False]
    assert "– for 1 of 2 scale vectors: the gain or a weight is frozen." in str(found)
    assert preconditioning(model.requires_grad_(False), F.mse_loss, BATCH).fall == 0.0


def test_behind_a_frozen_gain_a_map_learns_by_its_square():
    model = two_maps()
    model[3].weight.requires_grad_(False)
    gamma = model[3].weight.detach()
    found = preconditioning(model, F.mse_loss, BATCH)
    hidden = F.rms_norm(model[:3](BATCH[0]), (4,)).detach()
    gradient = 2 / 32 * (model(BATCH[0]).detach() - BATCH[1]).T @ hidden
    move = (gradient * gamma**2).norm() / gradient.norm()
    assert found.maps[1].move == pytest.approx(move.item(), rel=1e-10)
    assert found.vectors[1].speeds.isnan().all()  # γ² + ‖w‖² is no eigenvalue of it


@pytest.mark.parametrize(
    "conversion, lawful",
    [
        ({"placement": "input", "reparameterization": None}, True),
        ({"placement": "input", "reparameterization": "direction"}, False),
        ({"heterogeneous": False, "placement": "input"}, False),
        ({"reparameterization": None}, False),
        ({}, False),
    ],
)
def test_nothing_is_foretold_of_vectors_for_which_the_law_is_another(conversion, lawful):
    """Plain gradient descent with small steps: where a flow is given, it is what happens."""
    model = convert(two_maps(), BATCH[0], **conversion)
    record = amplification(model, BATCH[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(101):
        if step % 100 == 0:
            record.record(step)
        optimizer.zero_grad()
        F.mse_loss(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    (last,) = [row for row in record.curve(record.vectors[-1]) if row.step == 100]
    found = preconditioning(model, F.mse_loss, BATCH)
    if lawful:
        assert last.speed == pytest.approx(last.flow, rel=1e-3)
    assert torch.tensor([last.speed, last.flow, last.balance]).isnan().tolist() == [not lawful] * 3
    for said in (str(found), str(record)):
        assert ("– for 2 of 2 scale vectors" in said) is not lawful
        assert "nan" not in said


class Counting(nn.Module):
    """Counts in a buffer how often it was called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args):
        self.calls += 1
        return self.inner(*args)


def test_buffers_of_the_model_and_of_the_loss_stay():
    model, loss = Counting(two_maps()), Counting(F.mse_loss)
    preconditioning(model, loss, BATCH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert (model.calls.item(), loss.calls.item()) == (0, 0)


def test_inference_mode_around_it_changes_nothing():
    expected = preconditioning(two_maps(), F.mse_loss, BATCH).fall
    model = two_maps()
    with torch.inference_mode():
        inside = BATCH[0].clone(), BATCH[1].clone()
        assert preconditioning(model, F.mse_loss, inside).fall == expected
        amplification(model, inside[0]).record(0)


def test_growth_is_the_flows_under_small_steps_and_departs_from_it_under_decay():
    x = torch.randn(64, 4, dtype=torch.float64)
    record = {}
    for decay in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4, bias=False)).double()
        record[decay] = amplification(model, x)
        optimizer = torch.optim.SGD(
            [{"params": model[1].parameters(), "weight_decay": decay}, {"params": model[0].parameters()}],
            lr=1e-3,
        )
        for step in range(301):
            if step % 100 == 0:
                record[decay].record(step)
            optimizer.zero_grad()
            (model(x) - 3 * x).square().sum(1).mean().backward()
            optimizer.step()
    free, decayed = record[0.0].curve("0.weight"), record[1.0].curve("0.weight")
    assert [row.step for row in free] == [0, 100, 200, 300]
    assert free[-1].speed > 1.5 * free[0].speed
    assert free[-1].balance == pytest.approx(free[0].balance, abs=0.02)
    assert free[-1].speed == pytest.approx(free[-1].flow, rel=1e-3)
    assert free[0].speed == pytest.approx(free[0].gain + free[0].weight)
    assert decayed[-1].balance > decayed[0].balance + 0.1


def test_what_cannot_be_looked_at_is_said():
    model, x = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), torch.randn(3, 4)
    record = amplification(model, x)
    record.record(5)
    with pytest.raises(UseError, match="step is 5, and the last record was at 5: steps go up"):
        record.record(5)
    with pytest.raises(UseError, match="there is no record of a vector 'gain': there are"):
        record.curve("gain")
