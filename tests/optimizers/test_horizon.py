"""Rules for batch and tokens, on the real optimizers: random walks, half-lives and time scales that stay.

Gradients are noise whose standard deviation goes as 1/√batch, as that of a mean over the batch does.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import Size, UseError, plan
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon, HorizonCase, Stretch

from .small import build

pytestmark = pytest.mark.usefixtures("one_dissection")

WIDTH, BATCH, TOKENS = 64, 64, 2**20
STEPS, BEFORE = 128, 48
"""At the base: those that move the weights, and those before, which fill the averages."""
STRETCHES = ((4, 1), (1 / 4, 1), (1, 4), (4, 16))
HAVE_PACKAGE = importlib.util.find_spec("pytorch_optimizer") is not None
NEEDS = pytest.mark.skipif(not HAVE_PACKAGE, reason="needs pytorch_optimizer")
INSTALLED = {
    name: pytest.param(name, marks=(NEEDS,) if spec.source == "pytorch_optimizer" else ())
    for name, spec in OPTIMIZERS.items()
}


def class_of(name):
    given = OPTIMIZERS[name].implementation
    return given if isinstance(given, type) else given.load(name)


# Random walks


class Three(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(4, width, bias=False), nn.Linear(width, 2, bias=False)
        self.hidden = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.last(self.hidden(self.first(x)).relu())


@functools.cache
def walked(optimizer, options, m_batch, m_tokens):
    """The mean square of what the entries of a matrix have moved by, as a plan under `sde` trains it."""
    base = Size(WIDTH, 1, BATCH, TOKENS)
    made = plan(
        Three,
        torch.zeros(1, 4),
        base=base,
        size=base.at(batch=int(m_batch * BATCH), tokens=int(m_tokens * TOKENS)),
        optimizer=optimizer,
        lr=1e-3,
        eps=1e-30 if OPTIMIZERS[optimizer].eps else None,
        options=dict(options),
        horizon="sde",
    )
    torch.manual_seed(0)
    model = Three(WIDTH, 1).double()
    one = made.optimizer(model, skip=["first.weight", "last.weight"])
    weight, generator = model.hidden.weight, torch.Generator().manual_seed(1)
    rates = [group["lr"] for group in one.param_groups]
    first = round(BEFORE / m_batch)
    for step in range(first + round(STEPS * m_tokens / m_batch)):
        for group, rate in zip(one.param_groups, rates, strict=True):
            group["lr"] = rate if step >= first else 0.0
        if step == first:
            start = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / m_batch**0.5
        one.step()
    return (weight.detach() - start).square().mean().item()


def autocorrelation(weights, num):
    """Of a moving average of noise with these weights."""
    padded = np.concatenate([weights, np.zeros(num)])
    found = np.array([padded[: len(weights)] @ padded[k : k + len(weights)] for k in range(num)])
    return found / found[0]


def of_sum(correlation, num):
    """The variance of the sum of `num` steps, each of variance one."""
    distances = np.arange(1, num)
    return num + 2 * ((num - distances) * correlation[1:num]).sum()


K = np.arange(4000)
WALKS = {
    "sgd": ("sgd", {}, K == 0, None),
    "sgd with momentum": ("sgd", {"momentum": 0.9}, 0.9**K, None),
    "adamw": ("adamw", {}, 0.1 * 0.9**K, None),
    # The signs of two normal numbers correlate as (2/π)·asin of their correlation.
    "lion": (
        "lion",
        {"betas": (0.9, 0.95)},
        np.where(K == 0, 0.1, 0.9 * 0.05 * 0.95 ** (K - 1.0)),
        lambda r: 2 / math.pi * np.arcsin(r),
    ),
    "muon": ("muon", {}, np.where(K == 0, 1 - 0.95**2, 0.95**2 * 0.05 * 0.95 ** (K - 1.0)), None),
    "adamh": ("adamh", {}, 0.1 * 0.9**K, None),
}


@pytest.mark.parametrize("m_batch, m_tokens", STRETCHES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=INSTALLED[WALKS[name][0]].marks) for name in WALKS]
)
def test_noise_moves_the_weights_as_far_as_at_the_base(name, m_batch, m_tokens):
    """At any batch, but for how the first and the last steps of the averages weigh in a longer run.

    The variance of 64² entries has a standard error of √(2/64²) = 2.2 %, and two are compared.
    """
    optimizer, options, weights, signs = WALKS[name]
    options = tuple(options.items())
    correlation = autocorrelation(weights, STEPS * 16)
    correlation = correlation if signs is None else signs(correlation)
    longer = of_sum(correlation, STEPS * m_tokens) / (m_tokens * of_sum(correlation, STEPS))
    found = walked(optimizer, options, m_batch, m_tokens) / walked(optimizer, options, 1, 1)
    assert found == pytest.approx(longer, rel=0.15)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=INSTALLED[WALKS[name][0]].marks) for name in WALKS if name != "muon"]
)
def test_the_walk_at_the_base_is_that_of_the_closed_form(name):
    """So that what the walks above have in common is no fault of theirs."""
    optimizer, options, weights, signs = WALKS[name]
    correlation = autocorrelation(weights, STEPS)
    correlation = correlation if signs is None else signs(correlation)
    size = np.square(weights).sum() if optimizer == "sgd" else 1.0
    if optimizer == "adamw":
        size = 0.1 / 1.9  # an average of noise over its root mean square
    if optimizer == "adamh":  # a step has the length lr·‖W‖_F, W being uniform within ±1/√64
        size = 1 / 3 / WIDTH
    expected = 1e-6 * size * of_sum(correlation, STEPS)
    assert walked(optimizer, tuple(options.items()), 1, 1) == pytest.approx(expected, rel=0.12)


# Half-lives


def planned_options(name, m_batch, **options):
    """The options of an optimizer at m_B times the batch, under `sde`."""
    base = Size(64, 2, batch=64)
    case = HorizonCase(Horizon("sde"), base, base.at(batch=int(m_batch * 64)), OPTIMIZERS[name], options)
    return case.options_here


def state_after(name, grads, **options):
    """The state of one matrix after these gradients."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    one = class_of(name)([weight], lr=1e-9, **{**dict(OPTIMIZERS[name].fixed), **options})
    for grad in grads:
        weight.grad = torch.full_like(weight, grad)
        one.step()
    return one.state[weight]


