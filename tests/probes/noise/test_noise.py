"""The noise of gradients: closed forms, explicit matrices, and what a result says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite import UseError
from theodolite.core.calling import ModelLoss, OutputLoss
from theodolite.optimizers.joined import Joined
from theodolite.probes import Noise, noise
from theodolite.probes.noise.estimates import FoldSums, interval


class Place(nn.Module):
    """A point; the gradient of half the squared distance from x is the point minus x."""

    def __init__(self, at: Tensor) -> None:
        super().__init__()
        self.at = nn.Parameter(at.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.at - x


def half_square(difference: Tensor, targets: object) -> Tensor:
    return difference.square().sum(-1).mean() / 2


class Net(nn.Module):
    """An embedding that is used twice and tied to the head, with a norm and dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + (0.0 if shift is None else shift[:, None])
        x = self.frozen * x + torch.tanh(self.mix(self.norm(x)))
        found: Tensor = self.head(self.dropout(x))
        return found


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def sequences(number: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(7, (number, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def by_example(
    model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Any, Any]
) -> dict[str, np.ndarray]:
    """The gradient of each example, (n, numel) by name, one by one, in eval mode."""
    model.eval()
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for index in range(len(batch[1])):
        model.zero_grad()
        loss(model(batch[0][index : index + 1]), batch[1][index : index + 1]).backward()
        for name in names:
            rows[name].append(model.get_parameter(name).grad.flatten().numpy().copy())  # type: ignore[union-attr]
    model.zero_grad()
    return {name: np.stack(some) for name, some in rows.items()}


def expected(rows: np.ndarray) -> tuple[float, float]:
    """Tr Σ by numpy's covariance, and |mean|² − Tr Σ/n."""
    trace = float(np.trace(np.atleast_2d(np.cov(rows.T))))
    return trace, float((rows.mean(0) ** 2).sum() - trace / len(rows))


def test_each_tensor_and_the_whole_are_those_of_the_explicit_matrix_of_examples() -> None:
    batch = sequences()
    rows = by_example(net(), token_loss, batch)
    found = noise(net(), token_loss, batch, microbatch=1)
    assert [one.name for one in found.tensors] == list(rows) == ["embed.weight", "mix.weight", "mix.bias",
                                                                 "norm.weight", "norm.bias"]  # fmt: skip
    for one in found.tensors:
        assert (one.noise, one.signal) == pytest.approx(expected(rows[one.name]), rel=1e-9), one.name
    whole = expected(np.concatenate(list(rows.values()), 1))
    assert (found.whole.noise, found.whole.signal) == pytest.approx(whole, rel=1e-9)
    # A ratio of sums over tensors, not a mean of their ratios.
    assert found.critical == pytest.approx(whole[0] / whole[1], rel=1e-9)
    assert (found.of, found.units, found.examples, found.batch) == ("examples", 10, 10, 10)


def test_linear_regression_has_its_closed_form() -> None:
    # With inputs N(0, I_p), d = w − w* and residual noise σ the gradient of the squared error is
    # 2(xᵀd − ε)x: g = 2d and Tr Σ = 4((|d|² + σ²)p + |d|²).
    p, sigma, n = 8, 0.5, 20_000
    torch.manual_seed(0)
    model = nn.Linear(p, 1, bias=False).double()
    d = torch.linspace(-0.3, 0.4, p).double()
    inputs = torch.randn(n, p).double()
    targets = inputs @ (model.weight.detach()[0] - d) + sigma * torch.randn(n).double()
    found = noise(model, F.mse_loss, (inputs, targets[:, None]), batch=16)
    square = float(d.square().sum())
    trace = 4 * ((square + sigma**2) * p + square)
    assert found.of == "microbatches"
    assert found.units == 32
    assert found.whole.noise == pytest.approx(trace, rel=0.3)  # of 32 microbatches of 625
    exact = noise(model, F.mse_loss, (inputs[:4000], targets[:4000, None]), microbatch=1)
    assert exact.whole.noise == pytest.approx(trace, rel=0.06)
    assert exact.whole.signal == pytest.approx(4 * square, rel=0.1)
    assert exact.critical == pytest.approx(trace / (4 * square), rel=0.1)
    for one in (found, exact):
        assert one.low is not None
        assert one.high is not None
        assert one.low < trace / (4 * square) < one.high


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
def test_microbatches_of_any_sizes_have_the_same_expectation_as_examples(sizes: tuple[int, int]) -> None:
    # The mean over all ways to deal four examples to the microbatches is exact.
    batch = sequences(4)
    truth = noise(net(), token_loss, batch, microbatch=1)
    found = []
    for order in itertools.permutations(range(4)):
        dealt = [order[: sizes[0]], order[sizes[0] :]]
        parts = [(batch[0][list(some)], batch[1][list(some)]) for some in dealt]
        found.append(noise(net(), token_loss, parts, microbatch=max(sizes)))
    assert {one.units for one in found} == {2}
    for which in ("noise", "signal"):
        mean = np.mean([getattr(one.whole, which) for one in found])
        assert mean == pytest.approx(getattr(truth.whole, which), rel=1e-9), which


def test_more_units_than_gradients_are_kept_give_the_same_estimates() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(11, 5, generator=generator).double() + 0.5
    sizes = [1, 2, 3] * 3 + [1, 1]
    found = []
    for most in (3, 4, 32):
        sums = FoldSums(most)
        for row, size in zip(gradients, sizes, strict=True):
            sums.add([row[:2], row[2:]], size)
        found.append([one[:, 0].tolist() for one in sums.moments().estimates()])
    assert found[0] == [pytest.approx(one, rel=1e-9) for one in found[2]]
    assert found[1] == [pytest.approx(one, rel=1e-9) for one in found[2]]


@pytest.mark.parametrize("most", [24, 96])
@pytest.mark.parametrize("relative", [0.1, 0.5])
def test_the_interval_holds_the_truth_as_often_as_it_says(most: int, relative: float) -> None:
    # x ~ N(0, diag), |g|² such that the critical batch is so large relative to the number of examples.
    n, draws = 96, 150
    scales = torch.arange(1, 41).double() ** -0.5
    trace = float(scales.square().sum())
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(draws):
        g = torch.randn(40, generator=generator).double()
        g *= (trace / (relative * n)) ** 0.5 / g.norm()
        sums = FoldSums(most)
        for row in g + scales * torch.randn(n, 40, generator=generator).double():
            sums.add([row], 1)
        moments = sums.moments()
        drawn = moments.estimates(moments.draws())
        found = interval(*(float(one.sum()) for one in moments.estimates()), *(one.sum(0) for one in drawn))
        held += found.low <= relative * n <= (found.high or np.inf)
    assert held >= 0.9 * draws


def test_without_a_mean_gradient_the_critical_batch_has_no_upper_bound_and_the_result_says_so() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 20)
    found = noise(Place(torch.zeros(20)), half_square, (inputs, None), microbatch=1)
    assert not found.known
    assert found.high is None
    assert found.low is not None
    assert found.low > 30  # the true signal is at most about Tr Σ/30
    assert "cannot be told from 0 with 64 examples" in found.sentence
    assert found.sentence.endswith("give more examples.")
    assert "at least" in found.sentence
    assert "nan" not in str(found)
    still = noise(Place(inputs.mean(0)), half_square, (inputs, None), microbatch=1)
    assert still.critical is None  # |mean|² − Tr Σ/n is below 0
    with pytest.raises(UseError, match="not known"):
        still.more_steps(32)


def test_doubling_a_small_batch_halves_the_steps_and_at_the_critical_one_both_costs_are_twice_the_least() -> (
    None
):
    torch.manual_seed(0)
    # The trace is 10⁴ and the signal 4.
    inputs = 1000**0.5 * torch.randn(60_000, 10)
    found = noise(Place(torch.full((10,), 0.4**0.5)), half_square, (inputs, None), batch=10)
    critical = found.critical
    assert critical is not None
    assert critical == pytest.approx(10_000 / 4, rel=0.8)
    assert found.more_steps(critical) == found.more_examples(critical) == 2
    assert found.more_steps(10) / found.more_steps(20) == pytest.approx(2, rel=0.02)
    assert found.sentence.startswith("A step of 10 examples is 1/")
    assert "twice the batch nearly halves the steps" in found.sentence


def scaled(model: Net, roots: dict[str, Tensor | float]) -> nn.Module:
    """The same network in the coordinates x with θ = root·x."""

    class Root(nn.Module):
        def __init__(self, root: Tensor | float) -> None:
            super().__init__()
            self.root = root

        def forward(self, x: Tensor) -> Tensor:
            return self.root * x

        def right_inverse(self, weight: Tensor) -> Tensor:
            return weight / self.root

    for name, root in roots.items():
        owner, _, last = name.rpartition(".")
        nn.utils.parametrize.register_parametrization(model.get_submodule(owner), last, Root(root))
    return model


def stepped(make: Callable[[Net], torch.optim.Optimizer]) -> tuple[Net, torch.optim.Optimizer]:
    model = net().eval()
    optimizer = make(model)
    generator = torch.Generator().manual_seed(8)
    for _ in range(3):
        tokens = torch.randint(7, (4, 5), generator=generator)
        optimizer.zero_grad()
        token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _two_groups(model: Net) -> list[dict[str, Any]]:
    vectors = [one for one in model.parameters() if one.ndim == 1 and one.requires_grad]
    matrices = [one for one in model.parameters() if one.ndim == 2]
    return [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.07}]


