"""Models, losses and batches that a fast way of measuring could get wrong without a word.

Each is compared with finite differences in float64. What is not measured right has to be refused.
"""

from __future__ import annotations

import copy
import random
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from theodolite import UseError, probes
from theodolite.core.calling import OutputLoss
from theodolite.probes.curvature.directions import draw

from .explicit import apart, explicit
from .networks import Case

DIRECTIONS = 5
NUM, FEATURES, WIDTH, CLASSES = 6, 4, 5, 3
CE = F.cross_entropy
PARTS = ("hessian", "gauss_newton", "residual")


class Net(nn.Module):
    """`forward(net, inputs)` over the modules and parameters given by name."""

    def __init__(self, forward, **members):
        super().__init__()
        self.way = forward
        for name, member in members.items():
            setattr(self, name, member)
        self.double()

    def forward(self, *inputs):
        return self.way(self, *inputs)


def vectors(num=NUM, features=FEATURES):
    return torch.randn(num, features).double(), torch.arange(num) % CLASSES


def perceptron(**members):
    return {"first": nn.Linear(FEATURES, WIDTH), "last": nn.Linear(WIDTH, CLASSES), **members}


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def plain():
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


def rays(model, num=DIRECTIONS):
    """R (P × d), as they are drawn for this model."""
    shapes = {name: value.shape for name, value in model.named_parameters() if value.requires_grad}
    return draw(shapes, num, dtype=torch.float64).matrix


def measured(model, loss, batch, **options):
    return probes.curvature(model, loss, batch, directions=DIRECTIONS, **options)


def check(reading, truth, model):
    """All three matrices are those of the explicit Hessian, and a trace that is called exact is exact."""
    R = rays(model)
    scale = R.T @ truth.hessian @ R
    for part in PARTS:
        projection, matrix = getattr(reading, part), getattr(truth, part)
        assert apart(projection.matrix, R.T @ matrix @ R, scale) < 1e-6, part
        if projection.trace.exact:
            assert projection.trace.value == pytest.approx(
                matrix.trace().item(), abs=1e-6 * truth.hessian.norm().item()
            ), part


# Traces that are called exact


def centred(net, x):
    hidden = net.first(x)
    return net.last(torch.relu(hidden - hidden.mean(0)))


def rolled(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(hidden + 0.5 * hidden.roll(1, 0))


def summed(net, x):
    return net.last(torch.relu(net.first(x)).cumsum(0))


def over_a_graph(net, x):
    """The nodes of one graph are the rows of the batch."""
    return net.edges @ net.last(torch.relu(net.edges @ net.first(x)))


def edges():
    linked = (torch.rand(NUM, NUM) < 0.4).double() + torch.eye(NUM).double()
    return nn.Buffer(linked / linked.sum(1, keepdim=True))


MIXED = {
    "centred": lambda: Net(centred, **perceptron()),
    "rolled": lambda: Net(rolled, **perceptron()),
    "summed": lambda: Net(summed, **perceptron()),
    "graph": lambda: Net(over_a_graph, **perceptron(edges=edges())),
}


@pytest.mark.parametrize("name", MIXED)
def test_no_exact_trace_is_claimed_where_examples_depend_on_each_other(name):
    model, batch = MIXED[name](), vectors()
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


def test_one_example_that_depends_on_one_other_is_enough():
    """Wherever the two are in the batch, and whichever of them it is."""
    model, batch = Net(over_a_graph, **perceptron(edges=edges())), vectors()
    for one in range(NUM):
        for other in set(range(NUM)) - {one}:
            model.edges = torch.eye(NUM).double()
            model.edges[one, other] = 0.7
            found = measured(model, CE, batch).trace
            if found.exact:
                operator = probes.hessian(model, CE, batch)
                truth = (operator @ torch.eye(operator.size).double()).trace().item()
                assert found.value == pytest.approx(truth, rel=1e-9), (one, other)


TWICE = {
    "transposed": lambda net, x: F.linear(x, net.W) + F.linear(x.flip(1), net.W.T),
    "joined": lambda net, x: F.linear(x, net.W) + F.linear(x.flip(1), torch.cat([net.W])),
    # One parameter is what is multiplied, another what it is multiplied by.
    "as an input": lambda net, x: F.linear(net.X, net.W) + 0 * x,
    "as an input of a layer": lambda net, x: net.last(torch.relu(F.linear(net.X, net.W))) + 0 * x,
}


@pytest.mark.parametrize("name", TWICE)
def test_no_exact_trace_is_claimed_where_a_parameter_is_used_in_another_way_too(name):
    members = {"W": weight(CLASSES, CLASSES)}
    if "input" in name:
        members["X"] = weight(NUM, CLASSES)
    if "layer" in name:
        members["last"] = nn.Linear(CLASSES, CLASSES)
    model, batch = Net(TWICE[name], **members), vectors(features=CLASSES)
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


# Where the derivative that everything is checked with is zero


def padded():
    def forward(net, x):
        return net.last(F.pad(net.first(x), (1, 1), value=2.0))

    return Net(forward, first=nn.Linear(FEATURES, WIDTH), last=nn.Linear(WIDTH + 2, CLASSES))


def test_mean_square_at_zero_residual():
    model, (inputs, _) = padded(), vectors()
    batch = inputs, model(inputs).detach()
    check(measured(model, F.mse_loss, batch), explicit(Case(model, F.mse_loss, batch)), model)


def test_a_temperature_at_which_nothing_is_left_does_not_vouch_for_the_next():
    model, (inputs, _) = padded(), vectors()
    batch = inputs, model(inputs).argmax(-1)
    cold, warm = probes.along_temperature(model, CE, batch, [1e-4, 1.0], directions=DIRECTIONS)
    for reading, temperature in ((cold, 1e-4), (warm, 1.0)):
        alone = measured(model, CE, batch, temperature=temperature)
        for part in PARTS:
            found, expected = getattr(reading, part).matrix, getattr(alone, part).matrix
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12 * expected.abs().max().item()), part
    check(warm, explicit(Case(model, CE, batch)), model)


