from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import theodolite as th
from theodolite.models import GPT
from theodolite.size import Size
from theodolite.workloads import Workload, next_token_loss


KNOWN: dict[Any, th.Anatomy] = {}


@pytest.fixture(autouse=True, scope="module")
def _dissected_once() -> Iterator[None]:
    """All surveys of a network at a size share its anatomy: finding it would be half of the time.

    A network is known by its build, and that of a partial by the function and the options.
    """

    def dissect(build: Any, inputs: Any, *, size: th.Size, roles: Any = None) -> th.Anatomy:
        made = (build.func, build.args, frozenset(build.keywords.items())) if type(build) is partial else build
        seen = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(inputs)
        )
        key = made, size, seen, frozenset((roles or {}).items())
        if key not in KNOWN:
            KNOWN[key] = th.dissect(build, inputs, size=size, roles=roles)
        return KNOWN[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("surveying.site", "surveying.trials", "planning.planner"):
            patch.setattr(f"theodolite.{module}.dissect", dissect)
        yield


@pytest.fixture
def gpt() -> Callable[..., Workload]:
    """A small GPT with the options given."""

    def make(**options: Any) -> Workload:
        def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            tokens = torch.randint(32, (4, 9), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]

        build = partial(GPT, vocab=32, context=8, head_dim=16, **options)
        return Workload("small", build, batch, next_token_loss, Size(64, 2))

    return make


@pytest.fixture
def rows() -> Callable[..., Workload]:
    """A workload on rows of eight numbers, around any build."""

    def make(build: Callable[[int, int], Any], **changes: Any) -> Workload:
        def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            inputs = torch.randn(4, 8, generator=generator)
            return inputs, (inputs.sum(1) > 0).long()

        given = {"batch": batch, "loss": nn.functional.cross_entropy, "size": Size(32, 2)} | changes
        return Workload("mine", build, **given)

    return make
