"""Labelled images on the device, and networks of one shape that are trained on them side by side.

On a GPU a step of all of them is one CUDA graph, each network on a stream of its own: launching thousands of
small kernels costs nothing then, and the kernels of narrow networks run beside one another. A step needs
nothing from the host: images, order, crops and learning rates lie on the device, and the step counts itself.
"""

# T steps, N images, B batch, C channels, S side

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.data import Examples, Split, cifar10, generator

PAD = 4
"""Black pixels on each side of an image that is cropped."""
TEMPLATES = "templates"


@dataclass(frozen=True)
class Images:
    """Images (N, S + 2·PAD, S + 2·PAD, C) as bytes with a black border, and their labels."""

    padded: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def side(self) -> int:
        """Of an image without its border."""
        return self.padded.shape[1] - 2 * PAD

    def plain(self, rows_B: Tensor) -> Tensor:
        """These images as they are, normalised, (B, C, S, S)."""
        inner = slice(PAD, PAD + self.side)
        return self._normalised(self.padded[rows_B, inner, inner])

    def cut(self, rows_B: Tensor, down_B: Tensor, across_B: Tensor, mirrored_B: Tensor) -> Tensor:
        """Crops whose upper left corner is so far down and across, those marked 1 mirrored; (B, C, S, S).

        A crop from the middle is the image itself:

        >>> few = images_of(TEMPLATES, "train", num=2, side=8)
        >>> rows, middle = torch.arange(2), torch.full((2,), PAD)
        >>> torch.equal(few.cut(rows, middle, middle, torch.tensor([0, 0])), few.plain(rows))
        True
        """
        span_S = torch.arange(self.side, device=self.padded.device)
        down_BS = down_B[:, None] + span_S
        turned_BS = torch.where(mirrored_B[:, None] > 0, self.side - 1 - span_S, span_S)
        across_BS = across_B[:, None] + turned_BS
        return self._normalised(
            self.padded[rows_B[:, None, None], down_BS[:, :, None], across_BS[:, None, :]]
        )

    def _normalised(self, pixels_BSSC: Tensor) -> Tensor:
        values_BSSC = (pixels_BSSC.to(self.mean.dtype) / 255 - self.mean) / self.std
        values_BCSS = values_BSSC.permute(0, 3, 1, 2)  # which is channels-last in memory already
        return values_BCSS.contiguous(memory_format=layout_on(values_BCSS.device))


def layout_on(device: torch.device | str) -> torch.memory_format:
    """Channels-last on a GPU, where it is faster; contiguous on a CPU, where channels-last is not safe.

    On CPUs without AVX-512 the oneDNN of torch 2.13 writes past the end of its memory in the backward pass
    of a channels-last 1×1 convolution in float32 with stride 2 and 2 to 7 input channels, such as the
    shortcuts of a narrow ResNet. The process aborts ("corrupted size vs. prev_size", "double free or
    corruption") or goes on with a damaged heap. The contiguous layout takes another kernel.
    """
    return torch.channels_last if torch.device(device).type == "cuda" else torch.contiguous_format


