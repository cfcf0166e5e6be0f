"""The U-Net: counts, resolutions, conditions, and the ways it is run."""

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError
from theodolite.models import UNet
from theodolite.models.unet import ConditionedBlock


def small(depth=1, **options) -> UNet:
    torch.manual_seed(0)
    return UNet(16, depth, channels=2, classes=5, **options)


def batch(num=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 2, 8, 8, generator=generator), torch.linspace(0, 1, num), torch.arange(num)


def test_one_more_block_at_each_level_has_the_parameters_of_the_formula():
    def block(size, condition=16):
        return 2 * (9 * size**2 + size) + 4 * size + condition * size + size

    counts = [sum(tensor.numel() for tensor in small(depth).parameters()) for depth in (1, 2)]
    assert counts[1] - counts[0] == 2 * (block(16) + block(32))


def test_every_level_has_half_the_side_of_the_one_before_and_twice_the_channels():
    model, shapes = small(levels=3), []
    for level in model.down:
        level[-1].register_forward_hook(lambda *given: shapes.append(tuple(given[-1].shape[1:])))
    assert model(*batch()).shape == (2, 2, 8, 8)
    assert shapes == [(16, 8, 8), (32, 4, 4), (64, 2, 2)]


def test_a_block_adds_its_condition_between_the_convolutions():
    torch.manual_seed(0)
    block, h, c = (
        ConditionedBlock(8, 3).double(),
        torch.randn(2, 8, 4, 4).double(),
        torch.randn(2, 3).double(),
    )

    def normed(x, norm):  # as many groups as channels: each channel alone
        mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]

    inner = block.conv_in(torch.nn.functional.silu(normed(h, block.norm_in)))
    inner = inner + (c @ block.condition.weight.T + block.condition.bias)[:, :, None, None]
    expected = h + block.conv_out(torch.nn.functional.silu(normed(inner, block.norm_out)))
    torch.testing.assert_close(block(h, c), expected)


def test_the_shortcuts_carry_each_level():
    """With the way up from below cut off, the output still depends on the image, by the shortcut."""
    model, (images, times, labels) = small(), batch()
    torch.nn.init.zeros_(model.grow[0].weight)
    assert (model(images, times, labels) != model(images + 1, times, labels)).all(dim=(1, 2, 3)).all()
    with torch.no_grad():
        model.merge[0].weight[:, 16:] = 0
    assert torch.equal(model(images, times, labels), model(images.flip(0), times, labels))


def test_time_and_label_matter():
    model, (images, times, labels) = small(), batch()
    before = model(images, times, labels)
    assert (model(images, 1 - times / 2, labels) != before).any()
    assert (model(images, times, torch.full_like(labels, 5)) != before).any()


def test_it_runs_stacked_under_vmap():
    models = [small(), small()]
    torch.nn.init.normal_(models[1].readout.weight)
    params, buffers = stack_module_state(models)
    inputs = batch()
    with sdpa_kernel(SDPBackend.MATH):
        together = vmap(lambda p, b: functional_call(models[0], (p, b), inputs))(params, buffers)
    for one, model in zip(together, models, strict=True):
        torch.testing.assert_close(one, model(*batch()), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UseError, match="width"):
        UNet(12, 1)
    with pytest.raises(UseError, match="8 × 6 pixels: with levels=3 give sides that are multiples of 4"):
        small(levels=3)(batch()[0][..., :6], *batch()[1:])
    with pytest.raises(UseError, match="labels are missing"):
        small()(*batch()[:2])
