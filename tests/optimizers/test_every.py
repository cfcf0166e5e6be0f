"""What every optimizer of a plan does: on a small network, and on one tensor by its paper's formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Hyper, NonFiniteError
from theodolite.optimizers.matrix_optimizer import MatrixOptimizer

from .reference import references
from .small import gradients, model, noise, plan_for, train

# Of each class one rule: all of them are compared with their formula below.
EVERY = list({spec.class_name: name for name, spec in reversed(OPTIMIZERS.items())}.values())[::-1]


@pytest.mark.parametrize("rule", EVERY)
def test_resuming_is_as_if_nothing_had_happened(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    straight = model()
    expected = train(straight, plan.optimizer(straight), 4)

    first = model()
    optimizer = plan.optimizer(first)
    train(first, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    second = model(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = plan.optimizer(second)
    resumed.load_state_dict(saved)
    got = train(second, resumed, 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_state_is_loaded_by_name_whatever_the_order(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    network = model()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = copy.deepcopy((network, optimizer))

    # The same state as another program might have saved it: groups and parameters in the reverse order.
    saved["param_groups"].reverse()
    for group in saved["param_groups"]:
        group["params"].reverse()
        group["param_names"].reverse()
    fresh = plan.optimizer(network)
    fresh.load_state_dict(saved)
    got = train(network, fresh, 1, start=2)
    assert all(torch.equal(a, b) for a, b in zip(got, train(*expected, 1, start=2), strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_copies_train_alike_and_apart(rule: str) -> None:
    plan = plan_for(rule)
    network = model()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 1)
    twin, its_optimizer = copy.deepcopy((network, optimizer))
    before = [param.detach().clone() for param in network.parameters()]
    trained = train(twin, its_optimizer, 1, start=1)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))
    expected = train(network, optimizer, 1, start=1)
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_a_parameter_without_gradient_stays(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    network = model()
    optimizer = plan.optimizer(network)
    still = {"embed.weight", "blocks.1.feed_forward.branch.up.weight", "blocks.0.attention.norm_in.weight"}
    named = dict(network.named_parameters())
    assert still < set(named)
    before = {name: param.detach().clone() for name, param in named.items()}
    for step in range(2):
        gradients(network, step)
        for name in still:
            named[name].grad = None
        optimizer.step()
    moved = {name for name, param in named.items() if not torch.equal(param, before[name])}
    assert moved == set(named) - still


# Of second order: random vectors are drawn in the order of memory.
@pytest.mark.parametrize(
    "rule", [name for name in EVERY if references()[name].is_continuous and not OPTIMIZERS[name].second_order]
)
def test_layout_in_memory_makes_no_difference(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    results = []
    for turned in (False, True):
        network = model(dtype=torch.float64)
        if turned:
            for module in network.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
        results.append(train(network, plan.optimizer(network), 2))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-9)  # products sum in another order


@pytest.mark.parametrize("rule", EVERY)
def test_a_step_leaves_gradients_alone_and_calls_a_closure_once(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule, weight_decay=0.1).optimizer(network)
    params = list(network.parameters())
    calls: list[bool] = []
    given: list[torch.Tensor] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        gradients(network, len(calls))
        given[:] = [param.grad for param in params]  # type: ignore[misc]
        before[:] = [grad.detach().clone() for grad in given]
        return 7.0

    before: list[torch.Tensor] = []
    for _ in range(2):
        assert optimizer.step(closure) == 7.0
        for param, grad, value in zip(params, given, before, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, value)
    assert calls == [True, True]


@pytest.mark.parametrize("rule", EVERY)
def test_a_gradient_that_is_no_number_is_refused_and_nothing_has_moved(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule).optimizer(network)
    train(network, optimizer, 1)
    before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
    gradients(network, 1)
    name = "blocks.1.attention.branch.out.weight"
    with torch.no_grad():
        network.get_parameter(name).grad[2, 3] = torch.nan  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} is nan in 1 of 256 entries"):
        optimizer.step()
    for kept, now in zip(before, (network.state_dict(), optimizer.state_dict()["state"]), strict=True):
        torch.testing.assert_close(now, kept, rtol=0, atol=0)


@pytest.mark.parametrize("rule", EVERY)
def test_state_keeps_its_dtype_when_it_is_loaded(rule: str) -> None:
    """Moments in float32 beside weights in bfloat16, with digits that bfloat16 does not have."""
    network = model(dtype=torch.bfloat16)
    plan = plan_for(rule)
    optimizer = plan.optimizer(network)
    if rule == "shampoo":
        with pytest.raises(UseError, match=r"is torch\.bfloat16, in which Shampoo's sums"):
            train(network, optimizer, 1)
        return
    train(network, optimizer, 1)

    def finer(value: Any) -> Any:
        return value.float() + 1e-5 if isinstance(value, torch.Tensor) and value.ndim else value

    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = tree_map(finer, saved["state"])
    fresh = plan.optimizer(network)
    fresh.load_state_dict(saved)
    torch.testing.assert_close(fresh.state_dict()["state"], saved["state"], rtol=0, atol=0)
    moments = [value for value in tree_leaves(saved["state"]) if getattr(value, "ndim", 0)]
    assert len(moments) >= (0 if rule == "sgd" else len(list(network.parameters())))


@pytest.mark.parametrize("rule", [rule for rule in EVERY if not OPTIMIZERS[rule].takes_sparse])
def test_sparse_gradients_are_refused_by_name(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule).optimizer(network)
    gradients(network, 0)
    embed = network.get_parameter("embed.weight")
    embed.grad = embed.grad.detach().to_sparse()  # type: ignore[union-attr]
    with pytest.raises(UseError, match=r"the gradient of embed\.weight is sparse.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("rule", EVERY)
def test_float64_is_computed_in_float64(rule: str) -> None:
    """Runs that start 1e-10 apart end about as close: rounding to float32 would be seen at 1e-7."""
    plan = plan_for(rule)
    results = []
    for shift in (0.0, 1e-10):
        network = model(dtype=torch.float64)
        with torch.no_grad():
            network.get_parameter("embed.weight").add_(shift)
        results.append(train(network, plan.optimizer(network), 2))
    assert all(value.dtype == torch.float64 for value in results[0])
    if references()[rule].is_continuous:
        assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) < 2e-8


# On one tensor, against the formula

LR, DECAY, EPS, STEPS = 0.05, 0.2, 0.03, 5
"""An eps that matters, and more steps than one period of SOAP's bases."""


