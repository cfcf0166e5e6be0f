"""The residual MLP against explicit matrices in float64, and its laws of scale."""

import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.models import ResidualMLP


def relu(x):
    return x * (x > 0)


def small(**options) -> ResidualMLP:
    return ResidualMLP(7, 3, inputs=5, outputs=2, **options).double()


def by_hand(model: ResidualMLP, x, phi, branch_of):
    h = x @ model.embed.weight.T
    for block in model.blocks:
        h = h + branch_of([layer.weight for layer in block.layers], h, phi)
    return h @ model.readout.weight.T


BRANCHES = {
    1: lambda w, h, phi: phi(h) @ w[0].T,
    2: lambda w, h, phi: phi(h @ w[0].T) @ w[1].T,
    3: lambda w, h, phi: phi(phi(h @ w[0].T) @ w[1].T) @ w[2].T,
}


@pytest.mark.parametrize("block_layers", BRANCHES)
@pytest.mark.parametrize("activation, phi", [("relu", relu), ("linear", lambda x: x)])
def test_the_network_is_its_formula(block_layers, activation, phi):
    model = small(block_layers=block_layers, activation=activation)
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(model(x), by_hand(model, x, phi, BRANCHES[block_layers]))


def test_a_linear_network_is_one_matrix():
    model = small(activation="linear")
    product = model.embed.weight
    for block in model.blocks:
        first, second = (layer.weight for layer in block.layers)
        product = product + second @ first @ product
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(model(x), x @ (model.readout.weight @ product).T)


@pytest.mark.parametrize("block_layers", [1, 2])
def test_relu_makes_it_nonlinear_but_keeps_positive_scale(block_layers):
    model = small(block_layers=block_layers)
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(model(3 * x), 3 * model(x))
    assert (model(-x) + model(x)).abs().max() > 0.1


def test_biases_are_added_in_every_layer_and_start_at_zero():
    model = small(bias=True)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 1 + 3 * 2 + 1
    assert not any(bias.any() for bias in biases)
    for bias in biases:
        bias.data.normal_()
    h = model.embed.bias
    for block in model.blocks:
        first, second = block.layers
        h = h + second.weight @ relu(first.weight @ h + first.bias) + second.bias
    by_hand = model.readout.weight @ h + model.readout.bias
    torch.testing.assert_close(model(torch.zeros(1, 5, dtype=torch.float64))[0], by_hand)


@pytest.mark.parametrize("block_layers, share", [(1, 0.5), (2, 0.5), (3, 0.25)])
def test_a_branch_starts_with_half_the_variance_of_the_stream_for_each_relu(block_layers, share):
    model = ResidualMLP(1024, 1, inputs=64, outputs=1, block_layers=block_layers)
    stream = model.embed(torch.randn(64, 64))
    added = model.blocks[0](stream) - stream
    assert stream.square().mean().item() == pytest.approx(1.0, rel=0.05)
    assert added.square().mean().item() == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "tanh"}, "activation is 'tanh'. It is one of relu, linear"),
        ({"block_layers": 0}, "block_layers is 0: give an integer, at least 1"),
    ],
)
def test_impossible_options_are_refused_with_the_fix(options, message):
    with pytest.raises(UseError, match=message):
        small(**options)
