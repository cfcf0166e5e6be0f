"""The study of guidance: fields, budgets and inversions by closed forms, and tiny runs of each part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from theodolite_studies.framework.records import Records, select
from theodolite_studies.framework.study import report
from theodolite_studies.guidance import sampling
from theodolite_studies.guidance.fields import (
    CLASSES,
    EXACT,
    LABELS,
    LAYOUTS,
    Fields,
    class_data,
    field_error,
    fields,
    trained,
)
from theodolite_studies.guidance.inversion import inversions
from theodolite_studies.guidance.sampling import PLAIN, Way, grid, moments, residuals, steps_within
from theodolite_studies.guidance.study import STUDY, GuidanceSetting, cells


@pytest.mark.parametrize(
    ("budget", "scale", "way", "steps"),
    [
        (20, 2.0, PLAIN, 10),
        (20, 1.0, PLAIN, 20),  # one field alone
        (20, 0.0, PLAIN, 20),
        (20, 2.0, Way(1), 6),  # 12, and 2 in each of the steps at 0, 1/6, 2/6, 3/6
        (20, 2.0, Way(2, "anderson"), 4),  # 8, and 4 at 0, 1/4, 1/2
        (40, 2.0, Way(3), 6),  # 12 and 6·4; 7 steps would take 14 and 6·5
        (80, 2.0, Way(1), 25),  # 50 and 2·15: the step at 0.6 is not projected
        (20, 2.0, Way(late=1.0), 12),  # 2·8 and 4: 8 steps start before 0.6
        (20, 1.0, Way(1), 8),  # 8 and 2·5; 9 steps would take 9 and 2·6
    ],
)
def test_a_budget_buys_the_steps_that_were_counted_by_hand(
    budget: int, scale: float, way: Way, steps: int
) -> None:
    assert steps_within(budget, scale, way) == steps


@pytest.mark.parametrize("layout", ["uneven", "simplex"])
def test_each_class_has_its_own_field(layout: str) -> None:
    mixture, num = LAYOUTS[layout], 3
    both = fields(layout, EXACT, 0, num)
    x = torch.randn(CLASSES * num, mixture.centres.shape[1], generator=torch.Generator().manual_seed(0))
    found = both.conditional(x, torch.zeros(len(x)))
    # At t = 0 the velocity is the mean of the data less x.
    centres = mixture.centres[:CLASSES].float().repeat_interleave(num, 0)
    torch.testing.assert_close(found, centres - x)
    mean = (mixture.weights @ mixture.centres).float()
    torch.testing.assert_close(both.unconditional(x, torch.zeros(len(x))), mean - x)


def test_wrong_labels_pull_the_field_of_a_class_towards_the_others() -> None:
    mixture, x = LAYOUTS["uneven"], torch.zeros(CLASSES, 2)
    found = fields("uneven", LABELS, 0, 1).conditional(x, torch.zeros(CLASSES))
    mean = mixture.weights @ mixture.centres
    torch.testing.assert_close(found, (0.8 * mixture.centres + 0.2 * mean).float())


def test_the_corners_of_the_simplex_are_equally_far_apart() -> None:
    corners = LAYOUTS["simplex"].centres
    # Sides of a regular simplex with circumradius r in n dimensions: r √(2(n + 1)/n).
    torch.testing.assert_close(torch.pdist(corners), torch.full((10,), 1.2 * 2.5**0.5, dtype=torch.float64))


def test_halves_and_classes_are_compared_with_their_own_data() -> None:
    data = sampling._data("three", 50, "reference", 0)
    by_half = sampling._by_half(data)
    assert by_half.shape == (2, CLASSES, 50, 2)
    for half in range(2):
        torch.testing.assert_close(by_half[half].flatten(0, 1), class_data("three", 50, "reference", 0, half))
    assert sampling._distances(data, data) == [0.0, 0.0]
    # Classes in another order are as far as their centres, 1.2·√3, over √2, but for the directions.
    (first, _) = sampling._distances(data.roll(100, 0), data)
    assert first == pytest.approx(1.2 * 3**0.5 / 2**0.5, rel=0.15)


def test_the_exact_field_samples_its_classes_and_projection_pulls_them_away() -> None:
    found = list(moments("overlap", fields("overlap", EXACT, 0, 400), 0, 200, steps=40, scales=(1,)))
    by_way = {row["way"]: row for row in found}
    assert by_way["plain"]["off"] < 0.1
    assert by_way["plain"]["spread"] == pytest.approx(1.0, abs=0.1)
    assert by_way["picard 3"]["off"] > 0.2
    assert by_way["picard 3"]["gap"] < by_way["plain"]["gap"]


def test_a_late_scale_takes_over_at_its_time() -> None:
    """u = 0 and c = 1: the end is the start plus the mean of the scale over the time."""
    steady = Fields(lambda x, t: 0 * x, lambda x, t: 0 * x + 1)
    start = torch.zeros(1, 1)
    found, evaluations = sampling._sampled(steady, start, 10, 3.0, Way(late=0.5))
    assert found.item() == pytest.approx(0.6 * 3 + 0.4 * 0.5, rel=1e-5)
    assert evaluations == 20
    assert sampling._sampled(steady, start, 10, 3.0, PLAIN)[0].item() == pytest.approx(3.0, rel=1e-5)


def test_residuals_of_a_linear_map() -> None:
    """u = x, c = 1 − x: G(x) = (1 − h)²x + h leaves (1 − h)² of the residual; Anderson takes two steps."""
    linear = Fields(lambda x, t: x, lambda x, t: 1 - x)
    rows = {row["method"]: row["residuals"] for row in residuals("three", linear, 0, 10, iterations=2)}
    first, second, third = rows["picard"]
    assert second / first == pytest.approx(0.95**2, rel=1e-3)
    assert third / second == pytest.approx(0.95**2, rel=1e-3)
    assert rows["bare anderson"][2] < 0.05 * first
    assert rows["bare anderson"][2] < rows["anderson"][2] < third


def test_the_bound_of_a_linear_flow_is_two_over_its_factor() -> None:
    std, factor, steps = LAYOUTS["one"].std, 1.0, 20
    for step in range(steps):
        t = step / steps
        factor *= 1 + (t * std**2 - (1 - t)) / (t**2 * std**2 + (1 - t) ** 2) / steps
    found = list(
        inversions("one", EXACT, 0, num_noises=20, num_targets=4, multiples=(0.9, 1.1), iterations=60)
    )
    (bound,) = select(found, kind="bound")
    assert bound["close"] == pytest.approx(2 / factor, rel=1e-4)
    assert bound["random"] == pytest.approx(2 / factor, rel=1e-4)
    safe, beyond = select(found, kind="steps")
    assert (safe["converged"], safe["diverged"]) == (1.0, 0.0)
    assert (beyond["converged"], beyond["diverged"]) == (0.0, 1.0)
    # 0.9 of the bound leaves 0.8 of the residual: from about 1 to 1e-3 in 31 iterations.
    assert 20 < safe["iterations"] < 45


def test_training_brings_the_field_nearer_and_is_repeated_exactly() -> None:
    errors = [
        field_error("three", fields("three", kind, 0, 200), 200, 0)
        for kind in (EXACT, "100 steps", "1 steps")
    ]
    assert errors[0] == 0.0
    assert errors[1] < 0.7 * errors[2]
    again = trained.__wrapped__("three", 1, 0).state_dict()
    for name, tensor in trained("three", 1, 0).state_dict().items():
        assert torch.equal(tensor, again[name])


def test_a_tiny_study_from_end_to_end(tmp_path: Path) -> None:
    scales = {"plain": (1.0, 2.0), "projected": (1.0, 2.0)}
    path = tmp_path / "guidance.jsonl"
    records = Records(path, STUDY.about(STUDY.full))
    for part, kind in (("exact", EXACT), ("learned", "2 steps")):
        both, own = fields("three", kind, 0, 20), {"part": part, "layout": "three", "field": kind, "seed": 0}
        rows = [*grid("three", both, 0, 10, (40,), scales), *moments("three", both, 0, 10)]
        rows += residuals("three", fields("three", kind, 0, 10), 0, 10, iterations=3)
        records.append({**own, **row} for row in rows)
    for row in select(records.all, kind="grid"):
        assert all(36 <= count <= 40 for count in row["evaluations"])
    few = inversions("one", EXACT, 0, num_noises=10, num_targets=2, multiples=(0.9, 1.1), iterations=50)
    own = {"part": "inversion", "layout": "one", "field": EXACT, "seed": 0}
    records.append({**own, **row} for row in few)
    said = report(STUDY, path)
    assert "linear flow: 0.9 of the bound converges" in said
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == [
        "guidance-inversion.svg",
        "guidance-scales.svg",
    ]


def test_cells_of_all_parts() -> None:
    found = cells(GuidanceSetting())
    assert len(found) == 5 * (4 + 6 + 4 + 4)
    assert {cell["part"] for cell in cells(GuidanceSetting(small=True, seeds=1))} == {
        "exact",
        "learned",
        "inversion",
    }
