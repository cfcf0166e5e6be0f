"""Networks as velocity fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError
from theodolite.flows import Interpolant, field_of, three_gaussians
from theodolite.flows.interpolants import INTERPOLANTS


class Known(nn.Module):
    """A network that predicts a quantity of a mixture without error."""

    def __init__(self, predict: str, path: Interpolant) -> None:
        super().__init__()
        self.predict, self.path = predict, path

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        mixture = three_gaussians()
        found = getattr(mixture, "denoised" if self.predict == "data" else "score")(x, t, path=self.path)
        return {"sample": -self.path.sigma(t)[:, None] * found if self.predict == "noise" else found}


@pytest.mark.parametrize("path", INTERPOLANTS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("predict", ["data", "noise", "score"])
def test_predictions_become_the_velocity(predict: Any, path: Interpolant) -> None:
    x = torch.randn(20, 2, dtype=torch.float64)
    t = torch.linspace(0.1, 0.9, 20, dtype=torch.float64)
    found = field_of(Known(predict, path), path=path, predict=predict)(x, t)
    expected = three_gaussians().velocity(x, t, path=path)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert found.dtype == x.dtype


class Labelled(nn.Module):
    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return label[:, None] * torch.ones_like(x)


class Halved(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x[:, :1]


class Optional(nn.Module):
    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        return x.to(torch.bfloat16)


def test_conditions_are_labels_for_each_example_or_one_for_all() -> None:
    x, t = torch.zeros(3, 2), torch.rand(3)
    assert torch.equal(field_of(Labelled(), torch.tensor([1, 2, 3]))(x, t)[:, 0], torch.tensor([1.0, 2, 3]))
    assert torch.equal(field_of(Labelled(), 7)(x, t), torch.full((3, 2), 7.0))
    assert field_of(Optional())(x, t).dtype == torch.float32  # also of a network that rounds


def test_what_a_network_cannot_be_called_with_is_refused() -> None:
    x, t = torch.zeros(3, 2), torch.rand(3)
    with pytest.raises(UseError, match="Linear has no input for the time"):
        field_of(nn.Linear(2, 2))
    with pytest.raises(
        UseError, match=r"Labelled takes \(x, t, label\), and the condition after x, t is missing"
    ):
        field_of(Labelled())
    with pytest.raises(UseError, match=r"Halved takes \(x, t\), no condition: 1 given"):
        field_of(Halved(), 3)
    with pytest.raises(UseError, match=r"Halved returned the shape \(3, 1\) for an input of shape \(3, 2\)"):
        field_of(Halved())(x, t)
    with pytest.raises(UseError, match="a condition has 2 rows for 3 examples"):
        field_of(Labelled(), torch.ones(2))(x, t)
    with pytest.raises(UseError, match=r"t holds -0\.5"):
        field_of(Optional())(x, torch.full((3,), -0.5))
    with pytest.raises(UseError, match="predict is 'eps'"):
        field_of(Optional(), predict="eps")  # type: ignore[arg-type]
    with pytest.raises(UseError, match="path is 'cosine'"):
        field_of(Optional(), path="cosine")
    with pytest.raises(UseError, match="at t = 0, the velocity from the noise"):
        field_of(Optional(), predict="noise")(x, torch.zeros(3))
    with pytest.raises(UseError, match="the model is 3"):
        field_of(3)  # type: ignore[arg-type]
