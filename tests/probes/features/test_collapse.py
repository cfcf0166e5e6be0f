"""Neural collapse of networks against features taken by hand, and what cannot be measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite import UseError, probes
from theodolite.probes.features.collapse import Collapse

from .explicit import explicit, same

LOSS = F.cross_entropy
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(4, (60,), generator=GENERATOR)
INPUTS = torch.randn(4, 6, generator=GENERATOR)[LABELS] + 0.5 * torch.randn(60, 6, generator=GENERATOR)
BATCHES = [(INPUTS[:25], LABELS[:25]), (INPUTS[25:32], LABELS[25:32]), (INPUTS[32:], LABELS[32:])]


class Network(nn.Module):
    """Residual blocks with a norm, and a final norm, that keeps its features."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, classes)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.5)

    def features(self, x: Tensor) -> Iterator[Tensor]:
        x = self.enter(x)
        yield x
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
            yield x
        yield self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.features(x)
        found: Tensor = self.leave(last)
        return found


@torch.no_grad()
def test_a_network_is_measured_as_its_features_are_batch_by_batch_or_at_once() -> None:
    model = Network()
    model.eval()
    features = list(model.features(INPUTS))
    model.train()
    for batches in (
        BATCHES,
        (INPUTS, LABELS),
        torch.utils.data.DataLoader([*zip(INPUTS, LABELS, strict=True)], 16, True),
    ):
        found = probes.collapse(model, LOSS, batches)  # type: ignore[arg-type]
        assert [place.name for place in found.places] == [
            "before block 0",
            "after block 0",
            "after block 1",
            "before the head",
        ]
        assert [place.block for place in found.places] == [-1, 0, 1, None]
        for place, values in zip(found.places, features, strict=True):
            assert place.features == 8
            same(place.geometry, explicit(values, LABELS), rel=1e-4)
        assert found.profile == tuple(place.geometry.quotient for place in found.places[:3])
        logits = model.leave(features[-1])
        assert found.loss == pytest.approx(LOSS(logits, LABELS).item())
        assert found.accuracy == pytest.approx((logits.argmax(1) == LABELS).double().mean().item())
        means = torch.stack([features[-1][one == LABELS].mean(0) for one in range(4)])
        nearest = torch.cdist(features[-1], means).argmin(1)
        assert found.nc4 == pytest.approx((nearest == logits.argmax(1)).double().mean().item())
        product = (model.leave.weight @ (means - means.mean(0)).T).double()
        simplex = (torch.eye(4) - 0.25).double() / 3**0.5
        assert found.nc3 == pytest.approx(float((product / product.norm() - simplex).norm()), rel=1e-4)
        assert (found.head, found.classes, found.samples) == ("leave.weight", (0, 1, 2, 3), 60)
        assert found.notes == ()
    assert model.training


def test_a_head_along_the_corners_of_a_simplex_is_self_dual_and_agrees_with_the_nearest_mean() -> None:
    corners = torch.eye(3) - 1 / 3
    head = nn.Linear(3, 3, bias=False)
    head.weight = nn.Parameter(5 * corners)
    labels = torch.arange(3).repeat_interleave(2)
    found = probes.collapse(head, LOSS, (corners[labels], labels))
    (place,) = found.places
    assert place.geometry.quotient == pytest.approx(0, abs=1e-12)
    assert found.nc3 == pytest.approx(0, abs=1e-6)
    assert found.nc4 == 1
    swapped = probes.collapse(head, LOSS, (corners[labels], (labels + 1) % 3))
    assert swapped.nc4 == 0
    assert swapped.accuracy == 0
    assert swapped.nc3 > 1


