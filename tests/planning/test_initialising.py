"""A planned network starts as the plan says: its own distribution at base size, planned stds elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import theodolite as th
from theodolite import Size, UseError
from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import build_model
from theodolite.models import GPT, ResidualMLP
from theodolite.planning import initialising

pytestmark = pytest.mark.usefixtures("one_dissection")
TOKENS = torch.zeros(1, 8, dtype=torch.long)
VECTORS = torch.zeros(2, 8)


class Particular(nn.Module):
    """Tensors that are filled in ways of their own: orthogonal, a padded row, a range, a truncation."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=3)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scale = nn.ParameterList(torch.linspace(0.1, 1.0, width) for _ in range(depth))
        self.head = nn.Linear(width, 50)
        for layer in self.up:
            nn.init.orthogonal_(layer.weight)
        for layer in self.down:
            nn.init.trunc_normal_(layer.weight, std=0.1, a=-0.2, b=0.2)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down, scale in zip(self.up, self.down, self.scale, strict=True):
            x = x + scale * down(up(x).relu())
        return self.head(x * self.mask)


def hugging_face(family: str, width: int, depth: int, tied: bool | None = None) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=300,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
        max_position_embeddings=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **({} if family == "GPT2" else {"intermediate_size": 2 * width, "num_key_value_heads": width // 32}),
    )
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config)


def planned(build: Callable, size: Size, base: Size, inputs: Tensor = TOKENS) -> th.Plan:
    return th.plan(build, inputs, size=size, base=base, lr=2**-8)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in canonical_parameters(model)}


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (GPT, TOKENS),
        (partial(GPT, tied=True, bias=True, norm="layer", positions="learned", scaled_init=True), TOKENS),
        (partial(GPT, experts=3, gated=True, qk_norm=True), TOKENS),
        (partial(ResidualMLP, inputs=8), VECTORS),
        (Particular, TOKENS),
        (partial(hugging_face, "GPT2"), TOKENS),
        (partial(hugging_face, "Llama"), TOKENS),
    ],
    ids=["gpt", "gpt-tied", "gpt-experts", "residual-mlp", "particular", "hf-gpt2", "hf-llama"],
)
def test_at_base_size_every_tensor_has_the_networks_own_distribution(build: Callable, inputs: Tensor) -> None:
    size = Size(64, 2)
    ours = values(planned(build, size, size, inputs).build(seed=1))
    theirs = values(build_model(build, size, seed=2))
    assert ours.keys() == theirs.keys()
    for name in ours:
        one, two = ours[name].flatten(), theirs[name].flatten()
        if one.std(correction=0) < 1e-12:
            assert torch.equal(one, two), name
        else:
            assert stats.ks_2samp(one.numpy(), two.numpy()).pvalue > 1e-3, name


def test_at_another_size_the_stds_are_those_of_the_paper() -> None:
    """Four times as wide and four times as deep: 1/√4 hidden, 1/4 for each branch, 1/4 for the readout."""
    model = planned(GPT, Size(256, 8), Size(64, 2)).build(seed=0)
    expected = {
        "embed.weight": 1.0,
        "blocks.7.attention.branch.query.weight": 64**-0.5 / 2,
        "blocks.7.attention.branch.out.weight": 64**-0.5 / 2 / 4,
        "blocks.3.feed_forward.branch.up.weight": 64**-0.5 / 2,
        "blocks.3.feed_forward.branch.down.weight": 256**-0.5 / 2 / 4,
        "readout.weight": 64**-0.5 / 4,
    }
    found = values(model)
    assert {name: found[name].std().item() for name in expected} == pytest.approx(expected, rel=0.02)
    assert torch.equal(found["norm.weight"], torch.ones(256))


@pytest.mark.parametrize(
    ("build", "ends", "std"),
    [
        (
            partial(GPT, scaled_init=True),
            {"blocks.0.attention.branch.out.weight", "blocks.7.attention.branch.out.weight"},
            64**-0.5,
        ),
        (
            partial(hugging_face, "GPT2"),
            {"transformer.h.0.attn.c_proj.weight", "transformer.h.7.mlp.c_proj.weight"},
            0.02,
        ),
    ],
)
def test_a_depth_in_the_initialisation_is_not_counted_twice(build: Callable, ends: set, std: float) -> None:
    plan = planned(build, Size(128, 8), Size(64, 2))
    found = values(plan.build(seed=0))
    # 1/√(2L) with L of the base; 1/√2 for twice the width; 1/4 for four times the depth.
    right = std / math.sqrt(2 * 2) / math.sqrt(2) / 4
    for name in ends:
        assert plan[name].init.std == pytest.approx(right, rel=1e-12)
        assert found[name].std().item() == pytest.approx(right, rel=0.03)


