"""Every optimizer of a plan on one tensor in float64, against its paper's formula written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Muon, SpectralSphere

LR, DECAY, EPS, STEPS = 0.05, 0.2, 0.03, 5
"""An eps that matters, and more steps than one period of SOAP's bases."""
OPTIONS: dict[str, dict[str, Any]] = {
    # Of a sum over entries z ⊙ Hz is the diagonal itself for signs z.
    "sophia": {"update_period": 2, "hessian_distribution": "rademacher", "p": 0.5},
    "soap": {"precondition_frequency": 2},
    "sgd": {"momentum": 0.0},
}


def made(rule: str, params: list[Tensor], **more: Any) -> torch.optim.Optimizer:
    """The optimizer that a plan would make for these tensors."""
    spec = OPTIMIZERS[rule]
    names = [f"tensor {place}" for place in range(len(params))]
    group = {"params": params, "param_names": names, "lr": LR, "weight_decay": DECAY, **spec.fixed}
    if spec.eps:
        group[spec.eps.option] = EPS
    if "axes" in spec.layout:
        group["axes"] = ((1, *range(2, params[0].ndim)), (0,))
    group.update(more)
    return spec.maker(OPTIONS.get(rule, {}))([group])


def pull(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss(weight: Tensor, step: int) -> Tensor:
    """Its Hessian is diagonal, and it depends on where the weight is."""
    return (pull(tuple(weight.shape), step) * weight + 0.3 * weight**2 + 0.1 * weight**3).sum()


def differentiate(param: Tensor, step: int) -> None:
    param.grad = torch.autograd.grad(loss(param, step), param, create_graph=True)[0]


def start(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_five_steps_are_those_of_the_paper(rule: str) -> None:
    param = nn.Parameter(start(4, 3))
    optimizer = made(rule, [param])
    expected, state = start(4, 3), {}
    for step in range(STEPS):
        leaf = expected.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, step), leaf)
        expected = REFERENCES[rule](expected, slope, 0.6 + 0.6 * expected, state, step + 1)
        differentiate(param, step)
        optimizer.step()
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=TOLERANCES.get(rule, 1e-12))
    assert (expected - start(4, 3)).abs().max() > 0.02


@pytest.mark.parametrize("alone", [Muon, SpectralSphere])
def test_matrix_optimizers_alone_are_the_plans(alone: type[torch.optim.Optimizer]) -> None:
    rule = "muon" if alone is Muon else "sso"
    params = [nn.Parameter(start(4, 3)) for _ in range(2)]
    optimizers = [
        made(rule, params[:1]),
        alone([params[1]], lr=LR, weight_decay=DECAY, eps=EPS),  # type: ignore[call-arg]
    ]
    for step in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            differentiate(param, step)
            optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_kernels_in_any_layout(rule: str) -> None:
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = nn.Parameter(start(4, 3, 2, 2).to(memory_format=layout))
        optimizer = made(rule, [param])
        for step in range(3):
            differentiate(param, step)
            param.grad = param.grad.contiguous(memory_format=layout)  # type: ignore[union-attr]
            torch.manual_seed(step)
            optimizer.step()
        assert param.is_contiguous(memory_format=layout)
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [rule for rule in OPTIMIZERS if rule not in ("sophia", "schedule-free")])
def test_a_tensor_that_comes_late_starts_afresh(rule: str) -> None:
    early, late, fresh = (nn.Parameter(start(4, 3)) for _ in range(3))
    optimizer = made(rule, [early, late])
    for step in range(8):
        differentiate(early, step)
        if step >= 5:
            differentiate(late, step)
        optimizer.step()
    alone = made(rule, [fresh])
    for step in range(5, 8):
        differentiate(fresh, step)
        alone.step()
    torch.testing.assert_close(late, fresh, rtol=0, atol=1e-12)


def test_a_late_tensor_of_schedule_free_makes_steps_of_the_same_size() -> None:
    early, late = nn.Parameter(start(4, 3)), nn.Parameter(start(4, 3))
    optimizer = made("schedule-free", [early, late], weight_decay=0.0, eps=0.0)
    for step in range(8):
        differentiate(early, step)
        optimizer.step()
    differentiate(late, 8)
    before = late.detach().clone()
    optimizer.step()
    moved = (optimizer.state[late]["z"] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, LR), rtol=1e-9, atol=0)


FOREACH = ["sgd", "adamw", "diffgrad", "schedule-free", "lion", "sophia"]


@pytest.mark.parametrize("rule", FOREACH)
def test_all_at_once_or_one_after_the_other(rule: str) -> None:
    results = []
    for foreach in (False, True):
        params = [nn.Parameter(start(4, 3)), nn.Parameter(start(5)), nn.Parameter(start(4, 3).float())]
        optimizer = made(rule, params, foreach=foreach)
        for step in range(3):
            for param in params:
                differentiate(param, step)
            torch.manual_seed(step)
            optimizer.step()
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if one.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("rule", [rule for rule in OPTIMIZERS if rule not in ("sgd", "adamw")])
def test_sparse_gradients_are_refused_by_name(rule: str) -> None:
    dense, sparse = nn.Parameter(start(4, 3)), nn.Parameter(start(4, 3))
    optimizer = made(rule, [dense, sparse])
    dense.grad, sparse.grad = start(4, 3), start(4, 3).to_sparse()
    with pytest.raises(UseError, match=r"tensor 1.* sparse"):
        optimizer.step()
    assert torch.equal(dense, start(4, 3))