@pytest.mark.parametrize("reduce", [torch.mean, lambda outputs: outputs.square().mean()])
def test_a_loss_of_the_outputs_has_no_dimension(reduce):
    """The tangents of the loss itself are then a vector, one number for each direction."""
    model, batch = (
        nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).double(),
        vectors(),
    )
    loss = OutputLoss(lambda outputs, targets: reduce(outputs))
    found = measured(model, loss, batch)
    assert found.route == "tangents"
    R = draw(probes.hessian(model, loss, batch).shapes, DIRECTIONS, dtype=torch.float64).matrix
    expected = R.mT @ (probes.hessian(model, loss, batch) @ R)
    assert torch.allclose(found.hessian.matrix, expected, rtol=1e-9, atol=1e-12)


# Batches that are taken apart


def test_a_branch_of_batch_norm_that_begins_at_zero(monkeypatch):
    """It does not show in the logits that examples depend on each other."""

    def forward(net, x):
        hidden = torch.tanh(net.first(x))
        return net.last(hidden + net.norm(net.branch(hidden)))

    branch = {"branch": nn.Linear(WIDTH, WIDTH, bias=False), "norm": nn.BatchNorm1d(WIDTH)}
    nn.init.zeros_(branch["norm"].weight)
    model, batch = Net(forward, **perceptron(**branch)), vectors()
    monkeypatch.setattr(import_module("theodolite.probes.curvature.fan"), "CACHED_BYTES", 1)
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


def test_a_gate_on_the_mean_over_the_batch_that_begins_at_zero(monkeypatch):
    def forward(net, x):
        hidden = torch.tanh(net.first(x))
        return net.last(hidden + net.gate * hidden.mean(0))

    model, batch = Net(forward, **perceptron(gate=nn.Parameter(torch.zeros(WIDTH)))), vectors()
    monkeypatch.setattr(import_module("theodolite.probes.curvature.fan"), "CACHED_BYTES", 1)
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


def test_a_number_of_examples_that_is_written_into_the_model(monkeypatch):
    def forward(net, x):
        return net.last(torch.tanh(net.first(x).view(NUM, WIDTH)))

    model, batch = Net(forward, **perceptron()), vectors()
    monkeypatch.setattr(import_module("theodolite.probes.curvature.fan"), "CACHED_BYTES", 1)
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


# Parameters that autograd sees in part


def bags():
    return torch.tensor([[0, 1, 2], [3, 0, 1], [2, 2, 0], [1, 3, 3], [0, 0, 2], [1, 2, 3]])


