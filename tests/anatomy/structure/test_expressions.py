"""Gains that are stored as what they differ from one by; and the names by which a table is read out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from theodolite import Size, dissect

from ..golden.llama import decoder_build

TOKENS = torch.zeros(1, 6, dtype=torch.long)


class Gained(nn.Module):
    """A residual branch that ends in a gain, written in some way."""

    def __init__(self, width: int, depth: int, gained: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gains = nn.ParameterList(torch.zeros(width) for _ in range(depth))
        self.head = nn.Linear(width, 11)
        self.gained = gained

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for linear, gain in zip(self.linears, self.gains, strict=True):
            x = x + self.gained(F.gelu(linear(x)), gain)
        return self.head(x)


@pytest.mark.parametrize(
    ("gained", "offset"),
    [
        (lambda x, w: x * w, 0.0),
        (lambda x, w: x * (1 + w), 1.0),
        (lambda x, w: x * (w + 0.5), 0.5),
        (lambda x, w: x * (1.0 + w.to(torch.float64).view(1, -1)).float(), 1.0),
        (lambda x, w: x * (1 + (w.double() - 0 + 2)).float(), 3.0),
        # No number added to the gain itself.
        (lambda x, w: x * (2 * (1 + w)), 0.0),
        (lambda x, w: (1 + x) * w, 0.0),
    ],
)
def test_what_is_added_to_a_gain_before_it_multiplies(gained: Callable, offset: float) -> None:
    anatomy = dissect(lambda width, depth: Gained(width, depth, gained), TOKENS, size=Size(16, 2))
    assert [anatomy[f"gains.{i}"].offset for i in range(2)] == [offset, offset]
    assert {part.offset for part in anatomy.values() if part.role != "gain"} == {0.0}


@pytest.mark.parametrize(("family", "offset"), [("Gemma2", 1.0), ("Gemma3", 1.0), ("Llama", 0.0)])
def test_gemma_adds_one_to_its_gains(family: str, offset: float) -> None:
    pytest.importorskip("transformers")
    name = "Gemma3Text" if family == "Gemma3" else family
    build = _gemma3 if family == "Gemma3" else decoder_build(name)
    anatomy = dissect(build, TOKENS, size=Size(64, 2))
    assert {part.offset for part in anatomy.values() if part.role == "gain"} == {offset}


class Tied(nn.Module):
    """A language model whose head is its table, registered in some order."""

    def __init__(self, width: int, depth: int, *, head_first: bool, by_hand: bool = False) -> None:
        super().__init__()
        names = ["head", "embed"] if head_first else ["embed", "head"]
        for name in names:
            if name == "embed":
                self.embed = nn.Embedding(11, width)
            else:
                self.head = nn.Linear(width, 11, bias=False)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head.weight = self.embed.weight
        self.by_hand = by_hand

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for linear in self.linears:
            x = x + linear(x)
        return F.linear(x, self.embed.weight) if self.by_hand else self.head(x)


@pytest.mark.parametrize(
    ("head_first", "by_hand", "name", "readout"),
    [
        (False, False, "embed.weight", "head.weight"),
        (True, False, "head.weight", "head.weight"),
        (False, True, "embed.weight", "linear"),
        (True, True, "head.weight", "linear"),
    ],
)
def test_the_name_by_which_a_table_is_read_out(
    head_first: bool, by_hand: bool, name: str, readout: str
) -> None:
    anatomy = dissect(
        lambda width, depth: Tied(width, depth, head_first=head_first, by_hand=by_hand),
        TOKENS,
        size=Size(16, 2),
    )
    assert anatomy[name].readout == (readout,)
    assert anatomy["linears.0.weight"].readout == ()


def test_dissecting_a_tied_network_leaves_it_tied() -> None:
    model = Tied(16, 2, head_first=True)
    model.again = model.head  # a module by two names holds one tensor, whatever it was swapped for
    before = model.embed.weight
    dissect(model, TOKENS)
    assert model.embed.weight is before
    assert model.head.weight is before
    assert model.again.weight is before


def _gemma3(width: int, depth: int) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        head_dim=16,
        max_position_embeddings=32,
        use_cache=False,
        pad_token_id=None,
    )
    return Gemma3ForCausalLM(config)
