"""Every public call that measures or moves a network, each on a small one, for attacks on all of them."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite import fleet, growing, probes, surgery
from theodolite.anatomy.flop import flop
from theodolite.controllers import DriftAdjusted, NormalizedSmoothness, SafeStep, cancel_interaction
from theodolite.core.building import untouched_randomness
from theodolite.optimizers import Muon, SpectralSphere
from theodolite.planning.readout_multiplier import attach_multipliers

UNITS, INPUTS, WIDTH, CLASSES = 48, 6, 12, 4


class Block(nn.Module):
    """`x + W₂ dropout(tanh(W₁ norm(x)))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        return x + grown


class Network(nn.Module):
    """A few residual blocks with dropout, in training mode."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch; what class a row is of can be learnt."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randn(UNITS, INPUTS, generator=generator)
    return inputs, (inputs[:, :CLASSES] + 0.5 * inputs[:, -CLASSES:]).argmax(1)


WORKLOAD = th.Workload("small", Network, draw, F.cross_entropy, th.Size(WIDTH, 2))
BATCH = draw(0, 0)
SIZES = [th.Size(8, 2), th.Size(16, 2)]


def network() -> Network:
    """The same weights each time; no random number of the caller's is spent."""
    with untouched_randomness(0):
        return Network()


Call = Callable[[nn.Module], Any]
"""Given a network as `network()` makes it."""


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _with_gradients(model: nn.Module) -> nn.Module:
    model.eval()
    with torch.autocast("cpu", enabled=False):
        F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    return model


def _scaled(model: nn.Module) -> Any:
    weight = model.get_parameter("head.weight")
    with probes.scaled(model, 2.0):
        inside = F.linear(torch.eye(WIDTH), weight)
    return (F.linear(torch.eye(WIDTH), weight) / inside).detach()


def _tempered(model: nn.Module) -> Any:
    model.eval()
    with torch.no_grad():
        before = model(BATCH[0])
        with probes.tempered(model, 4.0):
            return (before / model(BATCH[0])).float()


def _tracked(model: nn.Module) -> Any:
    optimizer = _sgd(model)
    with probes.track(model, F.cross_entropy, BATCH, optimizer, every=1) as tracking:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [row.values for row in tracking.rows]


def _metered(model: nn.Module) -> Any:
    with probes.NoiseMeter(model.eval(), examples=UNITS // 2) as meter:
        for _ in range(3):
            for half in (slice(0, None, 2), slice(1, None, 2)):
                with torch.autocast("cpu", enabled=False):
                    LOSS(model(BATCH[0][half]), BATCH[1][half]).backward()
            meter.step()
            model.zero_grad()
    return meter.result()


def _amplified(model: nn.Module) -> Any:
    return probes.amplification(model, BATCH[0]).record(0)


def _operator(model: nn.Module) -> Any:
    found = probes.hessian(model, F.cross_entropy, BATCH)
    return (
        found @ torch.ones(found.size),
        found.gauss_newton @ torch.ones(found.size),
        found.gradient,
        found.loss,
    )


def _stepped(make: Callable[[nn.Module], Any]) -> Call:
    def call(model: nn.Module) -> Any:
        _with_gradients(model)
        stepper = make(model)
        if isinstance(stepper, (Muon, SpectralSphere)):
            stepper.step()
        else:
            stepper.step(BATCH)
        return [parameter.detach().clone() for parameter in model.parameters()]

    return call


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def _drift_adjusted(model: nn.Module) -> Any:
    adjusted = DriftAdjusted(_sgd(model), model, F.cross_entropy)
    adjusted.step(BATCH)
    return adjusted.lr


def _game(model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], Any]:
    """The network against one that moves its inputs, and the loss of the first."""
    with untouched_randomness(1):  # other threads wait: they draw random numbers too
        mover = nn.Linear(INPUTS, INPUTS)
    return (model, mover), lambda one, two, batch: LOSS(one(batch[0] + two(batch[0])), batch[1])


def _game_drift(model: nn.Module) -> Any:
    players, loss = _game(model)
    return probes.game_drift(players, loss, BATCH, lr=0.1)


def _cancelled(model: nn.Module) -> Any:
    players, loss = _game(model.eval())
    values = cancel_interaction(players, loss, BATCH, lr=0.1)
    return values, [parameter.grad for player in players for parameter in player.parameters()]


def _plan(width: int = WIDTH, **options: Any) -> th.Plan:
    return th.plan(Network, BATCH[0], size=th.Size(width, 2), base=th.Size(8, 2), lr=0.1, **options)


def _grown(model: nn.Module) -> Any:
    splits = growing.split([draw(5, step) for step in range(8)])
    model.eval()
    grown = th.grow(model, F.cross_entropy, splits, contenders=1, method="betting")
    return grown.before, grown.after, len(grown.new_blocks)


def _run(**options: Any) -> Call:
    def call(model: nn.Module) -> Any:
        run = fleet.Run(
            "small",
            th.Size(WIDTH, 2),
            base=th.Size(8, 2),
            lr=0.1,
            optimizer="sgd",
            steps=12,
            held_out=1,
            **options,
        )
        (outcome,) = fleet.serial([run], fleet.Resources(workloads={"small": WORKLOAD}))
        assert outcome.status == "finished", outcome.error
        return outcome.held_out, outcome.metrics

    return call


def _together(model: nn.Module) -> Any:
    from theodolite.fleet.vectorised import vectorised

    runs = [
        fleet.Run(
            "mlp-mixture", th.Size(8, 2), base=th.Size(8, 2), lr=lr, steps=4, held_out=1, precision="bfloat16"
        )
        for lr in (0.01, 0.02)
    ]
    outcomes = sorted(vectorised(runs, fleet.Resources()), key=lambda outcome: outcome.run.lr)
    assert all(outcome.status == "finished" for outcome in outcomes), [one.error for one in outcomes]
    return [(outcome.held_out, outcome.metrics) for outcome in outcomes]


def _survey(*only: str) -> Call:
    def call(model: nn.Module) -> Any:
        found = th.survey(WORKLOAD, only=only or None)
        return [(one.code, one.level, one.sentence) for one in found.findings]

    return call


def _trajectory(model: nn.Module) -> Any:
    states = [{name: one + shift for name, one in model.state_dict().items()} for shift in (0.0, 0.1, 0.3)]
    states[1]["head.bias"] = states[1]["head.bias"] + 1
    return probes.trajectory(model, states).points


def _path(model: nn.Module) -> Any:
    state = {name: one + 0.1 * torch.ones_like(one) for name, one in model.state_dict().items()}
    return probes.path(model, state, LOSS, BATCH, num=3)


def _sweep(model: nn.Module) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        found = th.sweep(
            WORKLOAD,
            lr=[0.1, 0.2],
            sizes=SIZES,
            seeds=1,
            steps=3,
            optimizer="sgd",
            out=folder,
            engine="serial",
        )
    return str(found)


def _surgery(edit: Callable[[nn.Module], Any]) -> Call:
    def call(model: nn.Module) -> Any:
        model.eval()
        edit(model)
        with torch.autocast("cpu", enabled=False):
            return model(BATCH[0]).detach(), [parameter.detach() for parameter in model.parameters()]

    return call


def _bake(model: nn.Module) -> None:
    attach_multipliers(model, {"head": 0.5})
    surgery.bake(model, BATCH[0])


LOSS = F.cross_entropy

PROBES: dict[str, Call] = {
    "amplification": _amplified,
    "along_scale": lambda model: probes.along_scale(model, LOSS, BATCH, [1.0, 2.0], directions=3),
    "along_temperature": lambda model: probes.along_temperature(model, LOSS, BATCH, [1.0, 2.0], directions=3),
    "assumptions": lambda model: probes.assumptions(WORKLOAD, _plan(), steps=1),
    "collapse": lambda model: probes.collapse(model, LOSS, BATCH).places,
    "coordinates": lambda model: (
        probes.coordinates(
            WORKLOAD, SIZES, base=SIZES[0], lr=0.1, steps=2, seeds=(0,), parameterization="standard"
        ).tracks
    ),
    "curvature": lambda model: probes.curvature(model, LOSS, BATCH, directions=3),
    "decay": lambda model: str(probes.decay(model, BATCH[0], torch.optim.AdamW(model.parameters()))),
    "density": lambda model: probes.density(model, LOSS, BATCH, steps=6),
    "drift": lambda model: probes.drift(model, LOSS, BATCH, lr=0.1, k=1, parameters="head.*"),
    "eigenvalues": lambda model: probes.eigenvalues(model, LOSS, BATCH, k=2).values,
    "fourier": lambda model: probes.fourier(model.get_parameter("embed.weight")).concentration,
    "fourier_winners": lambda model: (
        probes.fourier_winners(*[model.get_parameter("embed.weight")] * 2, out_axis=1).times
    ),
    "game_drift": _game_drift,
    "hessian": _operator,
    "landscape": lambda model: probes.landscape(model, LOSS, BATCH, dimensions=1, num=5),
    "noise": lambda model: probes.noise(model, LOSS, BATCH),
    "optimizer_step": lambda model: probes.optimizer_step(_sgd(_with_gradients(model)), model),
    "outliers": lambda model: probes.outliers(model, LOSS, BATCH, most=4, parameters="head.*"),
    "path": _path,
    "preconditioning": lambda model: probes.preconditioning(model, LOSS, BATCH),
    "profile": lambda model: probes.profile(model, LOSS, BATCH, lengths=[1.0], parameters="head.*"),
    "radius": lambda model: probes.radius(model, LOSS, BATCH),
    "scaled": _scaled,
    "sharpness": lambda model: probes.sharpness(model, LOSS, BATCH),
    "signal": lambda model: probes.signal(model.eval(), LOSS, BATCH),
    "spectral": lambda model: probes.spectral(WORKLOAD, SIZES[1], base=SIZES[0], lr=0.1, steps=2),
    "spectral_norm": lambda model: probes.spectral_norm(model.head.weight),  # type: ignore[arg-type, union-attr]
    "stream": lambda model: probes.stream(model, LOSS, BATCH),
    "stream_history": lambda model: probes.stream_history(WORKLOAD, _plan(), steps=2, every=1),
    "tempered": _tempered,
    "trace": lambda model: probes.trace(model, LOSS, BATCH, parameters="head.*"),
    "track": _tracked,
    "trajectory": _trajectory,
}
"""One for each function of `theodolite.probes`."""

OTHERS: dict[str, Call] = {
    "dissect": lambda model: str(th.dissect(model, BATCH[0])),
    "flop": lambda model: str(flop(model, BATCH[0])),
    "groups": lambda model: str(th.groups(model, BATCH[0], lr=0.1)),
    "plan": lambda model: [one.detach() for one in _plan().build(0).parameters()],
    "find_lr of a module": lambda model: (
        th.find_lr(model, LOSS, BATCH, optimizer="sgd", seeds=1, steps=3, low=1e-3).curves
    ),
    "find_lr of a workload": lambda model: (
        th.find_lr(WORKLOAD, optimizer="sgd", seeds=1, steps=3, low=1e-3).curves
    ),
    "stream along a number": lambda model: probes.stream(model, LOSS, BATCH, along=BATCH[0][:, 0]).groups,
    "grow": _grown,
    "a run": _run(),
    "a bfloat16 run": _run(precision="bfloat16"),
    "survey, one section": _survey("stream"),
    "DriftAdjusted": _drift_adjusted,
    "cancel_interaction": _cancelled,
    "NormalizedSmoothness": _stepped(lambda model: NormalizedSmoothness(model, LOSS)),
    "NoiseMeter": _metered,
    "SafeStep": _stepped(lambda model: SafeStep(_sgd(model, 100.0), model, LOSS)),
    "Muon": _stepped(lambda model: Muon(_matrices(model), lr=0.1)),
    "SpectralSphere": _stepped(lambda model: SpectralSphere(_matrices(model), lr=0.1)),
    "bake": _surgery(_bake),
    "fold": _surgery(lambda model: surgery.fold(model, BATCH[0])),
    "scale_vectors": _surgery(lambda model: surgery.scale_vectors(model, BATCH[0])),
    "insert_block": _surgery(lambda model: surgery.insert_block(model, BATCH[0], 1)),
    "theory": lambda model: growing.theory(model, LOSS, BATCH, examples=2).theorems,
}
"""Other calls that move weights, train, or swap what a network holds."""

LONG: dict[str, Call] = {"runs together": _together, "survey": _survey(), "sweep": _sweep}
"""Calls that take many seconds."""

UNCHANGED = (
    "along_temperature",
    "collapse",
    "curvature",
    "density",
    "dissect",
    "drift",
    "eigenvalues",
    "find_lr of a module",
    "game_drift",
    "groups",
    "hessian",
    "landscape",
    "noise",
    "path",
    "preconditioning",
    "profile",
    "radius",
    "sharpness",
    "stream",
    "trace",
)
"""Calls on the network itself that leave it as it was; nothing but the call looks at it."""


@cache
def expected(name: str) -> Any:
    """What a call gives outside autocast, in one thread."""
    return {**PROBES, **OTHERS, **LONG}[name](network())


def differences(one: Any, other: Any, tolerance: float) -> str | None:
    """Where two results differ, numbers by more than a share of themselves; None if they do not."""
    mine, others = (list(_leaves(value)) for value in (one, other))
    if len(mine) != len(others):
        return f"{len(mine)} values, not {len(others)}"
    for (name, a), (_, b) in zip(mine, others, strict=True):
        if isinstance(a, float) and isinstance(b, float):
            same = (
                a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))
            )
        else:
            same = a == b
        if not same:
            return f"{name} is {a!r}, not {b!r}"
    return None


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | np.ndarray):
        yield f"{name}.shape", tuple(value.shape)
        for place, number in enumerate(
            np.asarray(value.detach().float() if isinstance(value, Tensor) else value).reshape(-1).tolist()
        ):
            yield f"{name}[{place}]", number
    elif isinstance(value, nn.Module):
        yield from _leaves(list(value.parameters()), name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            if one.name not in ("seconds", "at"):
                yield from _leaves(getattr(value, one.name), f"{name}.{one.name}")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{name}[{key}]")
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{name}[{place}]")
    elif isinstance(value, bool | int | float | str) or value is None:
        yield name, float(value) if isinstance(value, int | float) else value
    else:
        yield name, type(value).__name__
