"""The update an optimizer would make: what its step then makes, and no trace before that."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.optim.optimizer import register_optimizer_step_post_hook

import theodolite as th
from theodolite.optimizers.muon import Muon
from theodolite.optimizers.planned import Planned
from theodolite.probes import optimizer_step


class Rude(torch.optim.Optimizer):
    """Does what a step should not: new memory for weights, gradients changed and dropped, attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.history: list[Tensor] = []
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5
            for param in group["params"]:
                param.grad.mul_(2)
                param.data = param.data - group["lr"] * param.grad + 1e-3 * torch.randn(param.shape)
                self.state[param]["seen"] = [param.grad]
                self.history.append(param.grad.clone())
                param.grad = None
        self.count += 1
        np.random.rand()
        random.random()


def planned(params: list[nn.Parameter]) -> Planned:
    matrix, *rest = params
    return Planned(
        [
            {"params": [matrix], "param_names": ["a"], "rule": "muon", "lr": 0.02, "planned_lr": 0.02},
            {"params": rest, "param_names": ["b", "c", "d"], "rule": "adamw", "lr": 1e-2, "planned_lr": 1e-2},
        ],
        {"muon": Muon, "adamw": torch.optim.AdamW},
    )


def from_pytorch_optimizer(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return pytest.importorskip("pytorch_optimizer").load_optimizer(name)(params, lr=1e-2)

    return make


MAKES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "torch muon": lambda params: torch.optim.Muon([params[0], params[2]], lr=0.02),
    "planned": planned,
    "soap": from_pytorch_optimizer("soap"),
    "lion": from_pytorch_optimizer("lion"),
    "rude": Rude,
}


def network() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(16, 6), torch.randint(0, 3, (16,))

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    return model, loss