def made(rule: str, params: list[Tensor], **more: Any) -> torch.optim.Optimizer:
    """The optimizer that a plan would make for these tensors."""
    spec = OPTIMIZERS[rule]
    names = [f"tensor {place}" for place in range(len(params))]
    decay = DECAY if spec.decays else 0.0
    group = {"params": params, "param_names": names, "lr": LR, "weight_decay": decay, **spec.fixed}
    if spec.eps:
        group[spec.eps.option] = EPS
    if "axes" in spec.layout:
        group["axes"] = ((1, *range(2, params[0].ndim)), (0,))
    return spec.maker(references()[rule].options)([group | more])


def loss(weight: Tensor, step: int) -> Tensor:
    """Its Hessian is diagonal, and it depends on where the weight is."""
    return (noise(*weight.shape, seed=step) * weight + 0.3 * weight**2 + 0.1 * weight**3).sum()


def differentiate(param: Tensor, step: int) -> None:
    param.grad = torch.autograd.grad(loss(param, step), param, create_graph=True)[0]


def start(*shape: int) -> Tensor:
    return noise(*shape, seed=99)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_five_steps_are_those_of_the_paper(rule: str) -> None:
    param = nn.Parameter(start(4, 3))
    optimizer = made(rule, [param])
    expected, state, paper = start(4, 3), {}, references()[rule]
    hyper = Hyper(1.0, 1.0, LR, DECAY, EPS)
    for step in range(STEPS):
        leaf = expected.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, step), leaf)
        expected = paper.step(expected, slope, 0.6 + 0.6 * expected, hyper, state, step + 1)
        differentiate(param, step)
        optimizer.step()
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=paper.tolerance)
    assert (expected - start(4, 3)).abs().max() > 0.02


