"""The quality of samples: distances of samples from data, from a known map, and in features of a classifier.

`sliced_wasserstein` compares with samples of the data, and `map_error` with the exact map, which is known for
Gaussian mixtures. Images are compared by the Fréchet distance of features, as in FID, but these features are
of a small classifier of the same data set. Its values compare samples with each other; they are not FIDs.
"""

# N samples, M other samples, D dimensions, P projections, F features

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite.core.arguments import one_of, whole
from theodolite.core.arguments import seed as checked_seed
from theodolite.core.building import build_model, in_one_line
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import replacing
from theodolite.core.progress import Progress, silent
from theodolite.core.size import Size
from theodolite.data import Examples, cifar10, draw_examples, fashion_mnist, folder, generator, mnist
from theodolite.models import LeNet5
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted

DATA = {"fashion-mnist": fashion_mnist, "mnist": mnist, "cifar10": cifar10}
"""Data sets that `feature_distance` knows by name."""
SORTED_AT_ONCE = 64
"""Projections."""
AT_ONCE = 1000
"""Images that go through the classifier."""
PER_FEATURE = 10
"""Images needed for each feature: a covariance of fewer is too noisy."""


@dataclass(frozen=True)
class _Recipe:
    """How the classifier is built and trained. Another recipe has another file in the cache."""

    width: int = 6
    depth: int = 2
    epochs: int = 6
    batch: int = 128
    lr: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0

    @property
    def features(self) -> int:
        """Of the last hidden layer of a LeNet5."""
        return 14 * self.width


RECIPE = _Recipe()


def sliced_wasserstein(
    a: Tensor, b: Tensor, *, num_projections: int = 128, order: int = 2, seed: int = 0
) -> float:
    """The sliced Wasserstein distance of two sets of samples, which may differ in number.

    `SW_p = (mean over directions u of W_p(u·a, u·b)^p)^(1/p)`, where u is uniform on the sphere, and W_p in
    one dimension is the distance of the quantile functions, `(∫|A⁻¹(q) − B⁻¹(q)|^p dq)^(1/p)`. It is not zero
    for two sets of the same distribution: compare with that of two sets of data.

    Args:
        a: (N, ...); all dimensions after the first are those of one sample.
        b: (M, ...).
        num_projections: number of directions.
        order: p, 1 or 2.
        seed: of the directions, which are the same for all sets of the same dimension.

    A shift by s in D dimensions is a distance of about |s|/√D; in one dimension of |s|:

    >>> a = torch.tensor([[0.0], [1.0], [5.0]])
    >>> sliced_wasserstein(a, a + 2.0)
    2.0
    """
    check_examples("a", a)
    check_examples("b", b)
    if a.shape[1:] != b.shape[1:]:
        raise UseError(f"a has samples of {tuple(a.shape[1:])} and b of {tuple(b.shape[1:])}: give the same")
    whole("num_projections", num_projections, least=1)
    one_of("order", order, (1, 2))
    checked_seed("seed", seed)
    kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a_ND, b_MD = a.flatten(1).to(kind), b.flatten(1).to(a.device, kind)
    drawn = generator("sliced wasserstein", seed).standard_normal((num_projections, a_ND.shape[1]))
    directions_PD = torch.from_numpy(drawn).to(a.device)
    directions_PD = F.normalize(directions_PD, dim=1).to(kind)
    places_a, places_b, widths = _common_quantiles(len(a), len(b), a.device)
    total = 0.0
    for some_PD in directions_PD.split(SORTED_AT_ONCE):
        a_NP, b_MP = ((one @ some_PD.T).sort(0).values for one in (a_ND, b_MD))
        apart = (a_NP[places_a] - b_MP[places_b]).abs().double() ** order
        total += (widths @ apart).sum().item()
    return float((total / num_projections) ** (1 / order))


