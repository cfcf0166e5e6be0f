"""Classes over depth: late blocks that do nothing are found, and what has hardly learned is not judged."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.calling import ModelLoss
from theodolite.core.size import Size
from theodolite.models import ResNet
from theodolite.probes import collapse as measure
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding
from theodolite.surveying.sections import collapse as collapse_section
from theodolite.surveying.sections.collapse import DrawnBatches, _has_classes, judge, section
from theodolite.surveying.short_training import ShortTraining
from theodolite.workloads import Workload, built_in

DEPTH, USED = 6, 2
CENTRES = 2.0 * torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def clouds(seed: int, step: int) -> Batch:
    """Five clouds of points, which a linear map tells apart."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    labels = torch.randint(5, (128,), generator=generator)
    return CENTRES[labels] + torch.randn(128, 8, generator=generator), labels


def parity(seed: int, step: int) -> Batch:
    """Of three bits out of eight: no linear map tells it."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    bits = torch.randint(2, (256, 8), generator=generator)
    return 2.0 * bits - 1.0, bits[:, :3].sum(1) % 2


def coin(seed: int, step: int) -> Batch:
    """Labels that nobody can tell."""
    inputs, _ = clouds(seed, step)
    generator = torch.Generator().manual_seed(1_000_003 * seed + step + 500)
    return inputs, torch.randint(5, (128,), generator=generator)


def many_classes(seed: int, step: int) -> Batch:
    """Most have one example."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return clouds(seed, step)[0], torch.randint(8192, (128,), generator=generator)


def one_class(seed: int, step: int) -> Batch:
    return clouds(seed, step)[0], torch.zeros(128, dtype=torch.long)


def squares(outputs: Tensor, counts: Tensor) -> Tensor:
    """Of a regression to whole numbers."""
    return F.mse_loss(outputs[:, 0], counts.float())


class Weighted(nn.Module):
    """Blocks with a norm; branches have the weights given."""

    def __init__(self, width: int, depth: int, used: int | None = None, outputs: int = 5) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = (
            nn.Linear(8, width),
            nn.Linear(width, outputs),
            nn.LayerNorm(width),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.weights = [1.0 if used is None or at < used else 1e-4 for at in range(depth)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for weight, block in zip(self.weights, self.blocks, strict=True):
            x = x + weight * block(x)
        found: Tensor = self.leave(self.norm(x))
        return found


def falls_of(found: Finding) -> list[float]:
    """The shares by which NC1 falls in each block."""
    first, *falls = [row["NC1 falls by"] for row in found.evidence.rows]
    assert first is None
    return [float(fall or 0) for fall in falls]


def finding(workload: Workload, **changes: Any) -> Finding:
    (found,) = section.run(SurveyContext(workload, workload.size, **changes))
    assert found.code == "TH531"
    return found


@pytest.mark.parametrize("seed", range(2))
def test_late_blocks_that_do_nothing_are_found_and_counted(rows: Any, seed: int) -> None:
    used = partial(Weighted, used=USED)
    found = finding(rows(used, batch=clouds, size=Size(32, DEPTH)), seed=seed)
    assert (found.level, found.title) == ("note", "Blocks after classes are apart")
    assert "after 128 steps of AdamW (held-out accuracy" in found.sentence
    assert f"classes are apart after {USED} of {DEPTH} blocks" in found.sentence
    assert "falls by less than 5% in each later block, and " in found.sentence
    assert "Compare with a network of fewer blocks" in found.remedy
    assert [row["place"] for row in found.evidence.rows][:2] == ["before block 0", "after block 0"]
    falls = falls_of(found)
    assert len(falls) == DEPTH
    assert min(falls[:USED]) > 0.05
    assert max(map(abs, falls[USED:])) < 0.002


@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_all_work_are_no_reason_for_a_note(rows: Any, seed: int) -> None:
    workload = rows(partial(Weighted, outputs=2), batch=parity, size=Size(64, 4))
    found = finding(workload, seed=seed)
    assert found.level == "ok"
    assert "before the first of 4 blocks to " in found.sentence
    assert "(held-out accuracy 100%)" in found.sentence
    assert min(falls_of(found)[1:]) > 0.5


def test_a_network_that_has_hardly_learned_is_not_judged(rows: Any) -> None:
    """Though its last blocks do nothing."""
    found = finding(rows(partial(Weighted, used=USED), batch=coin, size=Size(32, DEPTH)))
    assert found.level == "ok"
    assert re.fullmatch(
        r"Not judged: held-out accuracy is only [12]\d% after 128 steps of AdamW\.", found.sentence
    )
    assert "th.probes.collapse(model, loss, batches)" in found.remedy
    assert max(map(abs, falls_of(found)[USED:])) < 0.002


def test_a_network_with_batch_norms_and_images_is_measured() -> None:
    patterns = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def batch(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        labels = torch.randint(4, (64,), generator=generator)
        return patterns[labels] + torch.randn(64, 3, 8, 8, generator=generator), labels

    resnet = Workload("resnet", partial(ResNet, outputs=4), batch, F.cross_entropy, Size(8, 1))
    found = finding(resnet)
    assert found.level == "ok"
    assert re.search(r"\(held-out accuracy (9\d|100)%\), NC1", found.sentence)
    assert falls_of(found)[-1] > 0.05
    assert len(falls_of(found)) == 3


@pytest.mark.parametrize("name", ["gpt-sotu", "flow-mixture", "poisson", "two-cylinders"])
def test_a_network_that_is_no_classifier_costs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built_in()[name]

    def refuse(*given: Any) -> Any:
        raise AssertionError("a network was built")

    context = SurveyContext(workload, workload.size)
    _ = context.batch
    monkeypatch.setattr(SurveyContext, "build", refuse)
    (found,) = section.examine(context)
    assert (found.level, found.code) == ("ok", "TH531")
    assert found.sentence.startswith("The targets are not one class for each example")


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.arange(32), torch.zeros(4, 8).long(), None],
    ids=["numbers", "booleans", "tokens in a row", "tokens", "none"],
)
def test_other_targets_than_one_whole_number_for_each_example_are_no_classes(targets: Any) -> None:
    assert not _has_classes((torch.zeros(4, 8), targets))
    assert _has_classes((torch.zeros(4, 8), torch.arange(4)))


def test_a_network_without_branches_has_no_blocks_to_compare(rows: Any) -> None:
    found = finding(rows(lambda width, depth: nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))))
    assert found.level == "ok"
    assert "no residual branches" in found.sentence


