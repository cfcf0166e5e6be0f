"""Networks that add modulo p: against the built-in workload, closed forms and explicit counts."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.nn import functional

from theodolite import data
from theodolite.workloads import modular_addition
from theodolite_studies.modular_addition.reading import (
    ghosts,
    lottery,
    mechanism,
    progress,
    swapped,
    waves_of,
    winners_of,
)
from theodolite_studies.modular_addition.study import RECIPES, Recipe, grokking, waves
from theodolite_studies.modular_addition.training import (
    ACTIVATIONS,
    Adder,
    Pairs,
    adamw,
    sgd,
    start,
    train,
)


@pytest.mark.parametrize("activation", ["relu", "square"])
def test_a_step_is_that_of_the_workload_on_all_ordered_pairs(activation: str) -> None:
    """Half of the rows, counted twice, have the loss and the gradients of all P² examples."""
    pairs = Pairs(7)
    model = modular_addition(7, activation=activation).build(16, 1)  # type: ignore[arg-type]
    weights = [weight.detach().T.contiguous().requires_grad_() for weight in model.parameters()]
    network = Adder(*weights, activation)
    table = data.modular_addition(7)
    functional.cross_entropy(model(table.inputs()), table.labels).backward()
    assert list(train(network, pairs, pairs.orderings, sgd(network, 0.5), 1, ())) == [1]
    for mine, theirs in zip(network.weights, model.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.detach().T, theirs.detach() - 0.5 * theirs.grad, rtol=1e-4, atol=1e-6)


def test_an_ordered_split_draws_mirror_images_apart_and_an_unordered_one_together() -> None:
    pairs = Pairs(23)
    ordered = pairs.split(0.75, 0, ordered=True)
    assert ordered.sum() == 396  # of 529: the paper's 133 are left
    assert bool((ordered <= pairs.orderings).all())
    counts = Counter(ordered[pairs.orderings == 2].tolist())
    for number, share in ((2, 0.75**2), (1, 2 * 0.75 * 0.25), (0, 0.25**2)):
        assert counts[number] / 253 == pytest.approx(share, abs=0.06)
    together = pairs.split(0.75, 0, ordered=False)
    assert bool(((together == 0) | (together == pairs.orderings)).all())
    assert int((together > 0).sum()) == round(0.75 * 276)
    assert not torch.equal(together, pairs.split(0.75, 1, ordered=False))


def test_equal_starts_have_one_amplitude_and_random_phases() -> None:
    network = start(23, 50, "square", std_in=0.1, std_out=0.2, seed=0, equal=True)
    before = winners_of(network)
    torch.testing.assert_close(
        before.amplitude, torch.full((50, 11), 0.2 / 23**0.5).double(), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(before.out_amplitude, 2 * before.amplitude, rtol=1e-4, atol=0)
    assert abs(float(torch.cos(before.misalignment).mean())) < 0.1
    assert torch.equal(before.by("time"), before.by("misalignment"))  # the paper's corollary
    normal = start(23, 2000, "square", std_in=0.1, std_out=0.1, seed=0)
    assert float(winners_of(normal).amplitude.square().mean().sqrt()) == pytest.approx(
        0.2 / 23**0.5, rel=0.02
    )


def _ideal(modulus: int, group: int) -> Adder:
    """Squared neurons of every frequency with ψ = 2φ and evenly spread phases."""
    residues, rows = torch.arange(modulus).double(), []
    for frequency in range(1, modulus // 2 + 1):
        for place in range(group):
            phase = 2 * math.pi * (place + 0.3) / group
            angle = 2 * math.pi * frequency * residues / modulus
            rows.append((torch.cos(angle + phase), torch.cos(angle + 2 * phase)))
    w_in, w_out = (torch.stack(each).float() for each in zip(*rows, strict=True))
    return Adder(w_in.T.contiguous(), w_out, "square")


def test_the_network_of_the_theory_has_ghosts_of_half_the_height() -> None:
    """For at least five evenly spread phases in a group, whose moments of order 2 and 4 vanish."""
    pairs, network = Pairs(11), _ideal(11, 5)
    seen = mechanism(network, pairs)
    assert seen["ghosts"] == pytest.approx(0.5, rel=1e-4)
    assert (seen["accuracy"], seen["single"], seen["same"], seen["unused"]) == (1.0, 1.0, 1.0, 0)
    assert seen["concentration"] == pytest.approx(1)
    assert seen["alignment"] == pytest.approx(1)
    assert seen["dispersion"] == 0
    assert [seen[f"symmetry {order}"] for order in (1, 2, 4)] == pytest.approx([0, 0, 0], abs=1e-6)
    # By hand: the logits at x = 1, y = 3 are those of the proposition.
    row = pairs.xy.T.tolist().index([3, 1])
    logits = network.logits(pairs.inputs)[row]
    heights = torch.zeros(11)
    heights[4], heights[2], heights[6] = 11 / 2, 11 / 4, 11 / 4
    torch.testing.assert_close(logits, 5 / 2 * (heights - 1), rtol=1e-4, atol=1e-4)
    exact = swapped(network, pairs)
    assert (exact["|x|"], exact["x⁴"], exact["x"]) == (1.0, 1.0, pytest.approx(1 / 11, abs=0.1))


def test_ghosts_are_read_from_logits() -> None:
    pairs = Pairs(7)
    logits = torch.ones(len(pairs.labels), 7, dtype=torch.float64)
    for row, (x, y) in enumerate(pairs.xy.T.tolist()):
        logits[row, (x + y) % 7] += 10.0
        logits[row, 2 * x % 7] += 2.0 if x != y else 100.0
        logits[row, 2 * y % 7] += 4.0
    assert ghosts(logits, pairs) == pytest.approx(0.3)


def test_shares_of_the_lottery_are_counted_over_all_neurons_and_over_those_of_one_frequency() -> None:
    before = winners_of(start(11, 40, "square", std_in=0.1, std_out=0.1, seed=0))
    after = waves_of(_ideal(11, 8))  # 40 neurons, eight of each frequency
    found = lottery(before, after)
    right = [int(before.frequency[neuron]) == neuron // 8 + 1 for neuron in range(40)]
    assert found["all"]["time"] == found["won"]["time"] == pytest.approx(sum(right) / 40)
    assert sum(found["by lead"]) / 4 == pytest.approx(sum(right) / 40, abs=1e-4)
    assert found["leads"] == sorted(found["leads"])


def test_neurons_of_several_frequencies_have_not_won() -> None:
    """The second half of the neurons have frequencies 1, 2 and 3, of which the second is the largest."""
    ideal = _ideal(11, 4)
    mixed = ideal.w_in.clone()
    mixed[:, 10:] = ideal.w_in[:, :1] + 1.2 * ideal.w_in[:, 4:5] + ideal.w_in[:, 8:9]
    network = Adder(mixed, ideal.w_out, "square")
    before = winners_of(start(11, 20, "square", std_in=0.1, std_out=0.1, seed=3))
    right = [int(before.frequency[neuron]) == (neuron // 4 + 1 if neuron < 10 else 2) for neuron in range(20)]
    found = lottery(before, waves_of(network))
    assert found["won"]["time"] == pytest.approx(sum(right[:10]) / 10)
    assert found["all"]["time"] == pytest.approx(sum(right) / 20)
    assert found["won"]["time"] != found["all"]["time"]
    seen = mechanism(network, Pairs(11))
    assert (seen["single"], seen["same"]) == (0.5, 1.0)


def test_activations_are_those_that_they_are_called() -> None:
    wanted = {"relu": 0.0, "square": 4.0, "|x|": 2.0, "x²": 4.0, "x⁴": 16.0, "x": -2.0, "x³": -8.0}
    wanted |= {"log(1 + e²ˣ)": math.log1p(math.exp(-4)), "eˣ": math.exp(-2)}
    wanted["gelu"] = -2 * 0.5 * math.erfc(2 / math.sqrt(2))
    for name, activation in ACTIVATIONS.items():
        assert activation(torch.tensor(-2.0).double()).item() == pytest.approx(wanted[name]), name


def test_mirrored_pairs_are_told_from_new_ones() -> None:
    """A network that knows only the pairs with x + y = 0 mod 5."""
    pairs = Pairs(5)
    bias = torch.zeros(1, 5)
    bias[0, 0] = 1.0
    constant = Adder(torch.ones(5, 1), bias, "relu")
    zero = pairs.labels == 0  # (0, 0), (4, 1), (3, 2)
    trained = torch.where(zero, 1, 0)
    trained[0] = 0
    found = progress(constant, pairs, trained)
    assert (found["train"], found["mirrored"]) == (1.0, 1.0)
    assert found["new"] == pytest.approx(1 / 21, abs=1e-5)  # (0, 0) of all but four pairs
    assert found["test"] == pytest.approx(3 / 23, abs=1e-5)
    assert found["train loss"] == pytest.approx(-math.log(math.exp(2) / (math.exp(2) + 4)), rel=1e-4)
    assert found["norm"] == pytest.approx(6**0.5, rel=1e-4)
    unordered = progress(constant, pairs, pairs.split(0.6, 0, ordered=False))
    assert unordered["mirrored"] is None


def test_the_loss_of_sure_predictions_is_not_rounded_away() -> None:
    """In float32 a margin of 25 has no loss and no gradient of the right logit."""
    pairs = Pairs(3)
    network = Adder((1.25 * torch.eye(3)).requires_grad_(), (10 * torch.eye(3)).requires_grad_(), "relu")
    counts = torch.zeros_like(pairs.labels)
    counts[0] = 1  # 0 + 0
    before = network.w_in[0, 0].item()
    list(train(network, pairs, counts, sgd(network, 1e10), 1, ()))
    rise = network.w_in[0, 0].item() - before
    assert rise == pytest.approx(1e10 * 2 * math.exp(-25) * 2 * 10, rel=1e-2)


def test_small_cells_from_end_to_end() -> None:
    recipe = Recipe(modulus=11, width=64, activation="square", optimizer="sgd", lr=1.0, steps=500)
    records = list(waves(recipe, 0))
    assert [one["kind"] for one in records] == [*["mechanism"] * 3, "lottery", "swapped", "neurons"]
    assert sorted(one["when"] for one in records[:3]) == ["end", "quarter", "solved"]
    shares = records[3]["all"]
    assert shares["time"] > 0.8 > 0.6 > shares["misalignment"]
    own = Recipe(modulus=11, width=64, lr=3e-3, steps=400, every=20, decays=(1.0,))
    *moments, end, curve = grokking(own, 1.0, 0, ordered=True)
    assert [one["moment"] for one in moments][:1] == ["memorised"]
    assert moments[0]["train"] >= 0.99
    assert end["peak"] >= end["norm"]
    steps = curve["curves"]["steps"]
    assert (steps[0], steps[-1], steps) == (0, 400, sorted(set(steps)))
    assert len(curve["curves"]["new"]) == len(steps)


def test_starts_are_those_of_the_paper_and_of_the_workload() -> None:
    paper, own = RECIPES["ordered"]["p 23"].start(0), RECIPES["grokking"]["p 59, width 512"].start(0)
    for weight in paper.weights:
        assert weight.detach().std().item() == pytest.approx(0.1 / 23**0.5, rel=0.03)
    model = modular_addition().build(512, 1)
    for mine, theirs in zip(own.weights, model.parameters(), strict=True):
        assert mine.detach().std().item() == pytest.approx(theirs.detach().std().item(), rel=0.03)


def test_adamw_has_the_decay_and_the_momentum_of_the_paper() -> None:
    network = start(5, 4, "relu", std_in=1.0, std_out=1.0, seed=0)
    (group,) = adamw(network, 1e-4, 2.0).param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-4, 2.0, (0.9, 0.98))