def contents(value: Any) -> Any:
    """Everything in a value, tensors as their bytes, for comparing."""
    if isinstance(value, Tensor):
        return (id(value), value.data_ptr(), value.detach().numpy().tobytes(), value._version)
    if isinstance(value, dict):
        return [(contents(key), contents(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [id(value) if isinstance(value, list) else None, *map(contents, value)]
    if isinstance(value, torch.optim.Optimizer):
        return contents(vars(value))
    return value if isinstance(value, (int, float, str, bool)) else None


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return (
        contents(vars(optimizer)),
        [(contents(param), contents(param.grad)) for param in model.parameters()],
        [contents(buffer) for buffer in model.buffers()],
        torch.get_rng_state().numpy().tobytes(),
        np.random.get_state()[1].tobytes(),  # type: ignore[union-attr]
        random.getstate(),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("steps", [0, 3])
def test_it_is_what_the_step_then_does_and_leaves_no_trace(name: str, steps: int) -> None:
    model, loss = network()
    optimizer = MAKES[name](list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    optimizer.zero_grad()
    loss().backward()
    before, trace = copy.deepcopy(model.state_dict()), everything(model, optimizer)

    update = optimizer_step(optimizer, model)

    assert everything(model, optimizer) == trace
    optimizer.step()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor - before[key], update.get(key, torch.zeros_like(tensor))), key
    moved = [update[key].norm() for key in update]
    assert all(length > 0 for length in moved) or (name == "soap" and steps == 0)


def test_of_an_lbfgs_with_a_closure() -> None:
    model, loss = network()
    model.append(nn.BatchNorm1d(3))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    before, trace = copy.deepcopy(model.state_dict()), everything(model, optimizer)
    update = optimizer_step(optimizer, model, closure=closure)
    assert everything(model, optimizer) == trace
    optimizer.step(closure)
    for key, param in model.named_parameters():
        assert torch.equal(param - before[key], update[key]), key


def test_hooks_are_not_called_and_schedulers_do_not_count_it() -> None:
    model, loss = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("any"))
    loss().backward()
    counted = optimizer.step

    def logged(self: Any, *given: Any) -> None:
        calls.append("logged")
        counted(*given)

    optimizer.step = types.MethodType(logged, optimizer)  # type: ignore[method-assign]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer_step(optimizer, model)
    assert calls == []
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    everywhere.remove()
    schedule.step()
    assert sorted(calls) == ["after", "any", "before", "logged"]


def test_a_graph_made_before_can_still_go_backward() -> None:
    model, loss = network()
    optimizer = torch.optim.AdamW(model.parameters())
    value = loss()
    value.backward(retain_graph=True)
    optimizer_step(optimizer, model)
    value.backward()


class ByName(torch.optim.Optimizer):
    """Differentiates its gradients twice, by functions it has imported."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        slope = sum(param.grad.square().sum() for param in params)
        for product, param in zip(grad(slope, params, retain_graph=True), params, strict=True):
            param.data -= 0.1 * product
        slope.backward()
        for param in params:
            param.data -= 0.1 * param.grad.detach()


def sophia(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("theodolite.optimizers.borrowed").SophiaH(params, lr=1e-2)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("make", [sophia, ByName])
def test_gradients_that_have_a_graph_still_have_it(make: Callable[..., torch.optim.Optimizer]) -> None:
    model, loss = network()
    optimizer = make(list(model.parameters()))
    loss().backward(create_graph=True)
    before, trace = copy.deepcopy(model.state_dict()), everything(model, optimizer)
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    updates = [optimizer_step(optimizer, model) for _ in range(2)]
    assert everything(model, optimizer) == trace
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]
    optimizer.step()
    for name, param in model.named_parameters():
        made = param.detach() - before[name]
        assert made.any()
        assert all(torch.equal(made, update[name]) for update in updates), name
        param.grad = None  # a graph and its parameters hold each other


def test_names_come_from_the_model_from_the_groups_or_are_counted() -> None:
    model, loss = network()
    loss().backward()
    named = torch.optim.SGD([{"params": [*model.named_parameters()]}], lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(optimizer_step(plain, nn.DataParallel(model))) == list(dict(model.named_parameters()))
    assert list(optimizer_step(named)) == list(dict(model.named_parameters()))
    assert list(optimizer_step(plain))[:2] == ["parameter 0", "parameter 1"]


def test_bad_input_is_refused_by_name() -> None:
    model, loss = network()
    with pytest.raises(th.UseError, match=r"has a gradient.*backward"):
        optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
    loss().backward()
    with pytest.raises(th.UseError, match=r"LBFGS computes its gradients itself.*closure="):
        optimizer_step(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(th.UseError, match=r"parameter 0 of the optimizer.*none of the model's"):
        optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1), nn.Linear(2, 2))
    with pytest.raises(th.UseError, match=r"optimizer is a list.*not a torch.optim.Optimizer"):
        optimizer_step([model])  # type: ignore[arg-type]


def test_a_step_that_fails_leaves_no_trace_either() -> None:
    class Failing(Rude):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise ValueError("as said")

    model, loss = network()
    optimizer = Failing(model.parameters())
    loss().backward()
    trace = everything(model, optimizer)
    with pytest.raises(ValueError, match="as said"):
        optimizer_step(optimizer)
    assert everything(model, optimizer) == trace


class Boxed(torch.optim.Optimizer):
    """Keeps its state in objects of its own."""

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.count = tensor, 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            box = self.state[param].setdefault("box", self.Box(torch.zeros_like(param)))
            box.tensor.add_(param.grad)
            box.count += 1
            param.sub_(box.tensor)


def test_state_in_objects_is_as_before_too() -> None:
    model, loss = network()
    optimizer = Boxed(model.parameters())
    loss().backward()
    optimizer.step()
    boxes = [state["box"] for state in optimizer.state.values()]
    before = [(box.tensor, box.tensor.clone()) for box in boxes]
    optimizer_step(optimizer, model)
    assert [state["box"] for state in optimizer.state.values()] == boxes
    for box, (tensor, copied) in zip(boxes, before, strict=True):
        assert box.tensor is tensor
        assert box.count == 1
        assert torch.equal(tensor, copied)


def test_buffers_that_are_expanded_or_of_inference_mode_are_no_hindrance() -> None:
    model, loss = network()
    with torch.inference_mode():
        fixed = torch.arange(3.0)
    counts = torch.tensor([[1.0], [2.0]])
    model.register_buffer("fixed", fixed)
    model.register_buffer("counts", counts.expand(2, 5))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        counts.add_(1)  # the memory behind the expanded one
        value = loss()
        value.backward()
        return value

    before = copy.deepcopy([*model.parameters()])
    update = optimizer_step(optimizer, model, closure=closure)
    assert counts.tolist() == [[1.0], [2.0]]
    assert fixed.tolist() == [0.0, 1.0, 2.0]
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert all(bool(one.any()) for one in update.values())
