"""Stacks of networks."""

import torch
from torch import nn

from theodolite import Size, Workload
from theodolite.fleet.plans import planned
from theodolite.fleet.run import Run
from theodolite.fleet.stack import stack


def normed(width, depth):
    """A network with buffers."""
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def rows(seed, step):
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * seed + step))
    return inputs, (inputs.sum(1) > 0).long()


def test_a_single_network_has_the_values_of_its_place():
    network = Workload("normed", normed, rows, nn.functional.cross_entropy)
    runs = [
        Run(workload="normed", size=Size(8, 1), lr=2.0**-7, base=Size(8, 1), seed=seed, steps=2)
        for seed in (0, 1, 2)
    ]
    models = stack(runs, network, "cpu")
    for name, values in models.buffers.items():
        if name.endswith("running_mean"):
            values += torch.arange(3.0)[:, None]
    for place in (2, 0, 1):
        found, expected = models.single(place), planned(runs[place], network).build(place)
        for name, tensor in expected.named_parameters():
            assert torch.equal(found.get_parameter(name), tensor), name
        assert found[1].running_mean.tolist() == [place] * 8
