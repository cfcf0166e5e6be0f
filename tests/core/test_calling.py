"""Outputs, inputs and losses of every kind: where the logits are, what is looked into, what is refused."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.batches import on_device
from theodolite.core.calling import call, evaluate, logits, replace_logits, with_tensors
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.workloads import ModelLoss, OutputLoss, Workload

LOGITS, LOSS = torch.ones(2, 3), torch.tensor(0.5)


@dataclasses.dataclass(frozen=True)
class Predicted:
    scores: Tensor
    loss: Tensor | None = None
    cache: Any = None


OUTPUTS = {
    "nanoGPT without targets": (LOGITS, None),
    "nanoGPT with targets": (LOGITS, LOSS),
    "the loss first": (LOSS, LOGITS),
    "with counts": (LOGITS, torch.ones(4, dtype=torch.long)),
    "a list": [LOGITS],
    "a dict": {"prediction": LOGITS, "loss": LOSS},
    "diffusers": SimpleNamespace(sample=LOGITS, hidden=torch.ones(4, 4)),
    "CLIP": {"logits_per_image": LOGITS, "logits_per_text": LOGITS.T, "loss": LOSS},
    "a frozen dataclass": Predicted(LOGITS, LOSS, cache=[1]),
    "a named tuple": namedtuple("Out", "scores loss")(LOGITS, LOSS),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_logits_are_told_and_replaced(kind: str) -> None:
    output = OUTPUTS[kind]
    assert logits(output) is LOGITS
    other = replace_logits(output, LOGITS / 2)
    assert type(other) is type(output)
    assert bool((logits(other) == 0.5).all())
    assert logits(output) is LOGITS
    if "loss" in dir(other):
        assert other.loss is LOSS


def test_a_model_may_return_its_loss_alone() -> None:
    assert logits({"loss": LOSS}) is LOSS


@pytest.mark.parametrize("output", [(LOGITS, LOGITS), {"one": LOGITS, "other": LOGITS}, None, "text"])
def test_where_several_could_be_meant_the_error_says_what_to_do(output: Any) -> None:
    with pytest.raises(UseError, match="OutputLoss"):
        logits(output)


@dataclasses.dataclass(frozen=True)
class Points:
    positions: Tensor
    pairs: dict[str, Tensor]
    name: str = "points"


class Pairs(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, points: Points) -> tuple[Tensor, Tensor]:
        x = self.embed(points.positions) + points.pairs["weights"][:, None]
        for layer in self.layers:
            x = x + layer(F.relu(x))
        return self.head(x), x.square().mean()


def test_objects_with_tensors_in_them_are_inputs() -> None:
    points = Points(torch.ones(5, 3), {"weights": torch.ones(5)})
    roles = {part.name: part.role for part in th.dissect(Pairs, points, size=Size(8, 1)).values()}
    assert roles["embed.weight"] == "input"
    assert roles["head.weight"] == "output"
    moved = on_device((points, None), "meta")[0]
    assert moved.positions.is_meta
    assert moved.pairs["weights"].is_meta
    assert moved.name == "points"
    assert not points.positions.is_meta


def _mlp(width: int, depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))


def _points(seed: int, step: int) -> tuple[Tensor, None]:
    return torch.rand(8, 2, generator=torch.Generator().manual_seed(100 * seed + step)), None


def _slopes(model: nn.Module, batch: Any) -> Tensor:
    """`mean u² + |∂u/∂x|²`, with the model's derivative by its inputs."""
    inputs = batch[0].clone().requires_grad_()
    made = model(inputs)
    (slopes,) = torch.autograd.grad(made.sum(), inputs, create_graph=True)
    return made.square().mean() + slopes.square().mean()


