"""Γ and the theorems against their formulas, and A against what really happens to the output."""

from __future__ import annotations

import copy
import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import theodolite as th
from theodolite import UseError
from theodolite.growing import Theory, keep_better, theory
from theodolite.growing.complexity import Complexity
from theodolite.workloads import next_token_loss

SMALL = Complexity(
    layers=10, parameters=100_000, radius=10.0, log_amplification=23.0, loss_lipschitz=2**0.5, loss_bound=2.5
)


def test_gamma_is_about_sixty_for_a_small_network() -> None:
    # ln(3·10·10·e²³·√50000) = ln 300 + 23 + ln(50000)/2 = 5.7038 + 23 + 5.4099 = 34.1137
    second = 2 * 2.5 * math.sqrt(2 * 1e5 * 34.1137 / 5e4)
    expected = 2 * math.sqrt(2) / 223.607 + second + 3 * 2.5 * math.sqrt(4.38203 / 1e5)
    assert second == pytest.approx(58.4, abs=0.05)
    assert SMALL.gamma(50_000, 0.05) == pytest.approx(expected, rel=1e-4)


def test_the_theorems_are_what_they_say() -> None:
    one, two, three = SMALL.theorems(0.8, n=1e9, m=1e6, delta=0.05, training=0.1)
    gamma, other = SMALL.gamma(1e9, 0.05), SMALL.gamma(1e6, 0.05)
    assert one.change == pytest.approx(-0.8 - 0.1 + 2 * gamma)
    assert two.change == pytest.approx(-0.4 - 0.1 + 2 * gamma)
    assert three.change == pytest.approx(-0.8 - 0.1 + 2 * gamma + 2 * other)
    assert [one.failure, three.failure] == [0.05, 0.1]
    few = SMALL.theorems(0.8, n=1e9, m=2000, delta=0.05)[1].failure
    assert few == pytest.approx(0.05 + 6 * math.exp(-2 * 2000 * 0.1**2 / 2.5**2))
    assert [one.shows_gain, two.shows_gain, three.shows_gain] == [one.change < 0, two.change < 0, False]


def test_the_examples_needed_are_where_a_theorem_begins_to_show_a_gain() -> None:
    for place in range(3):
        needed = SMALL.theorems(0.3, 10, 10, 0.05)[place].needed
        for factor, shows in ((1.001, True), (0.999, False)):
            n = factor * needed
            assert (SMALL.theorems(0.3, n, n, 0.05)[place].change < 0) == shows
    assert SMALL.theorems(0.0, 10, 10, 0.05)[0].needed == math.inf


def test_the_second_theorem_needs_a_gain_and_examples_to_see_it() -> None:
    tiny = Complexity(1, 1, 1e-9, -20.0, 1.4, 1.0)
    one, two, _ = tiny.theorems(-0.4, 1e8, 1e8, 0.05, training=0.3)
    assert one.change > 0  # the risk may rise by 0.1, so no gain can be shown on a test either
    assert (two.failure, two.needed, two.shows_gain) == (1.0, math.inf, False)
    few = tiny.theorems(0.3, 1e8, 720, 0.05)[1]
    assert few.change < 0
    assert few.failure > 0.8
    assert not few.shows_gain
    # Training alone pays for Γ here: what remains is to see the margin on the test.
    needed = tiny.theorems(0.3, 10, 10, 0.05, training=2.0)[1].needed
    assert 6 * math.exp(-2 * needed * (0.3 / 8) ** 2) == pytest.approx(0.05, rel=0.01)
    for factor, shows in ((1.01, True), (0.99, False)):
        n = factor * needed
        assert tiny.theorems(0.3, n, n, 0.05, training=2.0)[1].shows_gain == shows
    with pytest.raises(UseError, match=r"training is -0\.1"):
        tiny.theorems(0.3, 10, 10, 0.05, training=-0.1)


def test_a_class_of_one_network_costs_no_more_than_a_mean() -> None:
    alone = Complexity(0, 0, 0.0, -math.inf, 0.0, 1.0)
    assert alone.gamma(100, 0.05) == pytest.approx(3 * math.sqrt(math.log(80) / 200))


