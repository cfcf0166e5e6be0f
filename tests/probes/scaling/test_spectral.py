import dataclasses
import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.matrices import as_matrices
from theodolite.planning.init_distribution import InitDistribution
from theodolite.probes.scaling.norm_history import NormHistory, observe
from theodolite.probes.scaling.spectral import (
    Ratio,
    Spectral,
    SpectralRow,
    compare,
    rows_limited_by_eps,
)
from theodolite.probes.scaling.spectral_norm import rms_norms

pytestmark = pytest.mark.usefixtures("one_dissection")


def exact(tensor, part):
    """`‖A‖_R` from numpy's singular values in float64."""
    stack = as_matrices(tensor.detach(), (part.in_axes, part.out_axes)).double()
    largest = torch.linalg.svdvals(stack).max().item()
    return math.sqrt(part.fan_in / part.fan_out) * largest


@pytest.mark.parametrize("shape", [(64, 64), (200, 30), (30, 200), (1, 40), (40, 1)])
def test_the_largest_singular_value_of_a_random_matrix(shape):
    matrix = torch.randn(shape)
    found = th.probes.spectral_norm(matrix)
    truth = torch.linalg.svdvals(matrix.double())[0].item()
    assert found.converged
    assert found.value.item() == pytest.approx(truth, rel=2e-3)
    assert found.value.item() <= truth * (1 + 1e-5)
    assert abs(found.value.item() - truth) <= found.uncertainty.item() + 1e-5 * truth


def test_a_tighter_tolerance_gives_more_digits():
    matrix = torch.randn(300, 300)
    truth = torch.linalg.svdvals(matrix.double())[0].item()
    found = th.probes.spectral_norm(matrix, rtol=1e-5)
    assert found.value.item() == pytest.approx(truth, rel=1e-5)


def test_a_stack_is_measured_matrix_by_matrix():
    stack = torch.randn(3, 4, 50, 20) * torch.tensor([1.0, 1e-3, 10.0])[:, None, None, None]
    found = th.probes.spectral_norm(stack)
    assert found.value.shape == (3, 4)
    truth = torch.linalg.svdvals(stack.double())[..., 0]
    assert torch.allclose(found.value.double(), truth, rtol=2e-3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_low_rank_and_extreme_scales(scale):
    left, right = torch.randn(80), torch.randn(50)
    found = th.probes.spectral_norm(scale * torch.outer(left, right))
    assert found.converged
    assert found.value.item() == pytest.approx(scale * left.norm().item() * right.norm().item(), rel=1e-4)


def test_zero_converges_and_nan_does_not():
    zero = th.probes.spectral_norm(torch.zeros(5, 4))
    assert (zero.value.item(), zero.converged) == (0.0, True)
    broken = th.probes.spectral_norm(torch.stack([torch.eye(4), torch.full((4, 4), math.nan)]))
    assert broken.value[0].item() == pytest.approx(1.0)
    assert math.isnan(broken.value[1].item())
    assert not broken.converged


def test_too_few_steps_are_admitted():
    found = th.probes.spectral_norm(torch.randn(400, 400), most_steps=3)
    assert not found.converged


def test_rms_norms_of_every_kind_of_tensor():
    def part(name, shape, op, in_axes, out_axes):
        fans = [math.prod(shape[axis] for axis in axes) for axes in (in_axes, out_axes)]
        return Part(name, shape, op, "hidden", *fans, True, True, in_axes, out_axes)

    parts = {
        one.name: one
        for one in (
            part("matrix", (20, 30), "linear", (1,), (0,)),
            part("another", (20, 30), "linear", (1,), (0,)),
            part("conv1d", (30, 20), "linear", (0,), (1,)),
            part("kernel", (8, 4, 3, 3), "conv", (1, 2, 3), (0,)),
            part("experts", (5, 12, 7), "linear", (2,), (1,)),
        )
    }
    tensors = {name: torch.randn(one.shape) for name, one in parts.items()}
    tensors["experts"][3] *= 10
    found = rms_norms(tensors, parts)
    for name, one in parts.items():
        assert found[name] == (pytest.approx(exact(tensors[name], one), rel=2e-3), True)
    assert as_matrices(tensors["kernel"], (parts["kernel"].in_axes, parts["kernel"].out_axes)).shape == (
        1,
        8,
        36,
    )

    bias = Part("bias", (4,), "add", "bias", 1, 4, False, True, (), (0,))
    table = Part("table", (3, 4), "embedding", "input", 3, 4, False, True, (0,), (1,))
    rows = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [3, 3, 3, 3]])
    found = rms_norms({"bias": torch.tensor([3.0, 4, 0, 0]), "table": rows}, {"bias": bias, "table": table})
    assert found["bias"][0] == pytest.approx(2.5)
    assert found["table"][0] == pytest.approx(math.sqrt((1 + 9) / 2))  # the row nobody read does not count


