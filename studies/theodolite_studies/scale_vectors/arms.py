"""The arms of the scale-vector study: one GPT, its scale vectors in seven states, and how it is trained.

All of them compute the same function at the start, from the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.fleet.run import Precision, Run
from theodolite.models import GPT
from theodolite.models.transformer import Placement
from theodolite.surgery.converting import convert
from theodolite.surgery.edits import Edits, held
from theodolite.surgery.gains import find_gains
from theodolite.workloads import Workload, next_token_loss
from theodolite_studies.framework.networks import batch_of
from theodolite_studies.framework.study import Setting

EXACT = "exact"
"""The part that trains no network."""
BASE = Size(128, 4)


@dataclass(frozen=True)
class Arm:
    """One way to train, at every learning rate and weight decay of a grid."""

    structure: str
    """A name in `STRUCTURES`."""
    exponents: tuple[float, ...]
    """log2 of the learning rates."""
    decays: tuple[float, ...]
    num_seeds: int
    optimizer: str = "adamw"
    schedule: str = "cosine"
    decay: str = "paper"
    size: Size = BASE

    @property
    def part(self) -> str:
        """Arms of one structure, optimizer and size are one program: a part."""
        return "-".join([self.structure, *self._others])

    @property
    def name(self) -> str:
        """What tells it from the others.

        >>> Arm("all", (-7.0,), (0.1,), 3, schedule="wsd", size=Size(256, 8)).name
        'all 256x8 wsd paper'
        """
        return " ".join([self.structure, *self._others, self.schedule, self.decay])

    def cells(self, weight_decay: float | None = None) -> list[tuple[float, float]]:
        """Learning rates and weight decays of the grid; at one decay, if it is given."""
        decays = [decay for decay in self.decays if weight_decay in (None, decay)]
        return [(2.0**exponent, decay) for exponent in self.exponents for decay in decays]

    @property
    def _others(self) -> list[str]:
        others = [] if self.optimizer == "adamw" else [self.optimizer]
        return others if self.size == BASE else [*others, f"{self.size.width}x{self.size.depth}"]


@dataclass(frozen=True, kw_only=True)
class ArmSetting(Setting):
    """How every run is trained, and which arms there are, their parts in the order of their worth."""

    text: str
    arms: tuple[Arm, ...]
    steps: int
    warmup: int
    num: int
    length: int
    held_out: int
    precision: Precision
    exact_seeds: int

    def runs(self, arm: Arm) -> list[Run]:
        """Those of an arm."""
        return [
            self.run(arm, exponent, weight_decay, seed)
            for exponent in arm.exponents
            for weight_decay in arm.decays
            for seed in range(arm.num_seeds)
        ]

    def run(self, arm: Arm, exponent: float, weight_decay: float, seed: int) -> Run:
        """One run of an arm. A network that is not of base size is trained by the plan from there."""
        planned = arm.size != BASE
        betas = {"betas": (0.9, 0.95)}
        return Run(
            workload=name_of(arm.structure, self.text),
            size=arm.size,
            lr=2.0**exponent,
            optimizer=arm.optimizer,
            parameterization="plan" if planned else "standard",
            base=BASE if planned else None,
            seed=seed,
            steps=self.steps,
            warmup=self.warmup,
            schedule=arm.schedule,
            weight_decay=weight_decay,
            decay=arm.decay,
            held_out=self.held_out,
            precision=self.precision,
            every=max(1, self.steps // 50),
            options=betas if arm.optimizer == "adamw" else {},
            vector_options={} if arm.optimizer == "adamw" else betas,
        )

    def about(self) -> dict[str, Any]:
        """What a file of records has to agree with to be gone on with."""
        names = ("text", "steps", "warmup", "num", "length", "held_out", "precision")
        name = "small" if self.small else "full"
        return {"name": name, **{name: getattr(self, name) for name in names}}


LRS, DECAYS = (-7.5, -7.0, -6.5), (0.125, 0.5)
"""Around 2⁻⁷, where `study transfer` found AdamW's best. Over 1000 steps of a cosine from 2⁻⁷ a weight that
nothing else moves shrinks by a factor of e^-0.5 and e^-2: enough to matter."""


def _tuned(structure: str, num_seeds: int = 8, **others: Any) -> Arm:
    return Arm(structure, LRS, DECAYS, num_seeds, **others)


FULL = ArmSetting(
    text="enwik8",
    arms=(
        _tuned("plain"),
        _tuned("plain", decay="matrices"),
        _tuned("plain", 4, schedule="wsd"),
        _tuned("all"),
        _tuned("all", 4, schedule="wsd"),
        _tuned("removed"),
        *(Arm("peri", (-7.0,), DECAYS, 8, decay=decay) for decay in ("matrices", "paper", "everything")),
        _tuned("heterogeneous"),
        _tuned("both"),
        _tuned("direction"),
        Arm("plain", (-7.5, -7.0), DECAYS, 3, size=Size(256, 8)),
        Arm("all", (-7.5, -7.0), DECAYS, 3, size=Size(256, 8)),
        Arm("plain", (-6.5, -6.0), DECAYS, 4, optimizer="muon-kimi"),
        Arm("all", (-6.5, -6.0), DECAYS, 4, optimizer="muon-kimi"),
    ),
    steps=1000,
    warmup=100,
    num=32,
    length=256,
    held_out=32,
    precision="bfloat16",
    exact_seeds=3,
)
SMALL = dataclasses.replace(
    FULL,
    small=True,
    text="sotu",
    arms=tuple(
        dataclasses.replace(arm, exponents=arm.exponents[-1:], decays=arm.decays[-1:], num_seeds=2)
        for arm in FULL.arms
        if arm.size == BASE and arm.optimizer == "adamw"
    ),
    steps=20,
    warmup=2,
    num=2,
    length=32,
    held_out=2,
    precision="float32",
    exact_seeds=2,
)
"""For a CPU: the built-in text and a few steps, to see how it goes."""


@dataclass(frozen=True)
class Structure:
    """Where the norms are, and what is done to their gains."""

    placement: Placement = "pre"
    removed: bool = False
    options: tuple[tuple[str, Any], ...] | None = None
    """Of `theodolite.surgery.scale_vectors`; None leaves the gains as they are."""


def _changed(**changes: Any) -> Structure:
    """Only what is named differs from the usual gain: one vector for all readers, before them, plain."""
    options = {"heterogeneous": False, "placement": "input", "reparameterization": None, **changes}
    return Structure(options=tuple(options.items()))


STRUCTURES: Mapping[str, Structure] = {
    "plain": Structure(),
    "removed": Structure(removed=True),
    "heterogeneous": _changed(heterogeneous=True),
    "both": _changed(placement="both"),
    "direction": _changed(reparameterization="direction"),
    "all": _changed(heterogeneous=True, placement="both", reparameterization="direction"),
    "peri": Structure("peri"),
}


def workload(structure: str, *, text: str, num: int, length: int) -> Workload:
    """A structure on a text, `num` sequences of `length` bytes in a batch.

    >>> workload("all", text="sotu", num=2, length=16).batch(0, 0)[0].shape
    torch.Size([2, 16])
    """
    return Workload(
        name_of(structure, text),
        partial(build, structure, length),
        partial(batch_of, text, "train", num, length),
        next_token_loss,
        held_out=partial(batch_of, text, "validation", num, length),
    )


def name_of(structure: str, text: str) -> str:
    """What ledgers call it."""
    return f"scale-vectors-{structure}-{text}"


def build(structure: str, context: int, width: int, depth: int) -> nn.Module:
    """A gated byte-level GPT with the structure's scale vectors."""
    chosen = STRUCTURES[structure]
    model = GPT(width, depth, vocab=256, context=context, gated=True, norm_placement=chosen.placement)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    if chosen.removed:
        # At one they need not be folded, as `remove_gains` would: weights keep the law they are drawn by.
        for gain in find_gains(model, tokens).found:
            Edits().freeze(held(model, gain.name), 1.0)
        return model
    if chosen.options is not None:
        return convert(model, tokens, **dict(chosen.options))
    return model
