"""The checks that torch makes of its own optimizers, made of ours, in the form of its `OptimizerInfo`.

torch ships the table (`torch.testing._internal.common_optimizers`) in its wheel, and the tests that read it
(test/test_optim.py) not: those that apply to any optimizer are written out here.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, borrowed

if "expecttest" not in sys.modules:  # which torch's table imports and never uses
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
try:
    # Importing it would forbid everybody in this process to set flags of backends.
    with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
        warnings.simplefilter("ignore")  # that hypothesis is missing
        from torch.testing._internal.opinfo.core import DecorateInfo

        # The table of all operations takes seconds to make; the one of optimizers wants a class of it.
        operations: Any = types.ModuleType("common_methods_invocations")
        operations.DecorateInfo = DecorateInfo
        with mock.patch.dict(sys.modules, {"torch.testing._internal.common_methods_invocations": operations}):
            from torch.testing._internal import common_optimizers as torchs
except ImportError as error:
    pytest.skip(f"torch's table of optimizers cannot be imported: {error}", allow_module_level=True)


def _inputs(*given: dict[str, Any], decays: bool = True) -> Callable[..., list[Any]]:
    usual: tuple[dict[str, Any], ...] = (
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.01)},
        {"lr": 0.01, "eps": 1e-3},
    )
    usual += ({"weight_decay": 0.2},) * decays
    return lambda device, dtype=None: [
        torchs.OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs)) for kwargs in (*usual, *given)
    ]


VARIANTS: tuple[dict[str, Any], ...] = (
    {"betas": (0.8, 0.9)},
    {"momentum": 0.8, "nesterov": False},
    {"scale": "rms"},
    {"steps": 6},
    {"radius": 0.5},
)
"""Options to try where a class has them."""


def _decays(optimizer: Any) -> bool:
    return "weight_decay" in inspect.signature(optimizer).parameters


def _infos() -> list[Any]:
    ours: dict[Any, Any] = {}
    for spec in OPTIMIZERS.values():
        if spec.source == "theodolite":
            known = inspect.signature(spec.implementation).parameters
            given = [one for one in VARIANTS if one.keys() <= known.keys()]
            ours[spec.implementation] = _inputs(*given, decays=spec.decays)
    with contextlib.suppress(UseError):  # pytorch_optimizer may be missing
        ours[borrowed.SOAP] = _inputs({"precondition_frequency": 1}, {"betas": (0.8, 0.9)})
        ours[borrowed.DiffGrad] = _inputs({"foreach": False}, {"ams_bound": True})
        ours[borrowed.ScheduleFreeAdamW] = _inputs({"foreach": False}, {"warmup_steps": 3})
    return [
        torchs.OptimizerInfo(
            optimizer,
            optim_inputs_func=inputs,
            optim_error_inputs_func=torchs.get_error_inputs_for_all_optims,
            supported_impls=(),
            supports_sparse=False,
            supports_complex=False,
        )
        for optimizer, inputs in ours.items()
    ]


INFOS = _infos()
CASES = [
    pytest.param(info.optim_cls, one.kwargs, id=f"{info.optim_cls.__name__}-{one.desc}")
    for info in INFOS
    for one in info.optim_inputs_func(device="cpu")
]
ONCE = [pytest.param(info, id=info.optim_cls.__name__) for info in INFOS]


def _params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (2, 5))]


def _train(optimizer: Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def _values(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def _same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer, kwargs", CASES)
def test_a_saved_state_goes_on_the_same(optimizer: Any, kwargs: dict[str, Any]) -> None:
    params = _params()
    one = optimizer(params, **copy.deepcopy(kwargs))
    _train(one, params, range(3))
    others = [nn.Parameter(value) for value in _values(params)]
    other = optimizer(others, **copy.deepcopy(kwargs))
    other.load_state_dict(copy.deepcopy(one.state_dict()))  # torch would let both work on the same tensors
    _train(one, params, range(3, 6))
    _train(other, others, range(3, 6))
    _same(_values(params), _values(others))
    _same(one.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("optimizer, kwargs", CASES)
def test_copied_and_pickled(optimizer: Any, kwargs: dict[str, Any]) -> None:
    params = _params()
    one = optimizer(params, **copy.deepcopy(kwargs))
    _train(one, params, range(2))
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        own = [param for group in twin.param_groups for param in group["params"]]
        _train(twin, own, range(2, 4))
        fresh = copy.deepcopy(one)
        _train(fresh, [param for group in fresh.param_groups for param in group["params"]], range(2, 4))
        _same(_values(own), _values([param for group in fresh.param_groups for param in group["params"]]))


@pytest.mark.parametrize("optimizer, kwargs", CASES)
def test_no_gradient_no_step_no_state(optimizer: Any, kwargs: dict[str, Any]) -> None:
    params = _params()
    one = optimizer(params, **copy.deepcopy(kwargs))
    one.step()
    _same(_values(params), _values(_params()))
    assert not any(one.state.values())
    _train(one, params[:1], range(2))
    _same(params[1].detach(), _params()[1].detach())
    assert not one.state.get(params[1])


@pytest.mark.parametrize("optimizer, kwargs", CASES)
def test_zero_gradients_move_nothing_without_decay(optimizer: Any, kwargs: dict[str, Any]) -> None:
    if "weight_decay" in kwargs or "radius" in kwargs:
        pytest.skip("decays, or goes to its sphere")
    params = _params()
    still = {"weight_decay": 0.0} if _decays(optimizer) else {}
    one = optimizer(params, **still, **copy.deepcopy(kwargs))
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros_like(param)
        one.step()
    torch.testing.assert_close(_values(params), _values(_params()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("info", ONCE)
def test_groups_have_their_own_options(info: Any) -> None:
    apart, together = _params(), _params()
    own = {"weight_decay": 0.3} if _decays(info.optim_cls) else {"eps": 0.3}
    options = ({"lr": 0.01, **own}, {"lr": 0.05, **dict.fromkeys(own, 0.0)})
    ones = [info.optim_cls([param], **own) for param, own in zip(apart, options, strict=True)]
    both = info.optim_cls([{"params": [together[0]], **options[0]}, {"params": [together[1]]}], **options[1])
    for step in range(3):
        _train(both, together, range(step, step + 1))
        for param, other in zip(apart, together, strict=True):
            param.grad = other.grad
        for one in ones:
            one.step()
    torch.testing.assert_close(_values(apart), _values(together))


@pytest.mark.parametrize("info", ONCE)
def test_a_learning_rate_in_a_tensor_is_read_at_every_step(info: Any) -> None:
    plain, wrapped = _params(), _params()
    one, other = info.optim_cls(plain, lr=0.01), info.optim_cls(wrapped, lr=torch.tensor(0.01))
    for step, lr in enumerate((0.01, 0.03, 0.002)):
        one.param_groups[0]["lr"] = lr
        other.param_groups[0]["lr"].fill_(lr)
        _train(one, plain, range(step, step + 1))
        _train(other, wrapped, range(step, step + 1))
    torch.testing.assert_close(_values(plain), _values(wrapped))


@pytest.mark.parametrize("info", ONCE)
def test_hooks_are_called_where_torch_calls_them(info: Any) -> None:
    params = _params()
    one = info.optim_cls(params)
    calls: list[str] = []
    one.register_step_pre_hook(lambda *_: calls.append("before step"))
    one.register_step_post_hook(lambda *_: calls.append("after step"))
    one.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    one.register_state_dict_post_hook(lambda *_: calls.append("after save"))
    one.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    one.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    _train(one, params, range(1))
    one.load_state_dict(one.state_dict())
    assert calls == [f"{when} {what}" for what in ("step", "save", "load") for when in ("before", "after")]


@pytest.mark.parametrize("info", ONCE)
def test_schedulers_of_torch_drive_it(info: Any) -> None:
    params = _params()
    one = info.optim_cls(params, lr=0.1)
    chain = [
        torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0, factor=0.1),
    ]
    for step in range(3):
        _train(one, params, range(step, step + 1))
        chain[0].step()
        chain[1].step(1.0)
    assert one.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * 0.1**2)


@pytest.mark.parametrize("info", ONCE)
def test_a_closure_is_called_once_with_gradients_enabled(info: Any) -> None:
    params = _params()
    one = info.optim_cls(params)
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        one.zero_grad()
        loss: Tensor = sum(param.square().sum() for param in params)  # type: ignore[assignment]
        loss.backward()
        return loss.detach()

    first = one.step(closure)
    assert first == pytest.approx(sum(value.square().sum().item() for value in _values(_params())))
    assert calls == [True]


WRONG = [
    pytest.param(info.optim_cls, one, id=f"{info.optim_cls.__name__}-{one.optimizer_error_input.desc}")
    for info in INFOS
    for one in info.optim_error_inputs_func("cpu", torch.float32)
]


@pytest.mark.parametrize("optimizer, wrong", WRONG)
def test_what_torch_refuses_is_refused(optimizer: Any, wrong: Any) -> None:
    given = wrong.optimizer_error_input
    params = _params() if given.params is None else given.params
    expected = (wrong.error_type, ValueError, RuntimeError)
    if issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            optimizer(params, **given.kwargs)
    else:
        with pytest.raises(expected) as caught:
            optimizer(params, **given.kwargs)
        assert str(caught.value)


@pytest.mark.parametrize("info", ONCE)
def test_complex_parameters_are_refused_by_name(info: Any) -> None:
    param = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="complex"):
        info.optim_cls([("weight", param)]).step()
    assert torch.equal(param, torch.ones_like(param))