def _joined(model: Net) -> Joined:
    one, other = _two_groups(model)
    return Joined(
        [
            torch.optim.AdamW(one["params"], lr=0.01, betas=(0.9, 0.8)),
            torch.optim.SGD(other["params"], lr=0.5),
        ]
    )


def _planned(model: Net) -> torch.optim.Optimizer:
    groups = [
        {**group, "param_names": [f"p{at}" for at in range(len(group["params"]))], "rule": "adamw",
         "planned_lr": group["lr"]}
        for group in _two_groups(model)
    ]  # fmt: skip
    return th.optimizers.Planned(groups, {"adamw": torch.optim.AdamW})


MAKES: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(_two_groups(model), betas=(0.9, 0.8)),
    "Adam with amsgrad": lambda model: torch.optim.Adam(_two_groups(model), amsgrad=True),
    "RMSprop": lambda model: torch.optim.RMSprop(_two_groups(model), centered=True),
    "Planned": _planned,
    "Joined": _joined,
}


def _factor(optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: Tensor) -> Tensor | float:
    """lr·D by the update formulas of PyTorch's documentation."""
    state = optimizer.state.get(tensor, {})
    if "max_exp_avg_sq" in state:
        v = state["max_exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
    elif "exp_avg_sq" in state:
        v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    elif "square_avg" in state:
        v = state["square_avg"] - state["grad_avg"] ** 2
    else:
        return float(group["lr"])
    return group["lr"] / (v.sqrt() + group["eps"])


@pytest.mark.parametrize("kind", MAKES)
def test_in_the_coordinates_of_an_optimizer_it_is_the_noise_of_the_network_in_these(kind: str) -> None:
    model, optimizer = stepped(MAKES[kind])
    names = {id(one): name for name, one in model.named_parameters()}
    roots = {
        names[id(one)]: _factor(optimizer, group, one) ** 0.5
        for group in optimizer.param_groups
        for one in group["params"]
    }
    batch = sequences()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)  # untie
    found = noise(model, token_loss, batch, optimizer=optimizer, microbatch=1)
    assert found.optimizer == type(optimizer).__name__
    plain = noise(model, token_loss, batch, microbatch=1)
    other = noise(scaled(model, roots), token_loss, batch, microbatch=1)
    for one in found.tensors:
        owner, _, last = one.name.rpartition(".")
        (same,) = (row for row in other.tensors if row.name == f"{owner}.parametrizations.{last}.original")
        assert (one.noise, one.signal) == pytest.approx((same.noise, same.signal), rel=1e-7), one.name
    assert found.critical == pytest.approx(other.critical, rel=1e-7)
    assert found.critical != pytest.approx(plain.critical, rel=1e-3)


