"""Streams and branches are found by what is added to what, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import dissect
from theodolite.core.size import Size

from ..hand import Step, attend, heads, look, mlp, vector


def _f(block: Any, x: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(block.norm(x))))


# One branch of two layers, pre-norm, that ends with `down`.

SAME: dict[str, Step] = {
    "x + f": lambda b, x: x + _f(b, x),
    "f + x": lambda b, x: _f(b, x) + x,
    "sum of a list": lambda b, x: sum([x, _f(b, x)]),
    "x − (−f)": lambda b, x: x - (-_f(b, x)),
    "x − f": lambda b, x: x - _f(b, x),
    "α x + f": lambda b, x: 0.7 * x + _f(b, x),
    "x + β f": lambda b, x: x + _f(b, x) / 3,
    "torch.add with alpha": lambda b, x: torch.add(x, _f(b, x), alpha=0.5),
    "convex": lambda b, x: 0.9 * x + 0.1 * _f(b, x),
    "x + β (g(x) − x)": lambda b, x: x + 0.5 * ((x + _f(b, x)) - x),
    "dropout": lambda b, x: x + F.dropout(_f(b, F.dropout(x, 0.1)), 0.1),
    "casts": lambda b, x: (x.double() + _f(b, x).to(torch.float64)).float(),
    "views": lambda b, x: x + _f(b, x.flatten(0, 1)).view(x.shape),
    "transposed": lambda b, x: (x.mT + _f(b, x).mT).mT.contiguous(),
    "in pieces": lambda b, x: x + torch.cat([_f(b, piece) for piece in x.split(1)]),
    "drop path": lambda b, x: x + _f(b, x).div(0.9) * torch.ones(2, 1, 1),
    "identity modules": lambda b, x: nn.Identity()(x) + nn.Identity()(_f(b, x)),
    "lerp": lambda b, x: torch.lerp(x, _f(b, x), 0.5),
    "lerp in place": lambda b, x: x.clone().lerp_(_f(b, x), 0.5),
    "lerp by a learned vector": lambda b, x: x.lerp(_f(b, x), b.norm.bias.sigmoid()),
    "stack and sum": lambda b, x: torch.stack([x, _f(b, x)]).sum(0),
    "stack and mean": lambda b, x: 2 * torch.stack([x, _f(b, x)], dim=-1).mean(-1),
    "addcmul": lambda b, x: torch.addcmul(x, _f(b, x), torch.ones(()), value=0.5),
    "addmm": lambda b, x: (
        torch.addmm(x[0], F.gelu(b.up(b.norm(x[0]))), b.down.weight.T, alpha=0.5).unsqueeze(0) + 0 * x
    ),
    "a learned scale on the stream": lambda b, x: b.norm.weight * x + _f(b, x),
    "a token picked": lambda b, x: torch.cat([(x[:, 0] + _f(b, x)[:, 0])[:, None], x[:, 1:]], 1),
    "a token sliced": lambda b, x: torch.cat([x[:, :1] + _f(b, x)[:, :1], x[:, 1:]], 1),
}


@pytest.mark.parametrize("step", SAME.values(), ids=SAME)
def test_a_branch_is_a_branch_however_it_is_added(step: Step) -> None:
    anatomy = look(mlp, step)
    assert [(b.block, b.branch, b.placement, b.layers) for b in anatomy.branches] == [
        (0, 0, "pre", 2),
        (1, 0, "pre", 2),
    ]
    for number, branch in enumerate(anatomy.branches):
        prefix = f"blocks.{number}."
        assert f"{prefix}down.weight" in branch.ends
        assert set(branch.ends) <= {f"{prefix}down.weight", f"{prefix}down.bias"}
        assert {f"{prefix}{name}.weight" for name in ("norm", "up", "down")} <= set(branch.parts)
    assert anatomy.grown_blocks == 4
    assert anatomy["embed.weight"].block is anatomy["head.weight"].block is None


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_are_counted(layers: int) -> None:
    def make(width: int) -> dict[str, Any]:
        return {"f": nn.ModuleList(nn.Linear(width, width) for _ in range(layers))}

    def step(block: Any, x: Tensor) -> Tensor:
        y = x
        for layer in block.f:
            y = layer(torch.tanh(y))
        return x + y

    anatomy = look(make, step)
    assert [branch.layers for branch in anatomy.branches] == [layers, layers]
    assert anatomy.branches[1].ends[0] == f"blocks.1.f.{layers - 1}.weight"


# Attention and MLP that read the same point.


def _two_limbs(width: int) -> dict[str, Any]:
    attention = {name: nn.Linear(width, width, bias=False) for name in ("q", "k", "v", "out")}
    return mlp(width) | attention


def _attend(b: Any, x: Tensor) -> Tensor:
    x = b.norm(x)
    return b.out(attend(heads(b.q(x)), heads(b.k(x)), heads(b.v(x))))


PARALLEL: dict[str, Step] = {
    "x + a + m": lambda b, x: x + _attend(b, x) + _f(b, x),
    "x + m + a": lambda b, x: x + _f(b, x) + _attend(b, x),
    "x + (a + m)": lambda b, x: x + (_attend(b, x) + _f(b, x)),
    "(m + a) + x": lambda b, x: (_f(b, x) + _attend(b, x)) + x,
    "a + (x + m)": lambda b, x: _attend(b, x) + (x + _f(b, x)),
}


@pytest.mark.parametrize("step", PARALLEL.values(), ids=PARALLEL)
def test_parallel_branches_are_two_branches_of_one_block(step: Step) -> None:
    anatomy = look(_two_limbs, step)
    assert anatomy.num_blocks == 2
    ends = {frozenset(branch.ends) for branch in anatomy.branches if branch.block == 1}
    assert ends == {
        frozenset({"blocks.1.out.weight"}),
        frozenset({"blocks.1.down.weight", "blocks.1.down.bias"}),
    }
    assert {branch.placement for branch in anatomy.branches} == {"pre"}


def test_branches_one_after_the_other_are_two_branches_of_one_block() -> None:
    def step(b: Any, x: Tensor) -> Tensor:
        x = x + _attend(b, x)
        return x + _f(b, x)

    anatomy = look(_two_limbs, step)
    assert [(b.block, b.branch, b.attention is not None) for b in anatomy.branches] == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, True),
        (1, 1, False),
    ]


def test_four_branches_of_a_block_with_two_alike() -> None:
    """Conformer's macaron: half an MLP, attention, the other half."""

    def make(width: int) -> dict[str, Any]:
        second = {f"second_{name}": module for name, module in mlp(width).items()}
        return {**_two_limbs(width), **second}

    def step(b: Any, x: Tensor) -> Tensor:
        x = x + 0.5 * _f(b, x)
        x = x + _attend(b, x)
        return x + 0.5 * b.second_down(F.gelu(b.second_up(b.second_norm(x))))

    anatomy = look(make, step)
    assert [(b.block, b.branch) for b in anatomy.branches] == [(n, r) for n in range(2) for r in range(3)]
    assert anatomy.grown_blocks == 4


