"""Rows that are matrices by themselves where no split of one result shows it: slices, groups, gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import dissect
from theodolite.planning import groups

WIDTH = 16
BY_THIRDS = tuple(((start, start + WIDTH),) for start in (0, WIDTH, 2 * WIDTH))
BY_QUARTERS = (*BY_THIRDS, ((3 * WIDTH, 4 * WIDTH),))


def _rows(model: nn.Module, inputs: Any, name: str) -> Any:
    return dissect(model, inputs)[name].rows


class Sliced(nn.Module):
    """Queries, keys, values and the way out in one parameter, cut before it is used."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.enter, self.leave = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.all = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.cut == "chunk":
            *parts, out = self.all.chunk(4)
            q, k, v = (F.linear(x, part) for part in parts)
        elif self.cut == "view":
            *parts, out = self.all.view(4, WIDTH, WIDTH)
            q, k, v = (x @ part.T for part in parts)
        else:
            q, k, v = F.linear(x, self.all[: 3 * WIDTH]).chunk(3, -1)
            out = self.all[3 * WIDTH :]
        return self.leave(x + F.linear(F.scaled_dot_product_attention(q, k, v), out))


@pytest.mark.parametrize("cut", ["chunk", "view", "slice"])
def test_slices_of_one_parameter_are_matrices_and_muon_takes_each(cut: str) -> None:
    model, inputs = Sliced(cut), torch.randn(2, 5, 3)
    assert _rows(model, inputs, "all") == BY_QUARTERS
    before = model.all.detach().clone()
    parts = [scale * nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)) for scale in (1, 2, 4, 8)]
    model.all.grad = torch.cat(parts)
    groups(model, inputs, lr=0.1).optimizer().step()
    for part in (model.all.detach() - before).chunk(
        4
    ):  # as one, the first would move by an eighth of the last
        assert 0.06 < torch.linalg.svdvals(part).min() <= torch.linalg.svdvals(part).max() < 0.13


def test_rows_that_only_a_part_of_a_parameter_has_are_none() -> None:
    class Half(Sliced):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            q, k, v = F.linear(x, self.all[: 3 * WIDTH]).chunk(3, -1)
            return self.leave(x + F.scaled_dot_product_attention(q, k, v))

    assert _rows(Half("slice"), torch.randn(2, 5, 3), "all") == ()


def test_queries_from_one_stream_and_keys_from_another() -> None:
    """torch cuts the weight in two, for queries and for keys with values."""
    layer = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True), 2)
    inputs = torch.randn(2, 5, WIDTH), torch.randn(2, 6, WIDTH)
    assert _rows(layer, inputs, "layers.1.multihead_attn.in_proj_weight") == BY_THIRDS
    assert _rows(layer, inputs, "layers.1.self_attn.in_proj_weight") == BY_THIRDS


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_gates_are_told_apart_in_every_layout_of_the_data(batch_first: bool, bidirectional: bool) -> None:
    layer = nn.LSTM(3, WIDTH, 2, batch_first=batch_first, bidirectional=bidirectional)
    anatomy = dissect(layer, torch.randn(4, 4, 3))
    for part in anatomy.values():
        if part.op == "linear":
            assert part.rows == BY_QUARTERS, part.name


def test_a_stream_that_is_cut_later_makes_no_blocks_of_the_weights_that_add_to_it() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.inner = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.leave = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x).relu()
            one, two = (x + self.inner(x)).chunk(2, -1)
            return self.leave(torch.cat([one.tanh(), two.sigmoid()], -1))

    assert _rows(Cut(), torch.randn(4, 3), "inner.weight") == ()


class Convolved(nn.Module):
    """A branch with queries, keys and values by one kernel, and another with a kernel in groups."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, 2, 1)
        self.qkv, self.out = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.each = nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1, groups=count)
        self.back = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q, k, v = (part.flatten(2).transpose(1, 2) for part in self.qkv(x).chunk(3, 1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, x.shape[2:])
        x = x + self.out(mixed)
        return self.leave(x + self.back(self.each(x).relu()))


def test_rows_of_kernels() -> None:
    anatomy = dissect(Convolved(), torch.randn(2, 3, 6, 6))
    assert anatomy["qkv.weight"].rows == anatomy["qkv.bias"].rows == BY_THIRDS
    assert anatomy["out.weight"].rows == ()
    groups_of_8 = tuple(((start, start + 8),) for start in range(0, 2 * WIDTH, 8))
    assert anatomy["each.weight"].rows == groups_of_8  # each group reads channels of its own
    assert anatomy["back.weight"].rows == ()  # the groups lie along its inputs
    depthwise = dissect(Convolved(WIDTH), torch.randn(2, 3, 6, 6))
    assert depthwise["each.weight"].rows == ()  # a kernel with one input channel