@cache
def looked_at(placement: str) -> tuple[nn.Module, Tensor, Theory]:
    torch.manual_seed(0)
    model = th.models.GPT(8, 2, vocab=11, head_dim=4, norm_placement=placement).double()
    tokens = torch.randint(11, (2, 4))
    return model, tokens, theory(model, next_token_loss, (tokens, tokens), n=50_000)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_no_change_of_a_branch_moves_the_output_by_more_than_it_is_amplified(placement: str) -> None:
    model, tokens, found = looked_at(placement)
    before = model(tokens).detach()
    for index, layer in enumerate(found.layers):
        block = model.blocks[index // 2]
        part = block.attention if index % 2 == 0 else block.feed_forward
        moved = 0.0
        for seed in range(5):
            other = copy.deepcopy(model)
            twin = other.get_submodule(next(name for name, one in model.named_modules() if one is part))
            torch.manual_seed(seed)
            steps = []
            for name, tensor in twin.named_parameters():
                if "norm_stream" not in name:
                    steps.append(1e-4 * torch.randn_like(tensor))
                    tensor.data += steps[-1]
            far = torch.cat([step.flatten() for step in steps]).norm()
            change = (other(tokens) - before).flatten(1).norm(dim=1).max()
            moved = max(moved, float((change / far).detach()))
        assert 0 < moved <= math.exp(layer.log_amplification)


def test_amplification_is_the_product_of_all_that_lies_behind() -> None:
    _, _, found = looked_at("post")
    behind = found.top.value
    for layer in reversed(found.layers):
        expected = behind * layer.norm.value * layer.parameter
        assert math.exp(layer.log_amplification) == pytest.approx(expected)
        behind *= layer.norm.value * (1 + layer.input.value)


def test_a_stream_without_norms_is_told_from_one_with() -> None:
    pre, post = looked_at("pre")[2], looked_at("post")[2]
    assert [one.norm.value for one in pre.layers] == [1.0] * 4
    assert all(one.norm.value != 1.0 for one in post.layers)
    assert (pre.is_post_norm, post.is_post_norm) == (False, True)
    assert "not normalised between layers" in str(pre)
    assert "not normalised between layers" not in str(post)


def test_it_says_how_vacuous_it_is() -> None:
    model, tokens, found = looked_at("pre")
    model.requires_grad_(False)
    branches = sum(one.numel() for name, one in model.named_parameters() if name.startswith("blocks"))
    assert found.parameters == branches
    losses = [next_token_loss(model(one[None]), one[None]).detach() for one in tokens]
    assert found.loss_bound == pytest.approx(float(max(losses)))
    assert found.loss_lipschitz == math.sqrt(2)
    expected = 2 * found.whole.gamma(50_000, 0.05) / found.loss
    assert found.vacuous_by == pytest.approx(expected)
    assert f"vacuous by a factor of {expected:.3g}" in str(found)
    measured, anywhere = (found.side(side).gamma(50_000, 0.05) for side in ("measured", "anywhere"))
    assert measured < found.gamma < anywhere
    assert found.alone(0).gamma(50_000, 0.05) < found.gamma


def test_with_examples_enough_it_is_not_vacuous() -> None:
    model, tokens, _ = looked_at("pre")
    found = theory(
        model, next_token_loss, (tokens, tokens), n=10**9, margin=1.0, training=0.2, bound=5.0, examples=1
    )
    assert found.loss_bound == 5.0
    assert found.theorems[0].change == pytest.approx(2 * found.whole.gamma(1e9, 0.05) - 1.2)
    assert found.theorems[0].shows_gain
    assert "is not vacuous" in str(found)


def test_parallel_branches_are_one_layer() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.readout = nn.Linear(6, 6), nn.Linear(6, 3)
            self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
            self.feed = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inside(x)
            seen = torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x) + 0 * torch.rand(())
            return self.readout(x + seen + self.feed(x))

    batch = torch.randn(2, 4, 6), torch.randn(2, 4, 3)
    model, randomness = Parallel(), torch.get_rng_state()
    found = theory(model, nn.functional.mse_loss, batch)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert [one.layer for one in found.layers] == [0, 0]
    assert found.whole.layers == 1
    assert found.lipschitz_is_measured


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.branch, self.readout = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        return self.readout(x + self.branch(x)).mT


