"""A network with scale vectors inside its weights is the same network: its other Parts do not change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.part import Part
from theodolite.core.size import Size
from theodolite.models import GPT

from ..scaled import FORMS, Scaled, own_gain, retire, scale, scaled_gpt

TOKENS = torch.zeros(1, 8, dtype=torch.long)
SIZE = Size(64, 1)
Make = Callable[[int, int], nn.Module]


def looked_at(make: Make, inputs: Any, ready: bool) -> Anatomy:
    return dissect(make(SIZE.width, SIZE.depth), inputs) if ready else dissect(make, inputs, size=SIZE)


def plain_name(name: str) -> str:
    return re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name)


def check_same(plain: Anatomy, scaled: Anatomy, but: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """All that the plain network has, apart from retired gains, is as it was; returns what is new."""
    new = {}
    for name, part in scaled.items():
        if plain_name(name) not in plain:
            new[name] = part
            continue
        old = plain[plain_name(name)]
        part = dataclasses.replace(part, beside=part.beside and plain_name(part.beside))
        assert part == dataclasses.replace(old, name=name, **(but or {}).get(plain_name(name), {})), name
    retired = set(plain) - {plain_name(name) for name in scaled}
    assert all(plain[name].norm == "input" for name in retired)
    for old, one in zip(plain.branches, scaled.branches, strict=True):
        assert (one.block, one.branch, one.placement, one.layers, one.attention) == (
            old.block, old.branch, old.placement, old.layers, old.attention,
        )  # fmt: skip
        if not but:
            assert {plain_name(name) for name in one.ends} == set(old.ends)
    return new


def check_vector(part: Part, form: str, length: int, grows: bool) -> None:
    """A γ or b, or the α of one."""
    last = len(part.shape) - 1
    assert (part.role, part.op, part.norm, part.offset) == ("gain", "scale", "input", 0.0)
    assert (part.fan_in, part.fan_out, part.in_axes, part.out_axes) == (1, length, (), (last,))
    assert (part.width_in, part.width_out, part.grown_axes) == (False, grows, (last,) if grows else ())
    assert part.scale_free == (form == "direction")
    assert not part.ends_branch


def check_magnitude(part: Part) -> None:
    assert part.shape[-1] == 1
    assert (part.role, part.op, part.norm, part.scale_free) == ("gain", "scale", "input", False)
    assert (part.fan_in, part.fan_out, part.width_in, part.width_out) == (1, 1, False, False)
    assert not part.ends_branch


built_or_ready = pytest.mark.parametrize("ready", [False, True], ids=["build", "ready"])


@pytest.mark.parametrize(
    ("form", "ready"), [("plain", True), ("direction", False), ("product", True), ("exp", True)]
)
@pytest.mark.parametrize("options", [{"gated": True, "bias": True, "norm": "layer"}, {"experts": 4}], ids=str)
def test_a_gpt_with_vectors(options: dict[str, Any], form: str, ready: bool) -> None:
    make = partial(GPT, **options)
    scaled = looked_at(lambda w, d: scaled_gpt(make(w, d), form), TOKENS, ready)
    new = check_same(looked_at(make, TOKENS, ready), scaled)
    lengths = {"query": 64, "key": 64, "value": 64, "gate": 192, "up": 192 if "gated" in options else 256}
    lengths |= {"router": 4, "readout": 256}
    seen = set()
    for name, part in new.items():
        if name.endswith("beta"):
            check_magnitude(part)
            continue
        (owner,) = [one for one in lengths if one in name.split(".")]
        over_outputs = ".b." in name
        fixed = over_outputs and owner in ("router", "readout")
        check_vector(part, form, lengths[owner] if over_outputs else 64, grows=not fixed)
        assert part.block == (None if owner == "readout" else int(name.split(".")[1]))
        seen.add((owner, over_outputs))
    assert len(seen) == 2 * (4 + len({"gate", "up", "router"} & {one for one, _ in seen}))


@pytest.mark.parametrize(("form", "ready"), [("direction", False), ("product", True), ("exp", True)])
def test_of_a_gain_in_two_pieces_one_carries_the_branch(form: str, ready: bool) -> None:
    make = partial(GPT, norm_placement="peri")
    plain = looked_at(make, TOKENS, ready)
    scaled = looked_at(lambda w, d: scaled_gpt(make(w, d), form), TOKENS, ready)
    direction = form == "direction"
    ends = {name: part for name, part in plain.items() if part.ends_branch}
    but = {"ends_branch": not direction, "scale_free": direction}
    new = check_same(plain, scaled, but=dict.fromkeys(ends, but))
    magnitudes = {name: part for name, part in new.items() if "norm_out" in name}
    assert len(magnitudes) == len(ends) == 2
    for part in magnitudes.values():
        assert (part.op, part.norm, part.offset, part.scale_free) == ("norm", "output", 0.0, False)
        assert part.width_out is False
        # e^β is not β times as large, and of β·α one factor is enough: only the β of β·α/rms(α) ends a branch
        assert part.ends_branch == direction


class Fused(nn.Module):
    """Attention with queries, keys and values in one weight, rows in three blocks."""

    def __init__(self, width: int, depth: int, form: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth))
        self.fused = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)
        for norm, fused in zip(self.norms, self.fused, strict=True):
            if form:
                scale(fused, "weight", norm, form, rows=[width] * 3)
                retire(norm)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, fused, out in zip(self.norms, self.fused, self.out, strict=True):
            q, k, v = fused(norm(x)).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v)
            x = x + out(mixed.transpose(1, 2).flatten(2))
        return self.head(x)


@built_or_ready
@pytest.mark.parametrize("form", ["plain", "direction"])
def test_a_fused_weight_has_a_vector_for_each_block_of_rows(form: str, ready: bool) -> None:
    plain = looked_at(partial(Fused, form=None), TOKENS, ready)
    assert len(plain["fused.0.weight"].rows) == 3
    new = check_same(plain, looked_at(partial(Fused, form=form), TOKENS, ready))
    vectors = [part for name, part in new.items() if name.endswith("alpha")]
    assert sorted(part.shape for part in vectors) == [(64,)] * 3 + [(192,)]
    for part in vectors:
        check_vector(part, form, part.shape[0], grows=True)


class OneLayer(nn.Module):
    """Branches of one layer: the weight that reads the norm is what ends the branch."""

    def __init__(self, width: int, depth: int, form: str | None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 5)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if form:
                scale(layer, "weight", norm, form)
                retire(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_ends_the_branch_and_its_vectors_do_not(form: str) -> None:
    plain = dissect(partial(OneLayer, form=None), torch.zeros(2, 3), size=SIZE)
    scaled = dissect(partial(OneLayer, form=form), torch.zeros(2, 3), size=SIZE)
    check_same(plain, scaled)
    assert set(scaled.branches[0].ends) == {"layers.0.parametrizations.weight.original", "layers.0.bias"}


class ZeroCentred(nn.Module):
    """An RMSNorm that multiplies by 1 + its gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