AVERAGES = [
    ("adamw", "exp_avg", 1 - 0.9**4),
    ("adamw", "exp_avg_sq", 1 - 0.999**4),
    ("muon", "momentum_buffer", 1 - 0.95**4),
    ("muonh", "momentum_buffer", 1 - 0.95**4),
    ("sso", "momentum_buffer", 1 - 0.95**4),
    ("lion", "exp_avg", 1 - 0.99**4),
    ("schedule-free", "exp_avg_sq", 1 - 0.999**4),
    ("diffgrad", "exp_avg", 1 - 0.9**4),
    ("soap", "exp_avg", 1 - 0.95**4),
]


@pytest.mark.parametrize(
    "name, kept, share", [pytest.param(*one, marks=INSTALLED[one[0]].marks) for one in AVERAGES]
)
@pytest.mark.parametrize("m_batch", [4, 2, 1, 1 / 4])
def test_the_newest_examples_have_the_weight_in_an_average_that_they_had(name, kept, share, m_batch):
    """Those of four steps at the base are of one step at four times the batch: the rest is as before."""
    options = {} if m_batch == 1 else planned_options(name, m_batch)
    newest = round(4 / m_batch)
    grads = [1e-12] * 3 + [1.0] * newest
    state = state_after(name, grads, **options)
    assert state[kept].flatten()[0].item() == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("m_batch", [4, 2, 1, 1 / 4])