@pytest.fixture
def mixture():
    return th.workload("mlp-mixture")


def planned(workload, size, base, **options):
    options = {"lr": 2**-8} | options
    return th.plan(workload.build, workload.batch(0, 0)[0], size=size, base=base, **options)


def compared(workload, *plans, **options):
    inputs = workload.batch(0, 0)[0]
    return compare(
        *(
            observe(workload, one, th.dissect(workload.build, inputs, size=one.size), **options)
            for one in plans
        )
    )


SMALL, WIDE, DEEP = Size(64, 2), Size(256, 2), Size(64, 8)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon-kimi"])
@pytest.mark.parametrize("large", [WIDE, DEEP], ids=["width", "depth"])
def test_a_plan_meets_the_condition(mixture, optimizer, large):
    lr = {"adamw": 2**-8, "sgd": 2**-4, "muon-kimi": 2**-8}[optimizer]
    found = th.probes.spectral(mixture, large, base=SMALL, optimizer=optimizer, lr=lr, steps=3)
    assert found.growth == 4
    assert found.converged
    assert found.holds(0.3), str(found)


def test_the_standard_parameterization_breaks_it_by_the_known_powers(mixture):
    standard = {"base": SMALL, "lr": 2**-8, "parameterization": "standard", "steps": 3}
    wide = th.probes.spectral(mixture, WIDE, **standard)
    powers = {row.name: wide.exponent(row.step.off) for row in wide.folded}
    # One Adam step has ‖A‖_R ~ n_in: too large by r_n, but for the input, whose fan-in stays.
    assert powers["embed.weight"] == pytest.approx(0.0, abs=0.2)
    for name in ("blocks.*.layers.0.weight", "blocks.*.layers.1.weight", "readout.weight"):
        assert powers[name] == pytest.approx(1.0, abs=0.25)
    assert [row.name for row in wide.broken("start")] == ["readout.weight"]
    # The readout starts at 1/√n where 1/n is wanted.
    assert wide.exponent(wide.broken("start")[0].start.off) == pytest.approx(0.5, abs=0.05)

    deep = th.probes.spectral(mixture, DEEP, **standard)
    # What ends a branch should move, and start, at 1/L.
    assert [row.name for row in deep.broken("step")] == ["blocks.*.layers.1.weight"]
    (ends,) = deep.broken("start")
    assert deep.exponent(ends.start.off) == pytest.approx(1.0, abs=0.02)


