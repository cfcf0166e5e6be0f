"""Muon's learning rate from AdamW's: the root mean square of both updates by definition, not by formula."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.planning.mixed import PIXELS, TOKENS, Convolutions, MixedGPT
from torch import Tensor

from theodolite.optimizers.muon import SCALES
from theodolite.planning import PlanRow, groups
from theodolite.planning.translation import MUONS, Translation, factor, muon_rms, shape_seen

SHAPES = [(16, 16), (16, 64), (64, 16), (7, 40)]
"""(out, in)."""


def _row(fan_out: int, fan_in: int) -> PlanRow:
    (row,) = [
        one for one in groups(MixedGPT(), TOKENS, lr=0.1).rows.values() if one.name == "blocks.0.out.weight"
    ]
    return dataclasses.replace(row, shape=(fan_out, fan_in), fan_in=fan_in, fan_out=fan_out)


def _orthogonal(fan_out: int, fan_in: int) -> Tensor:
    """UVᵀ of a random matrix."""
    generator = torch.Generator().manual_seed(fan_out)
    left, _, right = torch.linalg.svd(
        torch.randn(fan_out, fan_in, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return left @ right


@pytest.mark.parametrize(("fan_out", "fan_in"), SHAPES)
@pytest.mark.parametrize("name", MUONS)
def test_the_root_mean_square_of_an_orthogonal_update(name: str, fan_out: int, fan_in: int) -> None:
    update = SCALES[MUONS[name]](fan_in, fan_out) * _orthogonal(fan_out, fan_in)
    assert muon_rms(_row(fan_out, fan_in), MUONS[name]) == pytest.approx(update.square().mean().sqrt().item())


@pytest.mark.parametrize("name", MUONS)
def test_the_root_mean_square_over_fused_matrices_of_unequal_size(name: str) -> None:
    sizes = (32, 8, 8)
    row = dataclasses.replace(_row(48, 16), rows=(((0, 32),), ((32, 40),), ((40, 48),)))
    update = torch.cat([SCALES[MUONS[name]](16, size) * _orthogonal(size, 16) for size in sizes])
    assert muon_rms(row, MUONS[name]) == pytest.approx(update.square().mean().sqrt().item())


@pytest.mark.parametrize("name", MUONS)
def test_translated_rates_move_by_a_fifth_of_adamws_rate(name: str) -> None:
    """AdamW's update has a root mean square of 0.2: the weights move by 0.2 times its learning rate."""
    rows = groups(MixedGPT(), TOKENS, optimizer=name, adamw_lr=0.01, weight_decay=0.1).rows.values()
    moved = [row for row in rows if row.rule == name]
    assert len(moved) == 6
    for row in moved:
        assert row.lr * muon_rms(row, MUONS[name]) == pytest.approx(0.2 * 0.01)
        assert row.lr * row.weight_decay == pytest.approx(0.01 * 0.1)
    assert {row.lr for row in rows if row.rule == "adamw"} == {0.01}


def test_kimis_rate_is_adamws() -> None:
    rows = groups(Convolutions(), PIXELS, optimizer="muon-kimi", adamw_lr=0.01).rows.values()
    assert [row.lr for row in rows] == pytest.approx([0.01] * len(rows))


def test_all_scales_make_the_same_steps_at_translated_rates() -> None:
    moved = []
    for name in MUONS:
        torch.manual_seed(0)
        model = MixedGPT().double()
        one = groups(model, TOKENS, optimizer=name, adamw_lr=0.01, weight_decay=0.1).optimizer()
        model(TOKENS).square().mean().backward()
        one.step()
        moved.append([parameter.detach() for parameter in model.parameters()])
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("fan_out", "fan_in"), SHAPES)
@pytest.mark.parametrize("name", MUONS)
def test_the_spectral_rate_changes_a_layer_as_much(name: str, fan_out: int, fan_in: int) -> None:
    """AdamW's update as a matrix with RMS 0.2 and stable rank 4; ‖A‖_R is √(in/out) times its largest
    singular value."""
    # Singular values 1 and others whose squares add up to 3.
    values = torch.ones(min(fan_out, fan_in), dtype=torch.float64)
    values[1:] = math.sqrt(3 / (len(values) - 1))
    left, _, right = torch.linalg.svd(
        _orthogonal(fan_out, fan_in) + torch.eye(fan_out, fan_in), full_matrices=False
    )
    update = left @ torch.diag(values) @ right
    update *= 0.2 / update.square().mean().sqrt()
    size = math.sqrt(fan_in / fan_out)
    adamw_lr = 0.01
    wanted = adamw_lr * size * torch.linalg.matrix_norm(update, 2).item()

    made = groups(MixedGPT(), TOKENS, optimizer=name, adamw_lr=adamw_lr)
    row = dataclasses.replace(_row(fan_out, fan_in), rule=name)
    row = dataclasses.replace(row, lr=adamw_lr * 0.2 / muon_rms(row, MUONS[name]))
    (line,) = dataclasses.replace(made, rows={row.name: row}).translation.lines
    lr = line.muon[name] * line.spectral
    muon = lr * SCALES[MUONS[name]](fan_in, fan_out) * _orthogonal(fan_out, fan_in)
    assert size * torch.linalg.matrix_norm(muon, 2).item() == pytest.approx(wanted)


