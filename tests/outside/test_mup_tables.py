"""The rules against tables others have published: CompleteP in width and depth, microsoft/mup in width.

Sources:
    CompleteP: Dey et al., Don't be lazy, arXiv 2505.01618, Table 1 and equation 40, with its own code,
    EleutherAI/nanoGPT-mup, branch completep, `configure_optimizers`.
    muP: Yang et al., Tensor Programs V, arXiv 2203.03466, Tables 3 and 8, with its own code,
    microsoft/mup, `mup/optim.py` (MuAdam, MuSGD) and `mup/layer.py` (MuReadout).
"""

from __future__ import annotations

import dataclasses
from math import sqrt

import pytest
import torch

import theodolite as th
from theodolite.anatomy.part import Part
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Ratios

BASE = Base(lr=3e-3, weight_decay=0.1, eps=1e-8, std=0.02)


def rule(optimizer: str, part: Part, fan_in: float, fan_out: float, depth: float = 1.0) -> Hyper:
    """Factors on the base values."""
    found = OPTIMIZERS[optimizer].rule(part, Ratios(fan_in, fan_out, depth), BASE)
    return dataclasses.replace(
        found,
        std=found.std / BASE.std,
        lr=found.lr / BASE.lr,
        weight_decay=found.weight_decay / BASE.weight_decay,
        eps=found.eps / BASE.eps,
    )


def equal(found: Hyper, **expected: float) -> None:
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


INSIDE = {"block": 0, "branch": 0, "branch_layers": 2}
EMBEDDING = Part("wte", (100, 64), "embedding", "input", 100, 64, False, True, (0,), (1,))
HIDDEN = Part("up", (64, 64), "linear", "hidden", 64, 64, True, True, (1,), (0,), **INSIDE)
LAST = dataclasses.replace(HIDDEN, name="down", ends_branch=True)
READOUT = Part("head", (100, 64), "linear", "output", 64, 100, True, False, (1,), (0,))
HIDDEN_BIAS = Part("up.bias", (64,), "add", "bias", 1, 64, False, True, (), (0,), **INSIDE)
HIDDEN_NORM = Part("ln_1", (64,), "norm", "gain", 1, 64, False, True, (), (0,), norm="input", **INSIDE)
FINAL_NORM = Part("ln_f", (64,), "norm", "gain", 1, 64, False, True, (), (0,), norm="input")
READOUT_BIAS = Part("head.bias", (100,), "add", "bias", 1, 100, False, False, (), (0,))


@pytest.mark.parametrize("m_N, m_L", [(8.0, 4.0), (3.0, 16.0)])
def test_completep(m_N: float, m_L: float) -> None:
    vector = {"fan_in": 1.0, "fan_out": m_N, "depth": m_L}
    both = {"fan_in": m_N, "fan_out": m_N, "depth": m_L}
    # Embedding: variance 1, lr 1, decay 1; eps 1/m_N, as its code has it since a correction.
    equal(rule("adamw", EMBEDDING, **vector), multiplier=1, std=1, lr=1, weight_decay=1, eps=1 / m_N)
    # Hidden weights: variance 1/m_N, lr 1/m_N, decay m_N, eps 1/(m_N·m_L).
    row = {"std": 1 / sqrt(m_N), "lr": 1 / m_N, "weight_decay": m_N, "eps": 1 / (m_N * m_L)}
    equal(rule("adamw", HIDDEN, **both), multiplier=1, **row)
    # Residual blocks are multiplied by 1/m_L: here the weight that ends them is.
    equal(rule("adamw", LAST, **both), multiplier=1 / m_L, **row)
    # Hidden biases and norms: lr 1, eps 1/(m_N·m_L). That they do not decay there is a policy.
    equal(rule("adamw", HIDDEN_BIAS, **vector), multiplier=1, std=1, lr=1, eps=1 / (m_N * m_L))
    equal(rule("adamw", HIDDEN_NORM, **vector), multiplier=1, std=1, lr=1, eps=1 / (m_N * m_L))
    # The final norm and the readout are as the embedding, and the logits are multiplied by 1/m_N.
    equal(rule("adamw", FINAL_NORM, **vector), multiplier=1, lr=1, eps=1 / m_N)
    output = {"fan_in": m_N, "fan_out": 1.0, "depth": m_L}
    equal(rule("adamw", READOUT, **output), multiplier=1 / m_N, std=1, lr=1, weight_decay=1, eps=1 / m_N)