def test_a_cross_entropy_is_as_steep_as_it_is_reduced_and_weighted() -> None:
    model, batch = Plain(), (torch.randn(4, 10, 8), torch.randint(4, (4, 10)))
    assert theory(model, nn.CrossEntropyLoss(), batch).loss_lipschitz == math.sqrt(2)
    for loss in (
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="sum", weight=torch.tensor([1.0, 100.0, 1.0, 1.0])),
    ):
        found, logits = theory(model, loss, batch), model(batch[0]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(logits, batch[1]), logits)
        assert found.loss_lipschitz == pytest.approx(float(slope.flatten(1).norm(dim=1).max()), rel=1e-4)
        assert found.loss_lipschitz > math.sqrt(2)
        assert found.lipschitz_is_measured


def test_a_branch_may_read_the_data_themselves() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    found = theory(encoder, nn.functional.mse_loss, (torch.randn(2, 3, 8), torch.randn(2, 3, 8)))
    assert math.isnan(found.layers[0].input.measured)  # they have no gradient, and no A needs it
    assert all(math.isfinite(one.log_amplification) for one in found.layers)
    assert math.isfinite(found.side("measured").gamma(100, 0.05))


def test_what_has_no_bound_is_measured() -> None:
    tokens = torch.randint(11, (1, 4))
    model = th.models.GPT(8, 1, vocab=11, head_dim=4, experts=3)
    found = theory(model, next_token_loss, (tokens, tokens))
    expert = found.layers[1]
    assert expert.how == "measured: no bound for topk"
    assert expert.input.value == expert.input.measured > 0
    assert math.isfinite(found.gamma)


def test_it_is_read_back(tmp_path: Path) -> None:
    _, _, found = looked_at("pre")
    assert str(Theory.load(found.save(tmp_path / "theory.json"))) == str(found)


def test_the_network_is_left_as_it_was() -> None:
    model = th.models.ResNet(4, 1).train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = copy.deepcopy(model.state_dict())
    batch = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    randomness = torch.get_rng_state()
    found = theory(model, nn.CrossEntropyLoss(), batch, examples=1)
    assert found == theory(copy.deepcopy(model).eval(), nn.CrossEntropyLoss(), batch, examples=1)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_bad_input_is_refused() -> None:
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    loss = nn.functional.cross_entropy
    with pytest.raises(UseError, match="Sequential has no residual branches"):
        theory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), loss, batch)
    tokens = torch.randint(11, (1, 4))
    routed = th.models.GPT(8, 2, vocab=11, head_dim=4, residual="routed")
    with pytest.raises(UseError, match="stream of GPT is a mixture"):
        theory(routed, next_token_loss, (tokens, tokens))
    model, tokens, _ = looked_at("pre")
    with pytest.raises(UseError, match=r"bound is 0.1, but an example has the loss"):
        theory(model, next_token_loss, (tokens, tokens), bound=0.1, examples=1)
    for reentrant in (True, False):
        hidden = copy.deepcopy(model)
        for block in hidden.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        with pytest.raises(UseError, match="checkpointed"):
            theory(hidden, next_token_loss, (tokens, tokens), examples=1)
    with pytest.raises(UseError, match="examples is 0"):
        theory(model, next_token_loss, (tokens, tokens), examples=0)


def batch(*numbers: float) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(numbers)[:, None]
    return rows, 2 * rows


class Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + self.value


def test_the_fallback_rule_keeps_the_better_on_the_training_data() -> None:
    batches = [batch(1, 2), batch(3)]  # targets 2, 4, 6
    jumped, trained = Constant(3.0), Constant(4.0)
    kept = keep_better(jumped, trained, nn.functional.mse_loss, batches)
    assert kept.model is trained
    assert (kept.which, kept.margin) == ("trained", pytest.approx((1 + 1 + 9) / 3 - (4 + 0 + 4) / 3))
    kept = keep_better(trained, jumped, nn.functional.mse_loss, batches)
    assert (kept.which, kept.margin) == ("jumped", 0.0)
    assert kept.model is trained
    assert "training changed the training loss from 2.667 to 3.667" in str(kept)


def test_training_that_diverged_is_no_help() -> None:
    broken, sound = Constant(math.nan), Constant(1.0)
    assert keep_better(sound, broken, nn.functional.mse_loss, batch(1, 2)).which == "jumped"
    assert keep_better(broken, sound, nn.functional.mse_loss, batch(1, 2)).which == "trained"
    with pytest.raises(UseError, match="neither can be kept"):
        keep_better(broken, Constant(math.inf), nn.functional.mse_loss, batch(1, 2))
