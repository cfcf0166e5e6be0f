"""Flow maps: exact ones have no loss, and gradients are those of finite differences."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from theodolite import UseError
from theodolite.core.calling import evaluate, with_tensors
from theodolite.flows import (
    FlowMap,
    map_batches,
    map_loss,
    sample,
    sample_map,
    three_gaussians,
    velocity_loss,
)
from theodolite.flows.mixture import GaussianMixture
from theodolite.models import DiT, FlowMLP, UNet

KINDS = ("lagrangian", "eulerian", "progressive-midpoint", "progressive-uniform")
each_kind = pytest.mark.parametrize("kind", KINDS)
ONE = GaussianMixture([[1.0, -2.0]], 0.5)


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return three_gaussians().sample(16, seed, step, dtype=torch.float64)


class Exact(nn.Module):
    """The flow map of one Gaussian on the linear path, without a division by t − s; `off` spoils it."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.off = nn.Parameter(torch.tensor(off, dtype=torch.float64))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        s, t = times[:, :1], times[:, 1:]
        centre, variance = ONE.centres, ONE.std**2
        before, after = (time**2 * variance + (1 - time) ** 2 for time in (s, t))
        slope = ((s + t) * variance - (2 - s - t)) / (before * ((after / before).sqrt() + 1))
        return centre + slope * (x - s * centre) + self.off * t * x


def test_the_exact_network_is_the_exact_map() -> None:
    x, (s, t) = torch.randn(7, 2, dtype=torch.float64), torch.rand(2, 7, dtype=torch.float64)
    flow_map = FlowMap(Exact())
    assert torch.allclose(flow_map(x, s, t), ONE.flow_map(x, s, t), rtol=1e-12)
    assert torch.allclose(flow_map(x, 0.25, 1.0), ONE.flow_map(x, 0.25, 1.0), rtol=1e-12)
    assert torch.allclose(flow_map.velocity(x, t), ONE.velocity(x, t), rtol=1e-12)
    for steps in (1, 3):
        assert torch.allclose(sample_map(flow_map, x, steps), ONE.flow_map(x, 0.0, 1.0), rtol=1e-12)


@each_kind
@pytest.mark.parametrize("stop", [True, False])
def test_the_exact_map_has_no_loss_off_the_diagonal(kind: Any, stop: bool) -> None:
    batch = map_batches(lambda seed, step: ONE.sample(64, seed, step, dtype=torch.float64))(0, 0)
    loss, matching = map_loss(kind, stop_gradients=stop), map_loss("matching")

    def off_the_diagonal(net: nn.Module) -> float:
        return loss(net, batch).item() - 0.75 * matching(net, batch).item()

    assert abs(off_the_diagonal(Exact())) < 1e-12
    assert off_the_diagonal(Exact(0.1)) > 1e-6


def test_the_matching_loss_of_the_exact_map_is_the_floor() -> None:
    batches = map_batches(lambda seed, step: ONE.sample(4096, seed, step, dtype=torch.float64))
    losses = torch.tensor([map_loss("matching")(Exact(), batches(0, step)).item() for step in range(40)])
    assert abs(losses.mean() - ONE.floor()) < 5 * losses.std() / math.sqrt(40)


