"""Fourier features against waves that were put in, sums written out, and random phases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError, probes
from theodolite.models.conditioning import HIGHEST, time_features


def _wave(length: int, frequency: float, amplitude: float = 1.0, phase: float = 0.0) -> Tensor:
    places = torch.arange(length, dtype=torch.float64)
    return amplitude * torch.cos(2 * math.pi * frequency * places / length + phase)


def _by_sums(row: Tensor) -> list[float]:
    """The energy of each frequency in an orthonormal basis of cosines and sines, by sums."""
    length, found = len(row), []
    for frequency in range(1, length // 2 + 1):
        basis = [_wave(length, frequency), _wave(length, frequency, phase=-math.pi / 2)]
        if 2 * frequency == length:
            basis = basis[:1]
        found.append(sum(float((row @ one) ** 2 / (one @ one)) for one in basis))
    return found


@pytest.mark.parametrize("length", [3, 4, 23, 24])
def test_energy_and_concentration_are_those_of_an_orthonormal_basis(length: int) -> None:
    rows = torch.randn(5, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = probes.fourier(rows)
    for place, row in enumerate(rows):
        energies = _by_sums(row)
        total = sum(energies)
        assert found.energy[place].item() == pytest.approx(total)
        assert found.energy[place].item() == pytest.approx(float((row - row.mean()).square().sum()))
        wanted = sum(energy**2 for energy in energies) / total**2
        assert found.concentration[place].item() == pytest.approx(wanted)
        assert found.frequency[place].item() == 1 + int(np.argmax(energies))
        share = length * row.mean() ** 2 / row.square().sum()
        assert found.mean_share[place].item() == pytest.approx(float(share))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wave_is_found_with_its_amplitude_and_phase_whatever_its_mean(dtype: torch.dtype) -> None:
    waves = [(3, 0.5, 2.0), (11, 2.0, -3.0), (1, 1e-3, 0.0)]
    rows = torch.stack(
        [_wave(23, *one) + amplitude for one, amplitude in zip(waves, (7, 0, 1e-3), strict=True)]
    )
    found = probes.fourier(rows.to(dtype))
    rounding = 64 * torch.finfo(dtype).eps
    for place, (frequency, amplitude, phase) in enumerate(waves):
        largest = rows[place].abs().max().item()
        assert found.frequency[place] == frequency
        assert abs(found.amplitude[place] - amplitude) <= rounding * largest
        assert abs(found.phase[place] - phase) <= rounding * largest / amplitude
        assert found.concentration[place] > 1 - (20 * rounding * largest / amplitude) ** 2 - 1e-12


def test_one_frequency_has_the_concentration_one_at_every_phase() -> None:
    rows = torch.stack([_wave(59, 7, phase=phase) for phase in np.linspace(-3, 3, 13)])
    assert torch.allclose(probes.fourier(rows).concentration, torch.ones(13).double())


def test_frequencies_of_equal_energy_have_the_concentration_of_their_number() -> None:
    rows = torch.stack([sum(_wave(31, k) for k in range(1, num + 1)) for num in (1, 2, 5, 15)])
    assert probes.fourier(rows).concentration.tolist() == pytest.approx([1, 1 / 2, 1 / 5, 1 / 15])


@pytest.mark.parametrize("length", [11, 12])
def test_random_rows_have_the_concentration_that_is_said(length: int) -> None:
    rows = torch.randn(40_000, length, generator=torch.Generator().manual_seed(1))
    found = probes.fourier(rows)
    error = float(found.concentration.std() / math.sqrt(len(rows)))
    assert abs(float(found.concentration.mean()) - found.random_concentration) < 4 * error


def test_nyquists_frequency_has_an_amplitude_and_no_phase() -> None:
    rows = torch.stack([_wave(8, 4, -0.5), _wave(8, 1, phase=1.0)])
    found = probes.fourier(rows, rows.T)
    assert found.frequency.tolist() == [4, 1]
    assert found.amplitude.tolist() == pytest.approx([0.5, 1.0])
    assert found.phase.isnan().tolist() == [True, False]
    assert found.misalignment is not None
    assert found.misalignment.isnan().tolist() == [True, False]
    assert "frequency 4 alternates in sign and has no phase" in str(found)
    assert math.isnan(found.symmetry(2))
    pairs = torch.stack([_wave(8, 4), _wave(8, 4, 2.0), _wave(8, 1), _wave(8, 1, phase=math.pi / 2)])
    assert probes.fourier(pairs).symmetry(2) < 1e-12  # of the pair with phases


def test_the_misalignment_is_twice_the_input_phase_less_the_output_phase() -> None:
    waves = [(2, 1.0, 2.5), (5, -2.0, 1.0), (5, 3.0, -3.0)]
    w_in = torch.stack([_wave(13, k, 0.3, phase) for k, phase, _ in waves])
    w_out = torch.stack([_wave(13, k, 4.0, phase) for k, _, phase in waves], 1)
    found = probes.fourier(nn.Parameter(w_in), w_out)
    assert found.misalignment is not None
    wanted = [-0.5, math.remainder(-5.0, 2 * math.pi), math.remainder(9.0, 2 * math.pi)]
    assert found.misalignment.tolist() == pytest.approx(wanted)
    assert found.alignment == pytest.approx(np.mean(np.cos(wanted)))
    assert found.same.all()


def test_the_misalignment_is_that_of_no_rows_whose_frequencies_differ() -> None:
    found = probes.fourier(_wave(13, 2)[None], _wave(13, 3)[:, None])
    assert found.misalignment is not None
    assert found.misalignment.isnan().all()
    assert not found.same.any()
    assert math.isnan(found.alignment)


def test_the_symmetry_of_evenly_spread_phases_is_zero_and_that_of_random_ones_is_one() -> None:
    even = torch.stack([_wave(11, 3, phase=2 * math.pi * k / 5) for k in range(5)])
    assert [probes.fourier(even).symmetry(order) < 1e-12 for order in (1, 2, 4)] == [True] * 3
    opposed = torch.stack([_wave(11, 3), _wave(11, 3, phase=math.pi)])
    assert probes.fourier(opposed).symmetry(1) < 1e-12
    assert probes.fourier(opposed).symmetry(2) == pytest.approx(1 / math.sqrt(math.pi / 8))
    phases = 2 * math.pi * torch.rand(3000, generator=torch.Generator().manual_seed(2))
    random = torch.stack([_wave(301, 1 + k % 150, phase=float(phase)) for k, phase in enumerate(phases)])
    # 150 groups of 20; |mean| has the standard deviation 0.52 of its mean
    assert abs(probes.fourier(random).symmetry(2) - 1) < 4 * 0.53 / math.sqrt(150) + 0.01


def test_counts_and_evenness() -> None:
    rows = torch.stack([_wave(9, k) for k in (1, 1, 1, 2)] + [_wave(9, 3) + _wave(9, 4)])
    found = probes.fourier(rows)
    assert found.counts.tolist() == [3, 1, 0, 0]  # the last row has two frequencies
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.evenness == pytest.approx(math.exp(entropy) / 4)
    assert [(group.frequency, group.rows) for group in found.groups()] == [(1, 3), (2, 1)]
    assert [group.energy for group in found.groups()] == pytest.approx([0.5, 1 / 6])


def test_constant_rows_have_no_frequency() -> None:
    rows = torch.stack([torch.full((7,), 0.1), torch.zeros(7), _wave(7, 2).float()])
    found = probes.fourier(rows)
    assert found.frequency.tolist() == [0, 0, 2]
    assert found.mean_share[0] == 1
    assert found.mean_share[1].isnan()
    assert found.concentration.isnan().tolist() == [True, True, False]
    assert found.energy[:2].tolist() == [0, 0]
    assert "2 rows of them are constant" in str(found)
    assert probes.fourier(rows[:2]).counts.tolist() == [0, 0, 0]
    many = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not probes.fourier(many.expand(-1, 59)).frequency.any()  # whatever the rounding of their means
    assert "0 of 2 have one frequency" in str(probes.fourier(rows[:2]))


def test_tiny_and_huge_weights_are_read_as_well_as_any() -> None:
    for scale in (1e-200, 1e-30, 1e30, 1e150):
        found = probes.fourier(scale * (_wave(7, 2) + _wave(7, 3))[None])
        assert found.concentration.item() == pytest.approx(0.5)
        assert found.amplitude.item() == pytest.approx(scale)


def test_axes_arrays_and_dtypes() -> None:
    table = torch.stack([_wave(12, 1), _wave(12, 2), _wave(12, 5)], 1)  # positions × features
    found = probes.fourier(table, axis=0)
    assert found.frequency.tolist() == [1, 2, 5]
    assert torch.equal(probes.fourier(table.numpy().T).frequency, found.frequency)
    heads = torch.stack([table, table.flip(1)])
    assert probes.fourier(heads, axis=1).frequency.tolist() == [1, 2, 5, 5, 2, 1]
    assert probes.fourier([0, 1, 0, -1]).frequency.tolist() == [1]
    assert probes.fourier(np.array([[1, -1, 1, -1]], dtype=np.int8)).frequency.tolist() == [2]
    eighths = torch.stack([_wave(12, 3)]).to(torch.float8_e4m3fn)
    assert probes.fourier(eighths).frequency.tolist() == [3]


def test_nothing_is_changed() -> None:
    weight = nn.Parameter(torch.randn(3, 7))
    weight.grad = torch.ones(3, 7)
    before, random = weight.detach().clone(), torch.get_rng_state()
    found = probes.fourier(weight, weight, out_axis=1)
    assert torch.equal(weight, before)
    assert weight.requires_grad
    assert torch.equal(weight.grad, torch.ones(3, 7))
    assert torch.equal(torch.get_rng_state(), random)
    assert not found.concentration.requires_grad


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (torch.ones(2, 5, dtype=torch.complex64), "w_in is complex"),
        (np.ones((2, 5), dtype=complex), "w_in is complex"),
        (
            torch.tensor([[1.0, torch.nan, 0.0], [1.0, 2.0, 3.0]]),
            "w_in has entries that are nan .* in 1 of 2 rows",
        ),
        (torch.tensor([[1.0, torch.inf, 0.0]]), "nan or infinite, in 1 of 1 row"),
        (torch.ones(4, 2), "the cyclic axis of w_in .axis -1 of 4×2. has length 2: give at least 3"),
        (torch.ones(0, 5), "w_in has no rows: its shape is 0×5"),
        (torch.tensor(1.0), "w_in is a single number"),
        (None, "w_in is a NoneType without numbers that can be read"),
        (nn.Linear(3, 2), "w_in is a Linear: give its weights, such as layer.weight"),
        ([["1", "2", "3"]], "w_in is a list without numbers that can be read"),
        ([[1.0, 2.0, 3.0], [1.0]], "w_in is a list without numbers that can be read"),
        (torch.ones(2, 5, device="meta"), "w_in is a Tensor without numbers that can be read"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(weights: object, said: str) -> None:
    with pytest.raises(UseError, match=said):
        probes.fourier(weights)


def test_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(UseError, match="axis is 2"):
        probes.fourier(torch.ones(4, 5), axis=2)
    with pytest.raises(UseError, match="out_axis is True"):
        probes.fourier(torch.ones(4, 5), torch.ones(5, 4), out_axis=True)
    with pytest.raises(UseError, match=r"above is 1\.5"):
        probes.fourier(torch.ones(4, 5), above=1.5)
    with pytest.raises(UseError, match=r"w_in has 4 rows of length 5 and w_out 5 rows of length 4.*out_axis"):
        probes.fourier(torch.ones(4, 5), torch.ones(4, 5))
    with pytest.raises(UseError, match="no output to compare with"):
        _ = probes.fourier(torch.ones(4, 5)).same


def test_time_features_have_the_nearest_whole_frequency() -> None:
    """Over 2π their frequencies are their numbers of periods; `cos` and `sin` by known phases."""
    num, length = 32, 256
    table = time_features(2 * math.pi * torch.arange(length, dtype=torch.float64) / length)
    found = probes.fourier(table, axis=0)
    periods = HIGHEST ** (np.arange(num) / (num - 1))
    off = np.abs(periods - periods.round())
    clear = off < 0.4
    for half in (found.frequency[:num], found.frequency[num:]):
        assert (half.numpy()[clear] == periods.round()[clear]).all()
    whole = off < 1e-9
    assert whole.sum() == 2  # 1 and 100 periods
    assert (found.concentration[:num].numpy()[whole] > 1 - 1e-12).all()
    assert found.phase[:num].numpy()[whole] == pytest.approx([0, 0], abs=1e-9)
    assert found.phase[num:].numpy()[whole] == pytest.approx([-math.pi / 2] * 2)


def test_a_wave_between_two_frequencies_leaks_as_its_sums_say() -> None:
    """Of f + ½ periods the two neighbours get 4/π² of the energy each, far from both ends."""
    row = torch.exp(1j * 2 * math.pi * 100.5 * torch.arange(4001) / 4001).real
    found = probes.fourier(row.double()[None])
    series = sum(2 * (4 / math.pi**2 / (2 * n + 1) ** 2) ** 2 for n in range(100))
    assert found.concentration.item() == pytest.approx(series, rel=0.02)
    assert series == pytest.approx(1 / 3, rel=1e-3)


def test_a_result_says_what_it_found_and_is_read_back(tmp_path) -> None:
    w_in = torch.stack([_wave(23, 1 + k % 11, phase=0.3 * k) for k in range(44)])
    w_out = torch.stack([_wave(23, 1 + k % 11, phase=0.6 * k) for k in range(44)], 1)
    found = probes.fourier(w_in, w_out)
    text = str(found)
    assert "44 rows over a cyclic axis of length 23: 44 of 44 have one frequency" in text
    assert "11 of 11 frequencies have such rows, 4 to 4 each; evenness 1." in text
    assert "The output has the same frequency in 44 of 44; there the mean cos D is 1" in text
    assert len(found.table().rows) == 11
    assert [len(panel.data[0]["x"]) for panel in found.figure().panels] == [25, 11, 25]
    assert sum(found.figure().panels[2].data[0]["y"]) == 44
    again = probes.Fourier.load(found.save(tmp_path / "found.json"))
    assert str(again) == text
    assert again.frequency.dtype == torch.long
    assert again.output is not None
    assert torch.equal(again.output.phase, found.output.phase)  # type: ignore[union-attr]
    assert "Fourier features" in found.page()


def test_many_frequencies_are_cut_to_those_of_the_largest_energy() -> None:
    rows = torch.stack([_wave(101, k, 1 + (k == 50)) for k in range(1, 51)])
    found = probes.fourier(rows)
    text = str(found)
    assert "The 30 frequencies of the largest energy, of 50 that rows have" in text
    assert "\n       50" in text
    assert len(found.table().rows) == 50


def test_sparse_weights_are_read_like_dense_ones() -> None:
    dense = torch.eye(5)
    assert torch.equal(probes.fourier(dense.to_sparse()).phase, probes.fourier(dense).phase)
