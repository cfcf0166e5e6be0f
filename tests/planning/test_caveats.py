"""What a plan refuses, and what it says beside its numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.core.calling import Build
from theodolite.core.errors import UseError

pytestmark = pytest.mark.usefixtures("one_dissection")
TOKENS = torch.zeros(1, 8, dtype=torch.long)
BASE, DEEP, WIDE = th.Size(32, 2), th.Size(32, 4), th.Size(64, 2)


class Branch(nn.Module):
    """`x + φ(W₂ relu(W₁ x))`, perhaps with a gain after φ."""

    def __init__(self, width: int, activation: nn.Module, gain: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = activation
        self.gain = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        added = self.activation(self.down(self.up(x).relu()))
        return x + (added if self.gain is None else self.gain * added)


def network(width: int, depth: int, *, activation: nn.Module, gain: bool = False) -> nn.Module:
    blocks = [Branch(width, activation, gain) for _ in range(depth)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 2))


def plan(build: Build, size: th.Size, inputs: Tensor | None = None) -> th.Plan:
    inputs = torch.zeros(1, 8) if inputs is None else inputs
    return th.plan(build, inputs, size=size, base=BASE, lr=2**-8)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Tanh()], ids=lambda one: type(one).__name__)
def test_a_branch_that_no_tensor_scales_cannot_get_deeper(activation: nn.Module) -> None:
    build = partial(network, activation=activation)
    with pytest.raises(UseError, match=r"branch 0 of block 0 \(it holds 1\.up\.weight\) ends in no tensor"):
        plan(build, DEEP)
    assert plan(build, WIDE)["1.down.weight"].lr == 2**-8 / 2  # width alone is no trouble


@pytest.mark.parametrize(
    "activation, gain, end", [(nn.ReLU(), False, "down.weight"), (nn.GELU(), True, "gain")]
)
def test_what_a_factor_passes_through_or_a_gain_ends_is_scaled(
    activation: nn.Module, gain: bool, end: str
) -> None:
    """Scaling the named tensors by 1/2 halves what the branch adds, which the plan relies on."""
    build = partial(network, activation=activation, gain=gain)
    ends = {
        name for name, part in th.dissect(build, torch.zeros(1, 8), size=BASE).items() if part.ends_branch
    }
    branch = build(32, 1)[1]
    x = torch.randn(4, 32)
    before = branch(x) - x
    with torch.no_grad():
        for name, tensor in branch.named_parameters():
            if f"1.{name}" in ends:
                tensor.mul_(0.5)
    torch.testing.assert_close(branch(x) - x, before / 2)
    assert f"1.{end}" in ends
    assert plan(build, DEEP)[f"1.{end}"].lr == 2**-8 / 2


def test_a_norm_without_gain_at_the_end_is_refused() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return network(width, depth, activation=nn.LayerNorm(width, elementwise_affine=False))

    with pytest.raises(UseError, match="keep the depth of the base"):
        plan(build, DEEP)


def test_depth_in_the_own_initialisation_is_said_and_counted_once() -> None:
    build = partial(th.models.GPT, scaled_init=True)
    made = plan(build, th.Size(32, 8), TOKENS)
    (note,) = made.notes
    assert "blocks.*.attention.branch.out.weight" in note
    assert "depth to the −0.50" in note
    # 1/√(2·2) at base depth, over the four times larger number of branches; not 1/√(2·8).
    assert made["blocks.5.attention.branch.out.weight"].init.std == pytest.approx(32**-0.5 / 2 / 4)
    assert not plan(th.models.GPT, th.Size(32, 8), TOKENS).notes


def test_a_stack_without_branches_is_said_to_be_planned_for_its_width() -> None:
    def plain(width: int, depth: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width),
            *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, 2),
        )

    (note,) = plan(plain, DEEP).notes
    assert "no residual branch is seen" in note
    assert not plan(plain, WIDE).notes


def test_heads_that_grow_with_width_are_said_to_need_another_scale() -> None:
    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            return x + self.out(weights @ v)

    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), *(Attention(width) for _ in range(depth)), nn.Linear(width, 2)
        )

    (note,) = plan(build, WIDE, torch.zeros(1, 4, 8)).notes
    assert "TH106" in note


def test_a_zero_centred_gain_that_ends_a_branch_starts_below_zero() -> None:
    """`(1 + γ)·x` of a quarter is γ = −3/4; scaled, it is what the branch without a plan is, over four."""

    class Centred(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
            self.gamma = nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            added = self.down(self.up(x).relu())
            return x + nn.functional.rms_norm(added, added.shape[-1:]) * (1 + self.gamma)

    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), *(Centred(width) for _ in range(depth)), nn.Linear(width, 2)
        )

    made = plan(build, th.Size(32, 8))
    assert made["1.gamma"].init.mean == -0.75
    model = made.build(0)
    x = torch.randn(4, 32)
    added = model[1](x) - x
    assert added.square().mean(-1).sqrt().tolist() == pytest.approx([0.25] * 4, rel=1e-3)


class EncoderDecoder(nn.Module):
    """One stream reads the other across."""

    def __init__(self, width: int, encoder: int, decoder: int, post: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(8, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(encoder))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(decoder))
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if post else None
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        memory, y = self.first(x), self.second(x)
        for layer in self.encoder:
            memory = memory + layer(memory)
            memory = memory if self.norm is None else self.norm(memory)
        keys, values = self.keys(memory), self.values(memory)
        for layer in self.decoder:
            y = y + layer((y @ keys.mT).softmax(-1) @ values)
        return self.last(y)


@pytest.mark.parametrize("post", [False, True])
def test_streams_get_deeper_by_ratios_of_their_own(post: bool) -> None:
    def build(width: int, depth: int) -> nn.Module:
        return EncoderDecoder(width, depth, depth + 1, post)

    made = plan(build, th.Size(32, 6), torch.zeros(1, 4, 8))  # from 2 and 3 branches to 6 and 7
    for name, ratio in (("encoder.5.weight", 6 / 2), ("decoder.6.weight", 7 / 3)):
        assert made[name].lr == pytest.approx(2**-8 / ratio)
        assert made[name].init.std == pytest.approx(1 / (96 * ratio) ** 0.5, rel=1e-6)
    assert "residual branches 7 = 2.333 × 3" in str(made.explain("decoder.6.weight"))


def test_a_stream_that_does_not_get_deeper_is_left_alone() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return EncoderDecoder(width, depth, 2, post=False)

    made = plan(build, th.Size(32, 6), torch.zeros(1, 4, 8))
    assert made["encoder.5.weight"].init.std == pytest.approx(made["decoder.1.weight"].init.std / 3**0.5)
    assert made["decoder.1.weight"].lr == 2**-8
    assert any("2 residual branches do not repeat with depth" in note for note in made.notes)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_fixed_number_of_key_and_value_heads_is_said(fixed: bool) -> None:
    transformers = pytest.importorskip("transformers")

    def build(width: int, depth: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=17,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // 8,
            num_key_value_heads=2 if fixed else width // 16,
            head_dim=8,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    made = th.plan(build, TOKENS, size=th.Size(128, 2), base=BASE, lr=2**-8)
    said = [note for note in made.notes if "key" in note]
    key = made["model.layers.0.self_attn.k_proj.weight"]
    assert key.role == ("output" if fixed else "hidden")
    if fixed:
        (note,) = said
        assert "model.layers.*.self_attn.k_proj.weight, model.layers.*.self_attn.v_proj.weight" in note
        assert "2 heads of 8 entries at every width" in note
        assert "initial std is 0.25 times that at base size, that of hidden weights 0.5 times" in note
        assert "Let num_key_value_heads grow with width" in note
        assert key.init.std == pytest.approx(0.02 / 4)  # what the note says
        assert made["model.layers.0.self_attn.q_proj.weight"].init.std == pytest.approx(0.02 / 2)
    else:
        assert not said
