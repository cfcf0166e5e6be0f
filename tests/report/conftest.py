from functools import partial

import pytest
import torch

from theodolite import Size, Survey, Workload, survey
from theodolite.models import GPT
from theodolite.workloads import next_token_loss


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
