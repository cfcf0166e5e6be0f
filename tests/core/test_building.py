"""A network is built only as far as its size allows."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from theodolite.core.building import TooLargeError, build_model
from theodolite.core.size import Size


def _drawn(width: int, depth: int) -> nn.Module:
    model = nn.Linear(width, width)
    with contextlib.suppress(Exception):
        model.extra = nn.Parameter(torch.randn(width, width))
    return model


def test_up_to_the_limit_a_network_is_built_as_it_is_without_one() -> None:
    limited, free = (build_model(_drawn, Size(8, 1), seed=0, most=most) for most in (136, None))
    assert all(map(torch.equal, limited.parameters(), free.parameters()))


@pytest.mark.parametrize("width, most", [(8, 135), (8, 63), (2**20, 10**6)])
def test_beyond_the_limit_it_is_not_whatever_a_build_catches(width: int, most: int) -> None:
    with pytest.raises(
        TooLargeError, match=rf"build\(width={width}, depth=1\) makes tensors of more than {most:,} el"
    ):
        build_model(_drawn, Size(width, 1), most=most)


def test_a_build_that_builds_keeps_to_the_outer_limit():
    def build(width: int, depth: int) -> nn.Module:
        return build_model(lambda *_: nn.Linear(width, width), Size(width, depth))

    assert build_model(build, Size(4, 1), most=100).weight.shape == (4, 4)
    with pytest.raises(TooLargeError, match="more than 100 elements"):
        build_model(build, Size(40, 1), most=100)
