"""Scale vectors as preconditioners: against explicit matrices and against real steps, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.probes.gains.preconditioning import preconditioning
from theodolite.probes.gains.scale_vectors import amplification
from theodolite.surgery.converting import convert
from theodolite.workloads import next_token_loss

CONVERSIONS = {
    "plain": None,
    "heterogeneous": {"heterogeneous": True, "placement": "input", "reparameterization": None},
    "both": {"heterogeneous": False, "placement": "both", "reparameterization": None},
    "direction": {"heterogeneous": False, "placement": "input", "reparameterization": "direction"},
    "all": {},
}


class Shared(nn.Module):
    """Two maps read one norm; a nonlinearity joins them."""

    def __init__(self, shift=False):
        super().__init__()
        self.norm = nn.LayerNorm(4) if shift else nn.RMSNorm(4)
        self.left, self.right = nn.Linear(4, 3, bias=shift), nn.Linear(4, 3, bias=shift)

    def forward(self, x):
        normed = self.norm(x)
        return torch.tanh(self.left(normed)) * self.right(normed)


def shared(**options):
    model = Shared(**options).double()
    for tensor in model.norm.parameters():
        nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def batch_of(model):
    x = torch.randn(16, 4, dtype=torch.float64)
    return x, model(x).detach() + torch.randn(16, 3, dtype=torch.float64)


def explicit_gradients(model, batch):
    """G of both maps, by the chain rule written out: y = A n (+ what the shift adds)."""
    x, target = batch
    normed = F.layer_norm(x, (4,)) if isinstance(model.norm, nn.LayerNorm) else F.rms_norm(x, (4,))
    matrices = [
        (one.weight * model.norm.weight).detach().requires_grad_() for one in (model.left, model.right)
    ]
    outputs = [normed @ matrix.T for matrix in matrices]
    if isinstance(model.norm, nn.LayerNorm):
        outputs = [
            out + one.weight @ model.norm.bias + one.bias
            for out, one in zip(outputs, (model.left, model.right), strict=True)
        ]
    loss = F.mse_loss(torch.tanh(outputs[0]) * outputs[1], target)
    return torch.autograd.grad(loss, matrices)


@pytest.mark.parametrize("shift", [False, True])
def test_moves_are_those_of_the_explicit_preconditioner(shift):
    model = shared(shift=shift)
    batch = batch_of(model)
    found = preconditioning(model, F.mse_loss, batch)
    gamma = model.norm.weight.detach()
    weights = [one.weight.detach() for one in (model.left, model.right)]
    gradients = explicit_gradients(model, batch)
    together = sum((weight * gradient).sum(0) for weight, gradient in zip(weights, gradients, strict=True))
    F.mse_loss(model(batch[0]), batch[1]).backward()
    falls = 0.0
    for row, one, weight, gradient in zip(
        found.maps, (model.left, model.right), weights, gradients, strict=True
    ):
        move = gradient * gamma**2 + weight * together
        if shift:  # of which W reads a part too
            move += torch.outer(one.bias.grad, model.norm.bias.detach()) * gamma
        assert row.move == pytest.approx((move.norm() / gradient.norm()).item(), rel=1e-10)
        fall = (gradient * move).sum() / gradient.square().sum()
        assert row.fall == pytest.approx(fall.item(), rel=1e-10)
        falls += (gradient * move).sum()
    squares = sum(gradient.square().sum() for gradient in gradients)
    assert found.fall == pytest.approx((falls / squares).item(), rel=1e-10)
    assert [row.weight for row in found.maps] == ["left.weight", "right.weight"]


def test_one_map_has_the_eigenvalues_of_its_columns():
    """P_j = γ_j²I + w_j w_jᵀ as a matrix: its spectrum, and its product with the gradient's column."""
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 3, bias=False)).double()
    nn.init.uniform_(model[0].weight, 0.5, 1.5)
    x, target = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)
    found = preconditioning(model, F.mse_loss, (x, target))
    gamma, weight = model[0].weight.detach(), model[1].weight.detach()
    gradient = 2 / 48 * (model(x).detach() - target).T @ F.rms_norm(x, (4,))
    columns = []
    for j in range(4):
        matrix = gamma[j] ** 2 * torch.eye(3, dtype=torch.float64) + torch.outer(weight[:, j], weight[:, j])
        values = torch.linalg.eigvalsh(matrix)
        assert found.vectors[0].speeds[j].item() == pytest.approx(values[-1].item(), rel=1e-12)
        assert found.vectors[0].gain_squares[j].item() == pytest.approx(values[0].item(), rel=1e-12)
        columns.append(matrix @ gradient[:, j])
    move = torch.stack(columns, 1)
    assert found.maps[0].move == pytest.approx((move.norm() / gradient.norm()).item(), rel=1e-10)
    torch.testing.assert_close(found.vectors[0].balance, gamma**2 - weight.square().sum(0))