class Net(nn.Module):
    """With a layer norm and attention, whose derivatives torch does not have right or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        h = torch.tanh(self.enter(torch.cat([x, times], 1)))
        q, k, v = self.qkv(self.norm(h).view(-1, 1, 2, 4)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.leave(h + mixed.reshape(-1, 8))


def small_net() -> nn.Module:
    net = Net().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return net


def reference(kind: str, net: nn.Module, frozen: nn.Module, batch: Any) -> float:
    """The loss by its formula: derivatives by finite differences, stopped parts by another network."""
    (x, times, *condition), (velocity, split) = batch
    on, step = len(velocity), 1e-5
    here, there = ([one[:on] for one in condition], [one[on:] for one in condition])

    def mean_velocity(model: nn.Module, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return model(x, torch.stack([s, t], 1), *there)

    def moved(model: nn.Module, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x + (t - s).view(-1, *[1] * (x.ndim - 1)) * mean_velocity(model, x, s, t)

    matched = net(x[:on], times[:on], *here) - velocity
    x, s, t = x[on:], times[on:, 0], times[on:, 1]
    if kind == "lagrangian":
        rate = (moved(net, x, s, t + step) - moved(net, x, s, t - step)) / (2 * step)
        residual = rate - mean_velocity(frozen, moved(frozen, x, s, t), t, t)
    elif kind == "eulerian":
        rate = (moved(net, x, s + step, t) - moved(net, x, s - step, t)) / (2 * step)
        drift = step * mean_velocity(frozen, x, s, s)
        carried = (moved(frozen, x + drift, s, t) - moved(frozen, x - drift, s, t)) / (2 * step)
        residual = rate + carried
    else:
        share = split if kind == "progressive-uniform" else torch.full_like(split, 0.5)
        middle = share * s + (1 - share) * t
        first = mean_velocity(frozen, x, s, middle)
        second = mean_velocity(frozen, moved(frozen, x, s, middle), middle, t)
        wide = share.view(-1, *[1] * (x.ndim - 1))
        residual = mean_velocity(net, x, s, t) - ((1 - wide) * first + wide * second)
    total = matched.square().sum() + residual.square().sum()
    return (total / (matched.numel() + residual.numel())).item()


def check_gradient(kind: Any, stop: bool, net: nn.Module, batch: Any) -> None:
    """The derivative along a random direction of the weights."""
    parameters = list(net.parameters())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in parameters]
    value = map_loss(kind, stop_gradients=stop)(net, batch)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    found = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    step, values = 1e-5, []
    with torch.no_grad():
        for sign in (1, -1):
            other = copy.deepcopy(net)
            for parameter, one in zip(other.parameters(), direction, strict=True):
                parameter += sign * step * one
            values.append(reference(kind, other, net if stop else other, batch))
    assert value.item() == pytest.approx(reference(kind, net, net, batch), rel=1e-6)
    assert found == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-5, abs=1e-6)


@each_kind
@pytest.mark.parametrize("stop", [True, False])
def test_gradients_are_those_of_finite_differences_with_the_stopped_parts_frozen(
    kind: Any, stop: bool
) -> None:
    check_gradient(kind, stop, small_net(), map_batches(draw, diagonal=0.25)(0, 0))


@pytest.mark.parametrize("kind", ["lagrangian", "eulerian"])
@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (partial(FlowMLP, 8, 1), (2,)),
        (partial(DiT, 8, 1, side=4, patch=2, head_dim=4, modulation="random"), (1, 4, 4)),
        (partial(UNet, 8, 1, head_dim=8), (1, 4, 4)),
    ],
    ids=["FlowMLP", "DiT", "UNet"],
)
def test_gradients_of_our_networks_are_right(kind: Any, net: Any, shape: tuple[int, ...]) -> None:
    def labelled(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        return data, torch.tensor([0, 1, 2, 0])

    batch = map_batches(labelled, diagonal=0.5, classes=3)(0, 0)
    torch.manual_seed(0)
    check_gradient(kind, True, net(classes=3, times=2).double(), batch)


@each_kind
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the parts that are stopped
def test_activation_checkpoints_do_not_change_gradients(kind: Any, reentrant: bool) -> None:
    net, batch = small_net(), map_batches(draw)(0, 0)
    gradients = torch.autograd.grad(map_loss(kind)(net, batch), list(net.parameters()))
    net.norm.forward = partial(checkpoint, net.norm.forward, use_reentrant=reentrant)  # type: ignore[union-attr]
    map_loss(kind)(net, batch).backward()
    for parameter, expected in zip(net.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, expected, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


@each_kind
def test_many_networks_have_the_gradients_of_each(kind: Any) -> None:
    """Inside vmap and grad, and inside vmap with a backward pass outside, as a fleet is trained."""
    net, loss = small_net(), map_loss(kind)
    batch = map_batches(draw)(0, 0)
    weights = {name: torch.stack([one.data, 1.2 * one.data]) for name, one in net.named_parameters()}

    def value(chosen: dict[str, Tensor]) -> Tensor:
        return with_tensors(net, chosen, partial(evaluate, loss), batch)

    with sdpa_kernel(SDPBackend.MATH):  # as fleets set it on the CPU
        together = torch.func.vmap(torch.func.grad(value))(weights)
        leaves = {name: one.clone().requires_grad_() for name, one in weights.items()}
        outside = torch.autograd.grad(torch.func.vmap(value)(leaves).sum(), list(leaves.values()))
    for model in range(2):
        alone = {name: one[model].clone().requires_grad_() for name, one in weights.items()}
        gradients = torch.autograd.grad(value(alone), list(alone.values()))
        for name, other, gradient in zip(alone, outside, gradients, strict=True):
            assert torch.allclose(together[name][model], gradient, rtol=1e-9, atol=1e-12)
            assert torch.allclose(other[model], gradient, rtol=1e-9, atol=1e-12)


def test_a_short_training_learns_to_jump() -> None:
    """One jump of the trained map against one step of Euler's method with the exact velocity."""
    mixture = three_gaussians()
    torch.manual_seed(0)
    net = FlowMLP(32, 2, times=2)
    batches = map_batches(lambda seed, step: mixture.sample(128, seed, step))
    optimizer, loss = torch.optim.Adam(net.parameters(), lr=4e-3), map_loss("lagrangian")
    for step in range(150):
        optimizer.zero_grad()
        evaluate(loss, net, batches(0, step)).backward()
        optimizer.step()
    noise = torch.randn(200, 2)
    exact = mixture.flow_map(noise, 0.0, 1.0, atol=1e-3)
    jump, euler = sample_map(FlowMap(net), noise), sample(mixture.field(), noise, steps=1)
    errors = [(found - exact).norm(dim=1).mean().item() for found in (jump, euler)]
    assert errors[0] < 0.5 * errors[1]


