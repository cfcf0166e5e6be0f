"""A kernel of torch 2.13's oneDNN writes past its memory on CPUs without AVX-512: nothing of ours calls it.

It is the backward pass of a channels-last 1×1 convolution in float32 with stride 2 and 2 to 7 input channels;
`theodolite_studies.depth_expansion.training.layout_on` has the words. The mode below looks at every
convolution that autograd differentiates and refuses such a one before it runs, so these tests are safe on any
CPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import theodolite as th
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.run import Run
from theodolite.fleet.vectorised import vectorised
from theodolite.models import ResNet
from theodolite_studies.depth_expansion.study import SMALL, trained


class Refusing(TorchDispatchMode):
    """Refuses the backward pass that damages the heap, and counts strided 1×1 convolutions."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            _, x, weight, _, stride, *_ = args
            pointwise = x.ndim == 4 and weight.shape[2:] == (1, 1) and max(stride) > 1
            self.seen += pointwise
            if pointwise and 1 < x.shape[1] < 8 and (_is_channels_last(x) or _is_channels_last(weight)):
                raise AssertionError(f"channels-last 1×1 convolution, {x.shape[1]} channels, stride {stride}")
        return func(*args, **(kwargs or {}))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(8, 3, 8, 8, generator=drawn), torch.randint(10, (8,), generator=drawn)


NARROW = th.Workload("narrow", ResNet, _batch, F.cross_entropy, th.Size(4, 1))


def test_such_a_convolution_is_recognised():
    convolution = nn.Conv2d(4, 8, 1, stride=2)
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(AssertionError, match="channels-last 1×1 convolution, 4 channels"), Refusing():
        convolution(x).sum().backward()


def test_the_study_of_narrow_resnets_on_a_cpu_never_comes_to_it():
    regime = SMALL.regimes["fitted"]
    recipe = dataclasses.replace(regime.recipe, epochs=1, batch=16)
    few = dataclasses.replace(
        SMALL, test=16, seeds=(0,), regimes={"fitted": dataclasses.replace(regime, images=16, recipe=recipe)}
    )
    few = dataclasses.replace(few, reader=dataclasses.replace(few.reader, images=16), candidates=8)
    with Refusing() as mode:
        trained(few, "fitted", 1, 2)
    assert mode.seen > 0


@pytest.mark.parametrize("engine", [serial, vectorised])
def test_a_run_of_a_narrow_resnet_never_comes_to_it(engine):
    runs = [
        Run("narrow", NARROW.size, 0.1, parameterization="standard", steps=2, held_out=1, seed=seed)
        for seed in (0, 1)
    ]
    with Refusing() as mode:
        outcomes = list(engine(runs, Resources(workloads={"narrow": NARROW})))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert mode.seen > 0


@pytest.mark.parametrize("probe", [th.probes.curvature, th.probes.sharpness, th.probes.signal])
def test_a_probe_of_a_narrow_resnet_never_comes_to_it(probe):
    batches = [_batch(0, 0)] if probe is not th.probes.signal else [_batch(0, step) for step in range(2)]
    with Refusing() as mode:
        probe(ResNet(4, 1), F.cross_entropy, *batches)
    assert mode.seen > 0
