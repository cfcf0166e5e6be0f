"""LeNet-300-100, LeNet-5 and ResNet-4: their formulas, and how outputs follow the scale of the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from theodolite.core.errors import UseError
from theodolite.models import LeNet5, LeNet300, ResNet4

NETWORKS = {
    "LeNet300": lambda variant: LeNet300(12, inputs=9, outputs=4, variant=variant).double(),
    "LeNet300 deep": lambda variant: LeNet300(12, 4, inputs=9, outputs=4, variant=variant).double(),
    "LeNet5": lambda variant: LeNet5(3, image=(1, 16, 16), outputs=4, variant=variant).double(),
    "ResNet4": lambda variant: ResNet4(12, inputs=9, outputs=4, variant=variant).double(),
    "ResNet4 deep": lambda variant: ResNet4(12, 2, inputs=9, outputs=4, variant=variant).double(),
}
LAYERS = {"LeNet300": 3, "LeNet300 deep": 5, "LeNet5": 5, "ResNet4": 4, "ResNet4 deep": 6}
RESIDUAL = [name for name in NETWORKS if name.startswith("ResNet4")]


def batch(name: str):
    shape = (5, 1, 16, 16) if name == "LeNet5" else (5, 9)
    return torch.randn(shape, dtype=torch.float64)


def scaled(model, alpha: float, x):
    """The output when weights and biases are multiplied by α, and the norms' gains and shifts are not."""
    norms = {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm)
        for kind in ("weight", "bias")
    }
    parameters = {
        name: parameter * (1.0 if name in norms else alpha) for name, parameter in model.named_parameters()
    }
    return functional_call(model, parameters, (x,))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_homogeneous_network_scales_with_the_power_of_its_layers(name):
    model, x = NETWORKS[name]("homogeneous"), batch(name)
    torch.testing.assert_close(scaled(model, 1.7, x), 1.7 ** LAYERS[name] * model(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_under_tiny_weights_only_the_last_bias_is_left(name):
    model, x = NETWORKS[name]("bias"), batch(name)
    last = [parameter for key, parameter in model.named_parameters() if key.endswith("bias")][-1]
    torch.testing.assert_close(scaled(model, 1e-6, x) / 1e-6, last.expand(5, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_with_layernorm_the_output_scales_like_the_last_layer(name, alpha):
    model, x = NETWORKS[name]("layernorm"), 100 * batch(name)
    torch.testing.assert_close(scaled(model, alpha, x), alpha * model(x), atol=0, rtol=0.02)


@pytest.mark.parametrize("name", NETWORKS)
def test_with_layernorm_that_fails_where_eps_dominates(name):
    model, x = NETWORKS[name]("layernorm"), batch(name)
    assert scaled(model, 1e-6, x).abs().max() < 1e-2 * 1e-6 * model(x).abs().max()


@pytest.mark.parametrize("name", RESIDUAL)
def test_under_tiny_weights_a_residual_network_is_its_identity_path(name):
    model, x = NETWORKS[name]("residual"), batch(name)
    path = F.relu(x @ model.embed[1].weight.T) @ model.readout.weight.T
    # Input layer and readout: L − ℒ = 2.
    torch.testing.assert_close(scaled(model, 1e-5, x) / 1e-10, path)


@pytest.mark.parametrize("name", RESIDUAL)
def test_under_huge_weights_a_residual_network_is_its_branches(name):
    model, x = NETWORKS[name]("residual"), batch(name)
    plain = NETWORKS[name]("homogeneous")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(scaled(model, 1e6, x) / 1e6 ** LAYERS[name], plain(x))


@pytest.mark.parametrize("name", RESIDUAL)
def test_with_everything_the_output_scales_like_the_last_layer(name):
    model, x = NETWORKS[name]("all"), batch(name)
    torch.testing.assert_close(scaled(model, 10.0, x), 10 * model(x), atol=0, rtol=0.01)


def normalised(z):
    return (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize("variant", ["homogeneous", "bias", "residual", "layernorm", "all"])
def test_each_variant_of_resnet4_is_its_formula(variant):
    model, x = NETWORKS["ResNet4"](variant), batch("ResNet4")
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    norm = normalised if variant in ("layernorm", "all") else lambda z: z

    def layer(number, h):
        z = h @ linears[number].weight.T
        return z + linears[number].bias if variant in ("bias", "all") else z

    h = F.relu(norm(layer(0, x)))
    branch = norm(layer(2, F.relu(norm(layer(1, h)))))
    h = h + branch if variant in ("residual", "all") else branch
    torch.testing.assert_close(model(x), layer(3, h))


def test_lenet5_is_its_formula():
    model, x = LeNet5(variant="bias").double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    first, second, *dense = [module for module in model.modules() if hasattr(module, "weight")]
    h = F.max_pool2d(F.relu(F.conv2d(x, first.weight, first.bias)), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, second.weight, second.bias)), 2).flatten(1)
    for layer in dense[:-1]:
        h = F.relu(h @ layer.weight.T + layer.bias)
    torch.testing.assert_close(model(x), h @ dense[-1].weight.T + dense[-1].bias)
    assert [layer.weight.shape[0] for layer in (first, second, *dense)] == [6, 16, 120, 84, 10]
    assert dense[0].weight.shape[1] == 400


def test_a_map_is_normalised_over_channels_and_positions():
    model, x = LeNet5(variant="layernorm").double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    convolution, norm = model.layers[0], model.layers[1]
    z = convolution(x)
    torch.testing.assert_close(norm(z), normalised(z.flatten(1)).view_as(z))


@pytest.mark.parametrize(
    "width, depth, features",
    [(300, 2, [300, 100, 10]), (300, 4, [300, 300, 300, 100, 10]), (60, 1, [20, 10])],
)
def test_lenet300_keeps_its_ratio_at_every_size(width, depth, features):
    weights = [parameter for parameter in LeNet300(width, depth).parameters() if parameter.dim() == 2]
    assert [weight.shape[0] for weight in weights] == features


@pytest.mark.parametrize("build", [LeNet300, LeNet5, ResNet4])
@pytest.mark.parametrize("variant", ["bias", "layernorm"])
def test_every_matrix_grows_with_width(build, variant):
    narrow, wide = build(6, variant=variant), build(12, variant=variant)
    for (name, small), large in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        if small.dim() > 1:
            assert small.shape != large.shape, name


def test_initial_values_are_the_papers():
    model = ResNet4(400, variant="all")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.var().item() == pytest.approx(2 / parameter.shape[1], rel=0.1), name
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.bias.abs().max() <= 0.1
        if isinstance(module, torch.nn.LayerNorm):
            assert module.eps == 1e-5
    # The standard deviation of U[−0.1, 0.1] is 0.1/√3.
    assert model.embed[1].bias.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.15)


@pytest.mark.parametrize("build", [LeNet300, LeNet5])
@pytest.mark.parametrize("variant", ["residual", "all"])
def test_a_lenet_refuses_to_be_residual_and_says_where_to_go(build, variant):
    with pytest.raises(UseError, match=f"variant is '{variant}': .* or take ResNet4"):
        build(variant=variant)


def test_impossible_options_are_refused_with_the_fix():
    with pytest.raises(UseError, match=r"width is 100, not a multiple of 3 .*: give 99 or 102"):
        LeNet300(100)
    with pytest.raises(UseError, match=r"variant is 'dropout'\. It is one of homogeneous"):
        ResNet4(variant="dropout")
    with pytest.raises(UseError, match=r"image is \(3, 8, 8\): .* sides of 16 or more"):
        LeNet5(image=(3, 8, 8))