@pytest.mark.parametrize(
    "changes, outputs, limits, reason",
    [
        ({"batch": many_classes}, 8192, {}, "classes are too few"),
        ({"batch": one_class}, 5, {}, "of 1 class are too few"),
        ({"loss": squares}, 1, {}, "logits of shape (4, 1) are not"),
        ({}, 5, {"parameters": 1000}, "parameters are too many for a short training"),
        ({}, 5, {"work": 1e8}, "a short training, of 32 steps, takes too much work"),
    ],
    ids=["many classes", "one class", "counts", "large", "slow"],
)
def test_what_cannot_be_judged_is_not_trained(
    rows: Any, monkeypatch: pytest.MonkeyPatch, changes: Any, outputs: int, limits: Any, reason: str
) -> None:
    monkeypatch.setattr(collapse_section, "train", None)
    monkeypatch.setattr(collapse_section, "QUICK", replace(collapse_section.QUICK, **limits))
    found = finding(rows(partial(Weighted, outputs=outputs), **changes))
    assert found.level == "ok"
    assert found.sentence.startswith("Not judged: ")
    assert reason in found.sentence


def test_a_loss_of_the_whole_model_is_a_note(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_section, "train", None)
    loss = ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    found = finding(rows(Weighted, batch=clouds, loss=loss))
    assert found.level == "note"
    assert "needs loss(logits, targets)" in found.sentence


def planted(*falls: float, accuracy: float = 1.0, nearest: float = 1.0) -> Finding:
    """The finding on a profile of NC1 that falls by these shares, with other numbers of a real one."""
    model = Weighted(8, len(falls)).eval()
    found = measure(model, F.cross_entropy, clouds(0, 0))
    value, places = 1.0, []
    for place in found.places:
        if place.block is not None and place.block >= 0:
            value *= 1 - falls[place.block]
        geometry = replace(place.geometry, quotient=value, nearest=nearest)
        places.append(replace(place, geometry=geometry))
    network = ShortTraining(model, Size(8, len(falls)), 2**-8, (2.0, 1.0))
    return judge(network, replace(found, places=tuple(places), accuracy=accuracy))


@pytest.mark.parametrize(
    "falls, said",
    [
        ((0.5, 0.5, 0.04, 0.04), "after 2 of 4 blocks"),
        ((0.04, 0.04, 0.04, 0.04), "before the first of 4 blocks"),
        ((0.5, 0.04, 0.06, 0.04), "after 3 of 4 blocks"),
        ((0.5, 0.04, -0.3, 0.04), "after 1 of 4 blocks"),
        ((0.5, 0.04, 0.04, 0.06), ""),
        # Each falls by less than 5 %, eight together by 28 %, and five by 18 %.
        ((0.04,) * 8, "after 3 of 8 blocks"),
        # One block in eight is less than a quarter.
        ((0.5,) * 7 + (0.0,), ""),
        ((0.5,) * 6 + (0.0,) * 2, "after 6 of 8 blocks"),
    ],
)
def test_blocks_are_counted_from_the_last_one_that_lowers_nc1(falls: Any, said: str) -> None:
    found = planted(*falls)
    assert found.level == ("note" if said else "ok")
    assert said in found.sentence
    assert ("classes are apart" in found.sentence) == bool(said)


def test_classes_that_are_not_apart_are_not_said_to_be() -> None:
    """The head knows more than the nearest class mean."""
    falls = 0.5, 0.0, 0.0, 0.0
    assert planted(*falls, accuracy=0.95, nearest=0.94).level == "note"
    assert planted(*falls, accuracy=0.95, nearest=0.92).level == "ok"
    assert planted(*falls, accuracy=0.89).sentence.startswith("Not judged: held-out accuracy is only 89%")


def test_batches_are_drawn_anew_and_cut(rows: Any) -> None:
    drawn = []

    def batch(seed: int, step: int) -> Batch:
        drawn.append((seed, step))
        return clouds(seed, step)

    context = SurveyContext(rows(Weighted, batch=batch), Size(32, 2), seed=3)
    batches = DrawnBatches(context, 3, 10)
    assert [len(inputs) for inputs, _ in batches] == [10] * 3
    assert len(batches) == 3
    assert drawn == [(3, 0), (3, 1), (3, 2)]
    held_out = list(DrawnBatches(context, 2, 10, held_out=True))
    assert drawn[3:] == [(2**31 - 1, 0), (2**31 - 1, 1)]
    assert not torch.equal(held_out[0][0], held_out[1][0])
