"""Linear maps with weights of their own read an Input-Norm's gain; something else an Output-Norm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import Part, dissect
from theodolite.core.size import Size

from ..hand import attend, heads, look, mlp, vector


def _f(block: Any, x: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(x)))


# Norms written out: all of them are recognised by what they compute.


def _rms(x: Tensor, g: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g


def _rms_in_float(x: Tensor, g: Tensor) -> Tensor:
    return g * (x.float() / x.float().square().mean(-1, keepdim=True).add(1e-6).sqrt()).to(x.dtype)


def _rms_of_norm(x: Tensor, g: Tensor) -> Tensor:
    return x / (x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + 1e-6) * g


def _layer(x: Tensor, g: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) * g


def _layer_of_centred(x: Tensor, g: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return g * centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)


def _layer_by_std(x: Tensor, g: Tensor) -> Tensor:
    return g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def _length(x: Tensor, g: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * g


def _scale_norm(x: Tensor, g: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * g


def _functional(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * g


def _fused(x: Tensor, g: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g)


HAND_MADE = [
    _rms,
    _rms_in_float,
    _rms_of_norm,
    _layer,
    _layer_of_centred,
    _layer_by_std,
    _length,
    _scale_norm,
    _functional,
    _fused,
]
each_norm = pytest.mark.parametrize("norm", HAND_MADE, ids=lambda norm: norm.__name__.strip("_"))


def _with_gain(width: int) -> dict[str, Any]:
    return {**mlp(width), "norm": nn.Identity(), "g": vector(width)}


@each_norm
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["g", "1+g"])
def test_a_norm_is_known_by_what_it_computes(norm: Callable[[Tensor, Tensor], Tensor], offset: float) -> None:
    before = look(_with_gain, lambda b, x: x + _f(b, norm(x, offset + b.g)))
    after = look(_with_gain, lambda b, x: x + norm(_f(b, x), offset + b.g))
    around = look(_with_gain, lambda b, x: norm(x + _f(b, x), offset + b.g))
    for anatomy, role, placement in (
        (before, "input", "pre"),
        (after, "output", "out"),
        (around, "output", "post"),
    ):
        part = anatomy["blocks.0.g"]
        assert (part.op, part.role, part.norm) == ("norm", "gain", role)
        assert anatomy.branches[0].placement == placement
    assert before["blocks.0.g"].branch == 0
    assert around["blocks.0.g"].branch is None
    assert after.branches[0].ends == ("blocks.0.g",)
    assert before.branches[0].ends == ("blocks.0.down.weight", "blocks.0.down.bias")


def test_the_last_post_norm_is_read_by_the_readout_alone() -> None:
    anatomy = look(mlp, lambda b, x: b.norm(x + _f(b, x)))
    assert [anatomy[f"blocks.{n}.norm.weight"].norm for n in (0, 1)] == ["output", "input"]


# Attention: who reads the gains of queries, keys and values.


def _attention(width: int) -> dict[str, Any]:
    linear = {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}
    return linear | {f"{name}_norm": nn.RMSNorm(8) for name in "qkv"}


@pytest.mark.parametrize("written", ["softmax", "sdpa"])
@pytest.mark.parametrize("cache", [False, True])
def test_norms_of_queries_and_keys_are_output_and_of_values_input(written: str, cache: bool) -> None:
    """W_o reads the gain of the values: attention averages tokens, channel by channel."""

    def step(block: Any, x: Tensor) -> Tensor:
        q, k, v = (getattr(block, f"{name}_norm")(heads(getattr(block, name)(x))) for name in "qkv")
        if cache:  # what a cache that is still empty does
            empty = torch.zeros(2, k.shape[1], 0, 8)
            k, v = torch.cat((empty, k), 2), torch.cat((empty, v), 2)
        if written == "softmax":
            return x + block.out(attend(q, k, v))
        return x + block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    anatomy = look(_attention, step)
    norms = {name: anatomy[f"blocks.0.{name}_norm.weight"].norm for name in "qkv"}
    assert norms == {"q": "output", "k": "output", "v": "input"}


def test_norms_of_queries_and_keys_are_output_without_a_softmax_too() -> None:
    """Linear attention sums the channels of queries and keys: no map with weights can take their gains up."""

    def step(block: Any, x: Tensor) -> Tensor:
        q, k, v = (getattr(block, f"{name}_norm")(heads(getattr(block, name)(x))) for name in "qkv")
        return x + block.out((q @ (k.transpose(-1, -2) @ v)).transpose(1, 2).flatten(2))

    anatomy = look(_attention, step)
    norms = {name: anatomy[f"blocks.0.{name}_norm.weight"].norm for name in "qkv"}
    assert norms == {"q": "output", "k": "output", "v": "input"}


def test_a_norm_of_latents_is_read_by_the_maps_that_expand_them() -> None:
    def make(width: int) -> dict[str, Any]:
        linear = {"a": nn.Linear(width, width // 2), "b": nn.Linear(width // 2, width)}
        return {**linear, "latent": nn.RMSNorm(width // 2), "out": nn.Linear(width, width)}

    def step(block: Any, x: Tensor) -> Tensor:
        k = heads(block.b(block.latent(block.a(x))))
        return x + block.out(attend(k, k, k))

    assert look(make, step)["blocks.0.latent.weight"].norm == "input"


# The end and the beginning of a network.


class Tied(nn.Module):
    """A language model; its readout is its embedding if `tied`, by a shared Parameter or by hand."""

    def __init__(self, width: int, depth: int, tied: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.first = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False) if tied != "by hand" else None
        if tied == "shared":
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        x = self.last(x + self.down(F.relu(self.up(x))))
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


@pytest.mark.parametrize(
    ("tied", "norm", "others"),
    [("no", "input", ()), ("shared", "output", ("head.weight",)), ("by hand", "output", ("linear",))],
)
def test_a_tied_head_has_no_weight_of_its_own(tied: str, norm: str, others: tuple[str, ...]) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    anatomy = dissect(lambda w, d: Tied(w, d, tied), tokens, size=Size(16, 1))
    assert anatomy["last.weight"].norm == norm
    assert anatomy["embed.weight"].tied == others
    assert anatomy["embed.weight"].role == "input"
    assert anatomy["first.weight"].norm == "output"  # it reaches the stream


MEANS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "tokens": lambda norm, x: norm(x).mean(1),
    "first token": lambda norm, x: norm(x)[:, 0],
    "dropout and cast": lambda norm, x: F.dropout(norm(x), 0.1).to(torch.float64).to(torch.float32),
    "map, channels last": lambda norm, x: norm(x.unflatten(1, (5, 1))).mean((1, 2)),
    "pooled map": lambda norm, x: F.adaptive_avg_pool2d(norm(x).transpose(1, 2)[..., None], 1).flatten(1),
    "pooled sequence": lambda norm, x: F.adaptive_avg_pool1d(norm(x).transpose(1, 2), 1).flatten(1),
    "more tokens of zeros": lambda norm, x: F.pad(norm(x), (0, 0, 1, 1)),
    "gated": lambda norm, x: norm(x) * F.silu(x),
    "shifted and mixed": lambda norm, x: 0.5 * norm(x) + 0.5 * norm(x).roll(1, 1),
    "padded": lambda norm, x: torch.cat((norm(x), torch.zeros(2, 1, x.shape[-1])), 1),
}


@pytest.mark.parametrize("read", MEANS.values(), ids=MEANS)
def test_what_leaves_channels_apart_may_stand_between_norm_and_readout(read: Any) -> None:
    """W D γ∘n = (W diag γ) D n for every D that treats each channel by itself."""

    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(read(self.norm, self.embed(x)))

    assert dissect(Net, torch.zeros(2, 5, 6), size=Size(16, 1))["norm.weight"].norm == "input"


def test_a_padded_map_is_still_read_by_the_convolution_alone() -> None:
    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
            self.last = nn.Conv2d(width, 5, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.pad(self.norm(self.first(x)), (0, 1, 0, 1)))

    assert dissect(Net, torch.zeros(2, 3, 8, 8), size=Size(16, 1))["norm.weight"].norm == "input"


def test_a_product_of_two_normed_tokens_is_not_linear_in_the_gain() -> None:
    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.embed(x))
            return self.head(y * y.roll(1, 1))

    assert dissect(Net, torch.zeros(2, 5, 6), size=Size(16, 1))["norm.weight"].norm == "output"


# Factors that are no norm's.


def _scaled(step: Callable[[Any, Tensor], Tensor], *shape: int) -> Part:
    anatomy = look(lambda w: {**mlp(w), "g": vector(*(shape or (w,)))}, step)
    assert anatomy.num_blocks == 2
    return anatomy["blocks.0.g"]


@pytest.mark.parametrize("shape", [(), (1,)], ids=["layer scale", "scalar"])
def test_a_scale_of_the_branch_is_no_norm_and_ends_it(shape: tuple[int, ...]) -> None:
    part = _scaled(lambda b, x: x + b.g * _f(b, b.norm(x)), *shape)
    assert (part.op, part.role, part.norm, part.ends_branch) == ("scale", "gain", None, True)


def test_a_gate_computed_by_a_reduction_is_no_norm_and_ends_nothing() -> None:
    """Squeeze and excite: x times a bounded function of its mean, with weights in between."""

    def step(b: Any, x: Tensor) -> Tensor:
        y = b.g * _f(b, b.norm(x))
        return x + y * torch.sigmoid(b.gate(y.mean(1, keepdim=True)))

    anatomy = look(lambda w: {**mlp(w), "gate": nn.Linear(w, w), "g": vector(w)}, step)
    assert (anatomy["blocks.0.g"].op, anatomy["blocks.0.g"].norm) == ("scale", None)
    assert anatomy.branches[0].placement == "pre"
    assert anatomy.branches[0].ends == ("blocks.0.g",)


def test_an_activation_reads_the_gain() -> None:
    """Pre-activation and slopes: N, then ReLU, is an Output-Norm; the slope of a PReLU is a scale."""

    def step(b: Any, x: Tensor) -> Tensor:
        return x + b.down(b.slope(b.up(torch.relu(b.norm(x))).transpose(1, 2)).transpose(1, 2))

    anatomy = look(lambda w: {**mlp(w), "slope": nn.PReLU(2 * w)}, step)
    assert anatomy["blocks.0.norm.weight"].norm == "output"
    slope = anatomy["blocks.0.slope.weight"]
    assert (slope.op, slope.role, slope.norm) == ("scale", "gain", None)


def test_a_map_over_tokens_cannot_take_up_a_gain_of_channels() -> None:
    """MLP-Mixer: W mixes tokens, so diag(γ) passes it by and reaches the activation."""

    def step(b: Any, x: Tensor) -> Tensor:
        x = x + b.mix(torch.relu(b.tokens(b.norm(x).transpose(1, 2)))).transpose(1, 2)
        return x + b.down(F.gelu(b.up(b.second(x))))

    def make(w: int) -> dict[str, Any]:
        tokens = {"tokens": nn.Linear(5, w), "mix": nn.Linear(w, 5)}
        return {**mlp(w), **tokens, "second": nn.LayerNorm(w)}

    anatomy = look(make, step)
    assert anatomy["blocks.0.second.weight"].norm == "input"
    assert anatomy["blocks.0.norm.weight"].norm == "output"
