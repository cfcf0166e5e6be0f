"""What the audit says that an optimizer does is what it does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from theodolite.probes.gains.decay import decay
from theodolite.probes.gains.parameter_groups import handlings

from .gained import INPUTS, Net, usual


def optimizers() -> list[Any]:
    torch_own = [
        *(
            ("SGD", {"momentum": 0.9}),
            ("Adam", {}),
            ("AdamW", {}),
            ("Adagrad", {}),
            ("Adadelta", {"lr": 0.1}),
        ),
        *(("Adamax", {}), ("ASGD", {}), ("RMSprop", {}), ("NAdam", {}), ("RAdam", {}), ("Adafactor", {})),
        *(
            ("NAdam", {"decoupled_weight_decay": True}),
            ("RAdam", {"decoupled_weight_decay": True}),
            ("Muon", {}),
        ),
    ]
    found = [(getattr(torch.optim, name), options) for name, options in torch_own]
    return [pytest.param(kind, options, id=f"{kind.__name__}-{len(options)}") for kind, options in found]


@pytest.mark.parametrize("kind, options", optimizers())
def test_coupled_or_decoupled_is_what_steps_along_no_gradient_do(kind: Any, options: dict[str, Any]) -> None:
    """Two steps with gradients of zero: decoupled decay leaves W·(1 − lr·λ)², and nothing else does."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [4.0, 0.5]], dtype=torch.float64))
    start = weight.detach().clone()
    optimizer = kind([weight], **{"lr": 0.01, "weight_decay": 0.3} | options)
    found, _ = handlings({"w": weight}, [optimizer])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    lr = options.get("lr", 0.01)
    decoupled = torch.allclose(weight, start * (1 - lr * 0.3) ** 2, rtol=1e-9)
    assert found["w"].decoupled is decoupled
    if decoupled:
        assert found["w"].rate == pytest.approx(lr * 0.3)
    else:
        assert math.isnan(found["w"].rate)


@pytest.mark.parametrize("fixed", [False, True])
def test_the_rate_is_the_fraction_lost_in_a_step(fixed: bool) -> None:
    Lion = pytest.importorskip("pytorch_optimizer").Lion
    weight = nn.Parameter(torch.full((2, 2), 2.0))
    optimizer = Lion([weight], lr=0.1, weight_decay=0.3, weight_decouple=True, fixed_decay=fixed)
    found, _ = handlings({"w": weight}, [optimizer])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert found["w"].rate == pytest.approx(1 - weight[0, 0].item() / 2, rel=1e-5)


def test_coupled_decay_is_said_to_go_through_the_preconditioner() -> None:
    model = Net()
    said = str(decay(model, INPUTS, torch.optim.Adam(model.parameters(), weight_decay=0.1)))
    assert "Adam, coupled (λ·W joins the gradient and goes through its preconditioner)" in " ".join(
        said.split()
    )


class Renamed(torch.optim.SGD):
    """Its decay has another name, and torch would not know it."""

    def __init__(self, parameters: Any, wd: float) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            del group["weight_decay"]
            group["wd"] = wd


def test_an_optimizer_without_the_option_may_decay_or_not() -> None:
    model = Net()
    audit = decay(model, INPUTS, Renamed(model.parameters(), 0.1))
    assert {row.now.state for row in audit.rows} == {"unknown"}
    assert {(row.verdict, row.should) for row in audit.rows} == {("note", None)}
    said = " ".join(str(audit).split())
    assert said.startswith("Weight decay is wrong for none of 7 gains, and not known for 7.")
    assert "Whether weights decay is not known: Renamed has no option weight_decay." in said
    assert "No weight decays" not in said
    assert "No weight decays" in str(decay(model, INPUTS, torch.optim.Rprop(model.parameters())))


def test_a_warm_up_that_starts_at_nothing_hides_nothing() -> None:
    model = Net()
    optimizer = usual(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    audit = decay(model, INPUTS, optimizer)
    assert {row.should for row in audit.advised} == {0.2}
    assert {row.now.rate for row in audit.rows if row.kind == "weight"} == {0.01 * 0.2}
