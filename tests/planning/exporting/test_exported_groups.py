"""Parameter groups are exported as plans are; initial values are left alone."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.planning.exporting.made import apart, run, trained_parts
from torch import Tensor, nn

import theodolite as th
from theodolite.planning import Groups
from theodolite.planning.exporting import find_formats

pytestmark = pytest.mark.usefixtures("one_dissection")


class Fused(nn.Module):
    """Attention with fused queries, keys and values, behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(6, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Over (batch, channels, positions)."""
        x = self.stem(x).transpose(1, 2)
        query, key, value = (
            one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        y: Tensor = self.last(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return y


@functools.cache
def _groups(optimizer: str = "muon-kimi") -> Groups:
    torch.manual_seed(0)
    return th.groups(Fused(), torch.randn(2, 6, 5), optimizer=optimizer, lr=0.01, weight_decay=0.1)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Fused()


def test_torch_takes_the_steps_of_the_groups() -> None:
    groups, ours, theirs = _groups(), _model(), _model()
    assert groups["qkv.weight"].rows, "queries, keys and values are matrices of their own"
    file = run(groups.export("torch").text)
    made = file.make_optimizers(theirs)
    assert [type(one).__name__ for one in made] == ["AdamW", "CutMuon", "Muon"]
    differ = apart(trained_parts(theirs, *made), trained_parts(ours, groups.optimizer(ours)))
    assert max(differ.values()) < 0.02


def test_initial_values_are_left_alone() -> None:
    made = _groups().export("torch")
    assert "def initialize" not in made.text
    assert "initialize(" not in made.text


@pytest.mark.parametrize("format", sorted(find_formats()))
def test_every_format_names_every_tensor_or_refuses_with_names(format: str) -> None:
    groups = _groups("adamw")
    text = groups.export(format).text
    assert all(name in text.replace("\\", "") for name in groups.rows)


@pytest.mark.parametrize("format", ["torch", "csv"])
def test_names_are_mapped(format: str) -> None:
    made = _groups().export(format, names={"*": "model.*"})
    assert "model.qkv.weight" in made.text
