"""The near-collapse model: flows along the central path and beside it, minima, and their expansion.

With W at its best for H, a minimum of L(W, H) over H has

    H = (WᵀY + βH₀)(WᵀW + (λ_H + β)I)⁻¹    (samples as rows: H = (YW + βH₀)(…)⁻¹)

so samples lie around the mean of their class by β(WᵀW + (λ_H + β)I)⁻¹ of what they do in H₀. If H₀ is
within a distance δ of collapse, W differs from that of the class means alone only in second order in δ: it
depends on the spread through HᵀH. So to first order, with W₀ and M₀ of the problem whose samples are the
class means of H₀,

    NC1 = β² Tr[(W₀ᵀW₀ + (λ_H + β)I)⁻² S_W(H₀)] / Tr S_B(M₀)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from theodolite.probes.features.class_spread import ClassGeometry, ClassMeans, ClassSpread
from theodolite.probes.features.near_collapse import ATOL, RTOL, Array, NearCollapse
from theodolite_studies.framework.records import Record, short

CLASSES, NUM, WIDTH = 4, 30, 20
"""K; samples of a class; features."""
DECAY, MORE = 0.005, 10.0
"""λ_W and λ_H, and how much more of one of them."""
END, CHECKS = 1000.0, 200
"""Of a flow: its last time, and how often NC1 is looked at on the way, evenly in the logarithm of time."""
FIRST = 0.01
ROUNDING = 10 * RTOL
"""Relative rise of NC1 between two checks that the integration's tolerance explains."""
BASES: Mapping[str, float] = {"λ_W = λ_H": 1.0, "Kλ_W = λ_H": 1 / CLASSES}
"""λ_W over λ_H where both are at their usual value: equal here, and equal in the paper's convention."""


def drawn(noise: float, seed: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """H₀ (N, D), and classes: Gaussian means of expected length 1, noise, and a common offset of a length."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    labels = torch.arange(CLASSES).repeat_interleave(NUM)
    around = torch.randn(len(labels), WIDTH, generator=generator, dtype=torch.float64)
    common = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return means[labels] + noise * around + offset * common / common.norm(), labels


def central(noise: float, seed: int, feature_decay: float, offset: float) -> Iterator[Record]:
    """The central path, with NC1 at every check."""
    features, labels = drawn(noise, seed, offset)
    path = NearCollapse(features, labels, DECAY, feature_decay).flow([0.0, *_times()])
    yield _seen(path.quotients, path.states[0].geometry, path.states[-1].geometry)


def joint(noise: float, seed: int, feature_decay: float, offset: float) -> Iterator[Record]:
    """The gradient flow of W and H together, from a head of random entries of the size of the features'."""
    features, labels = drawn(noise, seed, offset)
    model = NearCollapse(features, labels, DECAY, feature_decay)
    generator = torch.Generator().manual_seed(seed + 1_000)
    head = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    start = torch.cat([head, features])

    def fall(_: float, flat: Array) -> Array:
        both = torch.from_numpy(flat.copy()).view_as(start)
        head, features = both[:CLASSES], both[CLASSES:]
        miss = features @ head.T - model.targets
        slopes = (miss.T @ features / len(labels) + DECAY * head, miss @ head + feature_decay * features)
        found: Array = -torch.cat(slopes).numpy().ravel()
        return found

    times = [0.0, *_times()]
    found = solve_ivp(fall, (0.0, END), start.numpy().ravel(), "DOP853", t_eval=times, rtol=RTOL, atol=ATOL)
    assert found.success, found.message
    seen = [geometry_of(torch.from_numpy(flat.copy()).view_as(start)[CLASSES:], labels) for flat in found.y.T]
    yield _seen([one.quotient for one in seen], seen[0], seen[-1])


def _times() -> list[float]:
    return [float(time) for time in np.geomspace(FIRST, END, CHECKS)]


def _seen(quotients: tuple[float, ...] | list[float], first: ClassGeometry, last: ClassGeometry) -> Record:
    changes = [after / before - 1 for before, after in pairwise(quotients)]
    return {
        "rising": sum(change > ROUNDING for change in changes),
        "largest": short(max(changes)),
        "peak": short(max(quotients) / quotients[0]),
        "pinv": short(last.pinv),
        "nc2 start": short(first.nc2),
        "nc2": short(last.nc2),
        "quotients": [short(one) for one in quotients[:: CHECKS // 40]],
        "end": short(quotients[-1]),
    }


def minima(noise: float, seed: int, base: str, ties: tuple[float, ...]) -> Iterator[Record]:
    """At each tie: NC1 of the minimum, with ten times either decay, and to first order."""
    features, labels = drawn(noise, seed)
    given = geometry_of(features, labels).quotient
    for tie in ties:
        model = NearCollapse(features, labels, DECAY * BASES[base], DECAY, tie)
        usual = model.minimum().geometry
        more_feature = replace(model, feature_decay=MORE * model.feature_decay).minimum().geometry.quotient
        more_head = replace(model, head_decay=MORE * model.head_decay).minimum().geometry.quotient
        yield {
            "tie": tie,
            "given": short(given),
            "nc1": short(usual.quotient),
            "pinv": short(usual.pinv),
            "feature effect": short(usual.quotient / more_feature),
            "head effect": short(usual.quotient / more_head),
            "ratio": short(more_head / more_feature),
            "error": short(abs(first_order(model) / usual.quotient - 1)),
        }


def first_order(model: NearCollapse) -> float:
    """NC1 of the minimum for given features near collapse; see above."""
    counts = torch.bincount(model.labels)
    means = torch.zeros(len(counts), model.features.shape[1], dtype=torch.float64)
    means = means.index_add(0, model.labels, model.features) / counts[:, None]
    collapsed = replace(model, features=means[model.labels]).minimum().features
    assert collapsed is not None
    head = model.head(collapsed)
    away = model.features - means[model.labels]
    stiffness = head.T @ head + (model.feature_decay + model.tie) * torch.eye(head.shape[1]).double()
    left = model.tie * torch.linalg.solve(stiffness, away.T)
    rows = torch.stack([collapsed[model.labels == label][0] for label in range(len(counts))])
    centred = rows - rows.mean(0)
    return float(left.square().sum() / len(away) / centred.square().sum(1).mean())


def geometry_of(features: Tensor, labels: Tensor) -> ClassGeometry:
    """Of features (N, D) of classes (N,)."""
    counts = torch.bincount(labels)
    means = ClassMeans(counts, features)
    means.add(features, labels)
    spread = ClassSpread(means.means, counts)
    spread.add(features, labels)
    return spread.geometry()