def images_of(
    name: str,
    split: Split,
    *,
    num: int | None = None,
    side: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Images:
    """CIFAR-10 or `templates`, which are computed; the first `num` of them.

    Args:
        name: `cifar10` or `templates`.
        split: `train` or `test`.
        num: all, if it is not given.
        side: of computed images.
        device: where they lie.
        dtype: of what is cut from them.
    """
    if name == "cifar10":
        examples = cifar10(split)
    elif name == TEMPLATES:
        examples = templates(num or 1024, split, side=side)
    else:
        raise UseError(f"there are no images {name!r} in this study: say 'cifar10' or {TEMPLATES!r}")
    pixels_NCSS = examples.values[:num].to(device)
    mean, std = (torch.tensor(each, device=device, dtype=dtype) for each in (examples.mean, examples.std))
    padded = F.pad(pixels_NCSS, (PAD,) * 4).permute(0, 2, 3, 1).contiguous()
    return Images(padded, examples.labels[:num].to(device), mean, std)


def templates(num: int, split: Split, *, side: int = 16, classes: int = 10) -> Examples:
    """Smooth patterns, one for each class, moved by up to two pixels under much noise.

    Any number of them can be had, and no file is needed. The patterns are the same in both splits.

    >>> templates(4, "test").values.shape
    torch.Size([4, 3, 16, 16])
    """
    coarse = generator("templates", classes, side).standard_normal((classes, 3, 4, 4))
    patterns_KCSS = F.interpolate(torch.from_numpy(coarse), size=side, mode="bicubic").numpy()
    random = generator("templates", split, num)
    labels_N = np.arange(num) % classes
    moves_N2 = random.integers(-2, 3, (num, 2))
    drawn = [
        np.roll(patterns_KCSS[label], move, (1, 2)) for label, move in zip(labels_N, moves_N2, strict=True)
    ]
    noisy_NCSS = np.stack(drawn) + 1.5 * random.standard_normal((num, 3, side, side))
    pixels_NCSS = np.clip(128 + 30 * noisy_NCSS, 0, 255).astype(np.uint8)
    half = (0.5,) * 3
    return Examples(
        TEMPLATES, torch.from_numpy(pixels_NCSS), torch.from_numpy(labels_N), classes, half, (0.2,) * 3
    )


EAGER_STEPS = 3
"""Before the step is captured: cuDNN chooses its kernels in them."""


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum; the learning rate rises linearly, then falls linearly to zero."""

    epochs: int
    batch: int
    lr: float
    augmented: bool
    """Random crops of images with a border of four pixels, and mirror images."""
    momentum: float = 0.9
    decay: float = 5e-4
    """Weight decay, of every parameter as in PyTorch's SGD."""
    warmup: float = 0.1
    """Part of the steps."""

    def steps(self, num: int) -> int:
        """Of a training set of so many images. What an epoch leaves over is dropped."""
        if num < self.batch:
            raise UseError(f"{num} images are too few for a batch of {self.batch}")
        return self.epochs * (num // self.batch)

    def rates(self, steps: int) -> Tensor:
        """The learning rate of every step.

        >>> Recipe(1, 1, lr=1.0, augmented=False, warmup=0.4).rates(5).tolist()
        [0.5, 1.0, 1.0, 0.666..., 0.333...]
        """
        rising = max(1, round(self.warmup * steps))
        up = torch.arange(1, rising + 1, dtype=torch.float64) / rising
        down = torch.arange(steps - rising, 0, -1, dtype=torch.float64) / (steps - rising)
        return self.lr * torch.cat([up, down])


def train(
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    images: Images,
    recipe: Recipe,
    *,
    half: bool = False,
) -> Tensor:
    """Train each model with its seed's order and crops. The loss of every step and model, (T, models).

    Args:
        models: on the device of the images; changed in place.
        seeds: one for each model.
        images: what is trained on.
        recipe: how.
        half: bfloat16 autocast.
    """
    device = images.padded.device
    steps = recipe.steps(len(images))
    number = torch.zeros(1, dtype=torch.long, device=device)
    rates = recipe.rates(steps).to(device, images.mean.dtype)
    losses = torch.zeros(steps, len(models), device=device)
    learners = [
        _Learner(model.train(), itinerary(len(images), recipe, seed).to(device), losses[:, place : place + 1])
        for place, (model, seed) in enumerate(zip(models, seeds, strict=True))
    ]

    def advance(learner: _Learner) -> None:
        learner.step(images, recipe, number, rates, half=half)

    if device.type == "cuda":
        _by_graph(learners, advance, number, steps)
    else:
        for _ in range(steps):
            for learner in learners:
                advance(learner)
            number += 1
    for model in models:
        model.eval()
    return losses


def itinerary(num: int, recipe: Recipe, seed: int) -> Tensor:
    """What every step looks at: row, how far down and across, and mirrored or not; (4, T, B).

    >>> rows, down, *_ = itinerary(6, Recipe(2, 3, lr=0.1, augmented=False), seed=0)
    >>> rows.reshape(2, 6).sort().values.tolist(), down.unique().tolist()
    ([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]], [4])
    """
    random, turns = generator("depth-expansion", seed), num // recipe.batch
    rows = np.stack([random.permutation(num)[: turns * recipe.batch] for _ in range(recipe.epochs)])
    rows = rows.reshape(recipe.steps(num), recipe.batch)
    if recipe.augmented:
        down, across = random.integers(0, 2 * PAD + 1, (2, *rows.shape))
        mirrored = random.integers(0, 2, rows.shape)
    else:
        down = across = np.full_like(rows, PAD)
        mirrored = np.zeros_like(rows)
    return torch.from_numpy(np.stack([rows, down, across, mirrored]))


@dataclass
class _Learner:
    """A network, and what its optimizer remembers."""

    model: nn.Module
    way: Tensor
    losses: Tensor
    parameters: list[Tensor] = field(init=False)
    momenta: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())
        self.momenta = [torch.zeros_like(each) for each in self.parameters]

    def step(self, images: Images, recipe: Recipe, number: Tensor, rates: Tensor, *, half: bool) -> None:
        rows, down, across, mirrored = self.way.index_select(1, number)[:, 0]
        inputs_BCSS = images.cut(rows, down, across, mirrored)
        device = inputs_BCSS.device.type
        # What is cast is used once: a cache would only hold on to memory of the graph.
        with torch.autocast(device, torch.bfloat16, cache_enabled=False) if half else nullcontext():
            logits = self.model(inputs_BCSS)
        loss = F.cross_entropy(logits.to(images.mean.dtype), images.labels[rows])
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            pulled = torch._foreach_add(gradients, self.parameters, alpha=recipe.decay)
            torch._foreach_mul_(self.momenta, recipe.momentum)
            torch._foreach_add_(self.momenta, pulled)
            rate = rates.index_select(0, number)[0]
            torch._foreach_sub_(self.parameters, torch._foreach_mul(self.momenta, rate))
            self.losses.index_copy_(0, number, loss.detach().to(self.losses.dtype)[None, None])


def _by_graph(
    learners: Sequence[_Learner], advance: Callable[[_Learner], None], number: Tensor, steps: int
) -> None:
    streams = [torch.cuda.Stream() for _ in learners]

    def together() -> None:
        main = torch.cuda.current_stream()
        for learner, stream in zip(learners, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                advance(learner)
        for stream in streams:
            main.wait_stream(stream)
        number.add_(1)

    side = torch.cuda.Stream()  # a capture does not begin on the default stream, so nothing else does
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(min(EAGER_STEPS, steps)):
            together()
    torch.cuda.synchronize()
    if steps <= EAGER_STEPS:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together()
    for _ in range(steps - EAGER_STEPS):
        graph.replay()
    torch.cuda.synchronize()