def test_the_same_seed_gives_the_same_weights_whatever_the_network_is_wrapped_in_or_made_of() -> None:
    plan = planned(GPT, Size(64, 2), Size(32, 1))
    usual = values(plan.build(seed=3))

    class Backwards(nn.Module):
        """The same names, registered in another order."""

        def __init__(self) -> None:
            super().__init__()
            model = GPT(64, 2)
            for name, child in reversed(list(model.named_children())):
                self.add_module(name, child)

    torch.manual_seed(99)
    others = [
        plan.initialize(GPT(64, 2), seed=3),
        plan.initialize(torch.compile(GPT(64, 2), backend="eager"), seed=3),
        plan.initialize(checkpoint_wrapper(GPT(64, 2)), seed=3),
        plan.initialize(Backwards(), seed=3),
        plan.initialize(GPT(64, 2).double(), seed=3).float(),
    ]
    for model in others:
        found = values(model)
        assert found.keys() == usual.keys()
        assert all(torch.equal(found[name], usual[name]) for name in usual)
    half = values(plan.initialize(GPT(64, 2).bfloat16(), seed=3))
    assert all(torch.equal(half[name], usual[name].bfloat16()) for name in usual)


def test_another_seed_and_another_tensor_are_other_draws() -> None:
    plan = planned(GPT, Size(64, 2), Size(64, 2))
    one, two = values(plan.build(seed=0)), values(plan.build(seed=1))
    drawn = [name for name in one if one[name].std() > 0]
    assert not any(torch.equal(one[name], two[name]) for name in drawn)
    key, query = (one[f"blocks.0.attention.branch.{name}.weight"] for name in ("key", "query"))
    assert abs(torch.corrcoef(torch.stack([key.flatten(), query.flatten()]))[0, 1]) < 0.07


def test_the_numbers_are_those_of_a_stable_hash() -> None:
    """Written down once: another version or machine must not start from other weights."""
    weight = planned(GPT, Size(64, 2), Size(64, 2)).build(seed=0).readout.weight
    generator = torch.Generator().manual_seed(0xF3B5D029)  # printf 0/0/readout.weight | sha256sum
    assert torch.equal(weight, torch.empty(256, 64).normal_(0, 0.125, generator=generator))