def test_the_newest_examples_have_their_share_of_the_sum_that_is_sgds_momentum(m_batch):
    momentum = planned_options("sgd", m_batch, momentum=0.9)["momentum"]
    newest = round(4 / m_batch)
    state = state_after("sgd", [0.0] * 3 + [1.0] * newest, momentum=momentum)
    assert state["momentum_buffer"][0, 0].item() * (1 - momentum) == pytest.approx(1 - 0.9**4)


@pytest.mark.parametrize("m_batch", [8, 2, 1 / 2, 1 / 4])
def test_the_newest_examples_turn_lions_sign_as_easily_as_at_the_base(m_batch):
    """Of eight steps at the base. If all older ones say −1, the newest turn it with x·w = 1 − w."""
    pytest.importorskip("pytorch_optimizer")
    betas = planned_options("lion", m_batch)["betas"]
    older = 0.9 * 0.99**7  # in c = 0.9·M + 0.1·g, of M ← 0.99·M + 0.01·g
    turning = older / (1 - older)
    signs = []
    for size in (0.999, 1.001):
        weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
        one = class_of("lion")([weight], lr=1.0, betas=betas, **dict(OPTIMIZERS["lion"].fixed))
        one.state[weight]["exp_avg"] = torch.full_like(weight, -1.0)
        weight.grad = torch.zeros_like(weight)
        for _ in range(round(8 / m_batch)):
            weight.grad = torch.full_like(weight, size * turning)
            before = weight.item()
            one.step()
        signs.append(math.copysign(1, before - weight.item()))
    assert signs == [-1, 1]


def test_the_place_between_two_points_is_no_average_and_stays():
    assert planned_options("schedule-free", 4)["betas"] == (0.9, pytest.approx(0.999**4))
    assert planned_options("schedule-free", 4, betas=(0.8, 0.5))["betas"] == (0.8, pytest.approx(0.5**4))


def test_options_of_the_caller_are_scaled_and_the_others_stay():
    found = planned_options("adamw", 2, betas=[0.5, 0.25], amsgrad=True)
    assert found == {"betas": (0.25, 0.0625), "amsgrad": True}
    assert planned_options("sgd", 4) == {}  # without momentum there is nothing to scale
    assert planned_options("shampoo", 4) == {}


@pytest.mark.parametrize("name", INSTALLED.values())
def test_usual_rates_are_the_defaults_of_the_class_and_none_is_forgotten(name):
    spec, found = OPTIMIZERS[name], inspect.signature(class_of(name)).parameters
    usual = {} if spec.memory is None else dict(spec.memory.usual)
    averages = {option for option in found if option in ("momentum", "betas", "beta", "alpha", "rho")}
    assert {option: found[option].default for option in usual} == usual
    assert averages - set(spec.fixed) <= set(usual) | ({"momentum"} if name == "shampoo" else set())


# Rates, decay and eps


@pytest.mark.parametrize(
    "m_batch, m_tokens, sign, gradient",
    [(4, 1, 2, 4), (1, 4, 1 / 2, 1 / 2), (4, 16, 1 / 2, 1), (1 / 4, 1, 1 / 2, 1 / 4), (4, 4, 1, 2)],
)
def test_sde_is_the_root_rule_for_updates_of_one_size_and_the_linear_rule_for_gradients(
    m_batch, m_tokens, sign, gradient
):
    rule, stretch = Horizon("sde"), Stretch(m_batch, m_tokens)
    assert rule.rate(stretch) == pytest.approx(sign)
    assert rule.rate(stretch, 1) == pytest.approx(gradient)
    assert rule.rate(stretch, fades=True) == 1
    assert Horizon("none").rate(stretch, 1) == 1