# Streams that are more than x + f(x).


def test_a_gain_that_starts_at_zero_ends_its_branch() -> None:
    """ReZero: scaling it scales the branch, and the weight before it no longer ends anything."""
    anatomy = look(lambda w: {**mlp(w), "g": vector(1, value=0.0)}, lambda b, x: x + b.g * _f(b, x))
    assert anatomy.branches[0].ends == ("blocks.0.g",)


def test_a_stream_that_is_mixed_with_its_beginning() -> None:
    class Mixed(nn.Module):
        """x ← λ0 x + λ1 x0 before each branch, as in speed runs of GPT-2."""

        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, width), nn.Linear(width, 3)
            self.blocks = nn.ModuleList(nn.ModuleDict(mlp(width)) for _ in range(depth))
            self.mix = nn.Parameter(torch.ones(depth, 2))

        def forward(self, x: Tensor) -> Tensor:
            x = first = self.embed(x)
            for block, mix in zip(self.blocks, self.mix, strict=True):
                x = mix[0] * x + mix[1] * first
                x = x + _f(block, x)
            return self.head(x)

    anatomy = dissect(Mixed, torch.zeros(2, 6), size=Size(16, 3))
    assert [(b.block, b.layers, b.ends[0]) for b in anatomy.branches] == [
        (n, 2, f"blocks.{n}.down.weight") for n in range(3)
    ]
    assert anatomy["mix"].role == "gain"
    assert anatomy["mix"].op == "scale"


