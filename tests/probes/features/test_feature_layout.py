"""Where features and the head are found, by what the network is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.anatomy.recording.rerun import rerun
from theodolite.probes.features.feature_layout import find_features, rows_of


class Wired(nn.Module):
    """Two linear maps, wired as a function says."""

    def __init__(self, wiring: Callable[[Wired, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.scale, self.wiring = nn.Parameter(torch.ones(3, 3)), wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


class AfterReLU(nn.Module):
    """Blocks `relu(x + f(x))`, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        self.seen = [x]
        for block in self.blocks:
            x = F.relu(x + torch.tanh(block(x)))
            self.seen.append(x)
        return self.leave(x)


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def names(model: nn.Module, inputs: Tensor) -> list[str]:
    return [place.name for place in find_features(model, inputs).places]


def test_the_stream_after_an_activation_is_what_the_next_block_reads() -> None:
    model = AfterReLU()
    layout = find_features(model, X)
    assert [place.name for place in layout.places] == [
        "before block 0",
        "after block 0",
        "after block 1, before the head",
    ]
    values = rerun(model, X, layout.graph, keep=layout.values).values
    model(X)
    for place, seen in zip(layout.places, model.seen, strict=True):
        torch.testing.assert_close(values[place.value], seen)


def test_a_final_norm_makes_what_the_head_reads_a_place_of_its_own() -> None:
    model = th.models.GPT(16, 2, vocab=7, context=4, head_dim=8)
    layout = find_features(model, torch.randint(7, (2, 4)))
    found = [place.name for place in layout.places]
    assert found == ["before block 0", "after block 0", "after block 1", "before the head"]
    assert layout.head is not None
    assert layout.head.place == 3


def test_without_blocks_places_are_what_layers_read() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3))
    assert names(model, X) == ["before layer 1", "before the head"]
    convolutions = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)
    )
    layout = find_features(convolutions, torch.randn(2, 1, 6, 6))
    assert [place.name for place in layout.places] == ["before layer 1", "before the head"]
    assert layout.places[0].channels == 1


def test_a_linear_classifier_has_the_data_as_features() -> None:
    layout = find_features(nn.Linear(6, 3), X)
    assert [place.name for place in layout.places] == ["before the head"]
    assert layout.head is not None
    assert layout.head.name == "weight"


@pytest.mark.parametrize(
    "wiring",
    [
        lambda self, x: self.second(self.first(x).relu()),
        lambda self, x: self.first(x).relu() @ self.second.weight.T,
        lambda self, x: F.conv1d(self.first(x).relu()[..., None], self.second.weight[..., None])[..., 0],
        lambda self, x: self.second(self.first(x).relu()) * 2 + 1,
    ],
)
def test_the_weight_of_the_head_makes_the_logits(wiring: Callable[[Wired, Tensor], Tensor]) -> None:
    model = Wired(wiring)
    layout = find_features(model, X)
    assert layout.head is not None
    values = rerun(model, X, layout.graph, keep=layout.values).values
    torch.testing.assert_close(
        layout.head.matrix(values[layout.head.weight]).reshape(3, 8), model.second.weight
    )
    assert layout.places[layout.head.place].name == "before the head"
    torch.testing.assert_close(
        values[layout.places[layout.head.place].value].reshape(5, 8), model.first(X).relu()
    )


@pytest.mark.parametrize(
    ("wiring", "why"),
    [
        (lambda self, x: self.second(self.first(x)) + self.third(self.first(x).relu()), "2 linear maps"),
        (lambda self, x: self.second(self.first(x)) + x[:, :3], "do not depend on the network through"),
        (lambda self, x: x[:, :3] * 2, "no weight makes them"),
    ],
)
def test_why_there_is_no_head_is_told(wiring: Callable[[Wired, Tensor], Tensor], why: str) -> None:
    layout = find_features(Wired(wiring), X)
    assert layout.head is None
    assert why in layout.no_head


def test_rows_go_with_targets() -> None:
    sequences = torch.arange(24.0).reshape(2, 4, 3)
    assert rows_of(sequences, 2, (2, 4)).tolist() == sequences.reshape(8, 3).tolist()
    assert rows_of(sequences, 2, (8,)).tolist() == sequences.reshape(8, 3).tolist()
    assert rows_of(sequences, 2, (2,)).tolist() == sequences.mean(1).tolist()
    turned = sequences.transpose(0, 1)  # positions first
    assert rows_of(turned, 2, (2, 4)).tolist() == sequences.reshape(8, 3).tolist()
    assert rows_of(sequences, 2, (3, 4)) is None
    assert rows_of(sequences.long(), 2, (2, 4)) is None