def test_maps_that_share_a_gain_share_what_is_conserved():
    model = shared()
    (vector,) = preconditioning(model, F.mse_loss, batch_of(model)).vectors
    assert vector.maps == ("left.weight", "right.weight")
    squares = model.left.weight.square().sum(0) + model.right.weight.square().sum(0)
    torch.testing.assert_close(vector.weight_squares, squares.detach())


def gpt(conversion, **options):
    """A GPT in float64 whose gains are not one."""
    model = th.models.GPT(32, 1, vocab=32, head_dim=16, gated=True, **options).double()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(tensor, 0.5, 1.5)
    tokens = torch.randint(32, (2, 9))
    batch = tokens[:, :-1], tokens[:, 1:]
    if CONVERSIONS[conversion] is not None:
        convert(model, batch[0], **CONVERSIONS[conversion])
        for name, tensor in model.named_parameters():
            if "outputs" in name or "inputs" in name or "magnitude" in name:
                with torch.no_grad():
                    tensor.mul_(torch.empty_like(tensor).uniform_(0.8, 1.2))
    return model, batch


def effective(model):
    """A of every map that reads a norm, by hand."""
    block = model.blocks[0]
    attention, feed_forward = block.attention, block.feed_forward
    maps = {
        "blocks.0.attention.branch.query.weight": (attention.branch.query, attention.norm_in),
        "blocks.0.attention.branch.key.weight": (attention.branch.key, attention.norm_in),
        "blocks.0.attention.branch.value.weight": (attention.branch.value, attention.norm_in),
        "blocks.0.feed_forward.branch.gate.weight": (feed_forward.branch.gate, feed_forward.norm_in),
        "blocks.0.feed_forward.branch.up.weight": (feed_forward.branch.up, feed_forward.norm_in),
        "readout.weight": (model.readout, model.norm),
    }
    return {name: (one.weight * norm.weight).detach() for name, (one, norm) in maps.items()}


def plain_gradients(model, batch):
    """G, by a plain network whose weights are the effective matrices and whose gains are one."""
    plain = th.models.GPT(32, 1, vocab=32, head_dim=16, gated=True).double()
    own = dict(plain.named_parameters())
    values = {name: tensor for name, tensor in model.state_dict().items() if name in own}
    plain.load_state_dict({**plain.state_dict(), **values})
    with torch.no_grad():
        for name, tensor in own.items():
            if "norm" in name:
                tensor.fill_(1.0)
        for name, matrix in effective(model).items():
            own[name].copy_(matrix)
    loss = next_token_loss(plain(batch[0]), batch[1])
    loss.backward()
    return {name: own[name].grad for name in effective(model)}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_real_small_step_moves_the_maps_as_was_said(conversion):
    model, batch = gpt(conversion)
    found = {row.weight: row for row in preconditioning(model, next_token_loss, batch).maps}
    gradients = plain_gradients(model, batch)
    stepped, length = copy.deepcopy(model), 1e-6
    next_token_loss(stepped(batch[0]), batch[1]).backward()
    before = effective(model)
    with torch.no_grad():
        for tensor in stepped.parameters():
            tensor -= length * tensor.grad
    after = effective(stepped)
    assert found.keys() == before.keys()
    for name, row in found.items():
        move = (before[name] - after[name]) / length
        gradient = gradients[name]
        assert row.move == pytest.approx((move.norm() / gradient.norm()).item(), rel=1e-4)
        assert row.fall == pytest.approx(((move * gradient).sum() / gradient.square().sum()).item(), rel=1e-4)


