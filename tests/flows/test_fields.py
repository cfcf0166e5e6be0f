"""Networks as velocity fields."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from theodolite import UseError
from theodolite.flows import (
    FlowMap,
    Interpolant,
    denoiser_field,
    field_of,
    find_interpolant,
    map_batches,
    map_loss,
    sample,
    three_gaussians,
)
from theodolite.flows.interpolants import INTERPOLANTS
from theodolite.models import FlowMLP


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


def test_a_denoiser_of_data_plus_noise_is_a_field_on_the_linear_path() -> None:
    """EDM's D(y, σ): for data N(m, s²) it is (σ² m + s² y)/(s² + σ²).

    Its ODE dy/dσ = (y − D)/σ keeps (y − m)/√(s² + σ²). Our x is y/(1 + σ).
    """
    m, s = 3.0, 0.5
    high, low = 80.0, 0.002

    def denoised(y: Tensor, sigma: Tensor) -> Tensor:
        sigma = sigma[:, None]
        return (sigma**2 * m + s**2 * y) / (s**2 + sigma**2)

    field = field_of(lambda x, t: denoised(x / t[:, None], (1 - t) / t), predict="data")
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    found = sample(field, noise, steps=64, method="heun", start=1 / (1 + high), end=1 / (1 + low))
    shrunk = ((s**2 + low**2) / (s**2 + high**2)) ** 0.5
    expected = m + shrunk * ((1 + high) * noise - m)
    assert torch.allclose(found * (1 + low), expected, atol=2e-3)


class Labelled(nn.Module):
    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return label[:, None] * torch.ones_like(x)


class Named(nn.Module):
    def forward(self, x: Tensor, t: Tensor, *, label: Tensor) -> Tensor:
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
    for each in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3])):
        assert torch.equal(field_of(Labelled(), each)(x, t)[:, 0], torch.tensor([1.0, 2, 3]))
    for field in (field_of(Labelled(), 7), field_of(Labelled(), label=7), field_of(Named(), label=7)):
        assert torch.equal(field(x, t), torch.full((3, 2), 7.0))
    assert field_of(Optional())(x, t).dtype == torch.float32  # also of a network that rounds


def test_what_a_network_cannot_be_called_with_is_refused() -> None:
    x, t = torch.zeros(3, 2), torch.rand(3)
    with pytest.raises(UseError, match="Linear has no input for the time"):
        field_of(nn.Linear(2, 2))
    with pytest.raises(UseError, match=r"Labelled takes \(x, t, label\), and label is missing: give it too"):
        field_of(Labelled())
    with pytest.raises(UseError, match=r"Halved takes \(x, t\), no condition by position: 1 given"):
        field_of(Halved(), 3)
    with pytest.raises(UseError, match=r"Labelled takes \(x, t, label\), 1 condition by position: 2 given"):
        field_of(Labelled(), 3, 4)
    with pytest.raises(UseError, match=r"Named takes \(x, t, \*, label\), no condition by position: 1 given"):
        field_of(Named(), 3)
    with pytest.raises(UseError, match=r"Named takes .*, and label is missing: give it by name, label=…"):
        field_of(Named())
    with pytest.raises(UseError, match=r"got an unexpected keyword argument 'lable': give each .* by these"):
        field_of(Labelled(), lable=3)
    for condition, said in ((1.0, "the float 1.0"), (True, "the bool True")):
        with pytest.raises(UseError, match=f"a condition is {said}: give an integer label"):
            field_of(Labelled(), condition)
    with pytest.raises(UseError, match=r"Halved returned the shape \(3, 1\) for an input of shape \(3, 2\)"):
        field_of(Halved())(x, t)
    with pytest.raises(UseError, match=r"a condition has 2 rows for 3 examples.* such as positions, go into"):
        field_of(Labelled(), torch.ones(2))(x, t)
    for times in (torch.tensor(0.5), torch.rand(2), torch.rand(1), torch.rand(3, 1)):
        with pytest.raises(UseError, match=r"t has the shape \(.*\) for x \(3, 2\): give one time for each"):
            field_of(Optional())(x, times)
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


class Texts(nn.Module):
    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        assert text.shape == (len(x), 4, 2)
        return x + text.sum(1)


def test_one_text_is_shared_by_all_examples() -> None:
    x, t, text = torch.randn(3, 2), torch.rand(3), torch.randn(1, 4, 2)
    assert torch.equal(field_of(Texts(), text)(x, t), field_of(Texts(), text.repeat(3, 1, 1))(x, t))


def test_positions_go_into_a_function() -> None:
    x, t, positions = torch.randn(3, 2), torch.rand(3), torch.randn(5, 2)
    found = field_of(lambda x, t: x + positions.sum(0))(x, t)  # type: ignore[arg-type]
    assert torch.equal(found, x + positions.sum(0))


class TwoTimes(nn.Module):
    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return x * times[:, 1:]


def test_an_error_leaves_no_trace() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            return nn.functional.dropout(self.norm(torch.cat([x, times], 1)))[:, :2]

    model, x, t = Noisy(), torch.randn(5, 2), torch.rand(5)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(UseError, match=r"use FlowMap\(net\)\.velocity"):
        field_of(model)(x, t)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


def test_a_network_that_fails_is_named_with_its_inputs() -> None:
    x, t = torch.zeros(3, 2), torch.rand(3)
    with pytest.raises(
        UseError,
        match=r"TwoTimes was called with x of shape \(3, 2\), times of shape \(3,\), and failed with ",
    ) as caught:
        field_of(TwoTimes())(x, t)
    assert str(caught.value).endswith("if it takes two times, use FlowMap(net).velocity")
    assert isinstance(caught.value.__cause__, IndexError)


class Prompted(nn.Module):
    """Without its text it fails as networks of others do."""

    def __init__(self, failure: str) -> None:
        super().__init__()
        self.failure = failure

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        text: Any = None,
        *,
        timestep: Any = None,
        plain: bool = True,
    ) -> Tensor:
        if self.failure == "KeyError":
            text = {"words": text}["text"]
        if self.failure == "TypeError":
            return x + text
        if self.failure == "AssertionError":
            raise AssertionError
        return x.to(text.dtype)


FAILURES = {
    "AttributeError": "AttributeError: 'NoneType' object has no attribute 'dtype'",
    "KeyError": "KeyError: 'text'",
    "TypeError": "TypeError: unsupported operand type(s) for +: 'Tensor' and 'NoneType'",
    "AssertionError": "AssertionError in `raise AssertionError`",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_network_without_its_conditions_is_told_which_it_lacks(failure: str) -> None:
    net, x, t = Prompted(failure), torch.zeros(3, 2), torch.rand(3)
    batch = map_batches(lambda seed, step: (torch.zeros(4, 2), None))(0, 0)
    calls = {
        "x of shape (3, 2), times of shape (3,), without text, timestep": lambda: field_of(net)(x, t),
        "x of shape (3, 2), timestep of shape (3,), without t, text": lambda: denoiser_field(net)(x, t),
        "x of shape (3, 2), times of shape (3, 2), without text, timestep": lambda: FlowMap(net)(x, 0, 1),
        "x of shape (3, 2), times of shape (3, 2), without text, timestep, ": lambda: map_loss()(net, batch),
        "times of shape (3,), text (None), without timestep": lambda: field_of(net, text=None)(x, t),
        "times of shape (3,), condition 0 (None), without timestep": lambda: field_of(net, None)(x, t),
    }
    mapped = (", as in FlowMap(net, (labels,))", ": labels by giving classes to map_batches")
    given = (" by name", " by name", *mapped, " by name", " by name")
    for (called, call), how in zip(calls.items(), given, strict=True):
        with pytest.raises(UseError) as caught:
            call()
        said = str(caught.value)
        assert said.startswith("Prompted was called with x of shape ")
        assert f"{called.rstrip(', ')}, and failed with {FAILURES[failure]}: " in said
        shape = ", or check the shape of the points" if failure == "AssertionError" else ""
        assert said.endswith(f": give the conditions it was trained with{how}{shape}")
        assert type(caught.value.__cause__).__name__ == failure


def test_the_remedy_is_for_what_is_wrong() -> None:
    class Keyed(nn.Module):
        def forward(self, x: Tensor, t: Tensor, condition: dict[str, Tensor]) -> Tensor:
            return x + condition["label"][:, None]

    class Broken(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x @ torch.zeros(5, 2)

    x, t = torch.zeros(4, 2), torch.rand(4)
    labelled = FlowMLP(16, 1, classes=3)
    for label, integers in ((7, "7 to 7"), (torch.tensor([0, 1, 2, 9]), "0 to 9")):
        with pytest.raises(
            UseError,
            match=rf"condition 0 of shape \(4,\) with integers from {integers}, and failed with IndexError: "
            "index out of range in self: give labels below its number of classes$",
        ):
            field_of(labelled, label)(x, t)
    with pytest.raises(
        UseError, match=r"condition 0 \(a dict with the keys \['text'\]\), and failed with Key"
    ):
        field_of(Keyed(), {"text": t})(x, t)
    with pytest.raises(UseError, match="no conditions, so check the shape of the points"):
        field_of(Broken())(x, t)

    class Masked(nn.Module):
        def forward(self, x: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
            return x @ torch.zeros(5, 2)

    for field, how in ((field_of(Masked()), " by name"), (field_of(Masked(), mask=torch.ones(4)), "")):
        with pytest.raises(
            UseError,
            match="shapes cannot be multiplied.*: give the conditions it was trained with"
            f"{how}, or check the shape of the points$",
        ):
            field(x, t)


class Wave(nn.Module):
    """A network of the time and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor, times: Tensor | None = None, timestep: Tensor | None = None) -> Tensor:
        time = times if timestep is None else timestep / 1000
        assert time is not None
        return torch.sin(self.scale * x + time.reshape(len(x), -1)[:, :1])


