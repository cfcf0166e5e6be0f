"""Flow maps of Fashion-MNIST, and plain flows of it at several widths, with samples as pictures."""

# N images, C channels, H height, W width

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite import data, flows
from theodolite.core.building import build_model
from theodolite.core.size import Size
from theodolite.models import DiT
from theodolite.planning import plan
from theodolite.workloads import workload
from theodolite_studies.flow_maps.setting import ARMS, IMAGE_JUMPS, FlowMapSetting
from theodolite_studies.flow_maps.training import WeightAverage, normal, train
from theodolite_studies.framework.records import Record, short

CLASSES = 10
LR, WARMUP, CLIP = 2.0**-8, 100, 1.0
"""Of AdamW on images, at width 128."""
AVERAGED, AVERAGED_EARLY = 0.999, 0.99
"""Decays of the averages of the weights: of maps, and of networks that are drawn after 30 steps."""
AT_ONCE = 1000
"""Samples in one call."""
PICTURES, ACROSS = 6, 3
"""Images of a mosaic, and how many of them are side by side."""
STEPS = 20
"""Of Heun's method, for the samples of plain flows."""


def draw(num: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Training images and their classes."""
    return data.draw_examples(data.fashion_mnist("train"), num=num, seed=seed, step=step)


def map_of_images(kind: str, seed: int, setting: FlowMapSetting, device: str) -> Iterator[Record]:
    """Train one arm on Fashion-MNIST; feature distances of its jumps and of Euler's method."""
    arm, steps = ARMS[kind], setting.image_steps
    build = partial(DiT, times=2, classes=CLASSES)
    net = build_model(build, setting.image_size, seed=seed).to(device)
    course = train(
        net,
        flows.map_loss(arm.loss, stop_gradients=arm.stop_gradients),
        flows.map_batches(partial(draw, setting.image_batch), classes=CLASSES),
        torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0),
        seed=seed,
        steps=steps,
        warmup=min(WARMUP, steps // 10),
        averaged=AVERAGED,
        clip=CLIP,
    )
    record: dict[str, Any] = {
        "gradient": short(course.gradients[len(course.gradients) // 10 :].max().item()),
        "loss": short(course.losses[-(len(course.losses) // 10 + 1) :].mean().item()),
        "diverged": course.diverged,
    }
    if not course.diverged:
        record |= _quality(course.average.network(), setting.images, device, jumps=kind != "matching")
    yield record


@torch.no_grad()
def _quality(net: nn.Module, images: int, device: str, *, jumps: bool) -> Record:
    """Feature distances by the number of jumps and of Euler steps; pictures of the first samples."""
    noise = normal("images", 0, (images, 1, 28, 28))
    labels = torch.arange(images) % CLASSES
    ways = ("map", "euler") if jumps else ("euler",)
    found: dict[str, Any] = {way: [] for way in ways} | {"pictures": []}
    for number in IMAGE_JUMPS:
        for way in ways:
            sampler = partial(_jumped if way == "map" else _stepped, net, number)
            samples = _in_parts(sampler, noise, labels, device)
            compared = flows.feature_distance(samples, "fashion-mnist")
            found[way].append(short(compared.value))
            if way == ways[0]:
                found["pictures"].append(picture(samples[:PICTURES]))
    return found | {"floor": short(compared.floor), "classifier": compared.classifier}


def _jumped(net: nn.Module, number: int, noise: Tensor, labels: Tensor) -> Tensor:
    return flows.sample_map(flows.FlowMap(net, (labels,)), noise, number)


def _stepped(net: nn.Module, number: int, noise: Tensor, labels: Tensor) -> Tensor:
    return flows.sample(flows.FlowMap(net, (labels,)).velocity, noise, steps=number)


def _in_parts(
    sampler: Callable[[Tensor, Tensor], Tensor], noise: Tensor, labels: Tensor, device: str
) -> Tensor:
    parts = zip(noise.split(AT_ONCE), labels.split(AT_ONCE), strict=True)
    return torch.cat([sampler(some.to(device), own.to(device)).cpu() for some, own in parts])


def samples_at_width(width: int, seed: int, setting: FlowMapSetting, device: str) -> Iterator[Record]:
    """Train `dit-fashion` at a width by the plan from the base size; pictures of one noise on the way."""
    flow, base = workload("dit-fashion"), setting.image_size
    inputs, _ = flow.batch(seed, 0)
    planned = plan(flow.build, inputs, base=base, size=Size(width, base.depth), lr=LR)
    net = planned.build(seed).to(device)
    found: list[Record] = []

    def look(steps: int, average: WeightAverage) -> None:
        if steps in setting.moments:
            noise, labels = normal("widths", seed, (PICTURES, 1, 28, 28)), torch.arange(PICTURES)
            field = flows.field_of(average.network(), labels.to(device))
            samples = flows.sample(field, noise.to(device), steps=STEPS, method="heun")
            found.append({"step": steps, "picture": picture(samples.cpu())})

    steps = max(setting.moments)
    course = train(
        net,
        lambda model, batch: flows.velocity_loss(model(*batch[0]), batch[1]),
        flow.batch,
        planned.optimizer(net, check_gradients=False),
        seed=seed,
        steps=steps,
        warmup=min(WARMUP, steps // 10),
        averaged=AVERAGED_EARLY,
        clip=CLIP,
        after=look,
    )
    for record in found:
        near = course.losses[max(0, record["step"] - 20) : record["step"]]
        yield {**record, "loss": short(near.mean().item(), 4)}


def picture(samples_NCHW: Tensor) -> str:
    """Grey samples as one PNG image, in base64."""
    known = data.fashion_mnist("test")
    (mean,), (std,) = known.mean, known.std
    pixels = (255 * (samples_NCHW[:, 0].double() * std + mean)).round().clamp(0, 255)
    return base64.b64encode(encode_png(mosaic(pixels.to(torch.uint8).numpy(), ACROSS))).decode()


def mosaic(images_NHW: NDArray[np.uint8], across: int) -> NDArray[np.uint8]:
    """Images side by side, row by row, the last row filled with black.

    >>> mosaic(np.array([[[1]], [[2]], [[3]]], dtype=np.uint8), 2).tolist()
    [[1, 2], [3, 0]]
    """
    num, high, wide = images_NHW.shape
    rows = math.ceil(num / across)
    whole = np.zeros((rows * across, high, wide), np.uint8)
    whole[:num] = images_NHW
    return whole.reshape(rows, across, high, wide).swapaxes(1, 2).reshape(rows * high, across * wide)


def encode_png(pixels_HW: NDArray[np.uint8]) -> bytes:
    """An 8-bit grey image in PNG, without filters.

    >>> encode_png(np.zeros((2, 3), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'

    Reference: PNG specification, third edition, W3C 2025, sections 5, 9 and 11.
    """
    high, wide = pixels_HW.shape
    rows = np.concatenate([np.zeros((high, 1), np.uint8), pixels_HW], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", wide, high, 8, 0, 0, 0, 0)
    packed = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, body) for kind, body in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    )