def test_batches_are_pure_and_have_the_stated_times() -> None:
    big = map_batches(lambda seed, step: (torch.zeros(8000, 2, dtype=torch.float64), None), name="times")
    (x, times), (velocity, split) = big(1, 2)
    on, off = times[:6000], times[6000:]
    assert torch.equal(on[:, 0], on[:, 1])
    assert (off[:, 0] < off[:, 1]).all()
    # the mean of the smaller and of the larger of two uniform numbers
    assert (off.mean(0) - torch.tensor([1 / 3, 2 / 3])).abs().max() < 5 * math.sqrt(1 / 18 / 2000)
    assert abs(on.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 6000)
    assert abs(split.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 2000)
    assert torch.allclose(x[:6000], -(1 - on[:, :1]) * velocity, atol=1e-12)  # of data 0
    assert torch.equal(big(1, 2)[0][0], x)
    assert not torch.equal(big(1, 3)[0][0], x)


def test_batches_and_losses_can_be_sent_to_another_process() -> None:
    batches = map_batches(partial(three_gaussians().sample, 8), classes=3)
    batch, sent = batches(1, 2), pickle.loads(pickle.dumps(batches))(1, 2)
    torch.testing.assert_close(sent, batch, rtol=0, atol=0)
    batch, loss = map_batches(draw)(1, 2), map_loss("eulerian")
    assert torch.equal(pickle.loads(pickle.dumps(loss))(small_net(), batch), loss(small_net(), batch))


def test_labels_reach_the_network() -> None:
    class Labelled(nn.Module):
        def forward(self, x: Tensor, times: Tensor, label: Tensor) -> Tensor:
            return label[:, None] * torch.ones_like(x)

    x = torch.zeros(3, 2)
    assert torch.equal(FlowMap(Labelled(), (2,))(x, 0.0, 0.5), torch.ones(3, 2))
    assert torch.equal(FlowMap(Labelled(), (torch.arange(3),))(x, 0.0, 1.0)[:, 0], torch.arange(3.0))
    batch = map_batches(draw, classes=3, label_dropout=1.0)(0, 0)
    assert torch.equal(batch[0][2], torch.full((16,), 3))
    assert map_loss("lagrangian")(Labelled(), batch).item() > 0


