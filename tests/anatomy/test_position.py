"""Roles in a ready module: what the dataflow of one network shows, and what is assumed where it does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy import assumed, dissect
from theodolite.anatomy.position import POSITIONS_STAY
from theodolite.core.building import build_model
from theodolite.core.size import Size
from theodolite.models import GPT

from ..gallery.collection import exhibits

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def _roles(model: nn.Module, inputs: Any) -> dict[str, str]:
    return {part.name: part.role for part in dissect(model, inputs).values()}


def test_most_tensors_of_the_gallery_have_the_role_that_two_widths_show() -> None:
    """Those that have not hide a fixed side that no single network shows; all of them are named here."""
    wrong: dict[str, int] = {}
    count = 0
    for exhibit in exhibits():
        (inputs, _), size = exhibit.batch(0), Size(exhibit.widths[0], 2)
        hints = dict(exhibit.hints)
        known = dissect(exhibit.build, inputs, size=size, roles=hints)
        found = dissect(build_model(exhibit.build, size), inputs, roles=hints)
        count += len(known)
        if differing := sum(found[name].role != part.role for name, part in known.items()):
            wrong[exhibit.name] = differing
    assert wrong == {
        "RealNVP": 3,  # the data are the stream, and few
        "Glow": 4,
        "Llama, two keys": 4,  # heads of keys and values: a fixed number
        "DeepSeek attention": 2,  # the rotary key that all heads share
        "autoencoder": 2,  # a code of fixed size
        "TokenLearner": 1,  # a fixed number of learned tokens
    }
    assert count >= 1950


class Recurrent(nn.Module):
    """One layer and what reads its last state."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = layer(3, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, *state: Tensor) -> Tensor:
        return self.head(self.layer(x, *state)[0][:, -1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_starts_from_zeros_does_not_read_the_data(layer: type[nn.RNNBase]) -> None:
    roles = _roles(Recurrent(layer), torch.zeros(2, 5, 3))
    assert roles["layer.weight_ih_l0"] == "input"
    assert {roles[f"layer.weight_{kind}"] for kind in ("hh_l0", "ih_l1", "hh_l1")} == {"hidden"}
    assert roles["head.weight"] == "output"


def test_states_that_a_layer_returns_and_goes_on_with_are_no_results() -> None:
    roles = _roles(nn.LSTM(16, 16, 3), torch.zeros(5, 1, 16))
    assert {roles[f"weight_hh_l{layer}"] for layer in range(3)} == {"hidden"}
    assert roles["weight_ih_l1"] == "hidden"


class Queries(nn.Module):
    """Learned queries ask; boxes are returned beside the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.enter, self.ask = nn.Linear(3, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.classes, self.boxes = nn.Linear(16, 7), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.enter(x)
        scores = self.ask(self.queries) @ self.key(h).transpose(1, 2)
        pooled = scores.softmax(-1) @ self.value(h)
        return {"logits": self.classes(pooled), "boxes": self.boxes(pooled).sigmoid(), "states": h}


def test_learned_queries_are_no_data_and_second_results_are_results() -> None:
    roles = _roles(Queries(), torch.zeros(2, 9, 3))
    weights = {name.split(".")[0]: role for name, role in roles.items() if not name.endswith("bias")}
    assert weights == {
        "queries": "input",
        "enter": "input",
        "ask": "hidden",
        "key": "hidden",
        "value": "hidden",
        "classes": "output",
        "boxes": "output",
    }


class Adapted(nn.Module):
    """A weight with a pair of low rank beside it: as a sum of results, or as one weight."""

    def __init__(self, *, merged: bool, rank: int = 4) -> None:
        super().__init__()
        self.enter, self.whole, self.leave = nn.Linear(3, 32), nn.Linear(32, 48), nn.Linear(48, 2)
        self.a, self.b = nn.Parameter(torch.randn(rank, 32)), nn.Parameter(torch.randn(48, rank))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).relu()
        if self.merged:
            h = h @ (self.whole.weight + 2.0 * (self.b @ self.a)).T
        else:
            h = self.whole(h) + 2.0 * ((h @ self.a.T) @ self.b.T)
        return self.leave(h.relu())


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_beside_a_weight_stays(merged: bool, frozen: bool) -> None:
    model = Adapted(merged=merged)
    model.whole.requires_grad_(not frozen)
    anatomy = dissect(model, torch.zeros(2, 3))
    assert (anatomy["a"].role, anatomy["b"].role) == ("output", "input")
    assert anatomy["whole.weight"].role == ("frozen" if frozen else "hidden")
    assert assumed(anatomy)["the rank stays, as it adds to another weight"] == ("a", "b")


@pytest.mark.parametrize("rank", [32, 40, 48])
def test_a_pair_of_full_rank_beside_a_weight_is_hidden(rank: int) -> None:
    anatomy = dissect(Adapted(merged=False, rank=rank), torch.zeros(2, 3))  # beside 48 × 32
    assert (anatomy["a"].role, anatomy["b"].role) == ("hidden", "hidden")


class Scored(nn.Module):
    """A vector for each head, and a gate of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.hidden, self.leave = nn.Linear(3, 32), nn.Linear(32, 32), nn.Linear(32, 2)
        self.each, self.gate = nn.Parameter(torch.randn(4, 8)), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(self.enter(x).relu())
        scores = (h.view(-1, 4, 8) * self.each).sum(-1).softmax(-1)
        h = (h.view(-1, 4, 8) * scores[..., None]).flatten(1)
        return self.leave(h * self.gate(h).sigmoid())


def test_a_vector_for_each_head_and_a_single_gate_make_a_fixed_number_of_results() -> None:
    roles = _roles(Scored(), torch.zeros(2, 3))
    assert (roles["each"], roles["gate.weight"], roles["hidden.weight"]) == ("output", "output", "hidden")


class Mixed(nn.Module):
    """Branches across positions, and one across channels."""

    def __init__(self, positions: int = 6, width: int = 16, inner: int | None = None) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 2)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        sizes = (positions, inner, positions) if inner else (positions, positions)
        self.across = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = self.norm(x).transpose(1, 2)
        for layer in self.across:
            h = layer(h.relu())
        x = x + h.transpose(1, 2)
        return self.leave(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize("positions", [6, 16, 32])
def test_what_mixes_positions_does_not_follow_the_width(positions: int) -> None:
    """Also where there are as many as channels or as hidden units."""
    anatomy = dissect(Mixed(positions, inner=24), torch.randn(2, positions, 3))
    roles = {part.name: part.role for part in anatomy.values() if part.role != "bias"}
    assert (roles["across.0.weight"], roles["across.1.weight"]) == ("input", "output")
    assert (roles["up.weight"], roles["down.weight"]) == ("hidden", "hidden")
    assert assumed(anatomy) == {POSITIONS_STAY: ("across.0.weight", "across.1.weight")}


def test_a_square_matrix_of_positions_is_assumed_to_grow() -> None:
    anatomy = dissect(Mixed(), torch.randn(2, 6, 3))
    assert anatomy["across.0.weight"].role == "hidden"
    assert assumed(anatomy) == {"the positions that it mixes grow in number too": ("across.0.weight",)}


class Squeezed(nn.Module):
    """Convolutions with a gate through few channels, as few as there are rows of pixels, or in groups."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 32, 1), nn.Linear(32, 5)
        self.body = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
        self.reduce, self.expand = nn.Conv2d(32, 6, 1), nn.Conv2d(6, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = self.body(x.relu())
        gate = self.expand(self.reduce(h.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.leave((x + self.body(h * gate)).mean((2, 3)))


def test_the_number_of_pixels_is_no_width() -> None:
    for pixels in (6, 8):
        assert assumed(dissect(Squeezed(), torch.randn(2, 3, pixels, pixels))) == {
            "a side that is more than 4 times smaller than the other grows too": (
                "reduce.weight",
                "expand.weight",
            )
        }


def test_groups_of_channels_may_grow_in_size_or_in_number() -> None:
    found = assumed(dissect(Squeezed(groups=4), torch.randn(2, 3, 8, 8)))
    assert found["the channels of a group grow in number, and the groups do not"] == ("body.weight",)


class Talking(nn.Module):
    """Attention whose heads are mixed, and learned queries without heads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 32), nn.Linear(32, 2)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.talk = nn.Linear(4, 4)
        self.queries = nn.Parameter(torch.randn(6, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.leave((self.queries @ x.mT).softmax(-1) @ x)


def test_small_squares_and_few_queries_are_no_heads_of_keys() -> None:
    found = assumed(dissect(Talking(), torch.randn(2, 7, 3)))
    assert found == {
        "both sides grow, though they are 4 times smaller than the width, or more": ("talk.weight",),
        "a side that is more than 4 times smaller than the other grows too": ("queries",),
    }


def test_the_state_of_a_layer_alone_is_no_result() -> None:
    both = _roles(nn.LSTM(3, 16, 2, bidirectional=True), torch.randn(5, 2, 3))
    assert {role for name, role in both.items() if "weight_hh" in name} == {"hidden"}
    projected = _roles(nn.LSTM(3, 16, 2, proj_size=8), torch.randn(5, 2, 3))
    assert {role for name, role in projected.items() if "weight_hh" in name or "_hr" in name} == {"hidden"}


def test_a_layer_alone_says_that_data_and_results_may_be_the_stream() -> None:
    data, results = (
        f"the number of {what} stays, though it is the width, 16" for what in ("data", "results")
    )
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    found = assumed(dissect(attention, tuple(torch.randn(2, 5, 16) for _ in range(3))))
    assert found == {data: ("in_proj_weight",), results: ("out_proj.weight",)}
    assert assumed(dissect(nn.LSTMCell(3, 16), torch.randn(2, 3))) == {results: ("weight_hh",)}


class Scales(nn.Module):
    """One number between two layers of the width; scale vectors on the weights of both ends, and a mask."""

    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 2)
        self.squeeze, self.widen = nn.Linear(width, 1), nn.Linear(1, width)
        self.rows_in, self.rows_out = nn.Parameter(torch.ones(width, 1)), nn.Parameter(torch.ones(2, 1))
        self.columns = nn.Parameter(torch.ones(width))
        self.inner, self.mask = nn.Linear(width, width), nn.Parameter(torch.ones(width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.enter.weight * self.rows_in, self.enter.bias).relu()
        h = nn.functional.linear(h, self.inner.weight * self.mask, self.inner.bias).relu()
        h = h * self.widen(self.squeeze(h).tanh()).relu()
        return nn.functional.linear(h, self.leave.weight * self.rows_out * self.columns, self.leave.bias)


def test_single_numbers_and_scales_of_weights_grow_as_two_widths_show() -> None:
    ready = dissect(Scales(32), torch.zeros(2, 3))
    known = dissect(Scales, torch.zeros(2, 3), size=Size(32, 1))
    assert (ready["mask"].width_in, ready["mask"].width_out) == (True, True)
    for anatomy in (known, ready):
        assert {name: (anatomy[name].role, anatomy[name].width_out) for name in anatomy} == {
            "rows_in": ("gain", True),  # over the outputs of what reads the data
            "rows_out": ("gain", False),  # over the results
            "columns": ("gain", True),  # over the inputs of the readout
            "mask": ("gain", True),
            "inner.weight": ("hidden", True),
            "inner.bias": ("bias", True),
            "enter.weight": ("input", True),
            "enter.bias": ("bias", True),
            "leave.weight": ("output", False),
            "leave.bias": ("bias", False),
            "squeeze.weight": ("output", False),
            "squeeze.bias": ("bias", False),
            "widen.weight": ("input", True),
            "widen.bias": ("bias", True),
        }


def _mlp(*sizes: int) -> nn.Module:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _gpt(**options: Any) -> Callable[[int, int], GPT]:
    return lambda width, depth: GPT(width, depth, vocab=61, context=16, head_dim=8, **options)


def test_assumptions_are_said_of_the_tensors_that_rest_on_them() -> None:
    keys = assumed(dissect(_gpt(kv_heads=2)(32, 2), TOKENS))
    parts = tuple(f"blocks.{n}.attention.branch.{name}.weight" for n in (0, 1) for name in ("key", "value"))
    assert keys == {"the number of key and value heads grows: 2 here, for 4 query heads": parts}
    assert assumed(dissect(_mlp(5, 64, 8, 64, 2), torch.zeros(2, 5))) == {
        "a side that is more than 4 times smaller than the other grows too": ("2.weight", "4.weight")
    }
    encoder = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True)
    assert "the data follow the width, as they are the residual stream" in assumed(
        dissect(nn.TransformerEncoder(encoder, 2), torch.zeros(2, 5, 32))
    )


def test_a_layer_many_times_as_wide_as_the_stream_is_not_narrow_on_its_side() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(3, 32), nn.Linear(32, 2)
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            return self.leave(x + self.down(self.up(x).relu()))

    assert assumed(dissect(Wide(), torch.zeros(2, 3))) == {}


class Lowered(nn.Module):
    """Two weights with nothing in between but the width of the stream, and a kernel of groups behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 32), nn.Linear(64, 2)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.expand, self.lower, self.lift = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.down(self.up(x).relu())
        return self.leave(self.lift(self.lower(self.expand(x).relu())).relu())


def test_a_rank_is_assumed_neither_at_the_width_nor_in_a_kernel_of_groups() -> None:
    """A group of a kernel reads few channels of many, and the channels between two kernels are not few."""
    kernels = nn.Sequential(
        nn.Conv2d(3, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.Conv2d(64, 64, 3, groups=8),
        nn.ReLU(),
        nn.Conv2d(64, 5, 1),
    )
    for model, inputs in ((Lowered(), torch.zeros(2, 3)), (kernels, torch.zeros(1, 3, 6, 6))):
        assert not [clause for clause in assumed(dissect(model, inputs)) if "rank" in clause]


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"experts": 3, "gated": True}], ids=str)
def test_nothing_is_assumed_of_a_plain_gpt(options: dict[str, Any]) -> None:
    assert assumed(dissect(_gpt(**options)(32, 2), TOKENS)) == {}


def test_nothing_is_assumed_where_two_widths_are_compared() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return _mlp(5, width, 8, width, 2)

    assert assumed(dissect(build, torch.zeros(2, 5), size=Size(64, 1))) == {}


def test_nothing_is_assumed_of_what_the_caller_says() -> None:
    anatomy = dissect(
        _mlp(5, 64, 8, 64, 2), torch.zeros(2, 5), roles={"2.weight": "output", "4.weight": "input"}
    )
    assert assumed(anatomy) == {}
