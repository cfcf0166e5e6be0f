"""Attention against explicit softmax, and what rotary positions promise."""

import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.models.transformer import Attention, make_norm, make_rotation, rotate


def explicit(attention: Attention, x, heads: int):
    """One head and one query at a time, without rotation."""
    batch, length, width = x.shape
    size = width // heads
    out = torch.zeros_like(x)
    for b in range(batch):
        for h in range(heads):
            rows = slice(h * size, (h + 1) * size)
            q, k, v = (
                x[b] @ layer.weight[rows].T for layer in (attention.query, attention.key, attention.value)
            )
            for t in range(length):
                weights = torch.softmax(k[: t + 1] @ q[t] / size**0.5, 0)
                out[b, t, rows] = weights @ v[: t + 1]
    return out @ attention.out.weight.T


def test_attention_is_the_softmax_of_its_formula():
    attention = Attention(12, head_dim=4).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x), explicit(attention, x, heads=3))


def test_shared_key_value_heads_equal_full_attention_with_the_heads_repeated():
    grouped = Attention(24, head_dim=4, kv_heads=2).double()
    full = Attention(24, head_dim=4).double()
    full.query, full.out = grouped.query, grouped.out
    for name in ("key", "value"):
        shared = getattr(grouped, name).weight.data.unflatten(0, (2, 4))
        # Query heads 0, 1, 2 read the first shared head, 3, 4, 5 the second.
        getattr(full, name).weight.data = torch.cat([shared[0]] * 3 + [shared[1]] * 3)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    rotation = make_rotation(5, 4, like=x)
    torch.testing.assert_close(grouped(x, rotation), full(x, rotation))


def test_the_number_of_shared_heads_does_not_grow_with_width():
    shapes = [tuple(Attention(width, head_dim=4, kv_heads=2).key.weight.shape) for width in (16, 32)]
    assert shapes == [(8, 16), (8, 32)]


def test_rotary_scores_depend_on_the_distance_only():
    cos, sin = make_rotation(40, 8, like=torch.zeros(1, dtype=torch.float64))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(t: int, u: int):
        turned_q = rotate(q, (cos[t : t + 1], sin[t : t + 1]))
        return (turned_q * rotate(k, (cos[u : u + 1], sin[u : u + 1]))).sum()

    torch.testing.assert_close(score(9, 4), score(39, 34))
    torch.testing.assert_close(score(7, 7), (q * k).sum())
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_rotation_turns_pair_r_at_position_t_by_its_angle():
    cos, sin = make_rotation(4, 6, like=torch.zeros(1, dtype=torch.float64))
    x = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    as_complex = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.tensor([[t * 10_000 ** (-r / 3) for r in range(3)] for t in range(4)], dtype=torch.float64)
    turned = as_complex * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotate(x, (cos, sin)), torch.cat([turned.real, turned.imag], -1))


def test_normed_queries_and_keys_do_not_feel_the_scale_of_their_weights():
    attention = Attention(16, head_dim=8, qk_norm=make_norm("rms", shift=False)).double()
    x = 10 * torch.randn(1, 6, 16, dtype=torch.float64)
    before = attention(x)
    attention.query.weight.data *= 7
    attention.key.weight.data *= 7
    torch.testing.assert_close(attention(x), before, atol=1e-6, rtol=1e-5)


def test_low_precision_stays_low_precision():
    attention = Attention(16, head_dim=8).bfloat16()
    x = torch.randn(1, 4, 16, dtype=torch.bfloat16)
    out = attention(x, make_rotation(4, 8, like=x))
    assert out.dtype == torch.bfloat16
    exact = attention.double()(x.double(), make_rotation(4, 8, like=x.double()))
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"width": 100, "head_dim": 32}, r"width is 100, not a multiple of 32 .*: give 96 or 128"),
        (
            {"width": 64, "head_dim": 16, "kv_heads": 3},
            r"kv_heads is 3, .* 4 heads of 16: give a divisor of 4",
        ),
        ({"width": 64, "head_dim": 16, "kv_heads": 0}, "kv_heads is 0: give an integer, at least 1"),
    ],
)
def test_impossible_heads_are_refused_with_the_fix(options, message):
    with pytest.raises(UseError, match=message):
        Attention(**options)
