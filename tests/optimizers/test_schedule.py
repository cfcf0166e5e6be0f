"""Schedules against their closed forms and the paper's formula, and the ratios they keep."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from theodolite.core.errors import UseError
from theodolite.optimizers.schedule import LRFactor, Refined, refine, schedule

KINDS = ["constant", "cosine", "linear", "wsd"]
RATES = [1.0, 0.5, 3e-3, 2**-12, 1e-7]


def _optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in RATES]
    return torch.optim.SGD(groups)


def _run(kind: str, steps: int, **options: Any) -> list[list[float]]:
    """The learning rates of all groups that each of `steps` and a few more steps are made with."""
    optimizer = _optimizer()
    scheduler = schedule(optimizer, kind, steps=steps, **options)
    rates = []
    for _ in range(steps + 3):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_ratios_are_the_same_at_every_step(kind: str, warmup: int, final: float) -> None:
    for rates in _run(kind, 50, warmup=warmup, final=final):
        factors = [rate / planned for rate, planned in zip(rates, RATES, strict=True)]
        assert factors == pytest.approx([factors[0]] * len(RATES), rel=1e-12, abs=0)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_shapes(final: float) -> None:
    steps, warmup = 100, 10

    def rates(kind: str) -> list[float]:
        return [row[0] for row in _run(kind, steps, warmup=warmup, final=final)]

    rise = [(step + 1) / 10 for step in range(10)]
    along = [(step - 10) / 90 for step in range(10, 100)]
    after = [final] * 3
    assert rates("constant") == pytest.approx([*rise, *[1.0] * 93])
    fall = [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * s)) for s in along]
    assert rates("cosine") == pytest.approx([*rise, *fall, *after], abs=1e-12)
    assert rates("linear") == pytest.approx([*rise, *[1 - s * (1 - final) for s in along], *after], abs=1e-12)
    cool = [1 - (1 - final) * step / 20 for step in range(20)]
    assert rates("wsd") == pytest.approx([*rise, *[1.0] * 70, *cool, *after], abs=1e-12)


def test_cosine_is_that_of_torch_where_torch_keeps_ratios() -> None:
    optimizer = _optimizer()
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for mine in _run("cosine", 20)[:20]:
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(mine, rel=1e-9)
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (3, 0), (10, 9)]
)  # decay may be shorter than a step
@pytest.mark.parametrize("kind", KINDS)
def test_short_schedules_stay_between_zero_and_one(kind: str, steps: int, warmup: int) -> None:
    rates = [row[0] for row in _run(kind, steps, warmup=warmup)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[-1] == (1.0 if kind == "constant" else 0.0)
    assert max(rates) == 1.0


def test_the_state_is_json_and_resumes() -> None:
    optimizer = _optimizer()
    scheduler = schedule(optimizer, "wsd", steps=30, warmup=4, final=0.1)
    assert isinstance(scheduler, LambdaLR)
    assert all(factor is scheduler.lr_lambdas[0] for factor in scheduler.lr_lambdas)
    for _ in range(26):
        optimizer.step()
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict()))
    other = _optimizer()
    resumed = schedule(other, "cosine", steps=7)  # what it was made with does not matter
    resumed.load_state_dict(state)
    other.load_state_dict(optimizer.state_dict())
    for _ in range(6):
        optimizer.step(), scheduler.step()
        other.step(), resumed.step()
        for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
            assert mine["lr"] == theirs["lr"]


NORMS = [4.0, 3.0, 2.0, 2.0, 1.0, 1.5, 1.2, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("made_with", ["cosine", "refined"])
@pytest.mark.parametrize("saved", ["cosine", "refined"])
def test_a_refined_schedule_is_saved_as_json_and_resumes(made_with: str, saved: str) -> None:
    refined = refine(NORMS)

    def made(kind: str, optimizer: torch.optim.Optimizer) -> LambdaLR:
        if kind == "cosine":
            return schedule(optimizer, "cosine", steps=10)
        return schedule(optimizer, refined if kind == saved else refine([1.0, 2.0]))

    optimizer = _optimizer()
    scheduler = made(saved, optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict()))
    if saved == "cosine":  # a checkpoint from before there were refined schedules
        for factor in state["lr_lambdas"]:
            del factor["factors"]
    other = _optimizer()
    resumed = made(made_with, other)
    resumed.load_state_dict(state)
    other.load_state_dict(optimizer.state_dict())
    for _ in range(8):
        assert [group["lr"] for group in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
        optimizer.step(), scheduler.step()
        other.step(), resumed.step()
    assert refined == refine(NORMS)  # what the caller holds is not the scheduler's


def test_a_refined_schedule_keeps_ratios_and_one_for_each_group_does_not() -> None:
    ones, falling = refine(NORMS), refine([1.0] * 10)
    optimizer = _optimizer()
    scheduler = schedule(optimizer, ones)
    for step in range(12):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [rate * ones(step) for rate in RATES]
        optimizer.step(), scheduler.step()
    assert scheduler.get_last_lr() == [0.0] * len(RATES)
    apart = schedule(_optimizer(), [ones, falling, ones, falling, ones])
    assert apart.get_last_lr() == [
        rate * course(0) for rate, course in zip(RATES, [ones, falling] * 2 + [ones], strict=True)
    ]


def test_a_refined_schedule_is_stretched_to_the_steps_that_are_asked_for() -> None:
    optimizer = _optimizer()
    scheduler = schedule(optimizer, refine(NORMS), steps=25)
    rates = []
    for _ in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(), scheduler.step()
    assert rates[:25] == list(refine(NORMS).to(25).factors)
    assert rates[25] == 0


@pytest.mark.parametrize("kind", ["cosine", refine(NORMS)], ids=["cosine", "refined"])
@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
def test_numbers_of_steps_may_be_those_of_numpy(kind: str | Refined, number: Any) -> None:
    """As `len(frame) // batch` gives them; and the state is JSON as ever."""
    warmup = 3 if isinstance(kind, str) else 0
    plain = schedule(_optimizer(), kind, steps=25, warmup=warmup)
    numpys = schedule(_optimizer(), kind, steps=number(25), warmup=number(warmup))
    assert json.dumps(numpys.state_dict()) == json.dumps(plain.state_dict())
    assert [numpys.lr_lambdas[0](step) for step in range(30)] == [
        plain.lr_lambdas[0](step) for step in range(30)
    ]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (refine(NORMS), {"warmup": 3}, "warmup is 3: a refined schedule has its own start"),
        (refine(NORMS), {"final": 0.1}, "final is 0.1"),
        ([refine(NORMS)] * 2, {}, "2 refined schedules are given for 5 parameter groups"),
        (
            [Refined((1.0,) * n) for n in (3, 4, 3, 3, 3)],
            {},
            "have 3, 4, 3, 3, 3 steps: give the number of steps",
        ),
        ([], {}, "the schedule is .*: give a name"),
        ("cosine", {}, "steps is not given"),
    ],
)
def test_what_is_no_refined_schedule_for_this_optimizer(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(UseError, match=message):
        schedule(_optimizer(), kind, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cosin", "steps": 5}, "the schedule is 'cosin'. Did you mean 'cosine'?"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 5.5}, "steps is 5.5: give an integer"),
        ({"steps": 5, "warmup": 5}, "warmup is 5: give a number of steps below 5"),
        ({"steps": 5, "warmup": -1}, "warmup is -1"),
        ({"steps": 5, "final": 1.5}, "final is 1.5"),
        ({"steps": 5, "final": float("nan")}, "final is nan"),
    ],
)
def test_bad_schedules_are_refused(options: dict[str, Any], message: str) -> None:
    kind = options.pop("kind", "cosine")
    with pytest.raises(UseError, match=message):
        schedule(_optimizer(), kind, **options)


# Refined schedules


def _median_of_windows(norms: Sequence[float], width: int) -> list[float]:
    """Window by window: on the left the first norm again, on the right the norms mirrored at the last."""
    last = len(norms) - 1

    def seen(place: int) -> float:
        if place < 0:
            return norms[0]
        return norms[place] if place <= last else norms[2 * last - place]

    half = width // 2
    return [float(np.median([seen(t + d) for d in range(-half, half + 1)])) for t in range(len(norms))]


def _by_the_formula(norms: Sequence[float], power: int, width: int) -> list[float]:
    """Sums written out, with the last norm once more for the iterate after the last step."""
    filtered = _median_of_windows(norms, width)
    weights = [norm**-power for norm in [*filtered, filtered[-1]]]
    rates = [weights[t] * math.fsum(weights[t + 1 :]) for t in range(len(norms))]
    return [rate / max(rates) for rate in rates]


@pytest.mark.parametrize("steps", [2, 10, 1000])
def test_constant_norms_give_linear_decay(steps: int) -> None:
    linear = LRFactor("linear", steps)
    for norm in (1e-12, 1.0, 7e8):
        found = refine([norm] * steps)
        assert found.factors == pytest.approx([linear(step) for step in range(steps)], rel=1e-13)
        assert found.steps == steps
        assert found(steps) == 0 == linear(steps)


@pytest.mark.parametrize(("norm", "power"), [("l2", 2), ("l1", 1)])
@pytest.mark.parametrize(("smoothing", "width"), [(0.0, 1), (0.1, 19), (0.25, 47)])
def test_the_formula(norm: str, power: int, smoothing: float, width: int) -> None:
    draw = np.random.default_rng(0)
    norms = (np.linspace(9, 1, 190) * np.exp(draw.normal(size=190))).tolist()
    found = refine(norms, norm=norm, smoothing=smoothing)  # type: ignore[arg-type]
    assert found.factors == pytest.approx(_by_the_formula(norms, power, width), rel=1e-12)
    assert max(found.factors) == 1.0


def test_only_ratios_matter_even_where_squares_would_overflow() -> None:
    norms = [5.0, 4.0, 3.0, 2.0, 1.0]
    usual = refine(norms).factors
    for scale in (1e200, 1e-200):
        assert refine([scale * norm for norm in norms]).factors == pytest.approx(usual, rel=1e-12)


def test_an_outlier_does_not_show() -> None:
    norms = [1.0] * 100
    norms[37] = 1e6
    assert refine(norms).factors == refine([1.0] * 100).factors


def test_large_gradients_at_the_start_are_a_warm_up() -> None:
    found = refine([10.0] * 200 + [1.0] * 800)
    assert found.peak == 200
    assert found.factors[0] == pytest.approx((200 / 100 + 800) / 100 / 800, rel=1e-2)


def test_stretched_and_back() -> None:
    found = refine([3.0, 2.0, 1.0, 1.0, 1.5, 1.0])
    twice = found.to(12)
    assert twice.factors[::2] == pytest.approx(found.factors)
    assert twice.factors[1] == pytest.approx((found.factors[0] + found.factors[1]) / 2)
    assert twice.factors[-1] == pytest.approx(found.factors[-1] / 2)  # on the way to 0
    assert max(refine([1.0, 1.0, 5.0]).to(100).factors) == 1.0
    assert min(found.to(100).factors) > 0


@pytest.mark.parametrize(
    ("norms", "options", "message"),
    [
        ([1.0, 0.0, 1.0], {}, r"gradient_norms\[1\] is 0: nothing was learnt"),
        ([1.0, 1.0, math.nan], {}, r"gradient_norms\[2\] is nan"),
        ([math.inf, 1.0], {}, r"gradient_norms\[0\] is inf"),
        ([1.0, -2.0], {}, r"gradient_norms\[1\] is -2"),
        ([1.0], {}, "holds 1 steps"),
        ([], {}, "holds 0 steps"),
        ([[1.0, 2.0], [1.0, 2.0]], {}, r"shape \(2, 2\).*refine each"),
        (["a", "b"], {}, "give a list of numbers"),
        ([1e250, 1e-250], {"smoothing": 0.0}, r"gradient_norms\[0\] is 1e\+250 and the smallest 1e-250"),
        ([1.0, 2.0], {"norm": "l3"}, "norm is 'l3'. It is one of l2, l1"),
        ([1.0, 2.0], {"smoothing": 1.5}, "smoothing is 1.5"),
    ],
)
def test_norms_that_say_nothing_are_refused(norms: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(UseError, match=message):
        refine(norms, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_may_be_tensors_as_torch_gives_them(dtype: torch.dtype) -> None:
    norms = [4.0, 2.0, 1.0, 1.0]
    tensor = torch.tensor(norms, dtype=dtype, requires_grad=True)
    expected = [3.25 / 16, 3 / 4, 2, 1]  # weights 1/16, 1/4, 1, 1 and 1 once more, each times those after it
    for given in (tensor, list(tensor), tuple(tensor.detach()), np.array(norms)):
        assert refine(given).factors == pytest.approx([each / 2 for each in expected])  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_a_number_of_steps_is_a_whole_number(steps: object) -> None:
    with pytest.raises(UseError, match="steps is"):
        refine([1.0, 1.0]).to(steps)  # type: ignore[arg-type]


def test_a_refined_schedule_is_saved_and_read_back(tmp_path: Path) -> None:
    refined = refine([3.0, 2.0, 1.0, 1.5])
    assert Refined.load(refined.save(tmp_path / "refined.json")) == refined
    lines = refined.save(tmp_path / "refined.csv").read_text().splitlines()
    assert lines[0] == "step,factor"
    assert [float(line.split(",")[1]) for line in lines[1:]] == list(refined.factors)
