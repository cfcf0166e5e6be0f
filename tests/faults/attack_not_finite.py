"""Networks with numbers that are not finite, in every probe and in every section of a survey.

A network is spoilt in one of three depths: its loss is not finite, or only gradients are not, or only second
derivatives. Whatever measures something of that depth, or deeper, has to say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import Size, UseError, Workload, probes, survey
from theodolite.surveying.section import find_sections

from .attack import Attack

LOSS, GRADIENT, HESSIAN = 0, 1, 2
"""What is not finite: the loss and all derivatives, all derivatives, or the second ones alone."""
Poison = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.down(self.up(self.norm(stream)).tanh())


class Net(nn.Module):
    """A residual network on rows of eight numbers, with a poison between its two blocks."""

    def __init__(self, width: int, depth: int, poison: Poison = lambda stream: stream) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.shift = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, 3)
        self.poison = poison

    def forward(self, rows: Tensor) -> Tensor:
        stream = self.embed(rows)
        for number, block in enumerate(self.blocks):
            stream = self.poison(stream) if number == 1 else stream
            stream = block(stream)
        return self.head(self.norm(stream + self._shifted()))

    def _shifted(self) -> Tensor:
        return self.shift


class Odd(Net):
    """The gradient of one tensor alone is not finite: √(s²) at s = 0."""

    def _shifted(self) -> Tensor:
        return self.shift.square().sqrt()


def _with_entry(value: float) -> Callable[[int, int], nn.Module]:
    def build(width: int, depth: int) -> nn.Module:
        model = Net(width, depth)
        with torch.no_grad():
            model.blocks[1].up.weight[0, 0] = value  # type: ignore[union-attr, index]
        return model

    return build


def _with(poison: Poison) -> Callable[[int, int], nn.Module]:
    return lambda width, depth: Net(width, depth, poison)


BUILDS: dict[str, tuple[int, Callable[[int, int], nn.Module]]] = {
    "a weight is nan": (LOSS, _with_entry(math.nan)),
    "a weight is inf": (GRADIENT, _with_entry(math.inf)),
    "log of 0": (LOSS, _with(lambda stream: stream + (stream * 0).log())),
    "a branch overflows": (LOSS, _with(lambda stream: stream + (1e4 * (1 + stream.abs())).exp())),
    "sqrt of 0": (GRADIENT, _with(lambda stream: stream + (stream * 0).sqrt())),
    "log of 0 behind where": (
        GRADIENT,
        _with(lambda stream: stream + torch.where(stream > 1e9, (stream * 0).log(), 0.0)),
    ),
    "an overflow that is cut off": (
        GRADIENT,
        _with(lambda stream: stream + (1e4 * (1 + stream.abs())).exp().clamp(max=1.0)),
    ),
    "one gradient alone": (GRADIENT, Odd),
    "norm of 0": (HESSIAN, _with(lambda stream: stream + (stream - stream.detach()).norm())),
    "x to the 1.5 at 0": (HESSIAN, _with(lambda stream: stream + (stream * 0).abs().pow(1.5))),
}


def _batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    rows = torch.randn(16, 8, generator=generator)
    return rows, torch.randint(3, (16,), generator=generator)


def _step(model: nn.Module, loss: Any, batch: Any) -> dict[str, Tensor]:
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(model(batch[0]), batch[1]), list(model.parameters()))
    return {name: -0.1 * one for (name, _), one in zip(model.named_parameters(), gradients, strict=True)}


def _tracked(model: nn.Module, loss: Any, batch: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probes.track(model, loss, batch, optimizer, measure=["sharpness"]) as tracking:
        pass
    return tracking


def _workload(build: Callable[[int, int], nn.Module], **changes: Any) -> Workload:
    given: dict[str, Any] = {"batch": _batch, "loss": F.cross_entropy, "size": Size(32, 2)}
    return Workload("spoilt", build, **given | changes)


PROBES: dict[str, tuple[int, Callable[[nn.Module, Any, Any], Any]]] = {
    "curvature": (HESSIAN, lambda *given: probes.curvature(*given, directions=6)),
    "along_temperature": (
        HESSIAN,
        lambda *given: probes.along_temperature(*given, [0.5, 2.0], directions=6),
    ),
    "along_scale": (HESSIAN, lambda *given: probes.along_scale(*given, [0.5, 2.0], directions=6)),
    "eigenvalues": (HESSIAN, lambda *given: probes.eigenvalues(*given, k=2, most_products=30)),
    "sharpness": (HESSIAN, lambda *given: probes.sharpness(*given)),
    "trace": (HESSIAN, lambda *given: probes.trace(*given, rtol=0.5, most_products=30)),
    "density": (HESSIAN, lambda *given: probes.density(*given, probes=2, steps=5)),
    "outliers": (HESSIAN, lambda *given: probes.outliers(*given, most=3, most_products=30)),
    "track": (HESSIAN, _tracked),
    "landscape": (LOSS, lambda *given: probes.landscape(*given, num=3)),
    "landscape, hessian": (HESSIAN, lambda *given: probes.landscape(*given, num=3, axes="hessian")),
    "drift": (HESSIAN, lambda *given: probes.drift(*given, lr=0.1, k=2)),
    "radius": (GRADIENT, lambda *given: probes.radius(*given, _step(*given))),
    "profile": (GRADIENT, lambda *given: probes.profile(*given, _step(*given))),
    "stream": (GRADIENT, lambda *given: probes.stream(*given)),
    "preconditioning": (GRADIENT, lambda *given: probes.preconditioning(*given)),
    "signal": (GRADIENT, lambda model, loss, batch: probes.signal(model, loss, [batch], [_batch(7, 7)])),
}
UNTOUCHED = {
    *(("one gradient alone", name) for name in ("stream", "preconditioning", "signal")),
    ("an overflow that is cut off", "signal"),
}
"""What is not finite there has no part in what these probes measure."""
TOLD = re.compile(r"not finite|no finite number|\bnan\b|\binf\b|infinit|diverged|not known")
SURE = ("converged", "exact", "finite")


def _spoilt_probes(count: int, folder: Path) -> Iterator[str | None]:
    pairs = [
        (poison, build, name, probe)
        for poison, (depth, build) in BUILDS.items()
        for name, (needs, probe) in PROBES.items()
        if depth <= needs and (poison, name) not in UNTOUCHED
    ]
    for number in range(count):
        # The few tries of `make test` are spread over all poisons and probes.
        poison, build, name, probe = pairs[(number * 37) % len(pairs)]
        fault = _probed(build, probe)
        yield None if fault is None else f"{name}, {poison}: {fault}"


def _probed(
    build: Callable[[int, int], nn.Module], probe: Callable[[nn.Module, Any, Any], Any]
) -> str | None:
    torch.manual_seed(0)
    model = build(8, 2)
    before = _state(model)
    try:
        found = probe(model, F.cross_entropy, _batch(0, 0))
    except UseError as error:
        fault = None if TOLD.search(str(error)) else f"refused without the reason: {error}"
    else:
        fault = _claims(found)
    return fault or (None if _state(model) == before else "the model was changed")


def _claims(found: Any) -> str | None:
    """What a result is sure of although it is made of numbers that are not finite."""
    for one in found if isinstance(found, tuple) else (found,):
        for name in SURE:
            if getattr(one, name, None) is True:
                return f"{name} is True: {one}"
        if "(exact)" in str(one) or not TOLD.search(str(one)):
            return f"does not say that it is not finite: {one}"
    return None


def _state(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(one), one.detach().numpy().tobytes(), one.grad is None) for name, one in tensors]


def _spoilt_surveys(count: int, folder: Path) -> Iterator[str | None]:
    sections = list(find_sections())
    pairs = [(poison, section) for poison in BUILDS for section in sections]
    for number in range(count):
        poison, section = pairs[(number * 23) % len(pairs)]
        depth, build = BUILDS[poison]
        found = survey(_workload(build), only=[section])
        fault = _asserts(depth, section, found)
        yield None if fault is None else f"{section}, {poison}: {fault}"


VALUES = ("stream", "coordinates", "spectral", "curvature", "transfer", "steps", "depth", "noise", "collapse")
"""Sections that measure on data."""


def _asserts(depth: int, section: str, found: Any) -> str | None:
    """Good news on what could not be measured."""
    codes = {finding.code: finding for finding in found.findings}
    levels = {code: finding.level for code, finding in codes.items()}
    if depth < HESSIAN and section in VALUES and levels != {"TH108": "fail"}:
        return f"{levels}, not TH108 alone"
    for finding in found.findings:
        said = f"{finding.sentence} {finding.evidence.numbers}"
        if finding.level == "ok" and re.search(r"\bnan\b|\binf\b", finding.sentence):
            return f"{finding.code} is ok: {said}"
        second = depth == HESSIAN and finding.code in ("TH301", "TH302", "TH303", "TH702")
        if second and (finding.level == "ok" or not TOLD.search(said)):
            return f"{finding.code} is {finding.level}: {said}"
        if finding.code == "TH001":
            return f"crashed: {finding.sentence}"
    return None


def _one_spoilt_batch(count: int, folder: Path) -> Iterator[str | None]:
    """All batches but one are sound."""
    for number in range(count):
        bad = number + 1

        def batch(seed: int, step: int, bad: int = bad) -> tuple[Tensor, Tensor]:
            rows, targets = _batch(seed, step)
            return (rows * math.inf if step == bad else rows), targets

        section = VALUES[number % len(VALUES)]
        found = survey(_workload(Net, batch=batch), only=[section])
        fault = next((f"crashed: {one.sentence}" for one in found.findings if one.code == "TH001"), None)
        fault = fault or next(
            (
                f"{one.code}: {one.sentence}"
                for one in found.findings
                if one.level == "ok" and "nan" in one.sentence
            ),
            None,
        )
        yield None if fault is None else f"{section}, batch {bad} is infinite: {fault}"


ATTACKS = [
    Attack(
        "a probe on a network whose loss, gradient or Hessian is not finite",
        "refused with the reason, or reported as not finite; never exact or converged; model untouched",
        _spoilt_probes,
        few=16,
        many=sum(depth <= needs for depth, _ in BUILDS.values() for needs, _ in PROBES.values())
        - len(UNTOUCHED),
    ),
    Attack(
        "a survey of a network whose loss, gradient or Hessian is not finite",
        "TH108 fails and names the tensors; no section says that all is well with what it could not measure",
        _spoilt_surveys,
        few=12,
        many=len(BUILDS) * len(find_sections()),
    ),
    Attack(
        "a survey of a network with one batch that is not finite",
        "no section crashes, none reports nan as good",
        _one_spoilt_batch,
        few=1,
        many=len(VALUES),
    ),
]