def test_of_images_the_mean_over_positions_is_taken_and_of_labelled_pixels_each() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 4, 1)
    images, labels = torch.randn(40, 1, 4, 4), torch.arange(40) % 4
    hidden = first(images).relu()
    whole = nn.Sequential(first, nn.ReLU(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = probes.collapse(whole, LOSS, (images, labels))
    same(found.places[0].geometry, explicit(hidden.mean((2, 3)).detach(), labels), rel=1e-4)
    assert found.head == "2.weight"
    pixels = torch.randint(4, (40, 4, 4))
    found = probes.collapse(nn.Sequential(first, nn.ReLU(), second), LOSS, (images, pixels))
    rows = hidden.movedim(1, -1).reshape(-1, 5).detach()
    same(found.places[0].geometry, explicit(rows, pixels.flatten()), rel=1e-3)
    assert found.samples == 640


def test_of_a_language_model_tokens_are_classes() -> None:
    torch.manual_seed(0)
    model = th.models.GPT(16, 1, vocab=7, context=12, head_dim=8, tied=True)
    tokens = torch.randint(7, (20, 13))
    kept: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda *given: kept.append(given[-1].detach()))
    model(tokens[:, :-1])
    handle.remove()
    targets = tokens[:, 1:]
    found = probes.collapse(model, th.workloads.next_token_loss, (tokens[:, :-1], targets))
    same(found.places[-1].geometry, explicit(kept[0].flatten(0, 1), targets.flatten()), rel=1e-3)
    assert found.head


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_of_a_transformers_classifier_blocks_are_means_over_tokens_and_the_head_reads_one(kind: str) -> None:
    """With classes of different sizes, one that is ignored, and a post-norm (BERT) or a pre-norm (ViT)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    labels = torch.tensor([0] * 20 + [1] * 9 + [2] * 5 + [-100] * 6)[torch.randperm(40)]
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=20, num_labels=3, **small)
        model = transformers.BertForSequenceClassification(config).double().eval()
        inputs, blocks, last = torch.randint(20, (40, 5)), model.bert.encoder.layer, model.bert.pooler
    else:
        config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **small)
        model = transformers.ViTForImageClassification(config).double().eval()
        inputs, last = torch.randn(40, 3, 8, 8).double(), model.vit.layernorm
        blocks = model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer
    kept: list[Tensor] = []

    def keep(*given: Any) -> None:
        kept.append((given[-1][0] if isinstance(given[-1], tuple) else given[-1]).detach())

    handles = [module.register_forward_hook(keep) for module in (*blocks, last)]
    model(inputs)
    for handle in handles:
        handle.remove()
    *streams, read = kept
    wanted = [*(stream.mean(1) for stream in streams), read if kind == "bert" else read[:, 0]]
    batches = [(inputs[:13], labels[:13]), (inputs[13:], labels[13:])]
    found = probes.collapse(model, LOSS, batches)
    assert [place.name for place in found.places[1:]] == ["after block 0", "after block 1", "before the head"]
    for place, features in zip(found.places[1:], wanted, strict=True):
        same(place.geometry, explicit(features[labels >= 0], labels[labels >= 0]))
    assert found.head == "classifier.weight"
    assert found.samples == 34


def test_batch_norms_use_running_statistics_in_eval_mode_and_those_of_the_batch_in_training_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_var.copy_(torch.arange(1.0, 9))
    with torch.no_grad():
        normed = model[1](model[0](INPUTS))  # of the batch
        model[1].running_var.copy_(torch.arange(1.0, 9))
        model[1].running_mean.zero_()
        for training, wanted in ((True, normed), (False, model.eval()[1](model[0](INPUTS)))):
            model.train(training)
            before = {name: one.clone() for name, one in model.state_dict().items()}
            found = probes.collapse(model, LOSS, (INPUTS, LABELS))
            same(found.places[-1].geometry, explicit(wanted, LABELS), rel=1e-3)
            for name, one in model.state_dict().items():
                assert torch.equal(one, before[name])


@torch.no_grad()
def test_classes_with_too_few_samples_are_left_out_and_named() -> None:
    """As if the rows of the others alone were given."""
    model, labels = Network(6).double(), LABELS.clone()
    labels[LABELS == 2] = -100
    labels[0] = 5  # the only one
    found = probes.collapse(model, LOSS, (INPUTS.double(), labels))
    assert found.classes == (0, 1, 3)
    assert found.notes == (
        "left out: 2 classes with no sample (2 and 4)",
        "left out: 1 class with one sample (5)",
    )
    known = (labels >= 0) & (labels < 5)
    names = torch.tensor([0, 1, -1, 2])[LABELS[known]]
    rows = next(model.eval().features(INPUTS.double()))[known].detach()
    same(found.places[0].geometry, explicit(rows, names))
    assert found.samples == int(known.sum())
    *_, last = model.features(INPUTS.double())
    means = torch.stack([last[known][names == one].mean(0) for one in range(3)])
    heads = torch.tensor([0, 1, 3])
    nearest, said = torch.cdist(last[known], means).argmin(1), model(INPUTS.double())[known][:, heads]
    assert found.nc4 == pytest.approx((nearest == said.argmax(1)).double().mean().item())
    product = model.leave.weight[heads] @ (means - means.mean(0)).T
    simplex = (torch.eye(3) - 1 / 3).double() / 2**0.5
    assert found.nc3 == pytest.approx(float((product / product.norm() - simplex).norm()))
    assert found.loss == pytest.approx(LOSS(model(INPUTS.double()), labels).item())
    batches = [(INPUTS.double(), labels), (INPUTS.double()[:3], torch.full((3,), -100))]
    assert probes.collapse(model, LOSS, batches).loss == pytest.approx(found.loss)


def test_features_that_are_the_same_for_all_are_said_to_be() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.init.constant_(model[0].bias, -100)  # type: ignore[arg-type]
    found = probes.collapse(model, LOSS, (INPUTS, LABELS))
    assert found.profile == (math.inf,)
    assert "class means do not differ, so NC1 and CDNV are infinite: before the head" in found.notes[0]
    assert str(found)


def test_without_a_linear_head_the_reason_is_noted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.a(x) + self.b(x.relu())
            return found

    with pytest.raises(UseError, match="no features to measure: 2 linear maps together make the logits"):
        probes.collapse(Two(), LOSS, (INPUTS, LABELS))
    found = probes.collapse(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Two()), LOSS, (INPUTS, LABELS))
    assert [place.name for place in found.places] == ["before layer 1", "before layer 2"]
    assert math.isnan(found.nc3)
    assert found.head == ""
    assert found.notes == ("no NC3 and NC4: 2 linear maps together make the logits",)


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    found = probes.collapse(Network(), LOSS, BATCHES)
    found.save(tmp_path / "collapse.json")
    assert Collapse.load(tmp_path / "collapse.json") == found


class Redrawn:
    """Batches with other targets in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([(INPUTS, (LABELS + self.passes) % 4)])


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (Network, (INPUTS, INPUTS), "targets are .*float32.*Give one integer, the class"),
        (Network, (INPUTS, torch.zeros(60, dtype=torch.long)), "1 class with 2 samples or more.*takes two"),
        (
            Network,
            (INPUTS[:4], torch.arange(4)),
            r"0 classes with 2 samples or more .*4 classes with one sample",
        ),
        (Network, (INPUTS, LABELS + 1), "a target is 4, but the logits have 4 classes: 0 to 3"),
        (
            Network,
            (INPUTS, LABELS[:, None].repeat(1, 3)),
            r"logits of shape \(60, 4\) and targets of shape \(60, 3\)",
        ),
        (lambda: Network(1), (INPUTS, LABELS * 0), "have 1 column|1 class with"),
        (lambda: Network(1), (INPUTS, LABELS % 2), r"logits have 1 column.*give logits \(0, z\)"),
        (Network, (INPUTS * math.nan, LABELS), "features before block 0 are not finite"),
        (Network, Redrawn(), "other targets each time they are read"),
        (Network, iter(BATCHES), "iterated more than once"),
        (lambda: "a network", (INPUTS, LABELS), "not a torch.nn.Module"),
    ],
)
def test_bad_input_is_named(model: Callable[[], Any], batches: Any, message: str) -> None:
    with pytest.raises(UseError, match=message):
        probes.collapse(model(), LOSS, batches)


def test_a_loss_of_the_model_and_targets_of_booleans_are_refused() -> None:
    loss = th.workloads.ModelLoss(lambda model, batch: LOSS(model(batch[0]), batch[1]))
    with pytest.raises(UseError, match=r"needs loss\(logits, targets\)"):
        probes.collapse(Network(), loss, BATCHES)
    with pytest.raises(UseError, match=r"needs loss\(logits, targets\), but loss is None"):
        probes.collapse(Network(), None, BATCHES)  # type: ignore[arg-type]
    with pytest.raises(UseError, match=r"torch.bool: neural collapse is measured for classifiers"):
        probes.collapse(Network(), LOSS, (INPUTS, LABELS > 1))


def test_progress_goes_from_nothing_to_one() -> None:
    told: list[tuple[str, float]] = []
    probes.collapse(Network(), LOSS, BATCHES, progress=lambda *given: told.append(given))
    assert [title for title, _ in told] == ["class means"] * 3 + ["spread"] * 3
    assert [round(done, 6) for _, done in told] == [round(k / 6, 6) for k in range(1, 7)]
