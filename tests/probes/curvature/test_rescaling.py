"""Weights times α, logits over T, and nothing of either left behind."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.calling import logits
from theodolite.probes.curvature.rescaling import is_normalisation, scalable, scaled, tempered

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Gated(nn.Module):
    """A norm of the user's own, with a gain that starts at zero, of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.scale) * x / (x.square().mean((1, 2, 3), keepdim=True) + 1e-3).sqrt()


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class Squashed(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * torch.tanh(x)


def test_a_homogeneous_network_grows_by_the_power_of_its_layers() -> None:
    model = th.models.LeNet300(30, 2, inputs=6).double()
    before = model(X.double())
    with scaled(model, 3.0):
        torch.testing.assert_close(model(X.double()), 3.0**3 * before)
    assert torch.equal(model(X.double()), before)


@pytest.mark.parametrize("alpha", [1e-2, 0.3, 100.0])
def test_with_layer_norm_the_logits_grow_by_alpha_alone(alpha: float) -> None:
    """Which they would not if gains were multiplied too."""
    model = th.models.ResNet4(24, inputs=6, variant="layernorm").double()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.0
    before = model(X.double())
    with scaled(model, alpha):
        torch.testing.assert_close(model(X.double()), alpha * before)


@pytest.mark.parametrize(
    "module, expected",
    [
        (nn.LayerNorm(6), True),
        (nn.RMSNorm(6), True),
        (nn.GroupNorm(2, 6), True),
        (nn.BatchNorm1d(6), True),
        (nn.SyncBatchNorm(6), True),
        (nn.InstanceNorm2d(6, affine=True), True),
        (Gated(6), True),
        (th.models.resnet.MapRMSNorm(6), True),
        (nn.Linear(6, 6), False),
        (nn.Embedding(5, 6), False),
        (nn.Conv1d(6, 6, 3), False),
        (nn.PReLU(6), False),
        (LayerScale(6), False),
        (Squashed(6), False),
        (nn.Sequential(LayerScale(6), nn.LayerNorm(6)), False),  # its own parts are asked one by one
        (nn.ReLU(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_norm_is_known_by_what_it_does(module: nn.Module, expected: bool) -> None:
    before, state = bits(module), torch.get_rng_state()
    assert is_normalisation(module) is expected
    assert same(bits(module), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_norms_of_hugging_face_models_are_left_alone() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=20,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    left = {name for name, _ in model.named_parameters()} - set(scalable(model))
    assert left == {name for name, _ in model.named_parameters() if "norm" in name}
    assert len(left) == 5


def test_patterns_say_what_is_multiplied() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    with scaled(model, 2.0, parameters=["1.weight"]):
        assert torch.equal(model[1].weight, torch.full((6,), 2.0))
    assert set(scalable(model, ["0.*"])) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bits_come_back(dtype: torch.dtype) -> None:
    """Division by α would not bring them back."""
    model = th.models.ResNet4(24, inputs=6, variant="all").to(dtype)
    before, pointers = bits(model), [parameter.data_ptr() for parameter in model.parameters()]
    with scaled(model, 1 / 3), scaled(model, 1e20):
        assert not same(bits(model), before)
    assert same(bits(model), before)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]


def test_the_bits_come_back_after_an_error_and_after_training() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(list(scalable(model).values()), lr=0.1)
    F.mse_loss(model(X), torch.ones(16, 2)).backward()
    before = bits(model)
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def train_and_fail() -> None:
        with scaled(model, 7.0):
            optimizer.step()
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        train_and_fail()
    assert same(bits(model), before)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())


def test_tied_weights_are_multiplied_once() -> None:
    tied = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    tied[2].weight = tied[0].weight
    shared = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    shared[2].weight = nn.Parameter(shared[0].weight.detach().t())  # two parameters, one memory
    for model in (tied, shared):
        before = model[0].weight.detach().clone()
        with scaled(model, 3.0):
            assert torch.equal(model[0].weight, 3 * before)
        assert torch.equal(model[0].weight, before)


class TestAutograd:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def test_a_graph_from_before_is_still_good_afterwards(self) -> None:
        model = self.model()
        expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
        total = model(X).sum()
        with scaled(model, 2.0):
            pass
        found = torch.autograd.grad(total, list(model.parameters()))
        assert all(map(torch.equal, found, expected))

    def test_a_graph_from_inside_is_refused_outside_and_in_another_block(self) -> None:
        model = self.model()
        with scaled(model, 2.0):
            inside = model(X).sum()
            again = model(X).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(inside, list(model.parameters()))
        with scaled(model, 3.0), pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(again, list(model.parameters()))

    def test_a_graph_from_before_is_refused_inside(self) -> None:
        model = self.model()
        total = model(X).sum()
        with scaled(model, 2.0), pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(total, list(model.parameters()))

    def test_gradients_inside_are_those_of_the_scaled_network(self) -> None:
        model = self.model()
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2.0)
        with scaled(model, 2.0):
            found = torch.autograd.grad(model(X).sum(), list(model.parameters()))
        assert all(map(torch.equal, found, torch.autograd.grad(other(X).sum(), list(other.parameters()))))


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    cache: None = None


class Loose:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


Named = namedtuple("Named", ["logits", "cache"])
WAYS: dict[str, Any] = {
    "tensor": lambda z: z,
    "frozen dataclass": lambda z: Frozen(z),
    "object": lambda z: Loose(z),
    "dict": lambda z: {"logits": z, "cache": None},
    "named tuple": lambda z: Named(z, None),
    "tuple": lambda z: (z, None),
    "list": lambda z: [None, z],
}


class Returns(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.way = WAYS[way]

    def forward(self, x: Tensor) -> Any:
        return self.way(self.layer(x))


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_divided_wherever_they_are(way: str) -> None:
    model = Returns(way)
    plain = model(X)
    with tempered(model, 4.0):
        divided = model(X)
    assert type(divided) is type(plain)
    torch.testing.assert_close(logits(divided), logits(plain) / 4)
    assert torch.equal(logits(model(X)), logits(plain))


@pytest.mark.parametrize("output", [Loose(torch.ones(2)), {"logits": torch.ones(2)}], ids=["object", "dict"])
def test_what_the_model_keeps_of_its_output_is_not_changed(output: Any) -> None:
    class Keeps(nn.Module):
        def forward(self) -> Any:
            return output

    model = Keeps()
    with tempered(model, 4.0):
        for _ in range(2):
            assert logits(model()).tolist() == [0.25, 0.25]
    assert logits(output).tolist() == [1, 1]


def test_logits_of_a_hugging_face_model_are_divided_under_both_their_names() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.arange(8)[None]
    plain = model(tokens)
    kept = plain.logits.clone()
    with tempered(model, 4.0):
        divided = model(tokens)
    for found in (divided.logits, divided["logits"]):
        torch.testing.assert_close(found, kept / 4)
    assert torch.equal(plain.logits, kept)


def test_temperatures_multiply_and_hooks_go_after_an_error() -> None:
    model = nn.Linear(6, 3)
    expected = model(X)
    with tempered(model, 2.0), tempered(model, 5.0):
        torch.testing.assert_close(model(X), expected / 10)
    with pytest.raises(RuntimeError, match="half-way"), tempered(model, 2.0):
        raise RuntimeError("half-way")
    assert not model._forward_hooks
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_tempered_too(in_place: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    expected = model(X)
    if in_place:
        model.compile(backend="eager")
        compiled: Any = model
    else:
        compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(X), expected)  # now there is a program without a hook
    with tempered(compiled, 4.0):
        torch.testing.assert_close(compiled(X), expected / 4)
    torch.testing.assert_close(compiled(X), expected)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "2", True])
def test_a_factor_is_positive_and_finite(value: Any) -> None:
    model = nn.Linear(6, 3)
    before = bits(model)
    with pytest.raises(th.UseError, match=f"alpha is {value!r}"), scaled(model, value):
        pass
    with pytest.raises(th.UseError, match=f"temperature is {value!r}"), tempered(model, value):
        pass
    assert same(bits(model), before)


def test_nothing_to_scale_is_refused() -> None:
    with pytest.raises(th.UseError, match=r"parameters: 'blocks\.\*' matches none of the 2 names"):
        scalable(nn.Linear(2, 2), ["blocks.*"])
    with pytest.raises(th.UseError, match="no parameters but those of normalisations"):
        scalable(nn.LayerNorm(2))
