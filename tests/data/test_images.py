"""The images agree with what is published of them, whichever form they come in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite import UseError, data
from theodolite.data.images import decode_idx
from theodolite.data.sources import source


def _statistics(examples: data.Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel, exactly, from counts of the 256 values."""
    channels = [channel.flatten().bincount(minlength=256).double() for channel in examples.values.unbind(1)]
    value = torch.arange(256).double() / 255
    mean = torch.stack([count @ value / count.sum() for count in channels])
    square = torch.stack([count @ value.square() / count.sum() for count in channels])
    return mean, (square - mean.square()).sqrt()


def test_fashion_mnist_has_6000_of_each_class(need) -> None:
    need("fashion-mnist")
    assert data.fashion_mnist().labels.bincount().tolist() == [6000] * 10
    assert data.fashion_mnist("test").labels.bincount().tolist() == [1000] * 10


def test_fashion_mnist_begins_with_an_ankle_boot_and_a_tshirt(need) -> None:
    need("fashion-mnist")
    assert data.fashion_mnist().labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_mnist_has_the_published_numbers_of_digits(need) -> None:
    need("mnist")
    counts = data.mnist().labels.bincount().tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.mnist("test").labels.bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]


@pytest.mark.parametrize(
    ("name", "load"),
    [("fashion-mnist", data.fashion_mnist), ("mnist", data.mnist), ("cifar10", data.cifar10)],
)
def test_the_training_set_is_normalised_to_mean_0_and_deviation_1(name: str, load, need) -> None:
    need(name)
    examples = load()
    mean, std = _statistics(examples)
    assert torch.allclose(mean, torch.tensor(examples.mean).double(), atol=1e-4)
    assert torch.allclose(std, torch.tensor(examples.std).double(), atol=1e-4)
    inputs = examples.inputs(torch.arange(2000))
    assert abs(inputs.mean().item()) < 0.05
    assert abs(inputs.std().item() - 1) < 0.05


def test_cifar10_has_the_published_means_to_the_last_digit(need) -> None:
    need("cifar10")
    train = data.cifar10()
    assert train.labels.bincount().tolist() == [5000] * 10
    assert train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.cifar10("test").labels.bincount().tolist() == [1000] * 10
    means = (_statistics(train)[0] * 255).tolist()
    assert means == pytest.approx([125.306918046875, 122.950394140625, 113.86538318359375], abs=1e-11)


def test_cifar10_as_png_holds_the_bytes_of_the_original_binary_files(need) -> None:
    """The SHA-256 of the .bin files are published; those files are rebuilt here from what was decoded."""
    need("cifar10")
    published = {file.name: file.sha256 for file in source("cifar10").forms[0]}
    batches = {
        f"data_batch_{i + 1}.bin": (data.cifar10(), slice(10_000 * i, 10_000 * (i + 1))) for i in range(5)
    }
    batches["test_batch.bin"] = (data.cifar10("test"), slice(None))
    for name, (examples, rows) in batches.items():
        assert hashlib.sha256(_records(examples, rows)).hexdigest() == published[name]


def test_cifar10_in_the_original_binary_form_is_the_same_set(need, tmp_path: Path, monkeypatch) -> None:
    need("cifar10")
    expected = data.cifar10("test")
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    (place / "test_batch.bin").write_bytes(_records(expected, slice(None)))
    for i in range(1, 6):
        with (place / f"data_batch_{i}.bin").open("wb") as file:
            file.truncate(10_000 * 3073)  # the right length, the wrong bytes
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    found = data.cifar10("test")
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.labels, expected.labels)
    with pytest.raises(UseError, match=r"data_batch_1.bin is not the expected file"):
        data.cifar10("train")


def _records(examples: data.Examples, rows: slice) -> bytes:
    pixels, labels = examples.values[rows].flatten(1).numpy(), examples.labels[rows].numpy().astype(np.uint8)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file of bytes: it begins with "),
        (b"\x1f\x8b\x08\x00", "begins with 1f8b0800"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), r"damaged: 2 bytes for the shape \(3,\)"),
        (bytes([0, 0, 8, 3, 0, 0, 0, 3]), "begins with 00000803"),
    ],
)
def test_what_is_not_idx_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(UseError, match=message):
        decode_idx(content)


def test_images_have_no_validation_part() -> None:
    with pytest.raises(UseError, match="mnist has no 'validation' part: give 'train' or 'test'"):
        data.mnist("validation")