class Coded(nn.Module):
    """What it made of the inputs, and the code it made that from."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(2, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(x).tanh()
        return self.decode(code), code


def _rebuilt(output: tuple[Tensor, Tensor], targets: Any) -> Tensor:
    return (output[0] - 1).square().mean() + 0.1 * output[1].square().mean()


SIZE = Size(8, 1)
PINN = Workload("pinn", _mlp, _points, ModelLoss(_slopes), SIZE)
CODED = Workload("coded", Coded, _points, OutputLoss(_rebuilt), SIZE)


def _expected(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    loss: Any = workload.loss
    return loss.function(model, batch) if workload is PINN else loss.function(model(batch[0]), batch[1])


@pytest.mark.parametrize("workload", [PINN, CODED], ids=lambda one: one.name)
def test_a_loss_of_the_output_or_of_the_model_trains_in_every_engine(
    workload: Workload, tmp_path: Any
) -> None:
    engines = ("serial",) if workload is PINN else ("serial", "vectorised")
    for engine in engines:
        found = th.sweep(
            workload, lr=[0.01], widths=[8], base=SIZE, steps=3, seeds=1, parameterization="plan",
            engine=engine, out=tmp_path / engine,
        )  # fmt: skip
        assert [row["status"] for row in found.rows] == ["finished"]


@pytest.mark.parametrize("workload", [PINN, CODED], ids=lambda one: one.name)
def test_the_hessian_of_such_a_loss_is_that_of_autograd(workload: Workload) -> None:
    torch.manual_seed(0)
    model, batch = workload.build(4, 1), workload.draw(0, 0)
    operator = th.probes.hessian(model, workload.loss, batch)
    vector = torch.randn(operator.size)
    parameters = list(model.parameters())
    first = torch.autograd.grad(_expected(workload, model, batch), parameters, create_graph=True)
    flat = torch.cat([one.flatten() for one in first])
    second = torch.autograd.grad(flat @ vector, parameters, allow_unused=True)
    expected = torch.cat(
        [
            (torch.zeros_like(tensor) if one is None else one).flatten()
            for one, tensor in zip(second, parameters, strict=True)
        ]
    )
    torch.testing.assert_close(operator @ vector, expected)


def test_derivatives_by_the_inputs_can_be_had_without_gradients() -> None:
    model = PINN.build(4, 1)
    with torch.no_grad():
        value = PINN.evaluate(model, PINN.draw(0, 0))
    assert not value.requires_grad
    assert value == _slopes(model, PINN.draw(0, 0))


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, loss, batch: evaluate(loss, model, batch, temperature=2.0),
        lambda model, loss, batch: th.probes.along_temperature(model, loss, batch, [2.0]),
        th.probes.stream,
        th.probes.signal,
    ],
)
@pytest.mark.parametrize("workload", [PINN, CODED], ids=lambda one: one.name)
def test_what_needs_logits_refuses_a_loss_without_them(ask: Any, workload: Workload) -> None:
    with pytest.raises(UseError, match=r"needs loss\(logits, targets\), but this loss takes"):
        ask(workload.build(8, 1), workload.loss, workload.draw(0, 0))


def test_outputs_without_logits_are_followed_all_together() -> None:
    found = th.probes.coordinates(CODED, [Size(8, 1), Size(16, 1)], base=SIZE, lr=0.01, steps=1, seeds=[0])
    assert "change of logits" in str(found)


def test_other_tensors_get_what_user_code_has_set_on_the_parameters():
    class Marked(nn.Linear):
        def forward(self, x):
            return super().forward(x) / self.weight.width_ratio

    model = Marked(2, 1, bias=False)
    model.weight.width_ratio = 4.0
    x = torch.tensor([[3.0, 5.0]])
    assert with_tensors(model, {"weight": torch.ones(1, 2)}, call, x).item() == 2.0


def test_both_names_of_a_tied_parameter_keep_what_is_set_on_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight
            self.embed.weight.mark = "seen"  # type: ignore[attr-defined]

    def marks(module: nn.Module) -> list[str]:
        assert isinstance(module, Tied)
        return [getattr(one.weight, "mark", "lost") for one in (module.embed, module.head)]

    tensors = {name: torch.zeros(3, 2) for name in ("embed.weight", "head.weight")}
    assert with_tensors(Tied(), tensors, marks, tied=False) == ["seen", "seen"]
