"""A fused tensor knows which of its rows go which way, and only a fused one has rows to tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hand import WIDTH, attend, heads, look

SIZE = 8  # of a head
D = WIDTH
NUM = D // SIZE
BY_THIRDS = (((0, D),), ((D, 2 * D),), ((2 * D, 3 * D),))
BY_HEAD = tuple(
    tuple((3 * SIZE * head + SIZE * third, 3 * SIZE * head + SIZE * (third + 1)) for head in range(NUM))
    for third in range(3)
)


def _qkv(width: int) -> dict[str, Any]:
    return {"fused": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}


def _split(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(piece) for piece in x.split(x.shape[-1] // 3, -1))


def _chunk_late(x: Tensor) -> tuple[Tensor, ...]:
    return heads(x).chunk(3, 1)


def _five_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    return x.reshape(2, 5, 3, -1, SIZE).permute(2, 0, 3, 1, 4).unbind(0)


def _slices(x: Tensor) -> tuple[Tensor, ...]:
    d = x.shape[-1] // 3
    return heads(x[..., :d]), heads(x[..., d : 2 * d]), heads(x[..., 2 * d :])


def _each_head(x: Tensor) -> tuple[Tensor, ...]:
    return heads(x, 3 * SIZE).chunk(3, -1)


def _each_head_slices(x: Tensor) -> tuple[Tensor, ...]:
    whole = x.view(2, 5, -1, 3, SIZE)
    return tuple(whole[..., third, :].transpose(1, 2) for third in range(3))


LAYOUTS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], Any]] = {
    "split": (_split, BY_THIRDS),
    "heads, then chunk": (_chunk_late, BY_THIRDS),
    "five dimensions": (_five_dimensions, BY_THIRDS),
    "slices": (_slices, BY_THIRDS),
    "head by head": (_each_head, BY_HEAD),
    "head by head, slices": (_each_head_slices, BY_HEAD),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_queries_keys_and_values_are_told_apart(layout: Any) -> None:
    separate, rows = layout
    anatomy = look(_qkv, lambda block, x: x + block.out(attend(*separate(block.fused(x)))))
    assert anatomy["blocks.1.fused.weight"].rows == rows
    assert anatomy["blocks.1.fused.bias"].rows == rows
    assert anatomy["blocks.1.out.weight"].rows == ()


def test_the_heads_of_keys_and_values_that_an_index_picks() -> None:
    """As Falcon does it: `[..., [-2], :]` for the keys, which torch records as a lookup."""

    def make(width: int) -> dict[str, Any]:
        return {"fused": nn.Linear(width, width + 2 * SIZE, bias=False), "out": nn.Linear(width, width)}

    def step(block: Any, x: Tensor) -> Tensor:
        fused = block.fused(x)
        each = fused.view(*fused.shape[:-1], -1, SIZE).transpose(1, 2)
        q, *others = each[:, :-2], *(each[:, [-2]], each[:, [-1]])
        return x + block.out(attend(q, *(one.expand_as(q) for one in others)))

    q, k = WIDTH, WIDTH + SIZE
    assert look(make, step)["blocks.1.fused.weight"].rows == (((0, q),), ((q, k),), ((k, k + SIZE),))


def test_fewer_keys_than_queries() -> None:
    """Two heads of keys and of values for all queries."""

    def make(width: int) -> dict[str, Any]:
        return {"fused": nn.Linear(width, width + 4 * SIZE, bias=False), "out": nn.Linear(width, width)}

    def step(block: Any, x: Tensor) -> Tensor:
        q, k, v = block.fused(x).split([x.shape[-1], 2 * SIZE, 2 * SIZE], -1)
        k, v = (heads(piece).repeat_interleave(x.shape[-1] // SIZE // 2, 1) for piece in (k, v))
        return x + block.out(attend(heads(q), k, v))

    rows = (((0, D),), ((D, D + 2 * SIZE),), ((D + 2 * SIZE, D + 4 * SIZE),))
    assert look(make, step)["blocks.0.fused.weight"].rows == rows


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_are_told_apart(interleaved: bool) -> None:
    def make(width: int) -> dict[str, Any]:
        return {"fused": nn.Linear(width, 4 * width), "down": nn.Linear(2 * width, width)}

    def step(block: Any, x: Tensor) -> Tensor:
        both = block.fused(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return x + block.down(F.silu(gate) * up)

    evens = tuple((row, row + 1) for row in range(0, 4 * D, 2))
    odds = tuple((row + 1, row + 2) for row in range(0, 4 * D, 2))
    rows = (evens, odds) if interleaved else (((0, 2 * D),), ((2 * D, 4 * D),))
    assert look(make, step)["blocks.0.fused.weight"].rows == rows


def _turn_halves(x: Tensor) -> Tensor:
    cos, sin = torch.ones(SIZE // 2), torch.ones(SIZE // 2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _turn_rotated(x: Tensor) -> Tensor:
    a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return x * torch.ones(SIZE) + torch.cat((-b, a), -1) * torch.ones(SIZE)


def _turn_pairs(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * 0.5 - b * 0.5, a * 0.5 + b * 0.5), -1).flatten(-2)


def _turn_complex(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(4), torch.ones(4)
    )
    return torch.view_as_real(turned).flatten(-2)


def _turn_a_part(x: Tensor) -> Tensor:
    turned, kept = x[..., :4], x[..., 4:]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * 0.5 + torch.cat((-b, a), -1) * 0.5, kept), -1)


def _turn_the_last_part_in_pairs(x: Tensor) -> Tensor:
    kept, turned = torch.split(x, [4, 4], -1)
    turned = turned.unflatten(-1, (2, 2)).transpose(-1, -2).reshape(turned.shape)
    a, b = turned.chunk(2, -1)
    return torch.cat((kept, turned * torch.ones(4) + torch.cat((-b, a), -1) * torch.ones(4)), -1)


TURNS = [
    _turn_halves,
    _turn_rotated,
    _turn_pairs,
    _turn_complex,
    _turn_a_part,
    _turn_the_last_part_in_pairs,
]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.__name__.strip("_"))
def test_rotary_halves_are_no_row_blocks(turn: Callable[[Tensor], Tensor]) -> None:
    def separate(block: Any, x: Tensor) -> Tensor:
        q, k, v = _split(block.fused(x))
        return x + block.out(attend(turn(q), turn(k), v))

    assert look(_qkv, separate)["blocks.0.fused.weight"].rows == BY_THIRDS

    def alone(block: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (block.q, block.k, block.v))
        return x + block.out(attend(turn(q), turn(k), v))

    def make(width: int) -> dict[str, Any]:
        return {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}

    assert all(part.rows == () for part in look(make, alone).values())


def test_keys_and_values_from_one_latent() -> None:
    """A fused up-projection whose keys are copied into a fresh tensor beside other ones (as in MLA)."""

    def make(width: int) -> dict[str, Any]:
        return {name: nn.Linear(width, width) for name in ("q", "out")} | {"kv": nn.Linear(width, 2 * width)}

    def step(block: Any, x: Tensor) -> Tensor:
        both = heads(block.kv(x), 2 * SIZE)
        k, v = both.split([SIZE, SIZE], -1)
        keys = both.new_empty(k.shape)
        keys[..., :].copy_(k)
        return x + block.out(attend(heads(block.q(x)), keys, v))

    rows = look(make, step)["blocks.0.kv.weight"].rows
    starts = range(0, 2 * D, 2 * SIZE)
    assert rows == (
        tuple((start, start + SIZE) for start in starts),
        tuple((start + SIZE, start + 2 * SIZE) for start in starts),
    )
