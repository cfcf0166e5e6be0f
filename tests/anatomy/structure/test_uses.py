"""Which dimensions of a tensor are summed over and which are made comes from the operation it is used by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import Part, dissect
from theodolite.core.size import Size

W = 16

Shape = Callable[[int], tuple[int, ...]]


def _part(shape: Shape, use: Callable[[Tensor, Tensor], Tensor], inputs: Tensor | None = None) -> Part:
    """What `dissect` says of a parameter that meets (2, 5, width) features, or the inputs given."""

    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed = nn.Linear(6, width) if inputs is None else nn.Identity()
            self.p = nn.Parameter(torch.ones(shape(width)))

        def forward(self, x: Tensor) -> Tensor:
            return use(self.embed(x), self.p)

    return dissect(Net, torch.zeros(2, 5, 6) if inputs is None else inputs, size=Size(W, 1))["p"]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4)).transpose(1, 2)


# By case: the shape at a width, the use, then in_axes, out_axes and role.
MATRICES: dict[str, tuple[Shape, Callable[[Tensor, Tensor], Tensor], Any, Any, str]] = {
    "x Wᵀ": (lambda w: (2 * w, w), lambda x, p: F.linear(x, p), (1,), (0,), "hidden"),
    "x W": (lambda w: (w, 2 * w), lambda x, p: x @ p, (0,), (1,), "hidden"),
    "W xᵀ": (lambda w: (2 * w, w), lambda x, p: p @ x.mT, (1,), (0,), "hidden"),
    "einsum": (lambda w: (w, 3), lambda x, p: torch.einsum("bti,io->bto", x, p), (0,), (1,), "output"),
    "einsum, transposed": (
        lambda w: (3, w),
        lambda x, p: torch.einsum("oi,bti->bto", p, x),
        (1,),
        (0,),
        "output",
    ),
    "tensordot": (
        lambda w: (w, w),
        lambda x, p: torch.tensordot(x, p, dims=([2], [0])),
        (0,),
        (1,),
        "hidden",
    ),
    "stored flat": (lambda w: (w * w,), lambda x, p: x @ p.view(x.shape[-1], -1), (0,), (0,), "hidden"),
    "heads, dims": (
        lambda w: (w // 4, 4, w),
        lambda x, p: torch.einsum("btd,hed->bthe", x, p),
        (2,),
        (0, 1),
        "hidden",
    ),
    "summed over heads and dims": (
        lambda w: (w // 4, 4, w),
        lambda x, p: torch.einsum("bhte,hed->btd", _heads(x), p),
        (0, 1),
        (2,),
        "hidden",
    ),
    "a stack": (
        lambda w: (3, w, 2 * w),
        lambda x, p: torch.einsum("bti,eio->beto", x, p).sum(1),
        (1,),
        (2,),
        "hidden",
    ),
    "one of a stack": (lambda w: (3, 2 * w, w), lambda x, p: F.linear(x, p[1]), (2,), (1,), "hidden"),
    "kernel": (lambda w: (2 * w, w, 3), lambda x, p: F.conv1d(x.mT, p), (1, 2), (0,), "hidden"),
    "transposed kernel": (
        lambda w: (w, 2 * w, 3),
        lambda x, p: F.conv_transpose1d(x.mT, p),
        (0, 2),
        (1,),
        "hidden",
    ),
    "depthwise kernel": (
        lambda w: (w, 1, 3),
        lambda x, p: F.conv1d(x.mT, p, groups=x.shape[-1]),
        (1, 2),
        (0,),
        "input",
    ),
}


@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES)
def test_a_weight_has_the_axes_of_its_operation(case: Any) -> None:
    shape, use, in_axes, out_axes, role = case
    part = _part(shape, use)
    assert (part.in_axes, part.out_axes, part.role) == (in_axes, out_axes, role)
    assert part.op == ("conv" if "kernel" in next(k for k, v in MATRICES.items() if v is case) else "linear")


WORDS = torch.zeros(2, 5, dtype=torch.long)
TABLES: dict[str, tuple[Shape, Callable[[Tensor, Tensor], Tensor]]] = {
    "embedding": (lambda w: (9, w), lambda x, p: F.embedding(x, p)),
    "index": (lambda w: (9, w), lambda x, p: p[x]),
    "index_select": (lambda w: (9, w), lambda x, p: p.index_select(0, x.flatten())),
    "bag": (lambda w: (9, w), lambda x, p: F.embedding_bag(x, p, mode="mean")),
}


@pytest.mark.parametrize("case", TABLES.values(), ids=TABLES)
def test_a_table_that_is_looked_up_is_an_input(case: Any) -> None:
    part = _part(*case, inputs=WORDS)
    assert (part.op, part.role, part.in_axes, part.out_axes) == ("embedding", "input", (0,), (1,))
    assert (part.fan_in, part.fan_out, part.width_in, part.width_out) == (9, W, False, True)


def test_a_one_hot_product_is_an_input_layer() -> None:
    part = _part(lambda w: (9, w), lambda x, p: F.one_hot(x, 9).float() @ p, inputs=WORDS)
    assert (part.op, part.role, part.in_axes, part.out_axes) == ("linear", "input", (0,), (1,))


# By case: the shape at a width, the use, then op, role and out_axes.
VECTORS: dict[str, tuple[Shape, Callable[[Tensor, Tensor], Tensor], str, str, Any]] = {
    "bias": (lambda w: (w,), lambda x, p: x + p, "add", "bias", (0,)),
    "subtracted": (lambda w: (w,), lambda x, p: x - p, "add", "bias", (0,)),
    "bias of a map": (lambda w: (w, 1), lambda x, p: x.mT + p, "add", "bias", (0,)),
    "scale": (lambda w: (w,), lambda x, p: x * p, "scale", "gain", (0,)),
    "exponential of a scale": (lambda w: (w,), lambda x, p: x * p.exp(), "scale", "gain", (0,)),
    "divided by": (lambda w: (w,), lambda x, p: x / p, "scale", "gain", (0,)),
    "number": (lambda w: (), lambda x, p: (x * p) @ torch.ones(x.shape[-1], 2), "scale", "gain", ()),
    "token": (
        lambda w: (1, 1, w),
        lambda x, p: torch.cat((p.expand(2, -1, -1), x), 1),
        "concat",
        "input",
        (2,),
    ),
    "positions": (lambda w: (1, 5, w), lambda x, p: x + p, "add", "input", (2,)),
}


@pytest.mark.parametrize("case", VECTORS.values(), ids=VECTORS)
def test_a_vector_is_what_is_done_with_it(case: Any) -> None:
    shape, use, op, role, out_axes = case
    part = _part(shape, use)
    assert (part.op, part.role, part.out_axes, part.norm) == (op, role, out_axes, None)
    assert part.width_out == bool(out_axes)
    assert not part.width_in


def test_a_matrix_for_each_head_is_a_stack() -> None:
    """Block-diagonal maps: more heads, of the same size; only the caller can say how they should scale."""

    def use(x: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("bhte,hef->bhtf", _heads(x), p).transpose(1, 2).flatten(2)

    with pytest.raises(ValueError, match=r"p has shape \(4, 4, 4\)") as caught:
        _part(lambda w: (w // 4, 4, 4), use)
    assert "no dimension grows" not in str(caught.value)  # one does: the number of matrices


def test_a_projection_of_heads_sums_over_heads_and_entries() -> None:
    """o of (heads, entries, width): the fan-in is all of both, though only the entries grow."""

    def use(x: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("bthc,hcd->btd", x.unflatten(-1, (4, -1)), p)

    part = _part(lambda w: (4, w // 4, w), use)
    assert (part.in_axes, part.out_axes, part.fan_in, part.stack) == ((0, 1), (2,), W, 1)
    assert part.grown_axes == (1, 2)


def test_the_axes_that_grow_are_those_whose_sizes_grew() -> None:
    queries = _part(lambda w: (w, 4, w // 4), lambda x, p: torch.einsum("btd,dhc->bthc", x, p))
    assert queries.grown_axes == (0, 2)
    gain = _part(lambda w: (5, w), lambda x, p: x * p)
    assert (gain.role, gain.grown_axes, gain.width_out) == ("gain", (1,), True)


def test_a_bias_for_each_entry_of_each_head_is_a_bias() -> None:
    """Transformer-XL's u: (heads, entries), added to queries that were split into heads."""

    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.q, self.head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)
            self.u = nn.Parameter(torch.zeros(width // 4, 4))
            self.places = nn.Parameter(torch.zeros(5, width))

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(self.embed(x) + self.places).unflatten(-1, (-1, 4)) + self.u
            return self.head(torch.relu(q).flatten(-2))

    anatomy = dissect(Net, torch.zeros(2, 5, 6), size=Size(W, 1))
    assert (anatomy["u"].role, anatomy["u"].out_axes) == ("bias", (0, 1))
    assert (anatomy["places"].role, anatomy["places"].in_axes) == ("input", (0,))


def test_the_kinds_of_use_tell_a_tied_head_from_tied_embeddings() -> None:
    class Net(nn.Module):
        def __init__(self, width: int, depth: int, head: bool) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(9, width), nn.Embedding(9, width)
            self.head = nn.Linear(width, 9, bias=False)
            (self.head if head else self.target).weight = self.source.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.source(x) + self.target(x)))

    def uses(head: bool) -> tuple[str, ...]:
        tokens = torch.zeros(2, 5, dtype=torch.long)
        return dissect(lambda w, d: Net(w, d, head), tokens, size=Size(W, 1))["source.weight"].uses

    assert uses(head=True) == ("table", "weight")
    assert uses(head=False) == ("table",)