def test_power_takes_the_exponents_it_is_given_whatever_the_update():
    stretch = Stretch(batch=8, tokens=4)
    for degree in (-1, 0, 1):
        assert Horizon("power", tokens=0.5, batch=2 / 3).rate(stretch, degree) == pytest.approx(4 / 2)
    assert Horizon("power", tokens=-1.0).rate(stretch, fades=True) == pytest.approx(4)


@pytest.mark.parametrize("policy", ["paper", "independent"])
@pytest.mark.parametrize("rule", ["timescale", "sde+timescale", "power(0.3, 0.7)+timescale"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if OPTIMIZERS[name].decays])
def test_weights_average_over_the_same_share_of_training(name, rule, policy):
    """`lr·weight_decay·steps` of every tensor; with momentum as a sum, of what it sums to."""
    options = {"momentum": 0.9} if name == "sgd" else {}
    base, size = Size(8, 1, batch=4, tokens=1000), Size(16, 2, batch=16, tokens=2000)
    given = {"weight_decay": 0.1, "decay": policy, "options": tuple(options.items())}
    before = small_plan(name, base, size.at(batch=4, tokens=1000), **given)
    after = small_plan(name, base, size, horizon=rule, **given)
    shares = []
    for made, steps in ((before, 1.0), (after, 2000 / 16 / (1000 / 4))):
        whole = 1 / (1 - made.options["momentum"]) if name == "sgd" else 1.0
        shares.append({row.name: row.lr * row.weight_decay * steps * whole for row in made.trained})
    assert any(shares[0].values())
    assert shares[1] == pytest.approx(shares[0], rel=1e-9)


def small_plan(name, base, size, *, options=(), **given):
    return _small_plan(name, base, size, options, tuple(sorted(given.items())))


@functools.cache
def _small_plan(name, base, size, options, given):
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return plan(
        build, tokens, base=base, size=size, optimizer=name, lr=0.02, options=dict(options), **dict(given)
    )


@pytest.mark.parametrize("rule", ["none", "sde", "power(0.3, 0.7)"])
@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_independent_decay_takes_its_part_of_a_weight_at_every_step(name, rule):
    """Whatever the learning rate, unless the time scale is to stay."""
    options = (("momentum", 0.9),) if name == "sgd" else ()
    base, size = Size(8, 1, batch=4, tokens=1000), Size(16, 2, batch=16, tokens=2000)
    made = small_plan(name, base, size, weight_decay=0.1, decay="independent", horizon=rule, options=options)
    # The sum of SGD's momentum holds the decay too; 0.1 is the part of a step whose sum is that at the base.
    summed = (1 - 0.9) / (1 - made.options["momentum"]) if name == "sgd" else 1.0
    parts = {row.name: row.lr * row.weight_decay * summed for row in made.trained if row.weight_decay}
    assert parts
    assert parts == pytest.approx(dict.fromkeys(parts, 0.1), rel=1e-9)


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.eps])
def test_lr_times_eps_stays_where_eps_is_added_to_the_noise(name):
    """eps ∝ √(m_D/m_B); that of Shampoo as a sum of m_D/m_B times as many squares, each 1/m_B as large."""
    spec = OPTIMIZERS[name]
    case = HorizonCase(Horizon("sde"), Size(8, 1, 4, 1000), Size(8, 1, 16, 36_000), spec, {})
    found = case.factors(spec.degree, spec.eps.degree, independent=False)
    expected = {"sophia": 1.0, "shampoo": 9 / 4}.get(name, 3.0)
    assert found.eps == pytest.approx(expected)
    others = HorizonCase(Horizon("power", 0.5, 0.5), Size(8, 1, 4, 1), Size(8, 1, 16, 9), spec, {})
    assert others.factors(spec.degree, spec.eps.degree, independent=False).eps == 1
    assert others.averages == {}