@pytest.mark.parametrize("make", [field_of, lambda net: FlowMap(net).velocity, denoiser_field])
def test_fields_inside_checkpoints_have_the_same_gradients(make: Any) -> None:
    """A checkpoint ends its second pass by an exception inside the network."""
    net, x = Wave(), torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    field = make(net)
    found, expected = (
        torch.autograd.grad(sample(one, x, steps=2, differentiable=True).square().sum(), [x, net.scale])
        for one in (lambda x, t: checkpoint(field, x, t, use_reentrant=False), field)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=0)


def test_errors_of_theodolite_itself_inside_a_network_stay() -> None:
    class Unfollowed(Exception):
        """As a probe that looks on raises."""

    Unfollowed.__module__ = "theodolite.probes"

    def network(x: Tensor, t: Tensor) -> Tensor:
        raise Unfollowed

    with pytest.raises(Unfollowed):
        field_of(network)(torch.zeros(3, 2), torch.rand(3))  # type: ignore[arg-type]


def ends(x: Tensor, time: Tensor, path: Interpolant, label: int | None = None) -> tuple[Tensor, Tensor]:
    """The means of data and noise at a time that is 0 at the data, of one component or all."""
    t = 1 - time
    data = three_gaussians().denoised(x, t, label, path)
    return data, -path.sigma(t)[:, None] * three_gaussians().score(x, t, label, path)