def test_a_translation_goes_both_ways() -> None:
    forth = groups(Convolutions(), PIXELS, optimizer="adamw", lr=0.01).translation
    by_shape = {one.shape: one for one in forth.lines}
    assert set(by_shape) == {"16×72", "8×16"}
    assert by_shape["8×16"].muon == {
        "muon": pytest.approx(0.01 * 0.2 * 4),
        "muon-original": pytest.approx(0.01 * 0.2 * 4),
        "muon-kimi": pytest.approx(0.01),
        "muon-spectral": pytest.approx(0.01 * 0.2 * 4 / math.sqrt(0.5)),
    }
    rate = by_shape["8×16"].muon["muon-spectral"]
    back = groups(Convolutions(), PIXELS, optimizer="muon-spectral", lr=rate).translation
    (line,) = [one for one in back.lines if one.shape == "8×16"]
    assert (line.adamw, line.muon) == (pytest.approx(0.01), pytest.approx(by_shape["8×16"].muon))


def test_a_translation_is_saved_and_printed() -> None:
    made = groups(MixedGPT(), TOKENS, adamw_lr=0.01).translation
    assert Translation.from_dict(made.to_dict()) == made
    text = str(made)
    assert "lr(Muon) = lr(AdamW) · 0.2·√max(in, out) / s" in text
    assert "3 of 16×16" in text
    assert "k = 4" in text


def test_factors_are_written_with_their_numbers() -> None:
    made = {name: groups(MixedGPT(), TOKENS, optimizer=name, lr=0.1).rows for name in MUONS}
    written = {name: factor(rows["blocks.1.up.weight"]) for name, rows in made.items()}
    assert written == {
        "muon": "1",
        "muon-original": "√(32/16) = 1.41",
        "muon-kimi": "0.2·√32 = 1.13",
        "muon-spectral": "√(32/16) = 1.41",
    }
    assert factor(made["muon-kimi"]["blocks.1.down.weight"]) == "0.2·√32 = 1.13"  # 32 inputs, 16 outputs
    assert factor(made["muon"]["norm.weight"]) is None


def test_a_shape_is_what_the_optimizer_sees() -> None:
    row = dataclasses.replace(_row(48, 16), rows=(((0, 32),), ((32, 40),), ((40, 48),)))
    assert shape_seen(row) == "32×16 + 2 of 8×16"
    assert shape_seen(dataclasses.replace(row, rule="adamw")) == "48×16"


def test_tables_that_muon_trains_are_translated_too() -> None:
    hidden = groups(MixedGPT(), TOKENS, lr=0.1).translation.lines
    every = groups(MixedGPT(), TOKENS, lr=0.1, covers="all").translation.lines
    # Outputs of 23 tokens and of 8 places, and the 4 of the router.
    assert {one.shape for one in every} - {one.shape for one in hidden} == {"16×23", "16×8", "4×16"}


def test_the_smallest_matrix_of_a_fused_tensor_bounds_its_rank() -> None:
    made = groups(MixedGPT(), TOKENS, lr=0.1)
    row = dataclasses.replace(_row(36, 16), rows=(((0, 32),), ((32, 36),)))
    (line,) = dataclasses.replace(made, rows={row.name: row}).translation.lines
    assert line.spectral == pytest.approx(math.sqrt(4 / 4))


def test_a_factor_of_one_is_written_as_one() -> None:
    row = dataclasses.replace(_row(16, 64), rule="muon-original")
    assert factor(row) == "1"  # √max(1, 16/64)
