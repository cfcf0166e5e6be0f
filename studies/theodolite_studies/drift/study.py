"""Do flows with additional terms follow steps where plain flows do not, of one network and of two players?

Three parts on gradient descent, in float64 on the whole batch:

    quadratic   ten steps on random quadratics, below and above the edge of stability: how far from each flow
    network     a tanh network trained at a constant learning rate: how near it is to the edge, step by step;
                the same for steps a 20th as long, nearly the gradient flow; and drifts of single steps
    rates       the same network with fixed learning rates over a range of 64, and with DAL

and three on games of two players:

    dirac       the DiracGAN from several starts: how far steps end from the flow and from the modified flow,
                and where long runs of steps and of their corrections end
    ring        a GAN in the plane, trained with simultaneous, alternating and corrected steps over a range of
                learning rates
    rounds      drifts of some rounds of that GAN, at two moments of its training

References:
    Rosca et al., On a continuous time model of gradient descent dynamics and instability in deep learning,
    2023. Cohen et al., Gradient descent on neural networks typically occurs at the edge of stability, 2021.
    Rosca, Wu, Dherin and Barrett, Discretization drift in two-player games, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.controllers.drift_adjusted import DriftAdjusted
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.probes.curvature.tracking import track
from theodolite.probes.steps.drift import drift
from theodolite_studies.drift import games_report, report
from theodolite_studies.drift.dirac import dirac
from theodolite_studies.drift.ring import ARMS, rounds, training
from theodolite_studies.drift.ring import RATES as GAME_RATES
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study

SEEDS = 5
TOPS = (0.5, 1.5, 1.9, 2.1)
"""lr·λ_max of the quadratics."""
LR = 0.1
STEPS, EVERY, FINER = 600, 20, 20
RATES = tuple(2.0**power for power in range(-6, 1))
POWERS = (1.0, 0.5)
STARTS, GAMES = 20, 8
"""Starts of the DiracGAN, and GANs of which the drift is measured."""
BRIEF = {"steps": 60, "every": 20}
COARSE: dict[str, Any] = {"moments": (0,), "sizes": (0.05, 0.0125), "rtol": 1e-4}
"""Of the parts `ring` and `rounds`, when small."""

mse = nn.functional.mse_loss


def cells(setting: Setting) -> list[Cell]:
    """Parts times seeds; for `ring`, whose cells hold all seeds, arms times learning rates."""
    parts = ("quadratic", "rates") if setting.small else ("quadratic", "network", "rates")
    found: list[Cell] = [
        {"part": part, "seed": seed} for part in parts for seed in range(3 if setting.small else SEEDS)
    ]
    found += [{"part": "dirac", "seed": seed} for seed in range(3 if setting.small else STARTS)]
    rates = GAME_RATES[2::5] if setting.small else GAME_RATES
    found += [{"part": "ring", "arm": arm, "lr": lr} for lr in rates for arm in ARMS]
    return found + [{"part": "rounds", "seed": seed} for seed in range(1 if setting.small else GAMES)]


def run(cell: Cell, setting: Setting, *_: object) -> Iterator[Record]:
    """The records of one part and seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterator[Record]]] = {
        "quadratic": quadratics,
        "network": course,
        "rates": rates,
        "dirac": lambda: dirac(cell["seed"]),
        "ring": lambda: training(cell["arm"], cell["lr"], **(BRIEF if setting.small else {})),
        "rounds": lambda: rounds(cell["seed"], **(COARSE if setting.small else {})),
    }
    try:
        with untouched_randomness(cell.get("seed", 0)):
            yield from parts[cell["part"]]()
    finally:
        torch.set_num_threads(threads)


def quadratics(size: int = 10, steps: int = 10, rtol: float = 1e-6) -> Iterator[Record]:
    """A linear regression with eigenvalues from 0.01 to 1 times the largest."""
    for top in TOPS:
        turn, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
        # The mean of (xᵀθ − y)² over n points has the Hessian 2/n·XᵀX: here its largest eigenvalue is 1.
        scales = (torch.logspace(-2, 0, size, dtype=torch.float64) * size / 2).sqrt()
        model = nn.Linear(size, 1, bias=False).double()
        batch = scales[:, None] * turn, torch.randn(size, 1).double()
        found = drift(model, mse, batch, lr=top, steps=steps, k=size, rtol=rtol)
        yield {
            "top": top,
            "flow": found.relative,
            "modified": found.modified / found.length,
            "principal": found.principal / found.length,
        }


def course(steps: int = STEPS, every: int = EVERY, finer: int = FINER) -> Iterator[Record]:
    """Along one training: the edge, the edge of nearly the gradient flow, and drifts of single steps."""
    model, batch = network()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    moments = []
    with track(model, mse, batch, optimizer, measure=["loss", "edge"], every=every) as tracking:
        for step in range(steps):
            if step in (every, *range(steps // 2, steps, 2 * every)):
                moments.append({"step": step, **_moment(model, batch)})
            _step(model, batch, optimizer)
    yield {
        "way": "descent",
        "edge": [round(value, 4) for value in tracking.values("edge")],
        "loss": [float(f"{value:.3g}") for value in tracking.values("loss")],
    }
    model.load_state_dict(start)
    slow = torch.optim.SGD(model.parameters(), lr=LR / finer)
    with track(model, mse, batch, slow, measure=["loss", "edge"], every=every * finer) as tracking:
        for _ in range(steps * finer):
            _step(model, batch, slow)
    yield {
        "way": "flow",
        "edge": [round(value * finer, 4) for value in tracking.values("edge")],
        "loss": [float(f"{value:.3g}") for value in tracking.values("loss")],
    }
    yield from ({"way": "moment", **moment} for moment in moments)


def rates(steps: int = 400) -> Iterator[Record]:
    """The loss after training with each fixed learning rate, and with DAL. A run that diverges has none."""
    model, batch = network()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for rate in (*RATES, *(f"DAL {power:g}" for power in POWERS)):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate if isinstance(rate, float) else 1.0)
        adjusted = None
        if isinstance(rate, str):
            adjusted = DriftAdjusted(optimizer, model, mse, power=float(rate.split()[1]))
        lrs, first, last = [], math.nan, math.nan
        for step in range(steps):
            if adjusted is not None:
                try:
                    adjusted.step(batch)
                except UseError:  # the loss is no number any more
                    break
            lrs.append(float(optimizer.param_groups[0]["lr"]))
            last = _step(model, batch, optimizer)
            first = last if step == 0 else first
        diverged = not last <= first or len(lrs) < steps
        yield {
            "rate": rate,
            "diverged": diverged,
            "loss": None if diverged else float(f"{last:.4g}"),
            "lrs": [float(f"{lr:.3g}") for lr in lrs[:: max(1, steps // 40)]],
        }


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """8–32–32–1 with tanh; 64 points, and the sign of the product of their first two coordinates."""
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    ).double()
    points = torch.randn(64, 8, dtype=torch.float64)
    return model, (points, torch.sign(points[:, 0] * points[:, 1])[:, None])


def _step(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = mse(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _moment(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Record:
    found = drift(model, mse, batch, lr=LR, k=5)
    numbers = {
        "edge": found.edge,
        "relative": found.relative,
        "explained": found.explained,
        "by modified": 1 - found.modified / found.distance,
        "growth": found.growth,
    }
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


STUDY = Study(
    "drift",
    cells,
    run,
    (*report.CLAIMS, *games_report.CLAIMS),
    figures=lambda records: (*report.figures(records), *games_report.figures(records)),
    notes=lambda records: "\n\n".join(filter(None, (report.notes(records), games_report.notes(records)))),
)