def test_the_row_for_padding_is_no_parameter():
    def forward(net, tokens):
        return net.last(torch.tanh(net.embed(tokens).sum(1)))

    model = Net(forward, embed=nn.Embedding(4, 4, padding_idx=0), last=nn.Linear(4, CLASSES))
    nn.init.normal_(model.embed.weight)
    batch = bags(), torch.arange(NUM) % CLASSES
    truth = explicit(Case(model, CE, batch))
    for matrix in (truth.hessian, truth.gauss_newton):
        matrix[:4] = 0
        matrix[:, :4] = 0
    check(measured(model, CE, batch), truth, model)
    R, operator = rays(model), probes.hessian(model, CE, batch)
    assert apart(R.T @ (operator @ R), R.T @ truth.hessian @ R) < 1e-6


def test_what_is_computed_without_a_gradient_is_a_constant():
    """Attention by weights that no gradient goes through."""

    def forward(net, x):
        hidden = net.first(x)
        with torch.no_grad():
            shares = torch.softmax(hidden, -1)
        return net.last(hidden * shares)

    def frozen(net, x):
        return net.last(net.first(x) * net.shares)

    model, batch = Net(forward, **perceptron()), vectors()
    same = Net(frozen, first=model.first, last=model.last)
    same.shares = torch.softmax(model.first(batch[0]), -1).detach()
    check(measured(model, CE, batch), explicit(Case(same, CE, batch)), model)


