"""The explicit matrices that probes are compared with are the same however they are found."""

from __future__ import annotations

import pytest
import torch

from .explicit import all_at_once, apart, flat, one_by_one
from .networks import case


@pytest.mark.parametrize("name", ["dropout", "batch norm, train", "causal attention", "tied"])
@torch.random.fork_rng(devices=[])
def test_points_at_once_have_the_logits_and_gradients_of_each(name):
    made = case(name)
    named = {key: value.detach() for key, value in made.model.named_parameters()}
    start = flat(tuple(named.values()))
    points = start + 0.1 * torch.randn(4, len(start), dtype=start.dtype)
    outputs, gradients = one_by_one(made, named, points, 2.0)
    again, gradients_again = all_at_once(made, named, points, 2.0)
    assert apart(again, outputs) < 1e-12
    assert apart(gradients_again, gradients) < 1e-12
    assert apart(gradients[0], gradients[1]) > 1e-3