def test_seeds_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generator has 32 bits of seed, so that names may meet by chance."""
    monkeypatch.setattr(initialising, "_hashed", lambda text: sum(text.encode()) % 64)
    seeds = initialising._seeds([f"layers.{i}.weight" for i in range(40)], 0)
    assert len(set(seeds.values())) == 40
    assert seeds == initialising._seeds([f"layers.{i}.weight" for i in reversed(range(40))], 0)


def test_nothing_else_is_touched() -> None:
    plan = planned(Particular, Size(64, 4), Size(32, 2))
    model = Particular(64, 4)
    model.mask.fill_(5.0)
    model.up[1].weight.requires_grad_(False)
    frozen = model.up[1].weight.clone()
    before = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    identities = {name: id(tensor) for name, tensor in model.named_parameters()}
    state = torch.get_rng_state()
    assert plan.initialize(model) is model
    plan.build()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.mask, torch.full((64,), 5.0))
    assert torch.equal(model.up[1].weight, frozen)
    assert {name: tensor.requires_grad for name, tensor in model.named_parameters()} == before
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == identities


def test_what_the_network_fills_in_its_own_way_stays_so() -> None:
    plan = planned(Particular, Size(128, 6), Size(32, 2))
    model = plan.initialize(Particular(128, 6), seed=5)
    own = build_model(Particular, Size(128, 6), seed=5)
    # Orthogonal still, with the planned std.
    weight = model.up[2].weight.detach()
    assert weight.std(correction=0).item() == pytest.approx(plan["up.2.weight"].init.std)
    gram = weight @ weight.T
    torch.testing.assert_close(gram, gram[0, 0] * torch.eye(128), atol=1e-5, rtol=0)
    assert gram[0, 0].item() == pytest.approx(1.0, rel=1e-3)  # 1/√32 at base, over √4, is 1/√128
    # The padded row.
    assert not model.embed.weight[3].any()
    assert model.embed.weight[4].std().item() == pytest.approx(1.0, rel=0.2)
    # A gain that ends its branch: the network's own values at this width, a third for three times the depth.
    torch.testing.assert_close(model.scale[5].detach(), own.scale[5].detach() / 3)
    # Truncated: scaled with its bounds. The gain ends the branch, so there is no factor for depth.
    down = model.down[0].weight.detach()
    assert down.abs().max().item() == pytest.approx(0.2 / 2, rel=1e-3)
    assert down.std().item() == pytest.approx(0.1 / 2 * stats.truncnorm(-2, 2).std(), rel=0.02)
    # And by building, whatever random numbers the program has spent.
    torch.manual_seed(123)
    for name, tensor in values(plan.build(seed=5)).items():
        torch.testing.assert_close(tensor, values(model)[name])


class Shifted(nn.Module):
    """Weights whose mean is not zero: drawn, constant, drawn in an own way, and with a pattern of zeros."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.drawn = nn.Parameter(torch.rand(width, width))
        self.mean = nn.Parameter(torch.full((width, width), 1 / 32))
        self.positive = nn.Parameter(torch.randn(width, width).abs())
        self.sparse = nn.Parameter(torch.randn(width, width).relu())
        self.gain = nn.Parameter(torch.rand(width))
        nn.init.uniform_(self.last.weight, 0.0, 0.5)
        nn.init.constant_(self.first.bias, 0.5)
        sines = torch.outer(torch.arange(4.0), torch.arange(width)).sin()
        self.positions = nn.Parameter(sines, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.positions[0]
        for weight in (self.drawn, self.mean, self.positive, self.sparse):
            x = (x @ weight).relu()
        return self.last(x * self.gain)


def test_a_mean_goes_as_one_over_the_fan_in() -> None:
    """It adds up over the fan-in, where independent entries add up to the root of it."""
    plan = planned(Shifted, Size(512, 1), Size(32, 1), VECTORS)
    assert "mean m · 1/r_in = 0.5 · 1/16 = 0.03125" in str(plan.explain("drawn"))
    found = values(plan.build(seed=0))
    mean = {name: tensor.mean().item() for name, tensor in found.items()}
    std = {name: tensor.std().item() for name, tensor in found.items()}
    right = math.sqrt(2 / math.pi)  # the mean of |z|
    assert mean["drawn"] == pytest.approx(0.5 / 16, rel=0.02)
    assert std["drawn"] == pytest.approx(12**-0.5 / 4, rel=0.02)
    assert mean["mean"] == pytest.approx(1 / 512)
    assert mean["positive"] == pytest.approx(right / 16, rel=0.05)
    assert std["positive"] == pytest.approx(math.sqrt(1 - right**2) / 4, rel=0.05)
    assert mean["last.weight"] == pytest.approx(0.25 / 16, rel=0.02)
    # Zeros stay: then the mean decides alone.
    assert mean["sparse"] == pytest.approx(right / 2 / 16, rel=0.05)
    assert (found["sparse"] == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    # What is added or multiplies entry by entry is not summed over.
    assert mean["first.bias"] == 0.5
    assert mean["gain"] == pytest.approx(0.5, rel=0.1)


def test_frozen_values_are_those_that_the_network_makes_at_the_size() -> None:
    plan = planned(Shifted, Size(64, 1), Size(32, 1), VECTORS)
    model = Shifted(64, 1)
    with torch.no_grad():
        model.positions.add_(7)  # loaded from elsewhere
    assert torch.equal(plan.build(seed=0).positions, Shifted(64, 1).positions)
    assert torch.equal(plan.initialize(model).positions, Shifted(64, 1).positions + 7)


class Spectral(nn.Module):
    """Complex weights between two Fourier transforms, and a complex gain."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.mix = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) * width**-0.5)
        self.shifted = nn.Parameter(torch.rand(width, width, dtype=torch.cfloat))
        self.phase = nn.Parameter(torch.polar(torch.ones(width), torch.arange(1.0, width + 1)))
        self.turn = nn.Parameter(torch.full((width,), 0.5 + 0.5j))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(self.first(x))
        return self.last(torch.fft.ifft((z @ self.mix @ self.shifted) * self.phase * self.turn).real)


def test_complex_values_keep_their_imaginary_part() -> None:
    plan = planned(Spectral, Size(256, 1), Size(32, 1), VECTORS)
    found = values(plan.build(seed=0))
    mix, shifted = found["mix"], found["shifted"]
    for part in (mix.real, mix.imag):
        assert part.std().item() == pytest.approx(256**-0.5 / math.sqrt(2), rel=0.05)
    for part in (shifted.real, shifted.imag):
        assert part.mean().item() == pytest.approx(0.5 / 8, rel=0.05)
        assert part.std().item() == pytest.approx((12 * 8) ** -0.5, rel=0.05)
    assert torch.equal(found["phase"], Spectral(256, 1).phase)
    assert torch.equal(found["turn"], Spectral(256, 1).turn)
    assert plan["mix"].init.std == pytest.approx(256**-0.5, rel=0.05)  # of |z|
    chosen = th.plan(Spectral, VECTORS, size=Size(64, 1), base=Size(64, 1), lr=1e-3, init={"mix": 0.1})
    mix = values(chosen.build(seed=0))["mix"]
    assert mix.abs().square().mean().sqrt().item() == pytest.approx(0.1, rel=0.05)
    assert mix.imag.std().item() == pytest.approx(0.1 / math.sqrt(2), rel=0.05)


def test_errors() -> None:
    plan = planned(Particular, Size(64, 2), Size(32, 2))
    orphan = dataclasses.replace(plan, build_function=None)
    with pytest.raises(UseError, match=r"no build function, which embed.weight starts from.*Plan.load"):
        orphan.initialize(Particular(64, 2))
    with pytest.raises(UseError, match=r"no build function.*Plan.load\(path, build\)"):
        orphan.build()
    with torch.device("meta"):
        hollow = Particular(64, 2)
    with pytest.raises(UseError, match=r"embed.weight is on the meta device.*to_empty\(device="):
        plan.initialize(hollow)
    with pytest.raises(UseError, match=r"device is meta"):
        plan.build(device="meta")
    with pytest.raises(
        UseError, match=r"(?s)does not fit this Particular.\n1 of another shape: embed"
    ) as caught:
        plan.initialize(_with(Particular(64, 2), embed=nn.Embedding(51, 64)))
    assert "embed.weight is (51, 64), planned (50, 64)" in str(caught.value)
    with pytest.raises(UseError, match=r"4 not in the network: scale.1, up.1.weight|5 not in the network"):
        plan.initialize(Particular(64, 1))
    with pytest.raises(UseError, match=r"2 not in the plan: extra.weight; extra.bias"):
        plan.initialize(_with(Particular(64, 2), extra=nn.Linear(2, 2)))
    with pytest.raises(UseError, match=r"the model is a dict"):
        plan.initialize({})


def test_a_model_that_does_not_fit_is_left_as_it_was() -> None:
    plan = planned(Particular, Size(64, 2), Size(32, 2))
    model = _with(Particular(64, 2), head=nn.Linear(64, 49))
    before = values(model)
    with pytest.raises(UseError):
        plan.initialize(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())


SHARDED = Path(__file__).parent / "programs" / "initialising.py"


def test_sharded_over_two_processes_the_weights_are_the_same(in_two_processes) -> None:
    in_two_processes(SHARDED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_weights_are_the_same() -> None:
    plan = planned(Particular, Size(64, 2), Size(32, 2))
    usual = values(plan.build(seed=1))
    on_gpu = plan.build(seed=1, device="cuda")
    assert {tensor.device.type for tensor in on_gpu.parameters()} == {"cuda"}
    there = values(plan.initialize(Particular(64, 2).cuda(), seed=1))
    for name, tensor in usual.items():
        assert torch.equal(there[name].cpu(), tensor), name
        assert torch.equal(values(on_gpu)[name].cpu(), tensor), name


def _with(model: nn.Module, **children: nn.Module) -> nn.Module:
    for name, child in children.items():
        setattr(model, name, child)
    return model
