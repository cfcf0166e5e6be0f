"""The network for the velocity of points, and what it is conditioned on."""

import math

import torch

from theodolite.models import FlowMLP
from theodolite.models.conditioning import time_features


def test_a_block_is_the_formula():
    torch.manual_seed(0)
    model = FlowMLP(6, 1, dimensions=3).double()
    x, t = torch.randn(4, 3).double(), torch.rand(4).double()
    frequencies = torch.tensor([100 ** (i / 31) for i in range(32)], dtype=torch.float64)
    features = torch.cat([(t[:, None] * frequencies).cos(), (t[:, None] * frequencies).sin()], 1)
    silu = torch.nn.functional.silu
    c = model.condition.time_out(silu(model.condition.time_in(features)))
    h, block = model.enter(x) + c, model.blocks[0]

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    h = h + block.down(silu(block.up(normed(h))))
    torch.testing.assert_close(model(x, t), model.readout(normed(h)))


def test_times_a_hundredth_apart_are_told_apart_and_equal_ones_are_equal():
    t = torch.tensor([0.5, 0.51, 0.5])
    features = time_features(t)
    assert torch.equal(features[0], features[2])
    assert (features[0] - features[1]).norm() > 0.5
    assert math.isclose(float(features[0].square().sum()), 32, rel_tol=1e-5)  # cos² + sin², 32 times


def test_the_parameters_of_a_flow_map_see_both_times():
    torch.manual_seed(0)
    model, x = FlowMLP(16, 1, times=2), torch.randn(1, 2)
    outputs = [model(x, torch.tensor([[s, t]])) for s, t in ((0.2, 0.8), (0.2, 0.5), (0.5, 0.8))]
    assert len({tuple(one.flatten().tolist()) for one in outputs}) == 3
