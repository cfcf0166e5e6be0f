"""The diffusion transformer: patches, modulation, the start of each variant, and the ways it is run."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError
from theodolite.models import DiT
from theodolite.models.dit import ModulatedBranch, grid_positions
from theodolite.models.routing import Route

VARIANTS = {
    f"{modulation} {residual}": {"modulation": modulation, "residual": residual}
    for modulation in ("zero", "random")
    for residual in ("add", "routed", "time-routed")
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def small(depth=2, **options) -> DiT:
    torch.manual_seed(0)
    return DiT(32, depth, channels=2, side=8, patch=2, classes=5, head_dim=16, **options)


def batch(num=3):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num, 2, 8, 8, generator=generator)
    return images, torch.linspace(0, 1, num), torch.arange(num)


def test_the_number_of_parameters_is_the_formula():
    width, patch, labels, features, depth = 32, 2 * 2 * 2, 6, 64, 2
    condition = features * width + width + width**2 + width + labels * width
    block = 12 * width**2 + 6 * (width**2 + width)
    ends = patch * width + width + 2 * (width**2 + width) + width * patch + patch
    assert sum(tensor.numel() for tensor in small().parameters()) == condition + depth * block + ends


def test_without_blocks_a_patch_of_the_output_depends_on_the_same_patch_of_the_input():
    model = small()
    torch.nn.init.normal_(model.readout.weight)
    images, times, labels = batch()
    changed = images.clone()
    changed[:, :, 2:4, 6:8] += 1.0
    differs = (model(images, times, labels) != model(changed, times, labels)).any(1)
    assert differs[:, 2:4, 6:8].all()
    differs[:, 2:4, 6:8] = False
    assert not differs.any()


def test_a_pixel_of_a_patch_keeps_its_place():
    """With W_out = W_inᵀ the largest output is where the only large input is."""
    model = small()
    with torch.no_grad():
        model.readout.weight.copy_(model.embed.weight.T)
    images, times, labels = batch(1)
    image = torch.zeros_like(images)
    image[0, 1, 5, 4] = 1e4  # the positions are nothing beside it
    found = model(image, times[:1], labels[:1])
    assert found.flatten().argmax() == image.flatten().argmax()


def test_every_patch_sees_every_other():
    model, (images, times, labels) = small(1, modulation="random"), batch()
    for place in (0, 6):  # the first patch, and the last
        changed = images.clone()
        changed[:, :, place : place + 2, place : place + 2] += 1.0
        assert (model(images, times, labels) != model(changed, times, labels)).all()


def test_a_branch_is_modulated_as_the_formula_says():
    torch.manual_seed(0)
    branch = ModulatedBranch(torch.nn.Tanh(), 4).double()
    h, c = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    shift, scale, gate = (c @ branch.modulation.weight.T + branch.modulation.bias).split(4, -1)
    for example in range(2):
        for token in range(3):
            row = h[example, token]
            normed = (row - row.mean()) / (row.var(unbiased=False) + 1e-5).sqrt()
            expected = row + gate[example] * torch.tanh((1 + scale[example]) * normed + shift[example])
            torch.testing.assert_close(branch(h, c)[example, token], expected)


def test_with_zero_modulation_only_the_readout_has_a_gradient_at_first():
    model, (images, times, labels) = small(), batch()
    F.mse_loss(model(images, times, labels), images).backward()
    reached = {name for name, tensor in model.named_parameters() if tensor.grad.abs().max() > 0}
    assert reached == {"readout.weight", "readout.bias"}


def test_with_random_modulation_every_tensor_has_a_gradient():
    model, (images, times, labels) = small(modulation="random"), batch()
    F.mse_loss(model(images, times, labels), images).backward()
    assert all(tensor.grad.abs().max() > 0 for tensor in model.parameters())


@pytest.mark.parametrize("residual", ["routed", "time-routed"])
def test_a_routed_network_starts_as_the_plain_one(residual):
    plain, routed = small(3, modulation="random"), small(3, modulation="random", residual=residual)
    routed.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(routed(*batch()), plain(*batch()), rtol=0, atol=2e-3)


def test_every_route_is_given_the_condition():
    model, given = small(modulation="random", residual="time-routed"), []
    routes = [module for module in model.modules() if isinstance(module, Route)]
    for route in routes:
        route.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
    _, times, labels = batch()
    before = model(*batch())
    assert len(given) == len(routes) == 4
    assert all(torch.equal(one, F.silu(model.condition(times, labels))) for one in given)
    torch.nn.init.normal_(routes[1].shift)
    assert (model(*batch()) != before).any()


@every_variant
def test_time_and_label_matter_once_the_modulation_is_not_zero(options):
    model, (images, times, labels) = small(**options), batch()
    for name, tensor in model.named_parameters():
        if "modulation" in name or name == "readout.weight":
            torch.nn.init.normal_(tensor, std=0.3)
    before = model(images, times, labels)
    assert (model(images, 1 - times / 2, labels) != before).any()
    assert (model(images, times, torch.full_like(labels, 5)) != before).any()


def test_one_time_of_a_flow_map_stands_for_both():
    model, (images, times, labels) = small(modulation="random", times=2), batch()
    both = torch.stack((times, times), 1)
    assert torch.equal(model(images, times, labels), model(images, both, labels))
    other = torch.stack((times, 1 - times / 2), 1)
    assert (model(images, other, labels) != model(images, both, labels)).any()


@every_variant
def test_it_runs_stacked_under_vmap_and_on_fake_tensors(options):
    models = [small(**options) for _ in range(2)]
    torch.nn.init.normal_(models[1].readout.weight)
    params, buffers = stack_module_state(models)
    inputs = batch()
    with sdpa_kernel(SDPBackend.MATH):
        together = vmap(lambda p, b: functional_call(models[0], (p, b), inputs))(params, buffers)
    for one, model in zip(together, models, strict=True):
        torch.testing.assert_close(one, model(*batch()), rtol=1e-4, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hollow = small(**options)
        assert hollow(*batch()).shape == (3, 2, 8, 8)


def test_positions_are_orthogonal_to_shifts_of_themselves_as_sines_are():
    """`p(i)·p(j)` depends on the distance of patches only."""
    table = grid_positions(4, torch.zeros(1, 32, dtype=torch.float64)).unflatten(0, (4, 4))
    inner = torch.einsum("rcd,sed->rcse", table, table)
    torch.testing.assert_close(inner[0, 0, 1, 2], inner[2, 1, 3, 3])
    torch.testing.assert_close(inner[0, 0, 1, 2], inner[1, 2, 0, 0])
    assert inner[0, 0, 1, 2] < inner[0, 0, 0, 0] - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modulation": "one"}, "modulation is 'one'"),
        ({"residual": "sum"}, "residual is 'sum'"),
        ({"side": 9}, "side"),
        ({"classes": -1}, "classes is -1"),
        ({"times": 0}, "times is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UseError, match=message):
        DiT(32, 1, **({"patch": 2, "side": 8} | options))


def test_inputs_that_do_not_fit_are_refused():
    model, (images, times, labels) = small(), batch()
    with pytest.raises(UseError, match=r"shape \(2, 8, 6\), the network was built for \(2, 8, 8\)"):
        model(images[..., :6], times, labels)
    with pytest.raises(UseError, match=r"labels are missing.*classes=5.*label 5 for none"):
        model(images, times)
    with pytest.raises(UseError, match=r"shape \(3, 2\).*times=1 and takes \(batch,\)$"):
        model(images, torch.stack((times, times), 1), labels)
    with pytest.raises(UseError, match="classes=0: leave them out"):
        DiT(32, 1, channels=2, side=8, patch=2, classes=0)(images, times, labels)
