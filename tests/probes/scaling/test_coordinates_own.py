"""What an author's optimizer leaves out is said by the probes that train with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.core.errors import UseError

MLP = th.workload("mlp-mixture")
LOW, HIGH = th.Size(16, 1), th.Size(32, 1)


def careless(model: nn.Module) -> Any:
    """The embedding is frozen on purpose, the blocks are forgotten."""
    model.get_parameter("embed.weight").requires_grad_(False)
    return torch.optim.AdamW([model.get_parameter("readout.weight")], lr=0.01)


def closing(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1)


def measured(make: Any) -> tuple[Any, Any]:
    workload, how = dataclasses.replace(MLP, optimizer=make), {"parameterization": "own", "steps": 1}
    return (
        lambda: th.probes.coordinates(workload, [LOW, HIGH], seeds=1, **how),
        lambda: th.probes.spectral(workload, HIGH, base=LOW, **how),
    )


@pytest.mark.parametrize("which", [0, 1], ids=["coordinates", "spectral"])
def test_tensors_that_are_left_out_are_named_apart_from_frozen_ones(which: int, tmp_path: Path) -> None:
    found = measured(careless)[which]()
    absent, frozen = found.notes
    assert absent.startswith("In no group of the optimizer")
    assert "blocks.0.layers" in absent
    assert "(2 tensors)" in absent
    assert "embed" not in absent
    assert frozen.startswith("Frozen by the factory")
    assert "embed.weight (1 tensor)" in frozen
    assert " ".join(absent.split()) in " ".join(str(found).split())
    assert type(found).load(found.save(tmp_path / "found.json")).notes == found.notes


@pytest.mark.parametrize("which", [0, 1], ids=["coordinates", "spectral"])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(which: int) -> None:
    with pytest.raises(UseError, match="a step of the factory's LBFGS needs closure, and"):
        measured(closing)[which]()