def test_adams_step_on_noise_is_the_same_with_the_eps_of_its_batch():
    """m/(√v + eps): noise and eps are both half as large at four times the batch."""
    base = Size(8, 1, batch=4)
    case = HorizonCase(Horizon("sde"), base, Size(8, 1, batch=16), OPTIMIZERS["adamw"], {})
    factor = case.factors(0, 1, independent=False).eps
    moved = []
    for noise, eps in ((1.0, 0.3), (0.5, 0.3 * factor)):
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        weight.grad = noise * torch.tensor([1.0, -0.2, 3.0], dtype=torch.float64)
        torch.optim.AdamW([weight], lr=0.1, eps=eps, weight_decay=0.0).step()
        moved.append(weight.tolist())
    assert moved[1] == pytest.approx(moved[0])


# Texts and errors


@pytest.mark.parametrize(
    "text, rule",
    [
        ("none", Horizon()),
        ("sde", Horizon("sde")),
        ("timescale", Horizon(timescale=True)),
        ("sde+timescale", Horizon("sde", timescale=True)),
        ("power(0.32, 0.5)", Horizon("power", 0.32, 0.5)),
        ("power(-0.1, 0)+timescale", Horizon("power", -0.1, 0.0, timescale=True)),
    ],
)
def test_a_rule_is_its_text(text, rule):
    assert str(rule) == text
    assert Horizon.of(text) == rule
    assert Horizon.of(rule) is rule
    assert Horizon.of(text.replace("+", " + ").replace(", ", ",")) == rule


@pytest.mark.parametrize(
    "text, words",
    [
        ("sdee", "Did you mean 'sde'"),
        ("sde+power(1, 2)", "give one rule, and timescale beside it"),
        ("timescale+timescale", "give one rule"),
        ("power", "power\\(a, b\\) for a learning rate as tokens"),
        ("power(1)", "power\\(a, b\\)"),
        ("power(a, b)", "'?a'?"),
        ("power(nan, 1)", "horizon is 'power\\(nan, 1\\)': 'nan' is no finite number"),
        ("power(1, inf)", "'inf' is no finite number"),
        ("", "horizon is ''"),
        (None, "horizon is None|horizon is 'None'"),
        (3, "horizon is 3"),
    ],
)
def test_what_is_no_rule_is_refused(text, words):
    with pytest.raises(UseError, match=words):
        Horizon.of(text)


@pytest.mark.parametrize("exponents", [(200.0, 0.0), (-200.0, 0.0), (0.0, 400.0)])
def test_powers_that_no_learning_rate_can_follow_are_refused_and_not_an_overflow(exponents):
    tokens, batch = exponents
    with pytest.raises(UseError, match=r"horizon is power\(.*: give exponents nearer to 0"):
        Horizon("power", tokens, batch).rate(Stretch(batch=64, tokens=1e9))


def test_exponents_are_finite_numbers_and_belong_to_power_alone():
    with pytest.raises(UseError, match="the exponent of tokens is nan"):
        Horizon("power", tokens=math.nan)
    with pytest.raises(UseError, match=r"the exponent of batch is 0\.5 and the rule 'sde': only power"):
        Horizon("sde", batch=0.5)
    with pytest.raises(UseError, match="horizon is 'linear'"):
        Horizon("linear")


def test_a_ratio_needs_both_ends_and_what_the_target_leaves_out_is_that_of_the_base():
    base = Size(8, 1, batch=4, tokens=100)
    assert Stretch.between(base, Size(16, 2)) == Stretch()
    assert Stretch.between(base, Size(16, 2, batch=2)) == Stretch(batch=0.5)
    assert Stretch.between(base, Size(16, 2, tokens=250)).changes == ("tokens",)
    assert Stretch.between(base, Size(8, 1, 8, 800)).steps == 4
    with pytest.raises(UseError, match=r"size has tokens=9 and base has none.* as in Size\(8, 1, tokens=…\)"):
        Stretch.between(Size(8, 1, batch=4), Size(8, 1, tokens=9))
    with pytest.raises(UseError, match="the ratio of batch is 0"):
        Stretch(batch=0)
