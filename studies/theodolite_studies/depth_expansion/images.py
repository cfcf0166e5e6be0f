"""Labelled images that lie on the device as bytes, with crops and mirror images cut there."""

# N images, B a batch, S side, C channels

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