@pytest.mark.parametrize("kind", ["matching", "lagrangian", "progressive-midpoint"])
def test_a_condition_may_be_a_dict(kind: Any) -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, times: Tensor, condition: dict[str, Tensor]) -> Tensor:
            return condition["shift"][:, None] * times.sum(1, keepdim=True) + 0 * x

    class Plain(nn.Module):
        def forward(self, x: Tensor, times: Tensor, shift: Tensor) -> Tensor:
            return shift[:, None] * times.sum(1, keepdim=True) + 0 * x

    (x, times), target = map_batches(draw)(0, 0)
    shift = torch.arange(16, dtype=torch.float64)
    found = map_loss(kind)(Shifted(), ((x, times, {"shift": shift}), target))
    assert torch.equal(found, map_loss(kind)(Plain(), ((x, times, shift), target)))


def test_times_of_bfloat16_data_stay_below_one() -> None:
    data = torch.ones(4096, 2, dtype=torch.bfloat16)
    (x, times), (velocity, split) = map_batches(lambda *_: (data, None), path="variance-preserving")(0, 0)
    assert (x.dtype, times.dtype, split.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert velocity.isfinite().all()
    loss = map_loss("progressive-uniform")(FlowMLP(8, 1, times=2).bfloat16(), ((x, times), (velocity, split)))
    assert loss.isfinite()


def test_gradients_through_jumps_are_kept_only_if_asked_for() -> None:
    noise = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    assert not sample_map(FlowMap(Exact()), noise).requires_grad
    assert sample_map(FlowMap(Exact()), noise, differentiable=True).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_of_the_points_stays(dtype: torch.dtype) -> None:
    net = FlowMLP(8, 1, times=2).to(dtype)
    x = torch.zeros(3, 2, dtype=dtype)
    assert sample_map(FlowMap(net), x, 2).dtype == dtype
    assert FlowMap(net).average(x, 0.0, 1.0).dtype == dtype


class Distances(nn.Module):
    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return torch.cdist(x[:, :, None], x[:, :, None]).sum(2) * times[:, :1]


class Tracking(nn.Module):
    """Batch norm in train mode, which writes into its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2).double()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.norm(x)


class OneTime(nn.Module):
    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return x * t.view(len(x), 1)


def test_a_network_of_one_time_or_without_its_labels_is_named() -> None:
    x, batches = torch.zeros(4, 2), map_batches(draw, classes=3)
    for call, rows in (
        (lambda: FlowMap(OneTime(), (1,))(x, 0.0, 1.0), 4),
        (lambda: map_loss("matching")(OneTime(), batches(0, 0)), 12),
        (lambda: map_loss("lagrangian")(OneTime(), batches(0, 0)), 12),
    ):
        shapes = rf"x of shape \({rows}, 2\), times of shape \({rows}, 2\)"
        with pytest.raises(
            UseError, match=f"OneTime was called with {shapes}.* if it takes one time, use field_of"
        ):
            call()
    missing = r"OneTime takes \(x, t, label\), and label is missing: give"
    with pytest.raises(UseError, match=f"{missing} classes to map_batches"):
        map_loss("matching")(OneTime(), map_batches(draw)(0, 0))
    with pytest.raises(UseError, match=f"{missing} it too"):
        FlowMap(OneTime())


def test_wrong_arguments_are_refused() -> None:
    x, batch = torch.zeros(3, 2), map_batches(draw)(0, 0)
    with pytest.raises(UseError, match=r"kind is 'lagrange'\. Did you mean 'lagrangian'"):
        map_loss("lagrange")  # type: ignore[arg-type]
    for steps in (0, -3):
        with pytest.raises(UseError, match=f"steps is {steps}"):
            sample_map(FlowMap(Exact()), x, steps)
    bare, fix = FlowMLP(8, 1, times=2), r"give FlowMap\(net\), or a function jump\(x, s, t\)"
    for wrong, said in (
        (bare, "a FlowMLP"),
        (None, "None"),
        (lambda x, t: x, r"a function that takes \(x, t\)"),
    ):
        with pytest.raises(UseError, match=f"^flow_map is {said}: {fix}$"):
            sample_map(wrong, x)  # type: ignore[arg-type]
    for bad in (None, x[0], x.long()):
        with pytest.raises(UseError, match=r"noise is .*: give floats of shape"):
            sample_map(FlowMap(Exact()), bad)  # type: ignore[arg-type]
    for found, said in ((None, "None"), (x[:, :1], r"a tensor of shape \(3, 1\)")):
        with pytest.raises(UseError, match=rf"flow_map returned {said} for points of shape \(3, 2\): return"):
            sample_map(lambda x, s, t, found=found: found, x)
    with pytest.raises(
        UseError, match=r"after step 3 of 4, from t = 0\.5 to 0\.75, the samples are not finite"
    ):
        sample_map(lambda x, s, t: x / (t < 0.6), x, 4)
    with pytest.raises(UseError, match="noise has values that are not finite"):
        sample_map(FlowMap(Exact()), torch.full((3, 2), math.nan))
    late = ((batch[0][0], batch[0][1] + 0.9), batch[1])
    with pytest.raises(UseError, match=r"the batch holds 1\.\d+: times go from 0 \(noise\) to 1 \(data\)"):
        map_loss()(Exact(), late)
    for diagonal, message in ((0, "diagonal is 0"), (1.5, "diagonal is 1.5")):
        with pytest.raises(UseError, match=message):
            map_batches(draw, diagonal=diagonal)
    with pytest.raises(UseError, match="no example off the diagonal, which eulerian needs"):
        map_loss("eulerian")(Exact(), map_batches(draw, diagonal=1.0)(0, 0))
    with pytest.raises(UseError, match=r"label_dropout is 0\.1, but labels are not kept"):
        map_batches(draw, label_dropout=0.1)
    with pytest.raises(UseError, match="Linear has no input for the time: let it be called as model"):
        FlowMap(nn.Linear(2, 2))
    with pytest.raises(UseError, match="condition is a tensor of shape"):
        FlowMap(Exact(), torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(UseError, match="s is -1"):
        FlowMap(Exact())(x, -1.0, 1.0)
    with pytest.raises(UseError, match="t holds 2"):
        FlowMap(Exact()).velocity(x, torch.full((3,), 2.0))
    with pytest.raises(UseError, match=r"t has the shape \(2,\) for x \(3, 2\)"):
        FlowMap(Exact()).velocity(x, torch.ones(2))
    with pytest.raises(UseError, match="give one of map_batches"):
        map_loss()(Exact(), (x, x))
    with pytest.raises(UseError, match="draw is None: give a function draw"):
        map_batches(None)  # type: ignore[arg-type]
    with pytest.raises(UseError, match="labels hold 2, but classes is 2: labels go from 0 to 1"):
        map_batches(draw, classes=2)(0, 0)
    with pytest.raises(UseError, match=r"the target is a tuple of 2 .*: with map_batches, use map_loss"):
        velocity_loss(batch[0][0], batch[1])
    half = ((batch[0][0][:8], batch[0][1][:8]), batch[1])
    with pytest.raises(UseError, match="a batch of 8 examples has times of shape"):
        map_loss()(Exact(), half)
    for net in (Distances(), Tracking()):
        with pytest.raises(UseError, match=f"{type(net).__name__} cannot be differentiated in forward mode"):
            map_loss("eulerian")(net, batch)
        assert map_loss("progressive-midpoint")(net, batch).isfinite()
    traced = small_net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".torch.jit")  # torch says that it is deprecated
        traced.norm = torch.jit.script(nn.LayerNorm(8).double())
    with pytest.raises(UseError, match=r"norm is compiled by torch\.jit"):
        map_loss("lagrangian")(traced, batch)