# The formulas, in the order of the rules. Each takes the weight, gradient, diagonal of the Hessian, what it
# has kept, and the step counted from 1.

State = dict[str, Any]
Reference = Callable[[Tensor, Tensor, Tensor, State, int], Tensor]


def averaged(state: State, name: str, value: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    found: Tensor = state[name]
    return found


def moved(w: Tensor, update: Tensor) -> Tensor:
    return w - LR * (update + DECAY * w)


def sgd(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    return moved(w, g)


def adam(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    m = averaged(state, "m", g, 0.9) / (1 - 0.9**t)
    v = averaged(state, "v", g**2, 0.999) / (1 - 0.999**t)
    return moved(w, m / (v.sqrt() + EPS))


def diffgrad(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    before = state.get("g", torch.zeros_like(g))
    state["g"] = g
    xi = 1 / (1 + torch.exp(-(before - g).abs()))
    m = averaged(state, "m", g, 0.9) / (1 - 0.9**t)
    v = averaged(state, "v", g**2, 0.999) / (1 - 0.999**t)
    return moved(w, xi * m / (v.sqrt() + EPS))


def schedule_free(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    z, x = state.get("z", w), state.get("x", w)
    v = averaged(state, "v", g**2, 0.999) / (1 - 0.999**t)
    z = z - LR * (g / (v.sqrt() + EPS) + DECAY * w)
    x = (1 - 1 / t) * x + z / t
    state["z"], state["x"] = z, x
    return 0.1 * z + 0.9 * x


def lion(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    update = (0.9 * state.get("m", torch.zeros_like(g)) + 0.1 * g).sign()
    averaged(state, "m", g, 0.99)
    return moved(w, update)


def sophia(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    m = averaged(state, "m", g, 0.96)
    h = averaged(state, "h", h, 0.99) if t % 2 else state["h"]
    return moved(w, (m / h.clamp_min(EPS)).clamp(-0.5, 0.5))


def muon(scale: float) -> Reference:
    def step(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
        m = averaged(state, "m", g, 0.95)
        x = 0.95 * m + 0.05 * g
        x = x / (x.norm() + EPS)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        return moved(w, scale * x)

    return step


def shampoo(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    roots = []
    for name, gram in (("left", g @ g.T), ("right", g.T @ g)):
        state[name] = state.get(name, EPS * torch.eye(len(gram), dtype=g.dtype)) + gram
        values, vectors = torch.linalg.eigh(state[name])
        roots.append(vectors * values**-0.25 @ vectors.T)
    return moved(w, roots[0] @ g @ roots[1])


def soap(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    grams = {"left": g @ g.T, "right": g.T @ g}
    if t == 1:  # finds its bases, and moves nothing
        for name, gram in grams.items():
            averaged(state, name, gram, 0.95)
            state[f"{name} basis"] = torch.linalg.eigh(state[name])[1].flip(1)
        return w
    left, right = state["left basis"], state["right basis"]
    m = averaged(state, "m", g, 0.95) / (1 - 0.95 ** (t - 1))
    v = averaged(state, "v", (left.T @ g @ right) ** 2, 0.95) / (1 - 0.95 ** (t - 1))
    update = left @ ((left.T @ m @ right) / (v.sqrt() + EPS)) @ right.T
    for axis, (name, gram) in enumerate(grams.items()):
        product = averaged(state, name, gram, 0.95) @ state[f"{name} basis"]
        if (t - 1) % 2 == 0:
            order = (state[f"{name} basis"] * product).sum(0).argsort(descending=True)
            state["v"] = state["v"].index_select(axis, order)
            state[f"{name} basis"] = torch.linalg.qr(product[:, order])[0]
    return (1 - LR * DECAY) * (w - LR * update)


def polar(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def sso(w: Tensor, g: Tensor, h: Tensor, state: State, t: int) -> Tensor:
    m = averaged(state, "m", g, 0.95)
    m = 0.95 * m + 0.05 * g
    m = m / (m.norm() + EPS)
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    theta = u[:, :1] @ vh[:1]
    radius = state.setdefault("radius", s[0])
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        rising = (theta * polar(m + middle * theta)).sum() > 0
        low, high = (low, middle) if rising else (middle, high)
    w = (1 - LR * DECAY) * w - LR * math.sqrt(4 / 3) * polar(m + low * theta)
    return w * radius / torch.linalg.matrix_norm(w, 2)


REFERENCES: dict[str, Reference] = {
    "sgd": sgd,
    "adamw": adam,
    "diffgrad": diffgrad,
    "schedule-free": schedule_free,
    "lion": lion,
    "sophia": sophia,
    "muon": muon(1.0),
    "muon-original": muon(math.sqrt(4 / 3)),
    "muon-kimi": muon(0.2 * math.sqrt(4)),
    "muon-spectral": muon(math.sqrt(4 / 3)),
    "shampoo": shampoo,
    "soap": soap,
    "sso": sso,
}
TOLERANCES = {"sso": 1e-6}
"""A bisection and power iterations; all others are exact."""