def test_one_learning_rate_for_all_entries_changes_nothing_and_a_frozen_group_counts_for_nothing() -> None:
    batch = sequences()
    model = net()
    plain = noise(model, token_loss, batch, microbatch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    assert noise(model, token_loss, batch, optimizer=optimizer, microbatch=1).critical == pytest.approx(
        plain.critical, rel=1e-9
    )
    part = torch.optim.SGD([model.mix.weight], lr=0.3)
    alone = noise(model, token_loss, batch, optimizer=part, microbatch=1)
    weight = next(one for one in plain.tensors if one.name == "mix.weight")
    assert alone.critical == pytest.approx(weight.critical, rel=1e-9)
    assert any("no step of the optimizer moves embed.weight" in note for note in alone.notes)


def test_optimizers_without_such_coordinates_are_refused_with_what_to_do() -> None:
    model, batch = net(), sequences()
    for optimizer, why in (
        (torch.optim.AdamW(model.parameters()), "no state for embed.weight yet.*few steps first"),
        (torch.optim.Adadelta(model.parameters()), "trained by Adadelta.*Leave out optimizer="),
        (torch.optim.SGD(model.parameters(), lr=0.0), "learning rates of the optimizer are 0"),
        (torch.optim.SGD(net().parameters(), lr=0.1), "its own optimizer"),
    ):
        with pytest.raises(UseError, match=why):
            noise(model, token_loss, batch, optimizer=optimizer)


def test_the_same_by_any_kind_of_inputs_and_loss() -> None:
    tokens, targets = sequences()
    truth = noise(net(), token_loss, (tokens, targets), microbatch=2).whole
    named = {"tokens": tokens, "shift": torch.zeros(10, 6).double()}
    whole = OutputLoss(lambda output, targets: token_loss(output, targets))
    own = ModelLoss(lambda model, batch: token_loss(model(batch[0]), batch[1]))
    summed = ModelLoss(lambda model, batch: 4 * token_loss(model(batch[0]), batch[1]) * len(batch[0]) / 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, targets), batch_size=4)
    for loss, batches in (
        (token_loss, (named, targets)),
        (whole, (tokens, targets)),
        (own, (tokens, targets)),
        (summed, (tokens, targets)),  # the sum over the examples
        (token_loss, loader),
    ):
        found = noise(net(), loss, batches, microbatch=2).whole
        assert (found.noise, found.signal) == pytest.approx((truth.noise, truth.signal), rel=1e-9)