def test_completep_on_a_gpt() -> None:
    # The whole table at once, by a plan, on a network with norms and an untied head. Rows have no
    # multipliers: 1/m_L and 1/m_N are absorbed as AdamW absorbs them (lr ×α; decay, eps ÷α).
    m_N, m_L = 4, 3
    build = th.models.GPT
    tokens = torch.zeros(1, 8, dtype=torch.long)
    plan = th.plan(
        build, tokens, size=th.Size(256, 6), base=th.Size(64, 2), lr=1.0, weight_decay=1.0, eps=1.0
    )
    table = {
        # lr, weight decay, eps, α
        "embed.weight": (1, 1, 1 / m_N, 1),
        "norm_in.weight": (1, 1, 1 / (m_N * m_L), 1),
        "query.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1),
        "key.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1),
        "value.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1),
        "branch.out.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1 / m_L),
        "up.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1),
        "down.weight": (1 / m_N, m_N, 1 / (m_N * m_L), 1 / m_L),
        "norm.weight": (1, 1, 1 / m_N, 1),
        "readout.weight": (1, 1, 1 / m_N, 1 / m_N),
    }
    assert len(plan.rows) == 3 + 6 * 8
    for name, row in plan.rows.items():
        lr, decay, eps, alpha = next(value for end, value in table.items() if name.endswith(end))
        assert (row.lr, row.weight_decay, row.eps) == pytest.approx((lr * alpha, decay / alpha, eps / alpha))


@pytest.mark.parametrize("m", [8.0, 3.0])
def test_mup_as_in_table_8(m: float) -> None:
    # Variance 1/fan_in, 1/fan_in, 1 and multiplier 1, 1, 1/fan_in for input, hidden, output weights.
    for optimizer in ("adamw", "sgd"):
        equal(rule(optimizer, EMBEDDING, 1, m), multiplier=1, std=1)
        equal(rule(optimizer, HIDDEN, m, m), multiplier=1, std=1 / sqrt(m))
        equal(rule(optimizer, READOUT, m, 1), multiplier=1 / m, std=1)
    # Adam: 1, 1/fan_in, 1. MuAdam multiplies the decay by what it divides lr by.
    equal(rule("adamw", EMBEDDING, 1, m), lr=1, weight_decay=1)
    equal(rule("adamw", HIDDEN, m, m), lr=1 / m, weight_decay=m)
    equal(rule("adamw", READOUT, m, 1), lr=1, weight_decay=1)
    # SGD: fan_out, 1, fan_in, and biases as input weights.
    for part in (EMBEDDING, HIDDEN_BIAS, HIDDEN_NORM, FINAL_NORM):
        equal(rule("sgd", part, 1, m), lr=m, weight_decay=1 / m)
        equal(rule("adamw", part, 1, m), lr=1, weight_decay=1)
    equal(rule("sgd", HIDDEN, m, m), lr=1, weight_decay=1)
    equal(rule("sgd", READOUT, m, 1), lr=m, weight_decay=1 / m)
    for optimizer in ("adamw", "sgd"):
        equal(rule(optimizer, READOUT_BIAS, 1, 1), multiplier=1, std=1, lr=1, weight_decay=1)


@pytest.mark.parametrize("m", [8.0, 3.0])
def test_mup_as_in_table_3_after_absorbing_the_multiplier(m: float) -> None:
    # Without multipliers the output's variance is 1/fan_in² and its lr 1/fan_in, for SGD as for Adam.
    for optimizer in ("adamw", "sgd"):
        found = rule(optimizer, READOUT, m, 1).absorbed()
        equal(found, multiplier=1, std=1 / m, lr=1 / m)


@pytest.mark.parametrize("r_in, r_out", [(2.0, 8.0), (8.0, 2.0)])
def test_mup_where_fans_grow_unequally(r_in: float, r_out: float) -> None:
    # MuAdam: lr/width_mult with the width of the input; MuSGD: lr divided by the ratio of fan-in to fan-out.
    equal(rule("adamw", HIDDEN, r_in, r_out), lr=1 / r_in, weight_decay=r_in)
    equal(rule("sgd", HIDDEN, r_in, r_out), lr=r_out / r_in, weight_decay=r_in / r_out)
