"""Slices of the loss against closed forms, and what batch norm does to them."""

from __future__ import annotations

import copy
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.curvature.axes import Axes, random_axes, trajectory
from theodolite.probes.curvature.landscape import landscape
from theodolite.probes.curvature.objective import Objective

LANDSCAPE = import_module("theodolite.probes.curvature.landscape")
GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(12, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(12, 3, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(3, (12,), generator=GENERATOR)


def linear() -> nn.Linear:
    return nn.Linear(5, 3, bias=False).double()


def quadratic(weight: Tensor) -> float:
    """The loss of a linear model, written out."""
    return ((X @ weight.T - Y) ** 2).mean().item()


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


def normed() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    for _ in range(20):
        model.train()(X + 1)  # stored statistics that are those of no batch below
    return model.eval()


@pytest.mark.parametrize("axes", ["random", "filter", "hessian"])
def test_a_plane_through_a_quadratic_is_the_quadratic(axes: Any) -> None:
    model = linear()
    found = landscape(model, F.mse_loss, (X, Y), axes=axes, num=5, radius=0.7)
    one, other = (vector["weight"] for vector in found.axes.vectors)
    places = np.linspace(-0.7, 0.7, 5)
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            expected = quadratic(model.weight + a * one + b * other)
            assert found.values[i, j] == pytest.approx(expected, rel=1e-12)
    assert found.loss == pytest.approx(quadratic(model.weight), rel=1e-12)


@pytest.mark.parametrize("axes", ["random", "filter", "hessian"])
def test_both_curvatures_of_a_quadratic_are_the_closed_form(axes: Any) -> None:
    found = landscape(linear(), F.mse_loss, (X, Y), axes=axes, num=5)
    for one, axis in zip(found.slices, found.axes.vectors, strict=True):
        expected = 2 * float(((X @ axis["weight"].T) ** 2).mean())
        assert one.parabola == pytest.approx(expected, rel=1e-6)
        assert one.exact == pytest.approx(expected, rel=1e-9)


def test_along_an_eigenvector_the_curvature_is_the_eigenvalue() -> None:
    found = landscape(linear(), F.mse_loss, (X, Y), axes="hessian", num=5)
    # The Hessian has three blocks 2/N·XᵀX, one for each output: each eigenvalue three times.
    largest = float(torch.linalg.eigvalsh(2 / Y.numel() * X.T @ X)[-1])
    assert found.slices[0].exact == pytest.approx(largest, rel=1e-6)
    assert found.slices[0].label == f"λ = {largest:.4g}"
    assert found.axes.orthonormal
    assert str(found.axes).endswith("; orthonormal")


def small() -> tuple[nn.Module, Tensor]:
    """A network and the eigenvalues of its Hessian, from the explicit matrix, ascending."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    shapes = {name: one.shape for name, one in model.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        tensors = {name: one.reshape(shapes[name]) for name, one in zip(shapes, parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, tensors, X), CLASSES)

    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    return model, torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))


@pytest.mark.parametrize(
    "which, places",
    [("largest", [-1, -2]), ("smallest", [0, 1]), ("ends", [-1, 0]), ("magnitude", None)],
)
def test_eigenvectors_are_those_of_the_chosen_eigenvalues(which: Any, places: list[int] | None) -> None:
    model, every = small()
    expected = every[every.abs().argsort(descending=True)[:2]] if places is None else every[places]
    found = landscape(model, F.cross_entropy, (X, CLASSES), axes="hessian", which=which, num=5)
    for one, value in zip(found.slices, expected.tolist(), strict=True):
        assert one.exact == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert one.label == f"λ = {value:.4g}"
    assert every[0] < -1e-3
    assert found.axes.orthonormal


def test_the_criteria_are_those_of_the_spectrum_at_the_centre() -> None:
    model, every = small()
    found = landscape(model, F.cross_entropy, (X, CLASSES), num=3, spectrum=True)
    assert found.spectrum is not None
    assert found.spectrum.r_e.value == pytest.approx(float((every[0] / every[-1]).abs()), rel=1e-6)
    k_h1 = found.spectrum.k_hn(1)
    assert abs(k_h1.value - float(-every[every < 0].sum() / every[every > 0].sum())) < 4 * k_h1.error
    assert f"r_e {found.spectrum.r_e}, K_H0.5 {found.spectrum.k_hn(0.5)}, K_H1 {k_h1}" in str(found)
    other = landscape(model, F.cross_entropy, (X, CLASSES), num=3)
    assert other.spectrum is None
    assert "r_e" not in str(other)


def test_the_spectrum_takes_the_statistics_of_the_batch_as_every_point_does() -> None:
    # Without dependence on the scale of the weights before a norm, θ·∂/∂θ of the loss is 0, and so is θ'Hθ.
    model = normed()
    weights = {"0.weight": model[0].weight.detach() * 2}
    found, stored = (
        landscape(
            model, F.cross_entropy, (X, CLASSES), axes=[weights], parameters="0.weight", num=3,
            spectrum=True, batch_norm=how,
        )
        for how in ("batch", "frozen")
    )  # fmt: skip
    assert found.spectrum is not None
    assert stored.spectrum is not None
    assert abs(found.slices[0].exact) < 1e-3 < stored.slices[0].exact
    assert found.spectrum.trace.value != pytest.approx(stored.spectrum.trace.value, rel=0.1)


def test_the_parabola_tends_to_the_curvature_of_a_network() -> None:
    model = deep().eval()
    coarse, fine = (
        landscape(model, F.cross_entropy, (X, CLASSES), num=5, radius=radius) for radius in (0.2, 0.002)
    )
    for one, other in zip(coarse.slices, fine.slices, strict=True):
        assert one.exact == pytest.approx(other.exact, rel=1e-9)
        assert abs(other.parabola / other.exact - 1) < 1e-4 < abs(one.parabola / one.exact - 1)


class TestAxes:
    def directions(self, model: nn.Module, *, filters: bool) -> dict[str, Tensor]:
        objective = Objective(model, F.cross_entropy, [])
        return dict(random_axes(objective, 1, filters=filters).vectors[0])

    def test_a_random_direction_is_as_long_as_all_weights(self) -> None:
        model = deep()
        found = self.directions(model, filters=False)
        length = math.sqrt(sum(float(tensor.square().sum()) for tensor in found.values()))
        weights = math.sqrt(sum(tensor.square().sum().item() for tensor in model.parameters()))
        assert length == pytest.approx(weights, rel=1e-6)

    def test_a_filter_is_as_long_as_its_weights_and_vectors_do_not_move(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 3), nn.LayerNorm((2, 8, 8))
        )
        model.append(nn.Embedding(6, 5))
        with torch.no_grad():
            model[0].weight[1] = 0  # type: ignore[union-attr, operator]
        found = self.directions(model, filters=True)
        for out in range(4):
            assert found["0.weight"][out].norm().item() == pytest.approx(
                model[0].weight[out].norm().item(), rel=1e-5
            )
        for out in range(2):  # which has its inputs first
            assert found["2.weight"][:, out].norm().item() == pytest.approx(
                model[2].weight[:, out].norm().item(), rel=1e-5
            )
        for token in range(6):
            assert found["4.weight"][token].norm().item() == pytest.approx(
                model[4].weight[token].norm().item(), rel=1e-5
            )
        still = {name for name, tensor in found.items() if not tensor.any()}
        assert still == {"0.bias", "1.weight", "1.bias", "2.bias", "3.weight", "3.bias"}

    def test_the_filters_of_a_transposed_linear_map_are_its_columns(self) -> None:
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        model = conv1d(6, 4)  # (in, out)
        found = self.directions(model, filters=True)["weight"]
        torch.testing.assert_close(found.norm(dim=0), model.weight.norm(dim=0))
        assert not torch.allclose(found.norm(dim=1), model.weight.norm(dim=1))

    def test_a_direction_is_not_what_the_weights_were_drawn_from(self) -> None:
        """Both may be drawn with seed 0."""
        torch.manual_seed(0)
        model = nn.Linear(40, 50, bias=False)
        nn.init.normal_(model.weight)
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        found = self.directions(model, filters=False)["weight"].flatten()
        weight = model.weight.detach().flatten()
        assert abs(float(found @ weight / found.norm() / weight.norm())) < 0.1

    def test_two_seeds_are_two_planes_and_one_is_one(self) -> None:
        model = linear()
        first, again, other = (
            landscape(model, F.mse_loss, (X, Y), num=3, seed=seed).values for seed in (0, 0, 1)
        )
        assert (first == again).all()
        assert (first != other).any()

    def test_whether_they_are_orthonormal_is_said(self) -> None:
        found = landscape(linear(), F.mse_loss, (X, Y), num=3)
        assert not found.axes.orthonormal
        assert "not orthonormal: lengths" in str(found.axes)
        one, other = (vector["weight"].flatten().numpy() for vector in found.axes.vectors)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert found.axes.angle == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-9)

    def test_axes_serve_again_at_other_weights(self) -> None:
        model = linear()
        axes = landscape(model, F.mse_loss, (X, Y), num=3).axes
        with torch.no_grad():
            model.weight += 1
        found = landscape(model, F.mse_loss, (X, Y), axes=axes, num=3)
        one, other = (vector["weight"] for vector in axes.vectors)
        assert found.values[0, 2] == pytest.approx(quadratic(model.weight - one + other), rel=1e-12)


class TestCheckpoints:
    def test_a_line_goes_from_here_to_there(self) -> None:
        here, there = deep().eval(), deep().eval()
        found = landscape(here, F.cross_entropy, (X, CLASSES), axes=[there.state_dict()], num=5)
        assert found.places[0].tolist() == [-0.5, 0, 0.5, 1, 1.5]
        assert found.values[1] == pytest.approx(F.cross_entropy(here(X), CLASSES).item(), rel=1e-9)
        assert found.values[3] == pytest.approx(F.cross_entropy(there(X), CLASSES).item(), rel=1e-9)

    def test_a_plane_holds_both(self) -> None:
        here, one, other = linear(), linear(), linear()
        found = landscape(here, F.mse_loss, (X, Y), axes=[one.state_dict(), other.state_dict()], num=5)
        assert found.values[3, 1] == pytest.approx(quadratic(one.weight), rel=1e-9)
        assert found.values[1, 3] == pytest.approx(quadratic(other.weight), rel=1e-9)
        middle = one.weight + other.weight - here.weight
        assert found.values[3, 3] == pytest.approx(quadratic(middle), rel=1e-9)

    def test_names_of_wrapped_models_are_understood(self) -> None:
        here, there = linear(), linear()
        expected = landscape(here, F.mse_loss, (X, Y), axes=[there.state_dict()], num=5).values
        compiled = torch.compile(here, backend="eager")
        for model, state in [
            (compiled, there.state_dict()),
            (compiled, torch.compile(there, backend="eager").state_dict()),
        ]:
            found = landscape(model, F.mse_loss, (X, Y), axes=[state], num=5)  # type: ignore[arg-type]
            assert (found.values == expected).all()

    def test_tied_weights_move_together(self) -> None:
        def tied() -> nn.Sequential:
            model = nn.Sequential(
                nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False)
            ).double()
            model[2].weight = model[0].weight
            return model

        here, there = tied(), tied()
        found = landscape(here, F.mse_loss, (X, X), axes=[there.state_dict()], num=5)
        assert found.values[3] == pytest.approx(F.mse_loss(there(X), X).item(), rel=1e-9)


class TestBatchNorm:
    """L along (1 + a)·W of the layer before the norm, for which the norm makes up."""

    def along_scale(self, model: nn.Sequential, how: Any) -> Any:
        double = copy.deepcopy(model.state_dict())
        double["0.weight"] *= 2
        return landscape(
            model, F.cross_entropy, (X, CLASSES), axes=[double], radius=(-0.5, 1), num=7,
            parameters=["0.weight"], batch_norm=how,
        )  # fmt: skip

    def test_with_the_statistics_of_the_batch_the_loss_ignores_the_scale(self) -> None:
        model = normed()
        model[1].eps = 1e-30
        found = self.along_scale(model, "batch")
        hidden = X @ model[0].weight.T
        hidden = (hidden - hidden.mean(0)) / hidden.var(0, unbiased=False).sqrt()
        expected = F.cross_entropy(model[3](hidden.relu()), CLASSES).item()
        np.testing.assert_allclose(found.values, expected, rtol=1e-9)
        assert found.slices[0].exact == pytest.approx(0.0, abs=1e-9)
        assert "statistics of the batch, at every point" in str(found)

    def test_with_stored_statistics_it_does_not(self) -> None:
        model = normed()
        norm = model[1]
        found = self.along_scale(model, "frozen")
        for a, value in zip(found.places[0], found.values, strict=True):
            hidden = (1 + a) * X @ model[0].weight.T
            hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
            expected = F.cross_entropy(model[3](hidden.relu()), CLASSES).item()
            assert value == pytest.approx(expected, rel=1e-9)
        assert np.ptp(found.values) > 0.01
        assert found.loss == pytest.approx(F.cross_entropy(model(X), CLASSES).item(), rel=1e-9)

    @pytest.mark.parametrize("training", [True, False])
    def test_the_mode_of_the_model_does_not_matter(self, training: bool) -> None:
        model = normed()
        expected = {how: self.along_scale(model, how).values for how in ("batch", "frozen")}
        model.train(training)
        for how, values in expected.items():
            assert (self.along_scale(model, how).values == values).all()

    def test_nothing_is_said_where_there_is_none(self) -> None:
        found = landscape(linear(), F.mse_loss, (X, Y), num=3)
        assert found.batch_norm is None
        assert "batch norm" not in str(found)


def test_several_batches_count_by_their_examples() -> None:
    model = linear()
    whole = landscape(model, F.mse_loss, (X, Y), num=3)
    parts = landscape(model, F.mse_loss, [(X[:3], Y[:3]), (X[3:], Y[3:])], num=3)
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-12)
    assert parts.slices[0].exact == pytest.approx(whole.slices[0].exact, rel=1e-9)


def test_all_points_see_the_same_dropout_mask() -> None:
    model = deep().train()
    still = Axes(
        "random", ({name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()},), ("0",)
    )
    found = landscape(model, F.cross_entropy, (X, CLASSES), axes=still, num=5)
    assert (found.values == found.values[0]).all()
    assert found.loss != F.cross_entropy(model.eval()(X), CLASSES).item()


class TestManyAtOnce:
    """As on a GPU, but here."""

    @pytest.fixture(autouse=True)
    def _vectorised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LANDSCAPE, "_first_try", lambda *_: 8)

    @pytest.mark.parametrize("build", [deep, normed])
    def test_it_is_the_same_as_one_by_one(self, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model, calls = build().train(), []

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            calls.append(logits)
            return F.cross_entropy(logits, targets)

        many = landscape(model, loss, (X, CLASSES), num=5)
        num_calls = len(calls)
        monkeypatch.setattr(LANDSCAPE, "_first_try", lambda *_: 1)
        one = landscape(model, loss, (X, CLASSES), num=5)
        np.testing.assert_allclose(many.values, one.values, rtol=1e-12)
        assert num_calls < len(calls) - num_calls - 20

    def test_fewer_are_taken_when_memory_is_short(self) -> None:
        seen: list[int] = []

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            level = torch._C._functorch.maybe_get_level(logits)
            batched = torch._C._functorch.get_unwrapped(logits).shape[0] if level > 0 else 1
            seen.append(batched)
            if batched > 2:
                raise torch.OutOfMemoryError("too much")
            return F.mse_loss(logits, targets)

        model = linear()
        found = landscape(model, loss, (X, Y), num=3)
        assert seen[:3] == [8, 4, 2]
        assert found.values[1, 1] == pytest.approx(quadratic(model.weight), rel=1e-12)

    def test_what_cannot_be_vectorised_is_done_one_by_one(self) -> None:
        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(logits, targets) + 0 * logits.sum().item()

        model = linear()
        found = landscape(model, loss, (X, Y), num=3)
        assert found.values[1, 1] == pytest.approx(quadratic(model.weight), rel=1e-12)


@pytest.mark.parametrize("width, together", [(8, True), (20_000, False)])
def test_a_small_network_is_evaluated_at_many_points_at_once(width: int, together: bool) -> None:
    levels: list[int] = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        levels.append(torch._C._functorch.maybe_get_level(logits))
        return F.mse_loss(logits, targets)

    landscape(nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3)).double(), loss, (X, Y), num=3)
    assert any(level > 0 for level in levels) == together


def test_where_the_loss_doubles() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    x, y = torch.ones(1, 1).double(), torch.full((1, 1), 1.0).double()
    # L(a) = (2 + a)² towards weight 4: twice 4 at 2√2 − 2 ahead, and at −2√2 − 2 behind.
    found = landscape(
        model, F.mse_loss, (x, y), axes=[{"weight": torch.full((1, 1), 4.0)}], radius=5, num=101
    )
    low, high = found.slices[0].doubles
    assert high == pytest.approx(2 * math.sqrt(2) - 2, abs=1e-3)
    assert low == pytest.approx(-2 * math.sqrt(2) - 2, abs=1e-3)
    near = landscape(model, F.mse_loss, (x, y), axes=[{"weight": torch.full((1, 1), 4.0)}], radius=0.5, num=5)
    assert near.slices[0].doubles == (-math.inf, math.inf)
    assert "< -0.5" in str(near)
    assert "> 0.5" in str(near)


def test_points_that_are_not_finite_are_values(tmp_path: Path) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.log() * x

    found = landscape(
        Root(), F.mse_loss, (torch.ones(2, 1), torch.ones(2, 1)), axes=[{"weight": torch.zeros(1, 1)}],
        radius=2, num=9,
    )  # fmt: skip
    assert [math.isfinite(value) for value in found.values] == [True] * 6 + [False] * 3
    assert math.isinf(found.values[6])
    assert math.isnan(found.values[7])
    assert "3 of 9 points are not finite" in str(found)
    saved = json.loads(found.save(tmp_path / "root.json").read_text())
    assert saved["values"][5] == pytest.approx((math.log(0.5) - 1) ** 2, rel=1e-5)
    assert saved["values"][6:] == [None] * 3


def test_a_model_without_second_derivative_has_a_landscape_and_says_why_no_curvature() -> None:
    class Fused(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            query = super().forward(x)[None, None]
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)[0][0, 0]

    found = landscape(Fused(5, 3).double(), F.cross_entropy, (X, CLASSES), num=3)
    assert math.isnan(found.slices[0].exact)
    assert math.isfinite(found.slices[0].parabola)
    assert "flash_attention_for_cpu_backward has no second derivative" in str(found)


class TestTrace:
    def state(self, model: nn.Module) -> dict[str, Any]:
        return {
            "bits": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "tracks": [getattr(module, "track_running_stats", None) for module in model.modules()],
            "hooks": [len(module._forward_hooks) for module in model.modules()],
            "versions": [p._version for p in model.parameters()],
            "random": torch.get_rng_state(),
        }

    def check(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def model(self) -> nn.Sequential:
        model = normed().train()
        model.append(nn.Dropout(0.5))
        F.cross_entropy(model(X), CLASSES).backward()
        model[3].bias.requires_grad_(False)
        model[2].eval()
        return model

    @pytest.mark.parametrize("how", ["batch", "frozen"])
    @pytest.mark.parametrize("axes", ["filter", "hessian", "path"])
    def test_none_is_left(self, how: Any, axes: Any) -> None:
        model = self.model()
        if axes == "path":
            states = [normed().append(nn.Dropout(0.5)).state_dict() for _ in range(3)]
            axes = trajectory(model, states)
        before = self.state(model)
        landscape(model, F.cross_entropy, (X, CLASSES), axes=axes, num=3, batch_norm=how)
        self.check(before, self.state(model))

    @pytest.mark.parametrize("at_once, fails_at", [(1, 1), (1, 7), (1, 16), (8, 1), (8, 2)])
    def test_none_is_left_after_an_error(
        self, at_once: int, fails_at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LANDSCAPE, "_first_try", lambda *_: at_once)
        model, calls = self.model(), 0

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            torch.rand(1)
            if calls >= fails_at:
                raise RuntimeError("half-way")
            return F.cross_entropy(logits, targets)

        states = [normed().append(nn.Dropout(0.5)).state_dict() for _ in range(3)]
        before = self.state(model)
        with pytest.raises(RuntimeError, match="half-way"):
            landscape(model, loss, (X, CLASSES), axes=trajectory(model, states), num=3)
        self.check(before, self.state(model))


@pytest.mark.parametrize("at_once, times", [(1, 9 + 3 + 3), (8, 2)])
def test_progress_goes_from_nothing_to_all(at_once: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LANDSCAPE, "_first_try", lambda *_: at_once)
    told: list[float] = []
    batches = [(X[:3], Y[:3]), (X[3:], Y[3:])]
    landscape(linear(), F.mse_loss, batches, num=3, progress=lambda title, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    assert len(told) == 2 * times


def test_a_page_asks_nobody_and_holds_the_plane(tmp_path: Path) -> None:
    path = landscape(linear(), F.mse_loss, (X, Y), num=3).save(tmp_path / "plane.html")
    source = path.read_text(encoding="utf-8")
    assert '"type": "contour"' in source
    assert '"type": "surface"' in source
    assert "http-equiv" in source


def test_a_csv_has_a_row_for_each_point(tmp_path: Path) -> None:
    found = landscape(linear(), F.mse_loss, (X, Y), num=3)
    head, *rows = found.save(tmp_path / "plane.csv").read_text(encoding="utf-8").splitlines()
    assert head == "filter 1,filter 2,loss"
    assert [float(row.split(",")[2]) for row in rows] == found.values.reshape(-1).tolist()
    with pytest.raises(th.UseError, match=r"must end in \.json or \.html or \.csv"):
        found.save(tmp_path / "plane.png")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"axes": "filters"}, "axes is 'filters': it is 'random', 'filter', 'hessian', one or two"),
        ({"axes": []}, "one or two state dicts in a list"),
        ({"axes": {"weight": torch.ones(3, 5)}}, "one or two state dicts in a list"),
        ({"axes": [{"weights": torch.ones(3, 5)}]}, "the checkpoint has no weight"),
        ({"axes": [{"weight": torch.ones(5, 3)}]}, r"weight has the shape \(5, 3\) in the checkpoint"),
        ({"axes": [3]}, "a checkpoint is a state dict, not the int 3"),
        ({"dimensions": 3}, "dimensions is 3"),
        ({"which": "top", "axes": "hessian"}, "which is 'top'"),
        ({"which": "smallest"}, r"which is 'smallest'.*needs axes='hessian'"),
        ({"which": "ends", "axes": "hessian", "dimensions": 1}, r"'ends'.*needs dimensions=2"),
        ({"num": 2}, "num is 2"),
        ({"radius": 0.0}, r"radius is 0\.0"),
        ({"radius": (1.0, -1.0)}, r"radius is \(1\.0, -1\.0\)"),
        ({"radius": math.inf}, "radius is inf"),
        ({"batch_norm": "train"}, "batch_norm is 'train'"),
        ({"parameters": ["*.bias"]}, r"'\*\.bias' matches none"),
    ],
)  # fmt: skip
def test_bad_input_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(th.UseError, match=said):
        landscape(linear(), F.mse_loss, (X, Y), **wrong)


def test_vectors_alone_have_no_filters() -> None:
    model = nn.Sequential(nn.LayerNorm(5), nn.PReLU(5)).double()
    with pytest.raises(th.UseError, match="Use axes='random'"):
        landscape(model, F.mse_loss, (X, X), num=3)


def test_the_same_weights_are_no_line() -> None:
    model = linear()
    with pytest.raises(th.UseError, match="checkpoint 0 has the same weights as the model"):
        landscape(model, F.mse_loss, (X, Y), axes=[model.state_dict()])


def test_two_checkpoints_on_one_line_are_no_plane() -> None:
    model = linear()
    states = [{"weight": model.weight.detach() + step} for step in (1.0, -2.0)]
    with pytest.raises(th.UseError, match="one line"):
        landscape(model, F.mse_loss, (X, Y), axes=states)


def test_a_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(th.UseError, match=r"not one number"):
        landscape(linear(), lambda logits, targets: logits - targets, (X, Y), num=3)
