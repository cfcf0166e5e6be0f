"""Sizes in a ready module that are no width: pixels, examples, the rows of a narrow table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy import assumed, dissect


class Coded(nn.Module):
    """A convolutional autoencoder that returns its code, of four channels, too."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        self.enter, self.code = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 4, 1)
        self.decode, self.leave = nn.Conv2d(4, 64, 1), nn.Conv2d(64, 3, 3, padding=1)
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.code(self.enter(x).relu())
        made = self.leave(self.decode(code).relu())
        return made, code.permute(0, 2, 3, 1) if self.channels_last else code


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("pixels", [8, 64, 128])
def test_the_number_of_pixels_makes_no_result_wide(pixels: int, channels_last: bool) -> None:
    anatomy = dissect(Coded(channels_last=channels_last), torch.zeros(1, 3, pixels, pixels))
    roles = [anatomy[f"{name}.weight"].role for name in ("enter", "code", "decode", "leave")]
    assert roles == ["input", "output", "input", "output"]
    assert assumed(anatomy) == {}


class Streams(nn.Module):
    """Streams beside each other, as in AltUp; small weights say how they are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 64), nn.Linear(64, 5)
        self.route, self.mix = nn.Linear(64, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        streams = self.enter(x).expand(4, -1, -1, -1)
        shares = self.mix(self.route(streams[0]).tanh()).unflatten(-1, (4, 4))
        mixed = (streams.permute(1, 2, 3, 0) @ shares).permute(3, 0, 1, 2)
        return self.leave((streams + mixed).mean(0))


@pytest.mark.parametrize("examples", [1, 2])
def test_the_number_of_examples_is_no_width(examples: int) -> None:
    small = "both sides grow, though they are 4 times smaller than the width, or more"
    assert assumed(dissect(Streams(), torch.zeros(examples, 5, 3)))[small] == ("mix.weight",)


class Tied(nn.Module):
    """A table narrower than the stream is the readout too, as in ELECTRA: layers lead in and out."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(97, rank), nn.Linear(32, 32)
        self.enter, self.leave, self.norm = nn.Linear(rank, 32), nn.Linear(32, rank), nn.LayerNorm(rank)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.enter(self.table(tokens))
        h = self.norm(self.leave(h + self.inner(h).relu()).relu())
        return h @ self.table.weight.T


def test_the_rank_of_a_tied_table_is_said_of_the_layers_on_both_sides_of_it() -> None:
    rank = "the rank, the number of values between two weights, grows too"
    assert assumed(dissect(Tied(12), torch.zeros(2, 8, dtype=torch.long))) == {
        rank: ("enter.weight", "leave.weight")
    }
    assert assumed(dissect(Tied(32), torch.zeros(2, 8, dtype=torch.long))) == {}
