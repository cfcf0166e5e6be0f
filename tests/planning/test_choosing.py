"""What one built model leaves open is named, and a build function settles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.mixed import PIXELS, TOKENS, Attention, Convolutions, MixedGPT, Recurrent
from torch import Tensor, nn

import theodolite as th
from theodolite.planning import groups


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
    assert found["up.weight"].startswith("a narrow side follows the width (4 beside 32); else it is fixed")
    (note,) = [one for one in groups(Narrow(), torch.zeros(1, 3), lr=0.1).notes if "Assumed" in one]
    assert "down.weight (4 beside 32), up.weight (4 beside 32)" in note
    assert "theodolite.groups(build, inputs, size=theodolite.Size(width, depth)" in note


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
    assert all("16 beside 64" in words for words in found.values())


def test_a_network_between_two_others_may_read_and_write_what_follows_the_width() -> None:
    body = nn.Sequential(nn.Linear(16, 16), Attention(16), nn.Linear(16, 16))
    found = _assumed(body, torch.zeros(2, 5, 16))
    assert found["0.weight"].startswith("the data they read have a fixed size (16); else")
    assert found["2.weight"].startswith("the results they make have a fixed size (16); else")


def test_a_vocabulary_as_large_as_the_stream_is_no_doubt() -> None:
    assert _assumed(MixedGPT(32, 1, vocab=32), TOKENS.clamp(max=22)) == {}


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
    assert found["heads"] == (
        "the leading dimension counts outputs (4); else it counts a stack, of matrices by themselves"
    )
