"""He et al.'s networks for CIFAR: layers, counts, shortcuts and norms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from theodolite.core.errors import UseError
from theodolite.models import ResNet
from theodolite.models.resnet import ConvolutionalBlock, make_map_norm


@pytest.mark.parametrize("depth", [1, 3])
def test_an_image_passes_six_n_plus_two_layers(depth):
    model = ResNet(4, depth)
    passed = []
    for module in model.modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)):
            module.register_forward_hook(lambda layer, *_: passed.append(layer))
    model(torch.randn(2, 3, 32, 32))
    assert len(passed) == 6 * depth + 2
    assert len(set(passed)) == len(passed)


def test_maps_halve_their_side_and_double_their_channels_between_stages():
    model = ResNet(4, 2)
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    model(torch.randn(1, 3, 32, 32))
    assert shapes == [(4, 32, 32)] * 2 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2


@pytest.mark.parametrize("norm, per_channel", [("batch", 2), ("layer", 2), ("rms", 1)])
def test_the_number_of_parameters_is_the_formula(norm, per_channel):
    n, w = 3, 16
    convolutions = 9 * (3 * w + 2 * n * w * w)
    for channels in (2 * w, 4 * w):
        convolutions += 9 * (channels // 2 * channels + (2 * n - 1) * channels**2) + channels // 2 * channels
    norms = w + 2 * n * (w + 2 * w + 4 * w) + 2 * w + 4 * w
    total = convolutions + per_channel * norms + 4 * w * 10 + 10
    assert sum(parameter.numel() for parameter in ResNet(w, n, norm=norm).parameters()) == total


def test_a_block_is_its_formula():
    block = ConvolutionalBlock(2, 4, stride=2, norm="rms").double()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)

    def norm(z):
        return z / (z.square().flatten(1).mean(1) + 1e-5).sqrt().view(-1, 1, 1, 1)

    h = F.relu(norm(F.conv2d(x, block.first.weight, stride=2, padding=1)))
    h = norm(F.conv2d(h, block.second.weight, padding=1))
    # A 1×1 convolution of stride 2 is a matrix at every second position.
    projected = torch.einsum("oc,bcst->bost", block.shortcut[0].weight[:, :, 0, 0], x[:, :, ::2, ::2])
    torch.testing.assert_close(block(x), F.relu(norm(projected) + h))


def test_only_stage_changes_have_a_projection():
    model = ResNet(4, 3)
    assert [len(block.shortcut) for block in model.blocks] == [0, 0, 0, 2, 0, 0, 2, 0, 0]


def test_each_norm_takes_its_statistics_where_it_says():
    x = 5 + 3 * torch.randn(6, 4, 8, 8)
    batch, layer, rms = (make_map_norm(kind, 4)(x) for kind in ("batch", "layer", "rms"))
    torch.testing.assert_close(batch.mean((0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.var((0, 2, 3), correction=0), torch.ones(4), atol=1e-4, rtol=0)
    centred = x - x.mean((1, 2, 3), keepdim=True)
    spread = (centred.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer, centred / spread, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rms.square().mean((1, 2, 3)), torch.ones(6), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["batch", "layer", "rms"])
def test_gains_belong_to_channels(kind):
    norm = make_map_norm(kind, 4)
    x = torch.randn(2, 4, 8, 8)
    before = norm(x)
    gain = torch.tensor([1.0, 2.0, 3.0, 4.0])
    norm.weight.data = gain
    torch.testing.assert_close(norm(x), before * gain[:, None, None])


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_without_batch_statistics_images_do_not_see_each_other(norm):
    model = ResNet(4, 1, norm=norm)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), atol=1e-5, rtol=1e-4)


def test_an_unknown_norm_is_refused_with_the_choices():
    with pytest.raises(UseError, match=r"norm is 'group'\. It is one of batch, layer, rms"):
        ResNet(norm="group")