def map_error(samples: Tensor, exact: Tensor) -> float:
    """The mean distance `|x̂ − x|` between what a map makes of noises and what the exact map makes of them.

    Unlike a distance of distributions it also sees samples that are swapped.

    >>> map_error(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 2))
    2.5
    """
    check_examples("samples", samples)
    check_examples("exact", exact)
    if samples.shape != exact.shape:
        raise UseError(
            f"samples has shape {tuple(samples.shape)} and exact {tuple(exact.shape)}: "
            "give what both maps make of the same noise"
        )
    apart = samples.double() - exact.to(samples.device).double()
    return float(apart.flatten(1).norm(dim=1).mean())


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Fréchet (Wasserstein-2) distance of the Gaussians with the moments of two sets of features.

    `|m_a − m_b|² + Tr(S_a + S_b − 2 (S_a^½ S_b S_a^½)^½)` in float64, with means m and covariances S. Few
    samples make it larger, so compare values of the same number of samples.

    Args:
        a: features (N, F).
        b: features (M, F).

    >>> a = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> frechet_distance(a, 2 * a + 3)  # standard deviations 1 and 2, means 0 and 3
    10.0
    """
    for name, value in (("a", a), ("b", b)):
        check_examples(name, value)
        if value.ndim != 2 or len(value) < 2:
            raise UseError(f"{name} has shape {tuple(value.shape)}: give two rows of features or more")
    if a.shape[1] != b.shape[1]:
        raise UseError(f"a has {a.shape[1]} features and b has {b.shape[1]}: give the same features")
    return _frechet(_moments(a), _moments(b))


@dataclass(frozen=True)
class FeatureDistance(Result):
    """How far images are from a data set, in features of a classifier. Made by `feature_distance`."""

    kind: ClassVar[str] = "feature distance"
    loads: ClassVar[bool] = True
    data: str
    value: float
    """The Fréchet distance of the samples from the training set."""
    floor: float
    """That of test images: what perfect samples would have."""
    samples: int
    floor_samples: int
    """Test images behind the floor: as many as samples, if there are so many."""
    features: int
    accuracy: float
    """Of the classifier, on the test set."""
    classifier: str
    """The beginning of a hash of its weights: only distances in the same features can be compared."""

    def table(self) -> Table:
        """The distances of samples and of test images."""
        rows = [("samples", self.samples, self.value), ("test images", self.floor_samples, self.floor)]
        return Table((f"compared with {self.data}", "images", "feature distance"), rows)

    def blocks(self) -> Iterator[Block]:
        """The distances, and whose features they are of."""
        yield self.table()
        yield (
            f"{counted(self.features, 'feature')} of classifier {self.classifier}, which is right on "
            f"{100 * self.accuracy:.1f} % of the test images"
        )


@exclusive()
def feature_distance(
    samples: Tensor, data: str | tuple[Examples, Examples], *, progress: Progress | None = None
) -> FeatureDistance:
    """The Fréchet distance of samples from the training images, in features of a classifier of this data set.

    The classifier is a LeNet-5 with 84 features before its readout. At first use it is trained on the CPU for
    about a minute and saved in `classifiers` in the data folder, with the moments of the training images. One
    that is trained on another machine can differ by rounding, and so can its features: the result names the
    classifier, and only distances with the same one can be compared.

    Args:
        samples: images (N, C, H, W), normalised as `Examples.inputs` are; values outside the range of pixels
            are clipped, as in a file of an image. At least 840, and better as many as there are test images.
        data: `fashion-mnist`, `mnist` or `cifar10`; or the training and the test images with their labels,
            each as `theodolite.data.Examples`. The labels are what the classifier learns.
        progress: called with what is being done and the fraction done.
    """
    train, test = _parts(data)
    _check_images(samples, train, test)
    judge = _judge(train, test, progress or silent)
    found = _moments(_features(judge.model, _clipped(samples.detach(), train).split(AT_ONCE)))
    compared = min(len(samples), len(judge.test_features))
    reference = judge.mean, judge.covariance
    (progress or silent)("measuring", 1.0)
    return FeatureDistance(
        train.name,
        _frechet(found, reference),
        _frechet(_moments(judge.test_features[:compared]), reference),
        len(samples),
        compared,
        RECIPE.features,
        judge.accuracy,
        judge.name,
    )


def check_examples(name: str, value: Any) -> None:
    """Check that it is a tensor of finite floats (examples, ...)."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2 or not value.numel():
        said = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UseError(f"{name} is {said}: give a tensor of floats (examples, ...)")
    if not bool(value.isfinite().all()):
        raise UseError(f"{name} has values that are not finite")


