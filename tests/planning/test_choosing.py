"""What one built model leaves open is named, and a build function settles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.mixed import PIXELS, TOKENS, Attention, Convolutions, MixedGPT, Recurrent
from torch import Tensor, nn

import theodolite as th
from theodolite.anatomy import Part
from theodolite.planning import Groups, groups
from theodolite.planning.choosing import assumed


class Narrow(nn.Module):
    """A branch through a bottleneck, of fixed width or one that follows."""

    def __init__(self, width: int = 32, depth: int = 1, inner: int | None = 4) -> None:
        super().__init__()
        inner = inner or width // 8
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 5)
        self.down, self.up = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last(x + self.up(torch.tanh(self.down(x))))
        return found


def _assumed(model: Any, inputs: Any, **given: Any) -> dict[str, str]:
    rows = groups(model, inputs, lr=0.1, **given).rows
    return {name: row.reasons["assumed"] for name, row in rows.items() if "assumed" in row.reasons}


def test_a_narrow_side_is_assumed_to_follow_the_width() -> None:
    found = _assumed(Narrow(), torch.zeros(1, 3))
    assert set(found) == {"down.weight", "up.weight"}
    (note,) = [one for one in groups(Narrow(), torch.zeros(1, 3), lr=0.1).notes if "Assumed" in one]
    assert f"Assumed: {found['up.weight']} (down.weight, up.weight)." in note
    assert "theodolite.groups(build, inputs, size=theodolite.Size(width, depth)" in note


def test_the_table_marks_what_is_assumed() -> None:
    def marked(made: Groups) -> set[str]:
        return {str(line[0]) for line in made.table().rows if str(line[-1]).endswith(" (assumed)")}

    assert marked(groups(Narrow(), torch.zeros(1, 3), lr=0.1)) == {"down.weight", "up.weight"}
    assert marked(groups(Narrow, torch.zeros(1, 3), size=th.Size(32, 1), lr=0.1)) == set()


@pytest.mark.parametrize(("inner", "rule"), [(4, "adamw"), (None, "muon")])
def test_a_build_function_settles_it(inner: int | None, rule: str) -> None:
    def build(width: int, depth: int) -> nn.Module:
        return Narrow(width, depth, inner)

    made = groups(build, torch.zeros(1, 3), size=th.Size(32, 1), lr=0.1)
    assert {made[name].rule for name in ("down.weight", "up.weight")} == {rule}
    assert not _assumed(build, torch.zeros(1, 3), size=th.Size(32, 1))
    assert not [note for note in made.notes if "Assumed" in note]


def test_networks_without_a_doubt_have_no_assumption() -> None:
    for model, inputs in ((MixedGPT(), TOKENS), (Convolutions(), PIXELS), (Recurrent(), TOKENS)):
        assert _assumed(model, inputs) == {}


def test_few_heads_for_keys_and_values_are_named() -> None:
    model = th.models.GPT(64, 1, head_dim=8, kv_heads=2)
    found = _assumed(model, torch.zeros(1, 8, dtype=torch.long))
    assert {name.split(".")[-2] for name in found} == {"key", "value"}
    assert all("2 here, for 8 query heads" in words for words in found.values())


def test_patterns_that_a_note_leaves_out_are_counted() -> None:
    class Bottlenecks(nn.Module):
        """Four branches, each through a bottleneck of its own name: eight narrow weights."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 32), nn.Linear(32, 5)
            for name in "abcd":
                setattr(self, f"{name}_down", nn.Linear(32, 4, bias=False))
                setattr(self, f"{name}_up", nn.Linear(4, 32, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for name in "abcd":
                x = x + getattr(self, f"{name}_up")(torch.tanh(getattr(self, f"{name}_down")(x)))
            found: Tensor = self.last(x)
            return found

    (note,) = [one for one in groups(Bottlenecks(), torch.zeros(1, 3), lr=0.1).notes if "Assumed" in one]
    assert note.splitlines()[0].endswith(
        "(a_down.weight, a_up.weight, b_down.weight, b_up.weight, c_down.weight, c_up.weight and 2 more)."
    )


def test_outputs_that_do_not_grow_are_said_to_be_heads_only_where_they_are() -> None:
    class Gated(nn.Module):
        """Two heads at every width, and a gate for each of them."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.gate = Attention(width), nn.Linear(width, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner
            normed = inner.norm(x)
            q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in inner.qkv(normed).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            gates = torch.sigmoid(self.gate(normed))[..., None]
            found: Tensor = x + inner.out((mixed * gates).flatten(2))
            return found

    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), Gated(width), nn.Linear(width, 3))

    rows = groups(build, torch.zeros(2, 4, 5), size=th.Size(16, 1), lr=0.1).rows
    assert rows["1.gate.weight"].reasons["why"] == "router or gate: its outputs do not grow"

    def shared(width: int, depth: int) -> nn.Module:
        return th.models.GPT(width, depth, head_dim=8, kv_heads=2)

    tokens = torch.zeros(1, 8, dtype=torch.long)
    kept = groups(shared, tokens, size=th.Size(64, 1), lr=0.1).rows
    keys = [row for name, row in kept.items() if name.endswith("key.weight")]
    assert [row.reasons["why"] for row in keys] == ["2 heads at every width: its outputs do not grow"]


def test_a_network_whose_result_is_as_wide_as_its_stream_is_named() -> None:
    body = nn.Sequential(nn.Linear(5, 16), Attention(16), nn.Linear(16, 16))
    assert set(_assumed(body, torch.zeros(2, 5, 5))) == {"2.weight"}


def test_a_leading_dimension_of_outputs_may_be_a_stack() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 2)
            self.heads = nn.Parameter(torch.randn(4, 16, 16))
            self.out = nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            made = torch.einsum("bi,hoi->bho", torch.tanh(x), self.heads).tanh()
            found: Tensor = self.last(x + self.out(made.flatten(1)))
            return found

    found = _assumed(Heads(), torch.zeros(2, 3))
    assert found["heads"] == "the leading dimension of 4 counts outputs, not a stack of matrices"


@pytest.mark.parametrize(("out_axes", "is_said"), [((0, 1), True), ((1, 2), False)])
def test_a_leading_dimension_is_assumed_to_count_outputs_only_if_it_does(
    out_axes: tuple[int, int], is_said: bool
) -> None:
    in_axes = tuple({0, 1, 2} - set(out_axes))
    part = Part("w", (4, 8, 16), "linear", "hidden", 16, 32, True, True, in_axes, out_axes)
    assert ("counts outputs" in assumed(part)) is is_said
