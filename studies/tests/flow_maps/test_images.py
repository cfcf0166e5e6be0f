"""Flow maps of images: pictures against the PNG specification, and tiny cells of made-up images."""

from __future__ import annotations

import base64
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.png import decoded
from torch import Tensor

from theodolite import data, flows
from theodolite.core.size import Size
from theodolite.data.batches import Examples
from theodolite_studies.flow_maps.images import encode_png, mosaic, picture
from theodolite_studies.flow_maps.report import figures, png_size
from theodolite_studies.flow_maps.setting import FULL, IMAGE_JUMPS
from theodolite_studies.flow_maps.study import STUDY, cells, run

TINY = dataclasses.replace(
    FULL,
    image_seeds={"matching": 1, "lagrangian": 1},
    image_size=Size(32, 1),
    image_steps=3,
    image_batch=4,
    images=8,
    widths=(32, 64),
    moments=(1, 2),
)


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(256, size=(5, 7), dtype=np.uint8)
    np.testing.assert_array_equal(decoded(encode_png(pixels)), pixels)


def test_a_mosaic_goes_row_by_row() -> None:
    images = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((2, 3), np.uint8)
    found = mosaic(images, 2)
    assert found.shape == (6, 6)
    assert found[::2, ::3].tolist() == [[0, 1], [2, 3], [4, 0]]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Examples:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(256, size=(400, 1, 28, 28), dtype=np.uint8))
    found = Examples("made up", images, torch.arange(400) % 10, 10, (0.5,), (0.25,))
    monkeypatch.setattr(data, "fashion_mnist", lambda split="train": found)
    return found


def test_a_picture_undoes_the_normalisation(made_up: Examples) -> None:
    content = picture(made_up.inputs()[:6])
    expected = np.block(
        [[made_up.values[3 * row + column, 0].numpy() for column in range(3)] for row in (0, 1)]
    )
    np.testing.assert_array_equal(decoded(base64.b64decode(content)), expected)
    assert png_size(content) == (84, 56)


def test_cells_of_images_from_end_to_end(made_up: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Tensor] = []

    def distance(samples: Tensor, name: str) -> Any:
        judged.append(samples)
        assert name == "fashion-mnist"
        return SimpleNamespace(value=1.0 + len(judged), floor=0.5, classifier="0123abcd")

    monkeypatch.setattr(flows, "feature_distance", distance)
    records: list[dict[str, Any]] = []
    for cell in cells(TINY):
        if cell["part"].startswith("dit"):
            records += [{**cell, **record} for record in run(cell, TINY, "cpu")]
    matching, jumping, *widths = records
    assert matching["euler"] == [2.0, 3.0, 4.0, 5.0]
    assert "map" not in matching
    assert jumping["map"] == [6.0, 8.0, 10.0, 12.0]
    assert jumping["euler"] == [7.0, 9.0, 11.0, 13.0]
    assert len(judged) == 3 * len(IMAGE_JUMPS)
    assert all(samples.shape == (8, 1, 28, 28) for samples in judged)
    jumped, stepped = judged[4:6]
    assert not torch.equal(jumped, stepped)  # the network is asked for other times
    assert [(row["width"], row["step"]) for row in widths] == [(32, 1), (32, 2), (64, 1), (64, 2)]
    drawn = dict(figures(records))
    assert set(drawn) == {"features", "samples", "widths"}
    assert drawn["widths"].count("<image ") == 4
    assert drawn["samples"].count("<image ") == 2 * len(IMAGE_JUMPS)
    assert all(row["picture"] in drawn["widths"] for row in widths)
    assert [claim.verdict for claim in STUDY.decide(records)] == ["unclear"] * 2  # of one seed
