"""On a GPU: the same anatomy as on the CPU, and no trace."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from theodolite.anatomy import dissect
from theodolite.core.size import Size
from theodolite.models import GPT, ResNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile, from within torch
@pytest.mark.parametrize("compiled", [False, True], ids=["model", "compiled model"])
def test_a_module_on_the_gpu_has_the_anatomy_it_has_on_the_cpu(compiled: bool) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model = GPT(64, 2, qk_norm=True, gated=True)
    expected = [dataclasses.asdict(part) for part in dissect(model, tokens).values()]
    model = model.cuda().bfloat16()
    wrapped = torch.compile(model) if compiled else model
    before = torch.cuda.get_rng_state()
    found = dissect(wrapped, tokens.cuda())
    assert [dataclasses.asdict(part) for part in found.values()] == expected
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_build_that_moves_to_the_gpu_is_dissected() -> None:
    images = torch.zeros(2, 3, 32, 32)
    expected = dissect(lambda w, d: ResNet(w, d), images, size=Size(16, 2))
    found = dissect(lambda w, d: ResNet(w, d).cuda(), images.cuda(), size=Size(16, 2))
    assert [dataclasses.asdict(part) for part in found.values()] == [
        dataclasses.asdict(part) for part in expected.values()
    ]


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_a_recurrent_module_on_the_gpu_has_the_roles_it_has_on_the_cpu(kind: type[torch.nn.Module]) -> None:
    model, inputs = torch.nn.Sequential(torch.nn.Linear(4, 8), kind(8, 16)), torch.zeros(5, 2, 4)
    expected = [part.role for part in dissect(model, inputs).values()]
    assert [part.role for part in dissect(model.cuda(), inputs.cuda()).values()] == expected
