"""Scale vectors during training: what the flow foretells, and what departs from it."""

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.probes.gains.scale_vectors import amplification


def test_growth_is_the_flows_under_small_steps_and_departs_from_it_under_decay():
    x = torch.randn(64, 4, dtype=torch.float64)
    record = {}
    for decay in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4, bias=False)).double()
        record[decay] = amplification(model, x)
        optimizer = torch.optim.SGD(
            [{"params": model[1].parameters(), "weight_decay": decay}, {"params": model[0].parameters()}],
            lr=1e-3,
        )
        for step in range(301):
            if step % 100 == 0:
                record[decay].record(step)
            optimizer.zero_grad()
            (model(x) - 3 * x).square().sum(1).mean().backward()
            optimizer.step()
    free, decayed = record[0.0].curve("0.weight"), record[1.0].curve("0.weight")
    assert [row.step for row in free] == [0, 100, 200, 300]
    assert free[-1].speed > 1.5 * free[0].speed
    assert free[-1].balance == pytest.approx(free[0].balance, abs=0.02)
    assert free[-1].speed == pytest.approx(free[-1].flow, rel=1e-3)
    assert free[0].speed == pytest.approx(free[0].gain + free[0].weight)
    assert decayed[-1].balance > decayed[0].balance + 0.1


def test_what_cannot_be_looked_at_is_said():
    model, x = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), torch.randn(3, 4)
    record = amplification(model, x)
    record.record(5)
    with pytest.raises(UseError, match="step is 5, and the last record was at 5: steps go up"):
        record.record(5)
    with pytest.raises(UseError, match="there is no record of a vector 'gain': there are"):
        record.curve("gain")