class Denoiser(nn.Module):
    """An exact network in the convention of diffusers: time 0 is data, the time is not the second input, the
    output has a name and more channels than have a meaning."""

    scale = 1000.0

    def __init__(self, predict: str = "velocity", path: str = "linear", **config: Any) -> None:
        super().__init__()
        self.predict, self.path, self.config = predict, find_interpolant(path), config

    def forward(
        self, sample: Tensor, class_labels: Tensor | None = None, timestep: Tensor | None = None
    ) -> SimpleNamespace:
        assert timestep is not None
        label = None if class_labels is None else int(class_labels[0])
        data, noise = ends(sample, timestep.to(sample) / self.scale, self.path, label)
        found = {"velocity": noise - data, "noise": noise, "data": data}[self.predict]
        return SimpleNamespace(sample=torch.cat([found, torch.ones_like(found)], 1))


class FluxTransformer2DModel(Denoiser):
    """By its name: one of diffusers whose time goes to 1."""

    scale = 1.0


POINTS = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TIMES = torch.linspace(0.05, 0.95, 20, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Denoiser, FluxTransformer2DModel])
@pytest.mark.parametrize("label", [None, 1])
def test_an_exact_denoiser_of_diffusers_is_the_velocity_of_the_mixture(
    kind: type[Denoiser], label: int | None
) -> None:
    condition = {} if label is None else {"class_labels": label}
    field = denoiser_field(kind(), **condition)
    expected = three_gaussians().velocity(POINTS, TIMES, label)
    assert torch.allclose(field(POINTS, TIMES), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", ["linear", "variance-preserving"])
@pytest.mark.parametrize("predict", ["noise", "data"])
def test_denoisers_may_predict_noise_or_data(predict: Any, path: str) -> None:
    field = denoiser_field(Denoiser(predict, path), predict=predict, path=path)
    expected = three_gaussians().velocity(POINTS, TIMES, path=path)
    assert torch.allclose(field(POINTS, TIMES), expected, rtol=1e-9, atol=1e-9)


def test_timesteps_are_in_the_units_of_the_denoiser() -> None:
    seen: list[Tensor] = []

    def model(x: Tensor, timestep: Tensor) -> Tensor:
        seen.append(timestep)
        return x

    x, t = torch.zeros(3, 2), torch.tensor([0.0, 0.25, 1.0])
    denoiser_field(model)(x, t)  # type: ignore[arg-type]
    denoiser_field(model, timesteps=8)(x, t)  # type: ignore[arg-type]
    assert [one.tolist() for one in seen] == [[1000, 750, 0], [8, 6, 0]]

    class Rows(nn.Module):
        """Times are rows of a table, of which noise has the last."""

        def __init__(self) -> None:
            super().__init__()
            self.config = {"time_embedding_type": "learned", "num_train_timesteps": 40}
            self.table = nn.Embedding.from_pretrained(torch.arange(40.0)[:, None])

        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            return self.table(timestep).expand_as(x)

    assert denoiser_field(Rows())(x, t)[:, 0].tolist() == [-39, -30, 0]


def test_what_a_denoiser_cannot_be_called_with_is_refused() -> None:
    fix = r"let it be called as model\(x, timestep=…\), or use field_of"
    with pytest.raises(UseError, match=rf"Labelled takes \(x, t, label\), and has no input timestep: {fix}"):
        denoiser_field(Labelled())
    with pytest.raises(UseError, match=r"Linear takes \(input\), and has no input timestep: let it be"):
        denoiser_field(nn.Linear(2, 2))
    with pytest.raises(UseError, match=r"Denoiser takes .*unexpected keyword argument 'labels'"):
        denoiser_field(Denoiser(), labels=3)
    with pytest.raises(UseError, match="the model is 3"):
        denoiser_field(3)  # type: ignore[arg-type]
    with pytest.raises(UseError, match="timesteps is 0"):
        denoiser_field(Denoiser(), timesteps=0)
    with pytest.raises(UseError, match="t has the shape"):
        denoiser_field(Denoiser())(POINTS, TIMES[:1])

    def prompted(x: Tensor, text: Tensor, timestep: Tensor) -> Tensor:
        return x

    with pytest.raises(UseError, match="and text is missing: give it by name, text=…"):
        denoiser_field(prompted)  # type: ignore[arg-type]