def test_the_numbers_are_those_of_the_training(mixture):
    """Against a loop written out, with exact singular values."""
    base = planned(mixture, SMALL, SMALL, lr=2**-6)
    found = th.probes.spectral(mixture, SMALL, base=SMALL, lr=2**-6, steps=2, seed=3)
    model = base.build(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, weight_decay=0.0)
    weights = [model.blocks[0].layers[1].weight.detach().clone()]
    losses = []
    for step in range(2):
        inputs, targets = mixture.batch(3, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(model.blocks[0].layers[1].weight.detach().clone())

    def size(matrix):
        return torch.linalg.svdvals(matrix.double())[0].item()

    (row,) = (row for row in found.rows if row.name == "blocks.0.layers.1.weight")
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert row.start.here == pytest.approx(size(weights[0]), rel=2e-3)
    steps = size(weights[1] - weights[0]) * size(weights[2] - weights[1])
    assert row.step.here == pytest.approx(math.sqrt(steps), rel=2e-3)
    assert row.drift.here == pytest.approx(size(weights[2] - weights[0]), rel=2e-3)
    assert row.start.off == row.step.off == 1.0


def test_a_single_tensor_planned_wrongly_is_named(mixture):
    right = planned(mixture, WIDE, SMALL)
    name = "blocks.1.layers.0.weight"
    row = right[name]
    base = planned(mixture, SMALL, SMALL)
    fast = dataclasses.replace(right, rows={**right.rows, name: dataclasses.replace(row, lr=row.lr * 30)})
    found = compared(mixture, fast, base, steps=2)
    worst = max(found.rows, key=lambda one: one.step.off)
    assert worst.name == name
    assert worst.step.off > 10
    large = InitDistribution(row.init.kind, std=row.init.std * 30)
    heavy = dataclasses.replace(right, rows={**right.rows, name: dataclasses.replace(row, init=large)})
    found = compared(mixture, heavy, base, steps=1)
    assert max(found.rows, key=lambda one: one.start.off).start.off == pytest.approx(30, rel=0.15)


def test_nothing_is_left_behind(mixture):
    def build(width, depth):
        return nn.Sequential(nn.Linear(32, width), nn.Dropout(0.5), nn.Linear(width, 10))

    dropping = dataclasses.replace(mixture, build=build)
    base = planned(dropping, SMALL, SMALL)
    before = torch.get_rng_state()
    th.probes.spectral(dropping, SMALL, base=SMALL, lr=2**-8, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    th.probes.assumptions(dropping, base, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_zero_steps_are_refused(mixture):
    with pytest.raises(UseError, match="steps is 0: give an integer, at least 1"):
        th.probes.spectral(mixture, SMALL, base=SMALL, lr=2**-8, steps=0)


def test_several_sizes_are_refused(mixture):
    with pytest.raises(UseError, match=r"size is \[Size\(width=.*\]: give one Size, such as Size\(256, 4\)"):
        th.probes.spectral(mixture, [SMALL, WIDE], base=SMALL, lr=2**-8)
    with pytest.raises(UseError, match="base is 64: give one Size"):
        th.probes.spectral(mixture, WIDE, base=64, lr=2**-8)


def test_the_result_names_every_kind_of_tensor_and_can_be_read_back(mixture, tmp_path):
    found = th.probes.spectral(mixture, SMALL, base=SMALL, lr=2**-8, steps=1)
    text = str(found)
    assert text.startswith("64 × 2 against 64 × 2: the spectral condition is met")
    assert "blocks.*.layers.1.weight" in text
    assert Spectral.load(found.save(tmp_path / "found.json")) == found


def test_spectral_norms_print_and_are_saved_as_a_table(tmp_path):
    one = th.probes.spectral_norm(torch.diag(torch.tensor([3.0, 2.0])))
    assert str(one).startswith("‖A‖₂ = 3 ± ")
    stack = th.probes.spectral_norm(torch.stack([torch.eye(2), 2 * torch.eye(2)])[None])
    assert stack.save(tmp_path / "norms.csv").read_text().splitlines()[2].startswith('"0, 1",2.0')


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_a_gpu(mixture):
    here, there = (
        th.probes.spectral(mixture, WIDE, base=SMALL, lr=2**-8, steps=2, device=device)
        for device in ("cpu", "cuda")
    )
    for one, other in zip(here.rows, there.rows, strict=True):
        assert other.step.off == pytest.approx(one.step.off, rel=0.05)
        assert other.start.off == pytest.approx(one.start.off, rel=1e-2)
    ratios = th.probes.assumptions(mixture, planned(mixture, SMALL, SMALL), steps=2, device="cuda")
    assert 0 < min(ratios.weights.values()) <= max(ratios.weights.values()) <= 1.01


class OneHead(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.query, self.key = (
            nn.Linear(4, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.readout = nn.Linear(width, 2)

    def forward(self, x):
        x = self.embed(x)
        weights = (self.query(x) @ self.key(x).mT / 8).softmax(-1)
        return self.readout((weights @ x).mean(1))


def test_a_gradient_that_is_only_rounding_is_known():
    """A softmax does not heed what the keys' bias adds to all scores of a query."""

    def batch(seed, step):
        x = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(step))
        return x, (x.sum((1, 2)) > 0).long()

    size = Size(16, 1)
    workload = th.Workload("head", OneHead, batch, nn.functional.cross_entropy, size)
    inputs = batch(0, 0)[0]
    plan = th.plan(OneHead, inputs, size=size, base=size, lr=2**-8)
    found = observe(workload, plan, th.dissect(OneHead, inputs, size=size), steps=2)
    assert {name for name, one in found.histories.items() if one.only_rounding} == {"key.bias"}
    measured = compare(found, found)
    (row,) = (row for row in measured.rows if row.name == "key.bias")
    assert math.isnan(row.off("step"))
    assert row.off("start") == pytest.approx(1)
    assert "key.bias: its gradient is zero up to rounding" in str(measured)


class Quiet(nn.Module):
    """The first weight's gradient is `scale` in every entry, the second's one."""

    def __init__(self, width, depth, scale):
        super().__init__()
        self.quiet, self.loud = nn.Linear(4, width, bias=False), nn.Linear(4, width, bias=False)
        self.scale = scale

    def forward(self, x):
        return self.scale * self.quiet(x) + self.loud(x)


@pytest.mark.parametrize(("scale", "optimizer", "is_limited"), [
    (1e-10, "adamw", True), (1e-5, "adamw", False), (1e-10, "sgd", False), (1e-10, "lion", False),
])  # fmt: skip
def test_a_step_that_eps_limits_is_known(scale, optimizer, is_limited):
    """Adam's step for a constant gradient g is lr·g/(g + eps); sgd and Lion have no eps."""
    size = Size(16, 1)
    inputs = torch.ones(2, 4)
    workload = th.Workload(
        "quiet",
        lambda width, depth: Quiet(width, depth, scale),
        lambda seed, step: (inputs, torch.zeros(2)),
        lambda outputs, _: outputs.mean(0).sum(),
        size,
    )
    plan = th.plan(workload.build, inputs, size=size, base=size, lr=2**-8, optimizer=optimizer)
    found = observe(workload, plan, th.dissect(workload.build, inputs, size=size), steps=2)
    quiet = found.histories["quiet.weight"]
    if optimizer == "adamw":
        assert quiet.over_eps == pytest.approx((scale / 1e-8, scale / 1e-8), rel=1e-3)
        # ‖A‖_R of a matrix of ones (16, 4): √(4/16)·√64
        assert quiet.step == pytest.approx(2**-8 * 4 * scale / (scale + 1e-8), rel=1e-2)
    measured = compare(found, found)
    assert [row.name for row in measured.rows if row.limited_by_eps] == ["quiet.weight"] * is_limited
    (row,) = (row for row in measured.rows if row.name == "quiet.weight")
    if optimizer == "adamw":
        assert math.isnan(row.off("step")) is math.isnan(row.off("drift")) is is_limited
    assert row.off("start") == pytest.approx(1)
    said = "quiet.weight: eps limits its steps, as its gradient at 16 × 1 is 0.01·eps"
    assert (said in str(measured)) is is_limited


def test_steps_that_eps_has_shortened_do_not_count_where_others_are_whole():
    part = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))
    history = NormHistory(part, 1.0, (0.0, 1e-3, 2.0), 2.0, converged=True, over_eps=(0.0, 0.1, 50.0))
    assert history.step == pytest.approx(2.0)
    limited = dataclasses.replace(history, over_eps=(0.0, 0.1, 0.2))
    assert limited.step == pytest.approx(math.sqrt(2e-3))
    assert (history.most_over_eps, limited.most_over_eps) == (50.0, 0.2)


INF = math.inf


def block(number, over_eps=(50.0, 50.0), step=1.0, only_rounding=False):
    """One of the tensors `blocks.*.w`, whose step is so many times too large."""
    sizes = Ratio(1.0, 1.0, 1.0)
    step = Ratio(step, float(step > 0), 1.0)
    name, pattern = f"blocks.{number}.w", "blocks.*.w"
    return SpectralRow(name, pattern, "hidden", sizes, step, step, True, 64, only_rounding, over_eps)


def of(*rows):
    return Spectral(DEEP, SMALL, 4.0, rows, (1.0,), (1.0,))


def test_blocks_that_eps_limits_are_named_beside_one_that_is_free():
    limited = [block(number, (0.1, 0.2), step=1e-3) for number in range(1, 8)]
    found = of(block(0, step=3.0), *limited)
    (folded,) = found.folded
    assert (folded.limited_by_eps, folded.off("step")) == (False, pytest.approx(3.0))
    (line,) = rows_limited_by_eps(found)
    assert (line.name, line.pattern, line.over_eps) == ("7 of 8 of blocks.*.w", "blocks.*.w", (0.1, 0.2))
    assert "7 of 8 of blocks.*.w: eps limits its steps, as its gradient at 64 × 8 is 0.1·eps" in str(found)
    assert [one.name for one in rows_limited_by_eps(of(*limited))] == ["blocks.*.w"]
    assert rows_limited_by_eps(of(block(0))) == ()
    # Of seeds that are pooled, one without a limit is enough.
    pooled = of(*limited, *(block(number) for number in range(1, 5)))
    assert [one.name for one in rows_limited_by_eps(pooled)] == ["3 of 7 of blocks.*.w"]


@pytest.mark.parametrize("other", [
    block(0, (INF, INF), step=0.0), block(0, (1e-3, 1e-3), only_rounding=True),
], ids=["no gradient", "rounding"])  # fmt: skip
def test_a_block_without_a_gradient_hides_no_block_that_eps_limits(other):
    found = of(other, block(1, (0.1, 5.0), step=1e-3), block(2, (0.3, 0.2), step=1e-3))
    (folded,) = found.folded
    assert folded.limited_by_eps
    assert math.isnan(folded.off("step"))
    (line,) = rows_limited_by_eps(found)
    assert (line.name, line.over_eps) == ("2 of 3 of blocks.*.w", (0.1, 0.2))
    assert rows_limited_by_eps(of(block(0, (INF, INF), step=0.0))) == ()


@pytest.mark.parametrize("over_eps", [(0.1, INF), (INF, 0.1), (INF, INF), (50.0, INF)])
def test_what_eps_limits_is_the_same_after_reading_a_file(tmp_path, over_eps):
    found = of(block(0, over_eps), block(1, over_eps))
    read = Spectral.load(found.save(tmp_path / "found.json"))
    assert read == found
    assert [row.limited_by_eps for row in read.rows] == [0.1 in over_eps] * 2
    assert str(read) == str(found)
    unknown = block(0, tuple(math.nan if one == INF else one for one in over_eps))
    assert unknown.limited_by_eps is (0.1 in over_eps)


# The own parameterization

MLP = th.workload("mlp-mixture")
LOW, HIGH = Size(32, 2), Size(256, 2)


def adamw_by_width(model):
    """muP as its authors write it down: hidden rates divided by the width, the readout as well."""
    first, rest = [], []
    for name, weight in model.named_parameters():
        (first if name.startswith("embed") else rest).append(weight)
    width = model.get_parameter("readout.weight").shape[1]
    slow = {"params": rest, "lr": 2**-8 * LOW.width / width, "eps": 1e-12}
    return torch.optim.AdamW([slow, {"params": first, "eps": 1e-12}], lr=2**-8, weight_decay=0.0)


def build_by_width(width, depth):
    model = MLP.build(width, depth)
    with torch.no_grad():
        model.get_parameter("readout.weight").mul_(math.sqrt(LOW.width / width))
    return model


def test_a_right_optimizer_by_hand_meets_the_condition_and_a_plain_one_breaks_it_as_standard_does():
    right = dataclasses.replace(MLP, build=build_by_width, optimizer=adamw_by_width)
    made = th.probes.spectral(right, HIGH, base=LOW, parameterization="own", steps=2)
    assert made.holds()
    plain = th.probes.spectral(
        MLP,
        HIGH,
        base=LOW,
        parameterization="own",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2**-8),
        steps=2,
    )
    standard = th.probes.spectral(MLP, HIGH, base=LOW, lr=2**-8, parameterization="standard", steps=2)
    assert (
        {row.name for row in plain.broken("step")} == {row.name for row in standard.broken("step")} != set()
    )
    with pytest.raises(UseError, match="lr is missing"):
        th.probes.spectral(MLP, HIGH, base=LOW)


def test_eps_of_an_optimizer_by_hand_is_seen_to_limit_its_steps():
    def blunt(model):
        return torch.optim.AdamW(model.parameters(), lr=2**-8, eps=1.0)

    made = th.probes.spectral(MLP, HIGH, base=LOW, parameterization="own", optimizer=blunt, steps=1)
    assert all(row.limited_by_eps for row in made.rows)
    sgd = th.probes.spectral(
        MLP,
        HIGH,
        base=LOW,
        parameterization="own",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=1,
    )
    assert not any(row.limited_by_eps for row in sgd.rows)  # which has no eps


def test_an_optimizer_by_hand_that_keeps_state_between_calls_is_refused():
    rates = iter([2**-8, 2**-9])

    def decaying(model):
        return torch.optim.AdamW(model.parameters(), lr=next(rates))

    with pytest.raises(UseError, match="keeps state between calls"):
        th.probes.spectral(MLP, HIGH, base=LOW, parameterization="own", optimizer=decaying, steps=1)
