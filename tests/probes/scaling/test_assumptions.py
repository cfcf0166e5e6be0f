"""The assumptions of the theory, as ratios: closed forms, and the paper's experiment in small."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_dissection")


def two_classes(width: int = 64) -> Workload:
    """Two Gaussian classes, all examples in every batch: the paper's setting without its images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    means = torch.randn(2, 64, generator=generator)
    inputs = 0.5 * means[labels] + torch.randn(200, 64, generator=generator)

    def loss(logits, targets):
        return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], targets)

    build = partial(th.models.ResidualMLP, inputs=64, outputs=1)
    return Workload("two", build, lambda seed, step: (inputs, labels.float()), loss, Size(width, 2))


def measured(workload, depth, steps, seed=0):
    base = workload.size
    plan = th.plan(
        workload.build,
        workload.batch(0, 0)[0],
        size=Size(base.width, depth),
        base=base,
        optimizer="sgd",
        lr=0.1,
    )
    return th.probes.assumptions(workload, plan, steps=steps, seed=seed)


@pytest.mark.parametrize("steps", [0, 5])
def test_ratios_do_not_depend_on_depth(steps):
    """Figures 3 to 6: at the start and in training, for the input layer and both layers of the last block."""
    workload = two_classes()
    depths = (2, 6, 18)
    ratios: dict[str, list[float]] = {}
    for depth in depths:
        runs = [measured(workload, depth, steps, seed) for seed in range(2)]
        last = f"blocks.{depth - 1}.layers"
        layers = {"input": "embed", "first": f"{last}.0", "second": f"{last}.1"}
        found = {"activation": [value for run in runs for value in run.activations]}
        for name, layer in layers.items():
            found[f"weight {name}"] = [run.weights[f"{layer}.weight"] for run in runs]
            found[f"feature {name}"] = [run.features[layer] for run in runs]
        # Eight examples are few, so the three layers are taken together.
        found["alignment"] = [run.alignment[f"{layer}.weight"] for run in runs for layer in layers.values()]
        for name, values in found.items():
            ratios.setdefault(name, []).append(float(np.mean(values)))
    for name, values in ratios.items():
        slope = np.polyfit(np.log(depths), np.log(values), 1)[0]
        assert abs(slope) < 0.1, f"{name}: {values}"
        assert min(values) > 0.2, f"{name}: {values}"
    # A ReLU passes half of the square of a symmetric input.
    assert ratios["activation"][0] == pytest.approx(math.sqrt(0.5), abs=0.05)


class Opposed(nn.Module):
    """`y = W x` on examples whose gradients for W point in opposite directions."""

    def __init__(self, width, depth):
        super().__init__()
        self.up = nn.Linear(2, width, bias=False)
        self.down = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def linear_workload(inputs, targets):
    return Workload(
        "linear",
        Opposed,
        lambda seed, step: (inputs, targets),
        lambda logits, targets: (logits * targets).mean(),
        Size(32, 1),
    )


def ratios_of(workload, *, steps=0, lr=0.1):
    plan = th.plan(
        workload.build,
        workload.batch(0, 0)[0],
        size=workload.size,
        base=workload.size,
        optimizer="sgd",
        lr=lr,
    )
    return th.probes.assumptions(workload, plan, steps=steps)


def test_examples_that_agree_have_alignment_one_and_opposed_ones_zero():
    inputs = torch.tensor([[1.0, 2.0]] * 4)
    agreeing = ratios_of(linear_workload(inputs, torch.ones(4, 1)))
    assert agreeing.alignment["up.weight"] == pytest.approx(1.0, rel=1e-4)
    opposed = ratios_of(linear_workload(inputs, torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])))
    assert opposed.alignment["up.weight"] == pytest.approx(0.0, abs=1e-6)


def test_orthogonal_examples_agree_by_one_over_root_two(tmp_path):
    # g_i = v xᵢᵀ with orthonormal xᵢ: ‖g₁ + g₂‖₂ = √2·‖v‖.
    found = ratios_of(linear_workload(torch.eye(2), torch.ones(2, 1)))
    assert found.alignment["up.weight"] == pytest.approx(math.sqrt(0.5), rel=1e-4)
    assert re.search(r"F\.3 alignment +2 +0\.7071", str(found))
    assert th.probes.Assumptions.load(found.save(tmp_path / "found.json")) == found


@pytest.mark.parametrize("sign, ratio", [(1.0, 0.0), (-1.0, 1.0)], ids=["cancels", "adds"])
def test_an_update_that_cancels_is_seen(sign, ratio):
    class Own(nn.Linear):
        """Its gradient is its weight, up to the sign: a step of 1 leaves nothing of it, or doubles it."""

        def forward(self, x):
            return super().forward(x) * 0 + 0.5 * sign * self.weight.square().sum()

    def build(width, depth):
        return nn.Sequential(nn.Linear(2, width, bias=False), Own(width, 1, bias=False))

    inputs, size = torch.eye(2), Size(32, 1)
    workload = Workload("own", build, lambda seed, step: (inputs, inputs), lambda y, t: y.mean(), size)
    roles = {"1.weight": "output"}
    plan = th.plan(build, inputs, size=size, base=size, optimizer="sgd", lr=1.0, roles=roles)
    found = th.probes.assumptions(workload, plan, steps=1, roles=roles)
    assert found.weights["1.weight"] == pytest.approx(ratio, abs=1e-5)  # ‖W ∓ W‖/(‖W‖ + ‖W‖)
    assert found.weights["0.weight"] == pytest.approx(1.0)  # it does not move


@pytest.mark.parametrize(
    "activation, ratio",
    [(nn.ReLU(), math.sqrt(0.5)), (nn.ReLU(inplace=True), math.sqrt(0.5)), (nn.LeakyReLU(1.0), 1.0)],
)
def test_the_ratio_of_an_activation(activation, ratio):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width, bias=False), activation, nn.Linear(width, 1, bias=False))

    inputs = torch.randn(64, 8)
    workload = Workload(
        "act", build, lambda seed, step: (inputs, inputs), lambda y, t: y.mean(), Size(256, 1)
    )
    found = ratios_of(workload)
    assert found.activations == (pytest.approx(ratio, abs=0.03),)


def test_examples_that_cannot_be_told_apart_are_refused():
    inputs = torch.eye(2)
    workload = Workload(
        "odd",
        Opposed,
        lambda seed, step: (inputs, torch.ones(3)),
        lambda logits, targets: logits.mean() * targets.mean(),
        Size(32, 1),
    )
    with pytest.raises(UseError, match=r"'odd': the tensors of a batch have first dimensions \[2, 3\]"):
        ratios_of(workload)