@pytest.mark.parametrize(
    "rule", [rule for rule in EVERY if "axes" in OPTIMIZERS[rule].layout and not OPTIMIZERS[rule].extent]
)
def test_matrix_optimizers_alone_are_the_plans(rule: str) -> None:
    params = [nn.Parameter(start(4, 3)) for _ in range(2)]
    alone: Any = OPTIMIZERS[rule].implementation
    decay = {"weight_decay": DECAY} if OPTIMIZERS[rule].decays else {}
    optimizers = [made(rule, params[:1]), alone([params[1]], lr=LR, eps=EPS, **decay)]
    assert isinstance(optimizers[1], MatrixOptimizer)
    for step in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            differentiate(param, step)
            optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_kernels_in_any_layout(rule: str) -> None:
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = nn.Parameter(start(4, 3, 2, 2).to(memory_format=layout))
        optimizer = made(rule, [param])
        for step in range(3):
            differentiate(param, step)
            param.grad = param.grad.contiguous(memory_format=layout)  # type: ignore[union-attr]
            torch.manual_seed(step)
            optimizer.step()
        assert param.is_contiguous(memory_format=layout)
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "rule", [name for name, spec in OPTIMIZERS.items() if not spec.second_order | spec.averages]
)
def test_a_tensor_that_comes_late_starts_afresh(rule: str) -> None:
    early, late, fresh = (nn.Parameter(start(4, 3)) for _ in range(3))
    optimizer = made(rule, [early, late])
    for step in range(8):
        differentiate(early, step)
        if step >= 5:
            differentiate(late, step)
        optimizer.step()
    alone = made(rule, [fresh])
    for step in range(5, 8):
        differentiate(fresh, step)
        alone.step()
    torch.testing.assert_close(late, fresh, rtol=0, atol=1e-12)


def test_a_late_tensor_of_schedule_free_makes_steps_of_the_same_size() -> None:
    early, late = nn.Parameter(start(4, 3)), nn.Parameter(start(4, 3))
    optimizer = made("schedule-free", [early, late], weight_decay=0.0, eps=0.0)
    for step in range(8):
        differentiate(early, step)
        optimizer.step()
    differentiate(late, 8)
    before = late.detach().clone()
    optimizer.step()
    moved = (optimizer.state[late]["z"] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, LR), rtol=1e-9, atol=0)


@pytest.mark.parametrize("rule", [rule for rule in EVERY if not OPTIMIZERS[rule].matrices_only])
def test_all_at_once_or_one_after_the_other(rule: str) -> None:
    results = []
    for foreach in (False, True):
        params = [nn.Parameter(start(4, 3)), nn.Parameter(start(5)), nn.Parameter(start(4, 3).float())]
        optimizer = made(rule, params, foreach=foreach)
        for step in range(3):
            for param in params:
                differentiate(param, step)
            torch.manual_seed(step)
            optimizer.step()
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if one.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("rule", [name for name, spec in OPTIMIZERS.items() if spec.source != "torch"])
def test_sparse_gradients_are_refused_before_anything_moves(rule: str) -> None:
    dense, sparse = nn.Parameter(start(4, 3)), nn.Parameter(start(4, 3))
    optimizer = made(rule, [dense, sparse])
    dense.grad, sparse.grad = start(4, 3), start(4, 3).to_sparse()
    with pytest.raises(UseError, match=r"tensor 1.* sparse"):
        optimizer.step()
    assert torch.equal(dense, start(4, 3))