def test_a_skip_around_many_blocks_is_no_branch() -> None:
    class Skips(nn.Module):
        """A U-Net by addition: the second half gets what the first half had."""

        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, width), nn.Linear(width, 3)
            self.blocks = nn.ModuleList(nn.ModuleDict(mlp(width)) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            x, kept = self.embed(x), []
            for number, block in enumerate(self.blocks):
                if 2 * number >= len(self.blocks):
                    x = x + kept.pop()
                x = x + _f(block, x)
                if 2 * number + 1 < len(self.blocks):
                    kept.append(x)
            return self.head(x)

    anatomy = dissect(Skips, torch.zeros(2, 6), size=Size(16, 4))
    assert [(b.block, b.layers, len(b.parts)) for b in anatomy.branches] == [(n, 2, 6) for n in range(4)]


def test_a_residual_inside_a_branch_is_a_detail_of_it() -> None:
    def step(b: Any, x: Tensor) -> Tensor:
        y = b.up(b.norm(x))
        return x + b.down(y + b.inner(torch.relu(y)))

    anatomy = look(lambda w: {**mlp(w), "inner": nn.Linear(2 * w, 2 * w)}, step)
    assert [(b.block, b.branch, b.layers) for b in anatomy.branches] == [(0, 0, 3), (1, 0, 3)]
    assert "blocks.0.inner.weight" in anatomy.branches[0].parts


def test_low_rank_detours_beside_weights_are_details_of_their_branch() -> None:
    """LoRA: W x + B A x for every weight; the branch ends with the last W and the last B."""

    def make(width: int) -> dict[str, Any]:
        rank = {"a": nn.Linear(width, 4, bias=False), "b": nn.Linear(4, 2 * width, bias=False)}
        last = {"last_a": nn.Linear(2 * width, 4, bias=False), "last_b": nn.Linear(4, width, bias=False)}
        return {**mlp(width), **rank, **last}

    def step(b: Any, x: Tensor) -> Tensor:
        y = b.norm(x)
        y = F.gelu(b.up(y) + 2.0 * b.b(b.a(y)))
        return x + (b.down(y) + 2.0 * b.last_b(b.last_a(y)))

    anatomy = look(make, step)
    assert [(b.block, b.branch, b.placement) for b in anatomy.branches] == [(0, 0, "pre"), (1, 0, "pre")]
    ends = {f"blocks.0.{name}" for name in ("down.weight", "down.bias", "last_b.weight")}
    assert set(anatomy.branches[0].ends) == ends
    roles = {name: anatomy[f"blocks.0.{name}.weight"].role for name in ("up", "a", "b", "last_a", "last_b")}
    assert roles == {"up": "hidden", "a": "output", "b": "input", "last_a": "output", "last_b": "input"}
    assert all(part.branch == 0 for name, part in anatomy.items() if name.startswith("blocks"))


def test_a_mixture_with_a_shared_expert_is_one_branch() -> None:
    def make(width: int) -> dict[str, Any]:
        stack = {"first": vector(3, width, width), "second": vector(3, width, width)}
        return {**mlp(width), **stack, "router": nn.Linear(width, 3, bias=False)}

    def step(b: Any, x: Tensor) -> Tensor:
        y = b.norm(x)
        hidden = torch.einsum("btd,edf->ebtf", y, b.first).relu()
        routed = torch.einsum("ebtf,efd,bte->btd", hidden, b.second, b.router(y).softmax(-1))
        return x + (routed + b.down(F.gelu(b.up(y))))

    anatomy = look(make, step)
    assert [(b.block, b.branch) for b in anatomy.branches] == [(0, 0), (1, 0)]
    ends = {"blocks.0.second", "blocks.0.down.weight", "blocks.0.down.bias"}
    assert set(anatomy.branches[0].ends) == ends
    assert anatomy["blocks.0.router.weight"].role == "output"
    part = anatomy["blocks.0.first"]
    assert (part.role, part.in_axes, part.out_axes, part.stack) == ("hidden", (1,), (2,), 3)


# Additions that are no residual.

NO_STREAM: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda w: nn.LSTM(w, w, num_layers=2, batch_first=True),
    "GRU": lambda w: nn.GRU(w, w, batch_first=True, bidirectional=True),
    "plain": lambda w: nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w)),
}


