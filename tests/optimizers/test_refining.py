"""Refined schedules against the paper's formula, written out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.optimizers.schedule import LRFactor, refine


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
        ([1.0, 2.0], {"norm": "l3"}, "norm is 'l3': it is one of l2, l1"),
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