def test_an_embedding_that_shrinks_its_own_weights_is_refused():
    def forward(net, tokens):
        return net.last(torch.tanh(net.embed(tokens).sum(1)))

    model = Net(forward, embed=nn.Embedding(4, 4, max_norm=0.5), last=nn.Linear(4, CLASSES))
    batch = bags(), torch.arange(NUM) % CLASSES
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UseError, match="max_norm"):
        probes.hessian(model, CE, batch).gradient  # noqa: B018
    with pytest.raises(UseError, match="max_norm"):
        measured(model, CE, batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


# Eigenvalues


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_smallest_eigenvalues_of_a_matrix_of_low_rank(dtype, seed):
    """G has at most 4 · 2 that are not zero, of 171; a space of vectors meets the zeros once.

    What rounding leaves of the vector after that is from 1e-15 to 1e-13 (1e-5 to 1e-4) of the largest.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3)).to(dtype)
    batch = torch.randn(4, 10, dtype=dtype), torch.tensor([0, 1, 2, 0])
    operator = probes.hessian(model, CE, batch).gauss_newton
    found = probes.eigenvalues(operator, k=4, which="smallest")
    largest = probes.eigenvalues(operator, k=1).values.max().item()
    if found.converged:
        assert found.values.abs().max().item() < 1e3 * torch.finfo(dtype).eps * largest


# What an operator was told may change


def test_a_loss_that_reads_the_parameters_is_refused():
    """It is no function of the logits: G, and so S, would lack what is outside of them."""
    model, batch = plain(), vectors()

    def loss(logits, targets):
        return CE(logits, targets) + 0.05 * sum(value.square().sum() for value in model.parameters())

    for refused in (measured, in_use):
        with pytest.raises(UseError, match=r"the loss depends on .*besides by the logits"):
            refused(model, loss, batch)


def clamped(logits, targets):
    return CE(logits.clamp(-3, 3), targets)


def up_to_date(operator, model, loss, batch, **options):
    """The operator, which has been in use, is that of the model as it is now."""
    truth = explicit(Case(model, loss, batch), **options)
    unit = torch.eye(len(truth.hessian)).double()
    assert apart(operator @ unit, truth.hessian) < 1e-6
    assert apart(operator.gauss_newton @ unit, truth.gauss_newton, truth.hessian) < 1e-6
    assert apart(operator.gradient, truth.gradient) < 1e-6


def in_use(model, loss, batch):
    operator = probes.hessian(model, loss, batch)
    operator @ torch.ones(operator.size).double()
    operator.gauss_newton @ torch.ones(operator.size).double()
    return operator


def test_a_loss_that_is_a_cross_entropy_of_small_logits_only():
    model, batch = plain(), vectors()
    operator = in_use(model, clamped, batch)
    with torch.no_grad():
        model[2].weight.mul_(20)
    up_to_date(operator, model, clamped, batch)


def test_targets_that_change_in_place():
    model, batch = plain(), vectors()
    operator = in_use(model, CE, batch)
    batch[1].copy_((batch[1] + 1) % CLASSES)
    up_to_date(operator, model, CE, batch)


def test_a_state_that_is_assigned():
    model, batch = plain(), vectors()
    operator = in_use(model, CE, batch)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    up_to_date(operator, model, CE, batch)


def test_a_parameter_that_is_replaced():
    model, batch = plain(), vectors()
    operator = in_use(model, CE, batch)
    model[2].weight = nn.Parameter(2 * model[2].weight.detach())
    up_to_date(operator, model, CE, batch)


def test_logits_that_are_tempered_around_an_operator():
    model, batch = plain(), vectors()
    operator = in_use(model, CE, batch)
    bare = copy.deepcopy(model)
    with probes.tempered(model, 3.0):
        up_to_date(operator, bare, CE, batch, temperature=3.0)
    up_to_date(operator, bare, CE, batch)


# Precision


def smoothed(logits, targets):
    return CE(logits, targets, label_smoothing=9e-4)


def test_a_little_label_smoothing_on_a_model_that_is_fitted():
    """What is left of the first derivative is of the size of the smoothing."""
    model, (inputs, targets) = plain().float(), vectors()
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(200):
        optimiser.zero_grad()
        smoothed(model(inputs.float()), targets).backward()
        optimiser.step()
    fine = copy.deepcopy(model).double()
    batch = inputs.float().double(), targets
    truth = explicit(Case(fine, smoothed, batch))
    operator = probes.hessian(model, smoothed, (inputs.float(), targets))
    unit = torch.eye(len(truth.hessian))
    # The residual is of the size of the gradient that is left, so its own norm is the scale.
    assert apart(operator.residual @ unit, truth.residual) < 0.01
    assert apart(operator @ unit, truth.hessian) < 1e-3
    reading = measured(model, smoothed, (inputs.float(), targets))
    R = rays(model)
    assert apart(reading.residual.matrix, R.T @ truth.residual @ R) < 0.01


def test_two_directions_are_too_few_for_an_error():
    model, batch = plain(), vectors()
    with pytest.raises(UseError, match="directions is 2"):
        probes.curvature(model, CE, batch, directions=2)
    with pytest.raises(UseError, match="directions is 2"):
        probes.along_temperature(model, CE, batch, [1.0], directions=2)


# Ways to write a model


def tanh_of_sum(net, x):
    return net.last(torch.tanh(torch.add(input=net.first(x), other=net.other(x))))


def leaky(net, x):
    hidden = net.first(x)
    return net.last(hidden.where(hidden > 0, 0.1 * hidden))


def leaky_by_name(net, x):
    hidden = net.first(x)
    return net.last(torch.where(hidden > 0, input=hidden, other=0.1 * hidden))


def scaled(net, x):
    return net.last(net.first(x) * net.gain) * net.gain.exp()


def scaled_by_what_has_no_rule(net, x):
    return net.last(net.first(x) * net.gain) * net.gain.sinh()


def convolved(net, x):
    return net.conv(x.view(NUM, 1, 2, 2))


def other():
    return {"other": nn.Linear(FEATURES, WIDTH)}


def images():
    return {"conv": nn.Conv2d(1, 2, 2, padding=1), "last": nn.Linear(18, CLASSES)}


LAST = torch.channels_last
WAYS = {
    "sum by name": (tanh_of_sum, lambda: perceptron(**other())),
    "where": (leaky, perceptron),
    "where by name": (leaky_by_name, perceptron),
    "channels last, to": (
        lambda net, x: net.last(convolved(net, x).to(memory_format=LAST).tanh().flatten(1)),
        images,
    ),
    "channels last, contiguous": (
        lambda net, x: net.last(convolved(net, x).contiguous(memory_format=LAST).tanh().flatten(1)),
        images,
    ),
    "mask that makes it larger": (
        lambda net, x: net.last(net.gain.masked_fill(x[:, :1] > 0, 0.3).sin() * net.first(x)),
        lambda: perceptron(gain=weight(WIDTH)),
    ),
    "number": (scaled, lambda: perceptron(gain=nn.Parameter(torch.tensor(0.7)))),
    "number, products": (
        scaled_by_what_has_no_rule,
        lambda: perceptron(gain=nn.Parameter(torch.tensor(0.7))),
    ),
    "name with brackets": (
        lambda net, x: torch.sinh(net.heads["h[0]"](x)),
        lambda: {"heads": nn.ModuleDict({"h[0]": nn.Linear(FEATURES, CLASSES)})},
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_any_way_to_write_a_model_is_measured(name):
    forward, members = WAYS[name]
    model, batch = Net(forward, **members()), vectors()
    check(measured(model, CE, batch), explicit(Case(model, CE, batch)), model)


def test_a_loss_that_refuses_what_is_no_probability():
    """It cannot be tried out at random logits."""

    def loss(probabilities, targets):
        return -Categorical(probs=probabilities).log_prob(targets).mean()

    model, batch = nn.Sequential(plain(), nn.Softmax(-1)), vectors()
    # The finite differences leave the simplex, where the loss is extended as it is.
    truth = explicit(Case(model, lambda p, t: F.nll_loss((p / p.sum(-1, keepdim=True)).log(), t), batch))
    check(measured(model, loss, batch), truth, model)
    unit = torch.eye(len(truth.hessian)).double()
    assert apart(probes.hessian(model, loss, batch) @ unit, truth.hessian) < 1e-6


# What a probe leaves behind


def test_a_loader_that_shuffles():
    """Its order comes from torch's random numbers: they are as before, and so is the order."""
    model, batch = plain(), vectors(7)
    loader = DataLoader(TensorDataset(*batch), batch_size=4, shuffle=True)
    incomplete = DataLoader(TensorDataset(*batch), batch_size=4, shuffle=True, drop_last=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    operator = probes.hessian(model, CE, loader)
    unit = torch.eye(operator.size).double()
    first, again = operator @ unit, operator @ unit
    reading = measured(model, CE, loader)
    partial = probes.hessian(model, CE, incomplete)
    one, another = partial @ unit[:, 0], partial @ unit[:, 0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    truth = explicit(Case(model, CE, batch))
    assert torch.equal(first, again)
    assert apart(first, truth.hessian) < 1e-6
    check(reading, truth, model)
    assert torch.equal(one, another)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chosen", [None, "first.*", "first.0.*"])
def test_activation_checkpoints(reentrant, chosen):
    def forward(net, x):
        return net.last(torch.tanh(net.first(x)))

    def kept_in_part(net, x):
        return net.last(torch.tanh(checkpoint(net.first, x, use_reentrant=reentrant)))

    first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model, batch = Net(forward, **perceptron(first=first)), vectors()
    same = Net(kept_in_part, first=model.first, last=model.last)
    truth = explicit(Case(model, CE, batch))
    operator = probes.hessian(same, CE, batch, parameters=chosen)
    rows = truth.rows(operator.names)
    unit = torch.eye(operator.size).double()
    for part, found in (("hessian", operator), *((part, getattr(operator, part)) for part in PARTS[1:])):
        expected = getattr(truth, part)[rows][:, rows]
        assert apart(found @ unit, expected, truth.hessian) < 1e-6, part
    reading = measured(same, CE, batch, parameters=chosen)
    R = draw(operator.shapes, DIRECTIONS, dtype=torch.float64).matrix
    expected = R.T @ truth.hessian[rows][:, rows] @ R
    assert apart(reading.hessian.matrix, expected) < 1e-6


def called(module, reentrant):
    return Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=reentrant), inner=module)


KEPT_IN_PART = {
    "not reentrant": lambda module: called(module, reentrant=False),
    "reentrant": lambda module: called(module, reentrant=True),
    "wrapper": checkpoint_wrapper,
    "composable": composable_checkpoint,
}


@pytest.mark.parametrize("way", KEPT_IN_PART)
def test_a_checkpointed_module_is_not_run_again(way):
    """Run again with the model's own parameters, it would be wrong where some are chosen and shapes agree."""
    runs = []

    def inner(net, x):
        runs.append(x)
        return torch.tanh(net.layer(x))

    kept = KEPT_IN_PART[way](Net(inner, layer=nn.Linear(WIDTH, WIDTH)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kept, nn.Linear(WIDTH, CLASSES)).double()
    operator = probes.hessian(model, CE, vectors(WIDTH, WIDTH), parameters="0.*")
    operator @ torch.eye(operator.size).double()
    assert len(runs) == 1