class Ended(nn.Module):
    """Branches that a zero-centred norm ends."""

    def __init__(self, width: int, depth: int, form: str | None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(ZeroCentred(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)
        for norm in self.norms:
            if form:
                own_gain(norm, form, offset=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + norm(F.relu(layer(x)))
        return self.head(x)


@pytest.mark.parametrize("form", FORMS[1:])
def test_the_gain_of_a_zero_centred_norm_in_two_pieces_is_not_centred(form: str) -> None:
    plain = dissect(partial(Ended, form=None), torch.zeros(2, 3), size=SIZE)
    scaled = dissect(partial(Ended, form=form), torch.zeros(2, 3), size=SIZE)
    assert plain["norms.0.weight"].offset == 1
    for name in ("original", "0.beta"):
        part = scaled[f"norms.0.parametrizations.weight.{name}"]
        assert (part.offset, part.norm, part.op) == (0, "output", "norm")
    assert [branch.placement for branch in scaled.branches] == ["out"]


class Centred(nn.Module):
    """`W·diag(1 + γ)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + self.gamma)


def _tower(width: int, depth: int, wrap: Callable[[nn.Module], object]) -> nn.Module:
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    for layer in layers:
        wrap(layer)
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 5))


def test_a_zero_centred_vector_inside_a_weight() -> None:
    def wrap(layer: nn.Module) -> None:
        register_parametrization(layer, "weight", Centred(layer.in_features))  # type: ignore[arg-type]

    part = dissect(partial(_tower, wrap=wrap), torch.zeros(2, 3), size=SIZE)[
        "1.parametrizations.weight.0.gamma"
    ]
    assert (part.role, part.norm, part.offset) == ("gain", "input", 1)


def test_vectors_on_a_weight_of_fixed_size_belong_to_no_norm() -> None:
    """Divided by its own norm, W sets no size: what the vector holds is all there is, as in weight norm."""

    def wrap(layer: nn.Module) -> None:
        parametrizations.spectral_norm(layer)
        register_parametrization(layer, "weight", Scaled(layer.weight, torch.ones(SIZE.width), "plain"))  # type: ignore[arg-type]

    found = dissect(_tower(SIZE.width, SIZE.depth, wrap=wrap), torch.zeros(2, 3))
    weight, vector = found["1.parametrizations.weight.original"], found["1.parametrizations.weight.1.b.alpha"]
    assert (weight.role, weight.scale_free) == ("hidden", True)
    assert (vector.role, vector.norm, vector.scale_free) == ("gain", None, False)


def test_a_vector_on_a_tied_head_is_of_an_output_norm() -> None:
    """The head's weight is the embedding too: decay on it is not what decay on the vector would balance."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 32)
            self.layer = nn.Linear(32, 32)
            self.gain = nn.Parameter(torch.ones(32))

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(torch.relu(self.layer(self.embed(tokens))), self.embed.weight * self.gain)

    found = dissect(Tied(), TOKENS)
    assert (found["gain"].role, found["gain"].norm) == ("gain", "output")
    assert found["embed.weight"].uses == ("table", "weight")


def test_a_vector_on_an_embedding_scales_the_stream() -> None:
    class Looked(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(16, width))
            self.gain = nn.Parameter(torch.ones(width))
            self.head = nn.Linear(width, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(F.embedding(tokens, self.table * self.gain))

    found = dissect(Looked, TOKENS, size=SIZE)
    assert (found["table"].role, found["table"].op) == ("input", "embedding")
    assert (found["gain"].role, found["gain"].norm, found["gain"].out_axes) == ("gain", None, (0,))


def test_conv1d_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")

    def make(width: int, depth: int, form: str | None) -> nn.Module:
        config = transformers.GPT2Config(
            n_embd=width, n_layer=depth, n_head=width // 16, vocab_size=96, n_positions=16, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        for block in model.transformer.h:
            if form:
                scale(block.attn.c_attn, "weight", block.ln_1, form, rows=[width] * 3, turned=True)
                scale(block.mlp.c_fc, "weight", block.ln_2, form, turned=True)
                retire(block.ln_1, block.ln_2)
        return model

    plain = dissect(make(64, 1, None), TOKENS)
    new = check_same(plain, dissect(make(64, 1, "direction"), TOKENS))
    vectors = [part for name, part in new.items() if name.endswith("alpha")]
    assert sorted(part.shape[0] for part in vectors) == [64] * 4 + [192, 256]
    for part in vectors:
        check_vector(part, "direction", part.shape[0], grows=True)
