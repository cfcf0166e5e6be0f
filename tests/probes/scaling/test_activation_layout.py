"""Branches, stream and logits are what hooks on the modules would see, and looking leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.scaling.activation_layout import record_activations

TOKENS = torch.arange(48).reshape(2, 24) % 256
CONFIGS = Path(__file__).parents[3] / "studies" / "theodolite_studies" / "framework" / "configs"


def hooked(model: nn.Module, modules: list[nn.Module], inputs: Any) -> list[Tensor]:
    """The outputs of some modules in one forward pass."""
    found: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    handles = [module.register_forward_hook(keep) for module in modules]
    with torch.no_grad():
        model.eval()(inputs)
    for handle in handles:
        handle.remove()
    return found


def assert_same(seen: tuple[Tensor, ...], said: list[Tensor]) -> None:
    assert len(seen) == len(said)
    for one, other in zip(seen, said, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", ["pre", "post", "peri", "out", "none"])
def test_our_gpt(placement: str) -> None:
    model = th.models.GPT(64, 3, norm_placement=placement)
    residuals = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
    sight = record_activations(model, TOKENS)
    assert_same(sight.branches, hooked(model, [residual.norm_out for residual in residuals], TOKENS))
    assert_same(sight.stream, hooked(model, residuals, TOKENS))
    assert_same((sight.logits,), hooked(model, [model], TOKENS))
    assert sight.layout.places == tuple((block, branch) for block in range(3) for branch in range(2))


class Pooled(nn.Module):
    """Post-norm blocks, and a readout of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.maps, self.norms, strict=True):
            x = norm(x + torch.tanh(linear(x)))
        found: Tensor = self.leave(x[:, 0])
        return found


def test_the_stream_after_the_last_block_has_all_tokens_where_the_readout_takes_one() -> None:
    model, inputs = Pooled(), torch.randn(5, 4, 8)
    seen = record_activations(model, inputs)
    assert_same(seen.stream, hooked(model, [*model.norms], inputs))
    assert [stream.shape for stream in seen.stream] == [inputs.shape] * 2


class Multiplied(nn.Module):
    """Post-norm blocks, and a readout whose input is multiplied by a number."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        kinds = {"layer": nn.LayerNorm, "by hand": Norm, "length": Length}
        self.norms = nn.ModuleList(kinds[norm](8) for _ in range(2))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.maps, self.norms, strict=True):
            x = norm(x + layer(x).relu())
        return self.leave(x / 16)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Length(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5 * self.gain


@pytest.mark.parametrize("norm", ["layer", "by hand", "length"])
def test_a_multiplier_of_the_readout_is_not_a_part_of_the_last_norm(norm: str) -> None:
    model, inputs = Multiplied(norm), torch.randn(4, 8)
    assert_same(record_activations(model, inputs).stream, hooked(model, list(model.norms), inputs))


def test_residual_mlp() -> None:
    model, inputs = th.models.ResidualMLP(32, 4, inputs=8, outputs=3), torch.randn(5, 8)
    sight = record_activations(model, inputs)
    ends = [block.layers[-1] for block in model.blocks]
    start, *branches = hooked(model, [model.embed, *ends], inputs)
    assert_same(sight.branches, branches)
    assert_same(sight.stream, [start + sum(branches[: count + 1]) for count in range(4)])


@pytest.mark.parametrize(
    "name, branches",
    [
        ("llama", lambda model: [part for one in model.model.layers for part in (one.self_attn, one.mlp)]),
        ("gpt2", lambda model: [part for one in model.transformer.h for part in (one.attn, one.mlp)]),
    ],
)
def test_hugging_face(name: str, branches: Callable[[nn.Module], list[nn.Module]]) -> None:
    pytest.importorskip("transformers")
    model = th.workload(f"hf:{CONFIGS / name}.json").build(64, 2)
    sight = record_activations(model, TOKENS)
    assert_same(sight.branches, hooked(model, branches(model), TOKENS))
    blocks = model.model.layers if name == "llama" else model.transformer.h
    assert_same(sight.stream[1::2], hooked(model, list(blocks), TOKENS))
    torch.testing.assert_close(sight.logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


class Multiplier(nn.Module):
    """A number that hooks can see the product with."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


class Experts(nn.Module):
    """A table and a sum of experts, both multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.leave = nn.Embedding(256, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in "12")
        self.enter, self.added = Multiplier(3.0), Multiplier(0.25)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.table(tokens).reshape(-1, 8))
        first, second = (expert(x) for expert in self.experts)
        found: Tensor = self.leave(x + self.added(first - second))
        return found


def test_numbers_that_multiply_a_table_or_a_sum_of_experts_are_a_part_of_what_they_make() -> None:
    model = Experts()
    seen = record_activations(model, TOKENS)
    entered, added = hooked(model, [model.enter, model.added], TOKENS)
    assert_same(seen.outside["table.weight"], [entered])
    assert_same(seen.branches, [added])


class Halves(nn.Module):
    """A gate: a layer whose output is taken in halves, of which one is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.leave = nn.Linear(8, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).chunk(2, -1)
        found: Tensor = self.leave(3 * one * other.tanh())
        return found


def test_a_layer_is_looked_at_before_it_is_split() -> None:
    model, inputs = Halves(), torch.randn(5, 8)
    assert_same(record_activations(model, inputs).outside["both.weight"], hooked(model, [model.both], inputs))


class InPlace(nn.Module):
    """`x += W₂ relu(W₁ x)`: every value of the stream is overwritten by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.readout = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x += second(first(x).relu())
        return self.readout(x)


def test_values_are_taken_before_they_are_overwritten() -> None:
    model, inputs = InPlace(), torch.randn(5, 4)
    sight = record_activations(model, inputs)
    x = model.embed(inputs)
    for seen, first, second in zip(sight.stream, model.layers[::2], model.layers[1::2], strict=True):
        x = x + second(first(x).relu())
        torch.testing.assert_close(seen, x.detach())


class Choosing(InPlace):
    """Which way it takes depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        shift = 1.0 if x.sum() > 0 else 0.0
        x = self.embed(x)
        if shift:
            x = x + shift
        x = x + self.layers[1](self.layers[0](x).relu())
        return self.readout(x)


def test_a_pass_that_takes_another_way_is_laid_out_again() -> None:
    model, inputs = Choosing(), torch.rand(5, 4)
    there = record_activations(model, inputs)
    back = record_activations(model, -inputs, there.layout)
    assert back.layout != there.layout
    start = model.embed(-inputs)
    torch.testing.assert_close(back.stream[0], start + model.layers[1](model.layers[0](start).relu()))


def test_looking_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    inputs = torch.randn(6, 4)
    model(inputs).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    kept, generator = inputs.clone(), torch.get_rng_state()
    record_activations(model, inputs)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(inputs, kept)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert torch.is_grad_enabled()
    assert model(inputs).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_as_on_the_cpu() -> None:
    model = th.models.GPT(64, 2, norm_placement="peri")
    here = record_activations(model, TOKENS)
    there = record_activations(model.cuda(), TOKENS.cuda())
    for one, other in zip(here.branches + here.stream, there.branches + there.stream, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-3, atol=1e-3)