def test_a_mean_over_different_numbers_of_tokens_is_noted_and_a_loss_that_compares_examples_refused() -> None:
    tokens, targets = sequences()
    padded = targets.clone()
    padded[::2, 1:] = -100
    found = noise(net(), token_loss, (tokens, padded), microbatch=1)
    assert any("is not the mean over its halves" in note for note in found.notes)

    def compared(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits - logits.mean(0, keepdim=True)).square().sum()

    with pytest.raises(UseError, match="not independent"):
        noise(net(), compared, (tokens, targets), microbatch=1)


@pytest.mark.parametrize("summed", [False, True])
def test_a_loss_that_draws_random_numbers_is_scaled_as_its_mean_or_sum(summed: bool) -> None:
    # The gradient of an example is at − x − ε with ε of N(0, 1): the trace is 10 times that of x plus 1.
    def loss(difference: Tensor, targets: object) -> Tensor:
        each = (difference - torch.randn_like(difference)).square().sum(-1) / 2
        return each.sum() if summed else each.mean()

    inputs = torch.randn(4000, 10, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    found = noise(Place(torch.ones(10)), loss, (inputs, None))
    assert found.notes == ()
    assert found.whole.noise == pytest.approx(10 * 2, rel=0.25)
    assert found.whole.signal == pytest.approx(10, rel=0.1)


def test_what_cannot_be_measured_is_refused_with_the_reason() -> None:
    tokens, targets = sequences()
    with pytest.raises(UseError, match=r"no spread.*more examples"):
        noise(net(), token_loss, (tokens[:1], targets[:1]))
    inputs = torch.ones(2, 3)
    inputs[1, 1] = np.inf
    with pytest.raises(UseError, match="is not finite in microbatch 1"):
        noise(nn.Linear(3, 1), F.mse_loss, (inputs, torch.zeros(2, 1)), microbatch=1)
    with pytest.raises(UseError, match="every example is zero"):
        noise(Place(torch.zeros(3)), half_square, (torch.zeros(4, 3), None))
    with pytest.raises(UseError, match="microbatch is 0"):
        noise(net(), token_loss, (tokens, targets), microbatch=0)
    with pytest.raises(UseError, match="requires a gradient"):
        noise(net().requires_grad_(False), token_loss, (tokens, targets))


def test_two_gradients_have_an_estimate_and_no_interval() -> None:
    """All draws of a bootstrap over two that keep a product of different ones are the same."""
    layer, inputs = nn.Linear(1, 1, bias=False), torch.ones(2, 1)
    nn.init.ones_(layer.weight)
    found = noise(layer, F.mse_loss, (inputs, torch.tensor([[-1.0], [0.0]])), microbatch=1)
    assert (found.critical, found.low, found.high, found.known) == (0.25, None, None, False)
    assert found.tensors[0].interval == "unknown"
    assert "not known: two gradients have no interval: give more examples" in str(found)


def test_a_microbatch_is_no_larger_than_the_batches() -> None:
    tokens, targets = sequences(12)
    batches = [(tokens[:5], targets[:5]), (tokens[5:], targets[5:])]
    found = noise(net(), token_loss, batches, microbatch=1000)
    assert (found.units, found.microbatch) == (2, 7)


def test_it_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    model[0].weight.grad = torch.ones(4, 4)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    found = noise(model, F.cross_entropy, (torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
                                           torch.arange(12) % 2))  # fmt: skip
    assert any("running statistics" in note for note in found.notes)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[3].weight.grad is None


def test_the_result_is_read_back_and_its_table_has_every_tensor(tmp_path: Path) -> None:
    for batch in (sequences(), sequences(2)):
        found = noise(net(), token_loss, batch, microbatch=1)
        assert Noise.load(found.save(tmp_path / "noise.json")) == found
    lines = found.save(tmp_path / "noise.csv").read_text().splitlines()
    assert lines[0] == "tensor,parameters,critical,low,high,noise,signal"
    assert [line.split(",")[0] for line in lines[1:]] == ["all", *(one.name for one in found.tensors)]
    assert "critical batch" in found.save(tmp_path / "noise.html").read_text()


def test_two_processes_with_half_of_the_examples_measure_all_of_them(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).with_name("programs") / "noise_halves.py")