@pytest.mark.parametrize("kind", NO_STREAM, ids=NO_STREAM)
def test_a_network_without_a_stream_has_no_branches(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.body = nn.Linear(6, width), NO_STREAM[kind](width)
            self.head = nn.Linear(2 * width if kind == "GRU" else width, 3)

        def forward(self, x: Tensor) -> Tensor:
            made = self.body(self.embed(x))
            return self.head(made[0] if isinstance(made, tuple) else made)

    anatomy = dissect(Net, torch.zeros(2, 4, 6), size=Size(16, 1))
    assert anatomy.branches == ()
    assert {part.role for name, part in anatomy.items() if name.startswith("body.weight")} <= {"hidden"}
    assert anatomy["head.weight"].role == "output"


def test_a_stream_may_begin_as_a_parameter() -> None:
    """DETR's queries: three branches in the first layer as in the others."""

    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(width, 2, 2 * width, batch_first=True, norm_first=True)
            self.embed, self.head = nn.Linear(6, width), nn.Linear(width, 3)
            self.queries = nn.Parameter(torch.zeros(1, 4, width))
            self.decoder = nn.TransformerDecoder(layer, depth)

        def forward(self, x: Tensor) -> Tensor:
            memory = self.embed(x)
            return self.head(self.decoder(self.queries.expand(len(x), -1, -1), memory))

    anatomy = dissect(Net, torch.zeros(2, 5, 6), size=Size(16, 2))
    assert [(b.block, b.branch) for b in anatomy.branches] == [(n, r) for n in range(2) for r in range(3)]
    assert (anatomy["queries"].role, anatomy["queries"].tied) == ("input", ())


def test_a_norm_between_two_weights_is_an_inner_one() -> None:
    """ConvNeXt: every path through the branch leads through it; values pass by a norm of queries."""
    inner = look(mlp_with_norm_inside, lambda b, x: x + b.down(F.gelu(b.norm(b.up(x)))))
    assert [branch.placement for branch in inner.branches] == ["inner", "inner"]


def mlp_with_norm_inside(width: int) -> dict[str, Any]:
    return {**mlp(width), "norm": nn.LayerNorm(2 * width)}


class Stage(nn.Module):
    """A branch with a stream of its own: `x + o(b_n(… b_1(i(x))))`, where `b_j(y) = y + f(y)`."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.norm, self.i, self.o = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.inner = nn.ModuleList(nn.ModuleDict(mlp(width)) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        y = self.i(self.norm(x))
        for block in self.inner:
            y = y + _f(block, y)
        return x + self.o(y)


def stages(width: int, num: int, num_inner: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, width), *(Stage(width, num_inner) for _ in range(num)), nn.Linear(width, 3)
    )


def test_branches_with_small_streams_of_their_own_are_branches() -> None:
    anatomy = dissect(lambda w, d: stages(w, d, 3), torch.zeros(2, 6), size=Size(16, 2))
    assert [branch.ends for branch in anatomy.branches] == [
        ("1.o.weight", "1.o.bias"),
        ("2.o.weight", "2.o.bias"),
    ]
    assert all(part.block == 0 for name, part in anatomy.items() if name.startswith("1."))


def test_a_single_branch_with_a_small_stream_is_one_if_depth_adds_more() -> None:
    anatomy = dissect(lambda w, d: stages(w, d, 3), torch.zeros(2, 6), size=Size(16, 1))
    assert [branch.ends for branch in anatomy.branches] == [("1.o.weight", "1.o.bias")]
    assert anatomy.grown_blocks == 2


def test_a_network_of_one_depth_with_small_streams_can_be_dissected() -> None:
    def fixed(width: int, depth: int) -> nn.Module:
        assert depth == 2, "there is no other depth"
        return stages(width, 2, 2)

    anatomy = dissect(fixed, torch.zeros(2, 6), size=Size(16, 2))
    assert [branch.ends[0] for branch in anatomy.branches] == ["1.o.weight", "2.o.weight"]


def test_where_depth_adds_to_small_streams_their_branches_count() -> None:
    anatomy = dissect(lambda w, d: stages(w, 2, d), torch.zeros(2, 6), size=Size(16, 2))
    ends = [f"{stage}.inner.{block}.down.weight" for stage in (1, 2) for block in (0, 1)]
    assert [branch.ends[0] for branch in anatomy.branches] == ends
    assert anatomy.grown_blocks == 8
    assert anatomy["1.o.weight"].block is None


def test_a_lone_branch_with_a_stream_inside_is_a_skip_around_it() -> None:
    anatomy = dissect(lambda w, d: stages(w, 1, d), torch.zeros(2, 6), size=Size(16, 3))
    assert [branch.ends[0] for branch in anatomy.branches] == [f"1.inner.{n}.down.weight" for n in range(3)]