@pytest.mark.parametrize("conversion", ["plain", "all"])
def test_an_optimizers_step_is_the_one_it_makes(conversion):
    model, batch = gpt(conversion)

    def made(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1)

    found = preconditioning(model, next_token_loss, batch, optimizer=made(model))
    stepped, alone = copy.deepcopy(model), copy.deepcopy(model)
    for one in (stepped, alone):
        next_token_loss(one(batch[0]), batch[1]).backward()
        named = dict(one.named_parameters())
        vectors = {name: tensor.detach().clone() for name, tensor in named.items() if tensor.dim() == 1}
        made(one).step()
        if one is alone:
            with torch.no_grad():
                for name, before in vectors.items():
                    named[name].copy_(before)
    before, after, by_weight = effective(model), effective(stepped), effective(alone)
    for row in found.maps:
        size = before[row.weight].norm()
        whole = ((after[row.weight] - before[row.weight]).norm() / size).item()
        part = ((by_weight[row.weight] - before[row.weight]).norm() / size).item()
        assert row.step == pytest.approx(whole, rel=1e-3)
        assert row.step_by_weight == pytest.approx(part, rel=1e-3)


@pytest.mark.parametrize("conversion", ["plain", "all"])
def test_nothing_is_left_behind(conversion):
    model, batch = gpt(conversion)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    next_token_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: (tensor.grad, tensor.grad.clone()) for name, tensor in model.named_parameters()}
    modules = [(module, type(module), module.training) for module in model.modules()]
    moments = copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    preconditioning(model, next_token_loss, batch, optimizer=optimizer)
    amplification(model, batch[0]).record(0)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for name, tensor in model.named_parameters():
        assert tensor.grad is gradients[name][0]
        assert torch.equal(tensor.grad, gradients[name][1])
    assert [(module, type(module), module.training) for module in model.modules()] == modules
    assert not any(module._forward_hooks for module in model.modules())
    for key, value in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value[name], moments["state"][key][name]) for name in value)
    assert torch.equal(torch.get_rng_state(), random)


def test_columns_are_those_of_the_weight_itself_whatever_is_on_its_output_side():
    model, batch = gpt("all")
    by_name = {vector.name: vector for vector in preconditioning(model, next_token_loss, batch).vectors}
    held = model.readout.parametrizations.weight
    torch.testing.assert_close(
        by_name["readout.weight"].weight_squares, held.original.detach().square().sum(0)
    )
    torch.testing.assert_close(
        by_name["readout.weight"].gain_squares, held[0].inputs[0]().detach().square(), check_stride=False
    )


def test_what_cannot_be_read_is_said():
    bare = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x, target = torch.randn(3, 4), torch.randn(3, 2)
    with pytest.raises(UseError, match="Sequential has no scale vector to measure"):
        preconditioning(bare, F.mse_loss, (x, target))
    model = shared().float()
    with pytest.raises(UseError, match="give a pair"):
        preconditioning(model, F.mse_loss, x)
    with pytest.raises(UseError, match="it has to be one finite number"):
        preconditioning(model, lambda logits, _: logits.sum(0), (x, x))


@pytest.mark.parametrize("shift", [False, True])
def test_a_gain_of_zero_is_read(shift):
    """Nothing is divided by it."""
    model = shared(shift=shift)
    with torch.no_grad():
        model.norm.weight[1] = 0.0
    batch = batch_of(model)
    gradient, _ = explicit_gradients(model, batch)
    found = preconditioning(model, F.mse_loss, batch)
    F.mse_loss(model(batch[0]), batch[1]).backward()
    move = model.left.weight.grad * model.norm.weight + model.left.weight * model.norm.weight.grad
    assert found.maps[0].move == pytest.approx((move.norm() / gradient.norm()).item(), rel=1e-10)
