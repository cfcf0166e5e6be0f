from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from theodolite import Survey, survey
from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.workloads import Workload, next_token_loss


@pytest.fixture(autouse=True, scope="module")
def _dissected_once(one_dissection: None) -> None:
    pass


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


@pytest.fixture(scope="session")
def surveyed() -> Survey:
    """A GPT with GPT-2's initialisation and biases: findings of every level but fail."""

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        tokens = torch.randint(32, (2, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    build = partial(GPT, vocab=32, context=8, head_dim=16, norm="layer", bias=True, scaled_init=True)
    workload = Workload("<small & sharp>", build, batch, next_token_loss, Size(64, 3))
    return survey(workload, only=["anatomy", "growth", "norms", "decay", "initialisation"])