def _common_quantiles(num_a: int, num_b: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pieces of [0, 1] in which both quantile functions are constant: ranks in a and b, and widths."""
    # In units of 1/(num_a num_b), so that equal ends are equal.
    ends = torch.cat([num_b * torch.arange(num_a + 1), num_a * torch.arange(num_b + 1)]).unique()
    starts, widths = ends[:-1], ends.diff().double() / (num_a * num_b)
    return (starts // num_b).to(device), (starts // num_a).to(device), widths.to(device)


_Moments = tuple[Tensor, Tensor]
"""Mean (F,) and covariance (F, F), in float64."""


def _moments(features_NF: Tensor) -> _Moments:
    wide = features_NF.detach().double()
    mean_F = wide.mean(0)
    return mean_F, (wide - mean_F).T @ (wide - mean_F) / (len(wide) - 1)


def _frechet(a: _Moments, b: _Moments) -> float:
    (mean_a, cov_a), (mean_b, cov_b) = a, (one.to(a[0].device) for one in b)
    values, vectors = torch.linalg.eigh(cov_a)
    root_a = vectors * values.clamp_min(0).sqrt() @ vectors.T
    overlap = torch.linalg.eigvalsh(root_a @ cov_b @ root_a).clamp_min(0).sqrt().sum()
    found = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap
    return max(float(found), 0.0)


@dataclass(frozen=True)
class _Judge:
    """A trained classifier, with what it sees in its data."""

    model: LeNet5
    accuracy: float
    mean: Tensor
    """Of the features of the training images, (F,), in float64."""
    covariance: Tensor
    test_features: Tensor
    name: str


def _judge(train: Examples, test: Examples, progress: Progress) -> _Judge:
    """The classifier of a data set, from the cache or newly trained."""
    digest = hashlib.blake2b(repr((RECIPE, train.classes, train.mean, train.std)).encode())
    for tensor in (train.values, train.labels, test.values, test.labels):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    safe = re.sub(r"[^\w-]", "_", train.name)
    path = folder() / "classifiers" / f"{safe}-{digest.hexdigest()[:16]}.safetensors"
    if not path.exists():
        _check_writable(path)
        # Autograd and saved tensors, also where the caller has switched them off.
        with torch.inference_mode(False), torch.enable_grad():
            model = _trained(train, progress)
        _write(path, model, train, test, progress)
    return _read(path, train)


def _untrained(train: Examples) -> LeNet5:
    shape = tuple(train.values.shape[1:])
    if len(shape) != 3:
        raise UseError(f"{train.name} has examples of shape {shape}: give images (C, H, W)")
    build = partial(LeNet5, image=shape, outputs=train.classes, variant="bias")
    model = build_model(build, Size(RECIPE.width, RECIPE.depth), seed=RECIPE.seed)
    assert isinstance(model, LeNet5)
    return model.float().eval()


def _trained(train: Examples, progress: Progress) -> LeNet5:
    model, num = _untrained(train).train(), RECIPE.batch
    steps = RECIPE.epochs * (len(train.labels) // num)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.lr, weight_decay=RECIPE.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.lr, total_steps=steps)
    for step in range(steps):
        inputs, labels = draw_examples(train, num=num, seed=RECIPE.seed, step=step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.float()), labels).backward()
        optimizer.step()
        schedule.step()
        progress(f"training a classifier of {train.name}", 0.8 * (step + 1) / steps)
    return model.eval()


def _write(path: Path, model: LeNet5, train: Examples, test: Examples, progress: Progress) -> None:
    from safetensors.torch import save_file

    progress(f"features of {train.name}", 0.8)
    mean_F, covariance_FF = _moments(_features(model, _images(train)))
    progress(f"features of {train.name}", 0.95)
    test_NF = _features(model, _images(test))
    with torch.no_grad():
        right = model.layers[-1](test_NF).argmax(1) == test.labels
    found = {"mean": mean_F, "covariance": covariance_FF, "test": test_NF, "right": right.double().mean()}
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    try:
        with replacing(path) as part:
            save_file({**found, **weights}, part)
    except OSError as error:
        raise UseError(f"{path} cannot be written: {error.strerror}") from error


def _read(path: Path, train: Examples) -> _Judge:
    from safetensors.torch import load

    model = _untrained(train)
    try:
        held = load(path.read_bytes())  # a copy: a mapped file that is cut short ends the process
        weights = {name: held[f"model.{name}"] for name in model.state_dict()}
        model.load_state_dict(weights)
        found = held["right"].item(), held["mean"], held["covariance"], held["test"]
    except Exception as error:
        raise UseError(f"{path} is damaged ({in_one_line(error)}): delete it, it is made again") from error
    digest = hashlib.blake2b()
    for tensor in weights.values():
        digest.update(tensor.numpy().data)
    return _Judge(model, *found, digest.hexdigest()[:8])


@torch.no_grad()
def _features(model: LeNet5, images: Iterable[Tensor]) -> Tensor:
    """What enters the readout, (N, F)."""
    return torch.cat([model.layers[:-1](some.cpu().float()) for some in images])


def _images(examples: Examples) -> Iterator[Tensor]:
    """All images, some at a time."""
    return (examples.inputs(rows) for rows in torch.arange(len(examples.labels)).split(AT_ONCE))


def _clipped(samples: Tensor, train: Examples) -> Tensor:
    """Samples within the range of pixels, if the data are pixels."""
    if train.values.dtype != torch.uint8:
        return samples
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, samples.shape[1], 1, 1)
    low, high = Examples("ends", pixels, torch.zeros(2), 1, train.mean, train.std).inputs().to(samples)
    return samples.clamp(low, high)


def _parts(data: Any) -> tuple[Examples, Examples]:
    """The training and the test images."""
    if isinstance(data, str):
        load = DATA[one_of("data", data, DATA)]
        return load("train"), load("test")
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(one, Examples) for one in data)):
        raise UseError(
            f"data is {described(data)}: give {', '.join(DATA)}, or the training and the test images with "
            "their labels, each a theodolite.data.Examples(name, images, labels, classes)"
        )
    return data


def _check_images(samples: Any, train: Examples, test: Examples) -> None:
    check_examples("samples", samples)
    shapes = [tuple(one.shape[1:]) for one in (samples, train.values, test.values)]
    if len(set(shapes)) > 1:
        raise UseError(
            f"samples are of shape {shapes[0]}, training images of {shapes[1]}, test images of {shapes[2]}: "
            "give images of the same shape"
        )
    fewest = PER_FEATURE * RECIPE.features
    numbers = {"samples": samples, "training images": train.labels, "test images": test.labels}
    for name, counted_ones in numbers.items():
        if len(counted_ones) < fewest:
            raise UseError(
                f"there are {len(counted_ones)} {name}: give {fewest} or more, {PER_FEATURE} for each of "
                f"{RECIPE.features} features"
            )


def _check_writable(path: Path) -> None:
    """Say that the cache cannot be written before a minute is spent on what it is to hold."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UseError(
            f"{path.parent} cannot be made or written to: {error.strerror}. Set THEODOLITE_DATA to a folder "
            "that can"
        ) from error
