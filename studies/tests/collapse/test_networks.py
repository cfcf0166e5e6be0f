"""Training of the networks of the study against a step written out, and what is kept of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import data
from theodolite.core.building import build_model
from theodolite.core.size import Size
from theodolite.data.batches import Examples
from theodolite_studies.collapse import networks as study
from theodolite_studies.collapse.networks import (
    ARMS,
    FEATURES,
    HEAD,
    PENALTY,
    Task,
    measure,
    networks,
    plain_mlp,
    squares,
    train,
)
from theodolite_studies.collapse.study import STUDY, CollapseSetting, cells


def examples(held_out: bool) -> Examples:
    return data.mixture(128, classes=3, dimensions=4, seed=int(held_out))


TINY = Task(partial(plain_mlp, inputs=4, outputs=3), Size(5, 2), examples, squares, 0.1, 1)


@pytest.mark.parametrize(("arm", "clip"), [*((arm, math.inf) for arm in ARMS), (PENALTY, 0.1)])
def test_steps_have_the_decay_and_the_penalty_of_their_arm(arm: str, clip: float) -> None:
    """Two steps of momentum 0.9, the second at half the learning rate."""
    trained, _ = train(replace(TINY, steps=2, clip=clip), arm, 0)
    model = build_model(TINY.build, TINY.size, seed=0)
    assert isinstance(model, nn.Sequential)
    wanted, momentum = list(model.parameters()), [torch.zeros_like(one) for one in model.parameters()]
    for step, lr in enumerate((0.1, 0.05)):
        inputs, labels = data.draw_examples(examples(False), num=128, seed=0, step=step)
        loss = 0.5 * (model(inputs) - torch.eye(3)[labels]).square().sum() / 128
        if arm == PENALTY:
            loss = loss + 0.005 / 2 * model[:-1](inputs).square().sum() / 128
        gradients = torch.autograd.grad(loss, wanted)
        norm = math.sqrt(sum(float(one.square().sum()) for one in gradients))
        gradients = tuple(one * min(1.0, clip / norm) for one in gradients)
        for place, (name, value) in enumerate(model.named_parameters()):
            decay = 0.005 if arm == (HEAD if name.startswith("4.") else FEATURES) else 0.0005
            momentum[place] = 0.9 * momentum[place] + gradients[place] + decay * value.detach()
            value.data -= lr * momentum[place]
    for value, after in zip(wanted, trained.parameters(), strict=True):
        torch.testing.assert_close(after, value, rtol=1e-5, atol=1e-6)


def test_the_record_has_nc1_of_explicit_scatters() -> None:
    task = replace(TINY, steps=20)
    (row,) = networks(task, FEATURES, 1)
    model, start = train(task, FEATURES, 1)
    assert row["profile start"] == pytest.approx(start.profile, rel=1e-4)
    assert isinstance(model, nn.Sequential)
    for when, held_out in (("end", False), ("held out", True)):
        few = examples(held_out)
        with torch.no_grad():
            rows = [model[:depth](few.inputs()).double().numpy() for depth in (2, 4)]
            right = (model(few.inputs()).argmax(1) == few.labels).double().mean().item()
        labels = few.labels.numpy()
        for found, features in zip(row[f"profile {when}"], rows, strict=True):
            means = np.stack([features[labels == label].mean(0) for label in range(3)])
            away, centred = features - means[labels], means - means.mean(0)
            wanted = (away**2).sum() / len(labels) / ((centred**2).sum() / 3)
            assert found == pytest.approx(wanted, rel=1e-3)
        assert row[f"accuracy {when}"] == pytest.approx(right, abs=1e-4)


def test_measuring_leaves_batch_norms_as_they_are() -> None:
    build = partial(study.ResNet, channels=1, outputs=3)
    images = Examples("images", torch.randn(128, 1, 4, 4), torch.arange(128) % 3, 3)
    task = Task(build, Size(2, 1), lambda held_out: images, nn.functional.cross_entropy, 0.1, 3)
    model, _ = train(task, study.USUAL, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure(model, task, images)
    assert len(found.profile) == 4  # before the first of three blocks, and after each
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])
    assert not model.training


def test_images_are_halved_by_means(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
    whole = Examples("two", pixels, torch.tensor([1, 0]), 2, (0.5,), (0.25,))
    asked: list[str] = []
    monkeypatch.setattr(data, "fashion_mnist", lambda split: asked.append(split) or whole)
    monkeypatch.setattr(study, "NUM", 2)
    found = study._fashion(False)
    first = (np.array([0, 1, 4, 5]).mean() / 255 - 0.5) / 0.25
    assert found.values.shape == (2, 1, 2, 2)
    assert float(found.values[0, 0, 0, 0]) == pytest.approx(first)
    assert found.labels.tolist() == [1, 0]
    study._fashion(True)
    assert asked == ["train", "test"]


def test_small_runs_have_seeds_of_their_own() -> None:
    assert isinstance(STUDY.full, CollapseSetting)
    assert isinstance(STUDY.small, CollapseSetting)
    full, small = ({cell["seed"] for cell in cells(setting)} for setting in (STUDY.full, STUDY.small))
    assert len(full) == 10
    assert not full & small
